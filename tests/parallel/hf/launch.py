"""Simulate torchrun and accelerate on ranks that serve many tests."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch


def forget() -> None:
    """Reset accelerate's state to that of a new process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


@contextmanager
def as_torchrun(group: Any, many_devices: bool = True) -> Iterator[None]:
    """Set the variables that torchrun sets, and make accelerate treat CPU ranks as multi-device.

    On ranks without GPUs, accelerate refuses ParallelismConfig and ignores an FSDP plugin. Both are patched here.
    Accelerate's state is reset afterwards, because these ranks serve many tests.
    many_devices: False if only the variables are needed.
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
    """AcceleratorState.__init__ that accepts an FSDP plugin on ranks without GPUs too."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    return init
