"""Calls of the matmuls of ragged groups that mutants must survive: tails, an empty expert, rows of nobody."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtp.ops.launch import Launch as Planned
from fusedtp.ops.launch.config import HOST, Config
from fusedtp.ops.moe import grouped
from fusedtp.sim.case import Case, Launch, Mismatch, Run, compare

# by an activation of integers below 100, relative to its argument
LOST = 512 * torch.finfo(torch.float32).eps
TILES = Config(16, 16, 16, group=2)
SIZES, SPARE, N, K = (17, 0, 3, 36), 3, 40, 20
HOW = (TILES, "ieee", HOST)


def grouped_case(kernel: str, halves: bool) -> Case:
    """One of the kernels on its own. halves: of tiles, see Config; and of a matmul, products of two weights."""

    def make() -> Run:
        generator = torch.Generator().manual_seed(0)
        used, experts = sum(SIZES), len(SIZES)

        def draw(*shape: int, most: int = 2) -> Tensor:
            return torch.randint(-most, most + 1, shape, generator=generator).float()

        def rows(width: int) -> Tensor:
            return torch.cat((draw(used, width), torch.full((SPARE, width), torch.nan)))

        def products(x: Tensor, w: Tensor) -> Tensor:
            out = x.new_full((used + SPARE, w.shape[1]), torch.nan)
            for e, (begin, end) in enumerate(pairwise(bounds)):
                out[begin:end] = x[begin:end] @ w[e].t()
            return out

        bounds = [0, *accumulate(SIZES)]
        offsets = torch.tensor(bounds, dtype=torch.int32)
        x, dy, w, up = rows(K), rows(N), draw(experts, N, K), draw(experts, N, K)
        g, u, size = products(x, w), products(x, up), torch.zeros(used + SPARE, N)
        launch: Planned
        if kernel == "grouped_matmul_kernel":
            config, bias = replace(TILES, halves=halves), draw(experts, N)
            xs, ws = ([x, x], [w, up]) if halves else ([x], [w])
            launch, y = grouped.plan_matmul(xs, ws, offsets, bias, config, *HOW[1:])
            each = products(torch.ones_like(x[:, :1]), bias[:, :, None])
            outs, wanted, sizes = [y], [g + u + each if halves else g + each], [size]
        elif kernel == "grouped_gated_kernel":
            launch, made = grouped.plan_gated(x, w, up, offsets, "silu", True, *HOW)
            outs = [each for each in made if each is not None]
            wanted, sizes = [F.silu(g.double()).float() * u, g, u], [(g * u).abs(), size, size]
        elif kernel == "grouped_wgrad_kernel":
            config = replace(TILES, halves=halves)
            launch, dw = grouped.plan_wgrad(dy, x, offsets, torch.float32, config, *HOW[1:])
            want = torch.stack([dy[begin:end].t() @ x[begin:end] for begin, end in pairwise(bounds)])
            outs, wanted, sizes = [dw], [want], [torch.zeros_like(want)]
        else:
            launch, grads = grouped.plan_gated_backward(dy, g, u, offsets, "silu", HOST)
            outs, sizes = [*grads], [(dy * g * u).abs(), (dy * g).abs()]
            wanted = [torch.ops.aten.silu_backward(dy * u, g), dy * F.silu(g)]
        for out in outs:
            out.fill_(torch.nan)

        def check() -> list[Mismatch]:
            found = []
            for i, (out, want, size) in enumerate(zip(outs, wanted, sizes, strict=True)):
                near = torch.where((out - want).abs() <= LOST * size, want, out)
                found += compare(f"out {i}", [near], [want])
            return found

        return Run([[Launch(launch.kernel, launch.programs, launch.args)]], check=check)

    return Case(f"{kernel}, {'halves' if halves else 'whole tiles'}", make)
