"""The laws of tests/properties with compiled kernels: the ranks of a virtual world side by side on one GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusedtp
from fusedtp import VirtualWorld
from tests.properties.cases import Case
from tests.properties.laws import compare
from tests.properties.strategies import cases

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _run(case: Case) -> None:
    def body(group: object) -> None:
        fusedtp.set_timeout(group, 60.0)
        compare(case, group, "cuda")

    VirtualWorld(case.world_size, device="cuda").run(body)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_kernels_equal_the_formula(data):
    _run(data.draw(cases(engine="triton", dtypes=KERNEL_DTYPES, rows=300, width=200, features=400)))


@pytest.mark.parametrize("engine", ["collective", "chunked"])
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_other_engines_equal_the_formula(engine, data):
    _run(data.draw(cases(engine=engine)))


def _replays(calls: int, replays: int, group: fusedtp.comm.VirtualGroup) -> None:
    """`calls` operations in a graph, replayed with an eager call after each replay, on new inputs each time."""
    rank, world_size = group.rank(), group.size()
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randint(-2, 3, (96, 128), generator=generator).cuda().half() for _ in range(world_size)]
    x = torch.zeros(64, 128, dtype=torch.half, device="cuda")

    def shards(number: int) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(number)
        return [torch.randint(-2, 3, (64, 128), generator=draw).cuda().half() for _ in range(world_size)]

    def call() -> torch.Tensor:
        return fusedtp.all_gather_matmul(x, [weights[rank]], group, engine="triton")[0]

    comm = fusedtp.comm.communicator(group)
    fusedtp.reserve(group, 1 << 20)
    with torch.no_grad():
        call()  # compiles and loads
        graph = torch.cuda.CUDAGraph()
        for turn in range(world_size):  # one after another: nothing runs while a graph is captured
            torch.cuda.synchronize()
            comm.world.barrier()
            if turn == rank:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    captured = [call() for _ in range(calls)]
            comm.world.barrier()
        for number in range(replays):
            every = shards(number)
            x.copy_(every[rank])
            want = torch.cat(every).double() @ weights[rank].double().T
            graph.replay()
            eager = call()
            for y in (*captured, eager):
                assert torch.equal(y.double(), want), f"rank {rank}, replay {number}"
    fusedtp.check(group)


@pytest.mark.parametrize("calls", [1, 3])
def test_a_graph_of_an_odd_number_of_calls_replays_between_eager_calls(calls):
    VirtualWorld(4, device="cuda").run(partial(_replays, calls, 50))


def test_a_rank_that_does_not_come_is_reported_and_the_workspace_is_not_used_again():
    def body(group: object) -> str:
        fusedtp.set_timeout(group, 2.0)
        x = torch.ones(32, 32, device="cuda")

        def call() -> None:
            fusedtp.all_gather_matmul(x, [x], group, engine="triton")
            torch.cuda.synchronize()

        call()
        if group.rank() == 1:
            return "away"
        call()
        with pytest.raises(fusedtp.SignalTimeout, match="rank 1"):
            fusedtp.check(group)
        with pytest.raises(fusedtp.SignalTimeout):
            call()
        return "told"

    assert VirtualWorld(2, device="cuda").run(body) == ["told", "away"]
