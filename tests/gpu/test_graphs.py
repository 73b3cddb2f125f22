"""CUDA graphs of fused calls: captured once, replayed a thousand times, with eager calls and other kernels between."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

import fusedtp
from fusedtp import VirtualWorld
from fusedtp.comm import VirtualGroup, communicator
from fusedtp.ops.engines import BY_COPY

pytestmark = pytest.mark.gpu
W, T, K, N = 4, 64, 128, 96
REPLAYS, INPUTS = 1000, 7


def whole(number: int, *shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(number)
    return torch.randint(-2, 3, shape, generator=draw).cuda().half()


class Calls:
    """A rank's inputs, with fixed addresses, and the calls on them."""

    def __init__(self, group: VirtualGroup, each: int = T) -> None:
        self.group, self.rank, rows = group, group.rank(), group.size() * each
        self.x, self.full = torch.zeros(each, K).cuda().half(), torch.zeros(rows, K).cuda().half()
        self.up, self.down = (whole(10 + i, N, K) for i in range(2))
        self.dy = whole(20, rows, N)
        # allocated now: a later copy from the host would wait for the device
        self.inputs = [whole(100 + number, rows, K) for number in range(INPUTS)]

    def refresh(self, number: int) -> None:
        """Write new inputs, the same on every rank; x is this rank's rows of them."""
        self.full.copy_(self.inputs[number % INPUTS])
        self.x.copy_(self.full[self.rank * len(self.x) :][: len(self.x)])

    def gather(self) -> list[Tensor]:
        return list(fusedtp.all_gather_matmul(self.x, [self.up], self.group, engine="triton"))

    def every(self) -> list[Tensor]:
        """Seven operations: an odd number."""
        gathered = self.gather()
        wgrad = fusedtp.all_gather_wgrad(self.x, [self.dy], self.group, engine="triton")
        scattered = fusedtp.matmul_reduce_scatter(self.full, self.down, self.group, engine="triton")
        small = fusedtp.matmul_all_reduce(self.full[:8], self.down, self.group, engine="triton")
        again = fusedtp.matmul_all_reduce(self.full, self.up, self.group, engine="triton")
        switched = [
            fusedtp.matmul_all_reduce(x, self.up, self.group, engine="multimem") for x in (self.full[:8], self.full)
        ]
        return [*gathered, *wgrad, scattered, small, again, *switched]


def captured(group: VirtualGroup, fn, warm: bool = True) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """fn's graph and its outputs. Ranks capture in turn, because nothing may run during a capture."""
    graph, world = torch.cuda.CUDAGraph(), communicator(group).world
    outs: list[Tensor] = []
    raised: Exception | None = None
    if warm:
        fn()  # compiles and loads the kernels
    for turn in range(group.size()):
        torch.cuda.synchronize()
        world.barrier()
        if turn == group.rank():
            try:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    outs = fn()
            except RuntimeError as error:
                raised = error
        world.barrier()
    if raised is not None:
        raise raised
    return graph, outs


def replays(which: str, between: str, group: VirtualGroup) -> None:
    """Each replay equals the same calls made eagerly, bit for bit; checked only now and then, because a check costs
    calls.

    A replayed kernel waits for its peers, but their hosts may not have launched yet. Everything that runs in between is
    therefore called once before: e.g. creating a cuBLAS handle may wait for the device.
    """
    fusedtp.reserve(group, 1 << 22)
    calls = Calls(group)
    fn = {"one": calls.gather, "every": calls.every}[which]

    def other(number: int) -> None:
        if between == "eager" and number % 3:
            calls.gather()
        elif between == "other kernels":
            torch.relu_(calls.full @ calls.up.T)
        elif between == "chunked" and number % 5 == 0:
            fusedtp.all_gather_matmul(calls.x, [calls.up], group, engine="chunked")

    def check(number: int, got: list[Tensor]) -> None:
        for i, (g, e) in enumerate(zip(got, fn(), strict=True)):
            assert torch.equal(g, e), f"rank {group.rank()}, replay {number}, output {i}"
        assert torch.equal(got[0].double(), calls.full.double() @ calls.up.double().T), number

    with torch.no_grad():
        graph, outs = captured(group, fn)
        calls.refresh(0)
        other(0), other(1), check(0, fn())
        torch.cuda.synchronize()
        communicator(group).world.barrier()
        for number in range(REPLAYS):
            calls.refresh(number)
            graph.replay()
            other(number)
            if number % 50 in (0, 1):
                check(number, [out.clone() for out in outs])
    torch.cuda.synchronize()
    fusedtp.check(group)


@pytest.mark.parametrize("which", ["one", "every"])
@pytest.mark.parametrize("between", ["nothing", "eager", "other kernels", "chunked"])
def test_a_thousand_replays_equal_eager_calls(which, between):
    VirtualWorld(W, device="cuda").run(partial(replays, which, between))


def grows(group: VirtualGroup) -> None:
    calls = Calls(group)
    calls.refresh(0)
    calls.gather()
    kept = communicator(group).workspace.slot_bytes
    larger = torch.ones(kept // 2, K, device="cuda").half()

    def more() -> list[Tensor]:
        return list(fusedtp.all_gather_matmul(larger, [calls.up], group, engine="triton"))

    with pytest.raises(RuntimeError, match=r"fusedtp\.reserve"):
        captured(group, more, warm=False)
    assert communicator(group).workspace.slot_bytes == kept
    (y,) = calls.gather()  # the group still works
    assert torch.equal(y.double(), calls.full.double() @ calls.up.double().T)


def test_growth_during_capture_raises_and_the_group_stays_usable():
    VirtualWorld(2, device="cuda").run(grows)


# -- the copy transport ------------------------------------------------------------------------------------------------


def by_copies(group: VirtualGroup) -> None:
    """Copies before any graph, mixed with the other transport; programs during capture and ever after."""
    comm = communicator(group)
    fusedtp.reserve(group, 1 << 22)
    calls = Calls(group, 3 * T)  # few rows are never moved by copies

    def call(transport: str) -> list[Tensor]:
        engine = {"copy": BY_COPY, "programs": "triton"}[transport]
        return list(fusedtp.all_gather_matmul(calls.x, [calls.up], group, engine=engine))

    def right(number: int, transport: str) -> None:
        calls.refresh(number)
        (y,) = call(transport)
        assert torch.equal(y.double(), calls.full.double() @ calls.up.double().T), (number, transport)

    with torch.no_grad():
        for number in range(200):
            right(number, "copy" if (number + group.rank()) % 3 else "programs")
            if number % 20 == 0:
                fusedtp.matmul_reduce_scatter(calls.full, calls.down, group, engine="triton")
        assert comm.workspace.epochs + 1 == int(comm.workspace.epoch[0]), "the host counts as the device does"
        graph, _outs = captured(group, lambda: call("copy"))
        assert comm.workspace.epochs is None
        for number in range(50):
            calls.refresh(number)
            graph.replay()
            right(number, "copy")
    torch.cuda.synchronize()
    fusedtp.check(group)


def test_copies_and_graphs_on_one_workspace():
    VirtualWorld(W, device="cuda").run(by_copies)
