"""How ranks that share a GPU start a kernel together; a fake kernel records who did what."""

from __future__ import annotations

import random
import threading
import time
from contextlib import nullcontext
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fusedtp import VirtualWorld
from fusedtp.comm import communicator
from fusedtp.comm.device_view import DeviceView
from fusedtp.ops.launch import Config, Launch
from fusedtp.ops.launch.run import check

W = 4


class Kernel:
    """A fake kernel: compiles slowly on first use, never for two ranks at once; records who started it."""

    def __init__(self) -> None:
        self.busy, self.compiled, self.started = threading.Lock(), 0, []

    def warmup(self, *_: Any, **__: Any) -> Any:
        assert self.busy.acquire(blocking=False), "two ranks compile one kernel"
        if not self.compiled:
            time.sleep(0.02)
        self.compiled += 1
        self.busy.release()
        return SimpleNamespace(_init_handles=lambda: None)

    def __getitem__(self, grid: tuple[int]) -> Any:
        return self.start

    def start(self, *_: Any, **__: Any) -> None:
        assert self.compiled == W, "a kernel waits for ranks that still load it"
        self.started.append(threading.current_thread().name)


def device_view_of(**known: Any) -> DeviceView:
    """A device view with only the given fields set; the rank's kernels read nothing else."""
    return DeviceView(**{field.name: known.get(field.name, torch.zeros(2)) for field in fields(DeviceView)})


def test_ranks_of_one_gpu_compile_one_by_one_and_go_on_when_all_have_started():
    pytest.importorskip("triton")
    kernel = Kernel()
    launch = Launch(kernel, 1, {}, Config(16, 16, 16))

    def body(group: Any) -> int:
        time.sleep(0.02 * random.Random(group.rank()).random())
        view = device_view_of(meet=communicator(group).world.barrier)
        launch.run(view, torch.device("cpu"))
        return len(kernel.started)  # the next step may wait for the device, and thus for all ranks

    assert VirtualWorld(W).run(body) == [W] * W
    assert len(kernel.started) == W


def test_operands_on_another_gpu_than_the_group_s_are_refused():
    """The kernel would store to memory that this GPU cannot reach, which ends the process's use of the GPU."""
    pytest.importorskip("triton")
    with FakeTensorMode():
        x, w = (torch.empty(4, 32, device="cuda:1") for _ in range(2))
        for index in (0, 1):
            view = device_view_of(epoch=torch.empty(4, device=f"cuda:{index}"), slot_bytes=4096)
            with nullcontext() if index == 1 else pytest.raises(ValueError, match=r"cuda:1.* memory is on cuda:0"):
                check(view, 64, x, [w])
