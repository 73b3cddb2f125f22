"""--determinism: two runs on the same machines give the same losses, bit for bit.

    what could differ                           what keeps it
    order of sums inside torch's operations     torch.use_deterministic_algorithms; one that has no such form raises
    split of cuBLAS matmuls                     CUBLAS_WORKSPACE_CONFIG
    NCCL's sums inside a switch                 NCCL_ALGO=^NVLS
    order of sums over ranks                    fused operations sum in rank order, always
    engines and kernel configurations           chosen by shapes and by tables on disk, never by a time of the run
    random numbers, order of tokens             drawn from the seed and the step, always

It does not cover another number of ranks or threads, another kind of device, other versions, other tables. Set before
the first operation on a GPU: both variables are read once, and what the environment has already is left as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS"}


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Within, this process runs nothing that could give other bits in another run, if that is wanted."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
