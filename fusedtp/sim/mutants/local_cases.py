"""Calls of the matmuls of one device that mutants must survive: tails everywhere, by pointers and by descriptors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtp.ops.launch import plain
from fusedtp.ops.launch.config import HOST, Config

from ..case import Case, Launch, Mismatch, Run, compare

# by an activation of integers below 100, relative to its argument
LOST = 512 * torch.finfo(torch.float32).eps
TILES = Config(16, 16, 16, group=2)
M, N, K = 36, 24, 56  # rows of K elements are multiples of 16 bytes, so that TMA takes them


def local(kernel: str, tma: bool) -> Case:
    """A matmul with every epilogue, or a gated one; `kernel` tells which, and whether K is split."""

    def make() -> Run:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randint(-2, 3, shape, generator=generator).float()

        x, w, up, bias, up_bias, residual = draw(M, K), draw(N, K), draw(N, K), draw(N), draw(N), draw(M, N)
        split = kernel in ("split_matmul_kernel", "join_parts_kernel")
        config = replace(TILES, tma=tma, splits=3 if split else 1, halves=tma)
        precision = (
            "tf32" if tma else "ieee"
        )  # which small integers do not tell apart; TMA is for matrix units
        product = x @ w.t()
        launches: list[Any] = []
        outs: list[Tensor] = []
        wanted: list[Tensor] = []
        sizes: list[Tensor] = []  # of what an output was computed from, 0 where it is exact
        if kernel != "gated_matmul_kernel":
            x_scale, w_scale = draw(M, 1), draw(N, 1)
            epilogue = plain.Epilogue(bias, residual, 0.5, x_scale, w_scale)
            made, y = plain.plan_linear(x, w, epilogue, torch.float32, config, precision, HOST)
            launches += made
            outs += [y]
            wanted += [0.5 * x_scale * w_scale.t() * product + bias + residual]
            sizes += [torch.zeros(M, N)]
        if kernel != "matmul_kernel":
            a, b, c = (
                torch.randint(-2, 1, (rows, 1), generator=generator).float().exp2() for rows in (M, N, N)
            )
            scales = (a, b, c)
            for activation in ("silu", "gelu", "gelu_pytorch_tanh"):
                args = (x, w, up, bias, up_bias, activation, True, config, precision, HOST)
                made, (y, g, u) = plain.plan_gated(*args, scales=scales)
                assert g is not None and u is not None
                launches += made
                outs += [y, g, u]
                gate = scales[0] * scales[1].t() * product + bias
                other = scales[0] * scales[2].t() * (x @ up.t()) + up_bias
                wanted += [_activated(gate.double(), activation).float() * other, gate, other]
                sizes += [(gate * other).abs(), torch.zeros(M, N), torch.zeros(M, N)]
        for out in [*outs, *(each.args["parts"] for each in launches if "parts" in each.args)]:
            out.fill_(torch.nan)

        def check() -> list[Mismatch]:
            found = []
            for i, (out, want, size) in enumerate(zip(outs, wanted, sizes, strict=True)):
                near = torch.where((out - want).abs() <= LOST * size, want, out)
                found += compare(f"out {i}", [near], [want])
            return found

        return Run([[Launch(each.kernel, each.programs, each.args) for each in launches]], check=check)

    return Case(f"{kernel}, {'descriptors' if tma else 'pointers'}", make)


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_pytorch_tanh" else "none")
