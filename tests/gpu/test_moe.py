"""The exchange and its experts compiled: laws of tests/ops/moe on a GPU, between virtual ranks and between processes.

In the virtual world the host makes plans, so tests of asynchrony and of graphs start with an existing plan.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings

import fusedtp
from fusedtp import VirtualWorld
from fusedtp.comm import communicator
from fusedtp.ops.moe import plan as plans
from tests.gpu.test_graphs import captured
from tests.ops.moe.laws import Case, conserves_rows
from tests.ops.moe.layer_laws import SMALL, Layer, Planned, experts_law
from tests.ops.moe.test_exchange import cases

pytestmark = pytest.mark.gpu
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def run(world_size: int, law, *arguments) -> None:
    """Run law(group, *arguments) on every virtual rank, and check that no kernel recorded a failure."""

    def body(group: object) -> None:
        fusedtp.set_timeout(group, 60.0)
        law(group, *arguments)
        torch.cuda.synchronize()
        fusedtp.check(group)

    VirtualWorld(world_size, device="cuda").run(body)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@settings(max_examples=9, deadline=None)
@given(case=cases(engines=("triton",)))
def test_the_kernels_conserve_rows(dtype: torch.dtype, case: Case):
    """Each draw compiles kernels: 27 in all, split over tests so that a run can resume between them."""
    run(len(case.sizes), conserves_rows, replace(case, dtype=dtype, device="cuda"))


@settings(max_examples=10, deadline=None)
@given(cases(engines=("collective",)))
def test_the_collective_conserves_rows(case: Case):
    run(len(case.sizes), conserves_rows, replace(case, device="cuda"))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("skew", ["uniform", "one"])
def test_large_exchanges_of_eight_ranks(dtype: torch.dtype, skew: str):
    sizes = (700, 0, 33, 512, 1, 300, 64, 129)
    run(8, conserves_rows, Case("triton", sizes, 64, 8, 1000, dtype, skew, 0.1, 3, device="cuda"))


LARGE = dict(num_experts=16, top_k=4, dim=128, hidden=96)


@pytest.mark.parametrize("sizes", [(64,), (300, 17), (5, 0, 70, 9), (40,) * 8], ids=str)
@pytest.mark.parametrize("engine", ["triton", "collective"])
def test_experts_equal_the_dense_formula(sizes: tuple[int, ...], engine: str):
    run(len(sizes), experts_law, Layer(sizes, **LARGE, engine=engine, device="cuda"), range(4))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES[1:], ids=str)
def test_experts_in_16_bits_equal_the_dense_formula(dtype: torch.dtype):
    run(3, experts_law, Layer((6, 0, 5), **SMALL, dtype=dtype, engine="triton", device="cuda"), range(4))


@pytest.mark.parametrize("sizes", [(64, 17, 0), (40,) * 8], ids=str)
def test_experts_in_rounds_equal_the_dense_formula(sizes: tuple[int, ...]):
    layer = Layer(sizes, **LARGE, engine="triton", device="cuda", recv_capacity=0.75)
    for used in VirtualWorld(len(sizes), device="cuda").run(experts_law, layer, range(4)):
        assert max(int(usage.rounds) for usage in used) > 1


def test_what_exceeds_the_usual_room_comes_in_rounds():
    """With a size threshold of 0, eight ranks have room for two shares; up to four shares arrive."""
    layer = Layer((40,) * 8, **LARGE, engine="triton", device="cuda")
    with patch.object(plans, "SMALL", 0):
        for used in VirtualWorld(8, device="cuda").run(experts_law, layer, range(4)):
            assert [usage.bound for usage in used] == [2 * 40 * 4] * 4
            assert max(int(usage.rounds) for usage in used) > 1


def unsynchronised(group, layer: Layer) -> None:
    """After kernels are compiled and memory is allocated, no call copies to the host or waits for the device."""
    planned, world = Planned(group, layer, 0), communicator(group).world
    planned.check(planned.both(), "first")
    planned.refresh(1, 1.0)
    torch.cuda.synchronize()
    world.barrier()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = planned.both()
        world.barrier()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    planned.check(got, "without a wait")


@pytest.mark.parametrize("sizes", [(300, 17), (40, 0, 70, 9)], ids=str)
def test_nothing_waits_for_the_gpu(sizes: tuple[int, ...]):
    run(len(sizes), unsynchronised, Layer(sizes, **LARGE, engine="triton", device="cuda"))


def replayed(group, layer: Layer, replays: int) -> None:
    """A captured layer works for any routing of as many tokens, because the device reads the destinations."""
    planned = Planned(group, layer, 0)
    fusedtp.reserve(group, 1 << 22)
    with torch.no_grad():
        graph, outs = captured(group, lambda: [planned.forward()])
        torch.cuda.synchronize()
        communicator(group).world.barrier()
        for number in range(1, replays + 1):
            planned.refresh(number % 7, (number % 3) / 2)
            graph.replay()
            planned.check([outs[0].clone()], f"replay {number}")
            if number % 2:  # an odd number of calls on the same slots
                planned.check([planned.forward()], f"eager call {number}")


@pytest.mark.parametrize("sizes", [(300, 17), (40, 0, 70, 9)], ids=str)
def test_a_graph_replays_with_other_routing(sizes: tuple[int, ...]):
    run(len(sizes), replayed, Layer(sizes, **LARGE, engine="triton", device="cuda"), 40)


def overflows(group) -> None:
    """The next check of what kernels recorded raises. That may be in the call itself, which launches two kernels."""
    ids = torch.tensor([[0, 1]] * 6, device="cuda")
    x, weights = torch.ones(6, 16, device="cuda"), torch.ones(6, 2, device="cuda")
    dispatch = partial(fusedtp.moe_dispatch, x, ids, weights, 4, group, engine="triton")
    dispatch(max_rows=24)
    torch.cuda.synchronize()
    fusedtp.check(group)
    dispatch(max_rows=23)  # 24 go to the experts of rank 0
    torch.cuda.synchronize()
    fusedtp.check(group)


def check_raises(group) -> None:
    with pytest.raises(fusedtp.TooManyRows, match="24 rows"):
        fusedtp.check(group)


def test_too_many_rows_are_told_to_every_rank_and_the_workspace_is_not_used_again():
    world = VirtualWorld(2, device="cuda")
    with pytest.raises(fusedtp.TooManyRows, match="24 rows"):
        world.run(overflows)
    world.run(check_raises)


# -- processes ---------------------------------------------------------------------------------------------------------


def whole_call(group, layer: Layer) -> None:
    """With one GPU per rank, planning does not synchronize either."""
    experts_law(group, layer, range(1))
    torch.cuda.synchronize()
    dist.barrier(group)
    planned = Planned(group, layer, 1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = planned.both()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    planned.check(got, "without a wait")


def _rank(rank: int, world_size: int, store: str) -> None:
    shared = torch.cuda.device_count() < world_size
    if shared:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0 if shared else rank)
    backend = "cpu:gloo,cuda:gloo" if shared else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
    group = dist.group.WORLD
    try:
        fusedtp.set_timeout(group, 60.0)
        sizes = tuple(0 if r == 1 else 40 + 7 * r for r in range(world_size))
        for engine in ("triton", "collective"):
            experts_law(group, Layer(sizes, **LARGE, engine=engine, device="cuda"), range(4))
        for dtype in KERNEL_DTYPES:
            conserves_rows(group, Case("triton", sizes, 16, 4, 100, dtype, "skewed", 0.1, 3, device="cuda"))
        if not shared:
            whole_call(group, Layer(sizes, **LARGE, engine="triton", device="cuda"))
        torch.cuda.synchronize()
        fusedtp.check(group)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_processes(world_size: int, tmp_path: Path):
    """Two processes share a GPU if there is only one; more processes need one GPU each."""
    if world_size > 2 and torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    mp.start_processes(_rank, args=(world_size, str(tmp_path / "store")), nprocs=world_size, start_method="spawn")
