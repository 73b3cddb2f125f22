"""What torchrun tells a rank, and accelerate of it, for tests whose ranks serve many tests."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch


def forget() -> None:
    """Put accelerate where a new process finds it."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


@contextmanager
def as_torchrun(group: Any, many_devices: bool = True) -> Iterator[None]:
    """The variables that torchrun sets, and CPU ranks that accelerate takes for many devices.

    For ranks without GPUs accelerate refuses ParallelismConfig and ignores an FSDP plugin; both are put right here.
    What it remembers of a process is forgotten afterwards, as ranks of these worlds serve many tests.
    many_devices: not, for what needs only the variables.
    """
    import accelerate
    from accelerate.state import AcceleratorState

    rank, size = str(group.rank()), str(group.size())
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "ACCELERATE_USE_CPU": "1",
    }
    forget()
    try:
        with (
            patch.dict(os.environ, variables),
            patch.object(accelerate.Accelerator, "multi_device", property(lambda self: True))
            if many_devices
            else nullcontext(),
            patch.object(AcceleratorState, "__init__", _with_fsdp(AcceleratorState.__init__)),
        ):
            yield
    finally:
        forget()


def _with_fsdp(original: Callable[..., None]) -> Callable[..., None]:
    """AcceleratorState.__init__, which takes an FSDP plugin on ranks without GPUs too."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    return init
