"""Calls of the plain matmul that mutants must survive: tails everywhere, by pointers and by descriptors."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fusedtp.ops.launch import plain
from fusedtp.ops.launch.config import HOST, Config
from fusedtp.sim.case import Case, Launch, Run, compare

TILES = Config(16, 16, 16, group=2)
M, N, K = 36, 24, 56  # rows of K elements are multiples of 16 bytes, so that TMA takes them


def local(kernel: str, tma: bool) -> Case:
    """The matmul with scales and a bias. By descriptors in tf32, which small integers do not tell from fp32."""

    def make() -> Run:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randint(-2, 3, shape, generator=generator).float()

        x, w, bias, scales = draw(M, K), draw(N, K), draw(N), (draw(M, 1), draw(N, 1))
        config, precision = replace(TILES, tma=tma, halves=tma), "tf32" if tma else "ieee"
        launch, y = plain.plan_matmul(x, w, bias, torch.float32, config, precision, HOST, scales)
        y.fill_(torch.nan)
        want = scales[0] * scales[1].t() * (x @ w.t()) + bias
        return Run(
            [[Launch(launch.kernel, launch.programs, launch.args)]], check=lambda: compare("y", [y], [want])
        )

    return Case(f"{kernel}, {'descriptors' if tma else 'pointers'}", make)
