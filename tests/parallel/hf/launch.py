"""What torchrun tells a rank, and accelerate of it, for tests whose ranks serve many tests."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


def forget() -> None:
    """Put accelerate where a new process finds it."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


@contextmanager
def as_torchrun(group: Any) -> Iterator[None]:
    """The variables that torchrun sets, and a Trainer's word for it that CPU ranks are many devices.

    accelerate refuses its ParallelismConfig for ranks without GPUs; this is the one thing that is put right here.
    What it remembers of a process is forgotten afterwards, as ranks of these worlds serve many tests.
    """
    import accelerate

    rank, size = str(group.rank()), str(group.size())
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "ACCELERATE_USE_CPU": "1",
    }
    many = accelerate.Accelerator.multi_device
    forget()
    with patch.dict(os.environ, variables):
        accelerate.Accelerator.multi_device = property(lambda self: True)
        try:
            yield
        finally:
            accelerate.Accelerator.multi_device = many
            forget()
