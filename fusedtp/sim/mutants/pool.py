"""Worker processes that interpret kernels; the process that asks them need not."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor


def interpreting(workers: int = 2) -> ProcessPoolExecutor:
    """Fresh processes in which kernels are decorated to be interpreted; what they run must be importable."""
    return ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_interpret
    )


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)  # tiny tensors, and a process a core
