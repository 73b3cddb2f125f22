"""The length of the path from a public call to its kernel: how many library files and functions a call enters.

Counted on the second call, on all threads, with Triton's interpreter. Not counted: device code in kernels/, and what a
host calls while a peer is late, because that depends on chance.
"""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import fusedtp
from fusedtp.comm import semaphore
from fusedtp.comm.process_world import ProcessWorld
from fusedtp.comm.workspace import Call, PeerWatch
from fusedtp.nn.experts import Experts
from tests.harness import world

ROOT = Path(fusedtp.__file__).parents[1]
APART = ("kernels", "tests")
COLUMNS = 16  # columns of a weight, as wide as kernels like it
WAITING = (semaphore.try_wait, semaphore.wait_slice, Call.lost, ProcessWorld.has_died)
WAITING_CODE = {function.__code__ for function in WAITING}
INSIDE_THE_WATCH = f"{PeerWatch.run.__qualname__}.<locals>"


class Road:
    """A profile function that records (file, line, function) of each call; `start` is the number before the kernel."""

    def __init__(self) -> None:
        self.entered: dict[tuple[str, int, str], None] = {}
        self.start: int | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(f"{ROOT}/"):
            return
        if code in WAITING_CODE or code.co_qualname.startswith(INSIDE_THE_WATCH):
            return
        file = Path(code.co_filename).relative_to(ROOT)
        if file.parts[0] not in ("fusedtp", "kernels"):
            return
        place = file.parts[file.parts[0] == "fusedtp"]
        if place == "kernels" and self.start is None:
            self.start = len(self.entered)
        if place not in APART:
            self.entered.setdefault((str(file), code.co_firstlineno, code.co_qualname))

    def counts(self, until: int | None = None) -> tuple[int, int]:
        """Numbers of files and functions, in total or before the kernel."""
        functions = list(self.entered)[:until]
        return len({file for file, _, _ in functions}), len(functions)


def road(group: Any, engine: str, backward: bool) -> Road:
    x, w = torch.ones(2, 4, requires_grad=backward), torch.ones(COLUMNS, 4, requires_grad=backward)

    def call() -> None:
        (y,) = fusedtp.all_gather_matmul(x, [w], group, engine=engine)
        if backward:
            y.sum().backward()

    return road_of(call)


def road_of_experts(group: Any, backward: bool) -> Road:
    """For a parallel layer of gated experts: dispatch with gate and up, and the matmul with combine."""
    experts, x = Experts(4, COLUMNS, 2), torch.ones(1, 4, requires_grad=backward)
    mesh = DeviceMesh.from_group(group, "cpu")
    fusedtp.parallelize(experts, mesh, plan={"": fusedtp.FusedExperts(engine="triton")})
    experts.requires_grad_(backward)
    ids, weights = torch.tensor([[0, 1]]), torch.ones(1, 2, requires_grad=backward)

    def call() -> None:
        y = experts(x, ids, weights)
        if backward:
            y.sum().backward()

    return road_of(call)


def road_of(call: Callable[[], None]) -> Road:
    call()
    seen = Road()
    threading.setprofile(seen)
    sys.setprofile(seen)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return seen


@pytest.mark.slow
def test_a_gather_reaches_its_kernel_through_at_most_8_files_and_35_functions():
    pytest.importorskip("triton")
    for seen in world(2).run(road, "triton", False):
        files, functions = seen.counts(seen.start)
        assert 0 < files <= 8 and 0 < functions <= 35, "\n".join(map(str, [*seen.entered][: seen.start]))


@pytest.mark.slow
def test_with_its_backward_it_enters_at_most_10_files_and_55_functions():
    pytest.importorskip("triton")
    for seen in world(2).run(road, "triton", True):
        files, functions = seen.counts()
        assert 0 < files <= 10 and 0 < functions <= 55, "\n".join(map(str, seen.entered))


@pytest.mark.slow
@pytest.mark.parametrize(("backward", "most"), [(False, 14), (True, 18)])
def test_a_layer_of_experts_enters_at_most_14_files_and_18_with_its_backward(backward, most):
    pytest.importorskip("triton")
    for seen in world(2).run(road_of_experts, backward, timeout=200):
        files = {file for file, _, _ in seen.entered}
        assert 0 < len(files) <= most, "\n".join(sorted(files))
