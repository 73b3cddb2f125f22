"""The protocol of calls on one workspace: rotation, growth, signatures, and ranks at different speeds."""

import random
import time
import warnings

import pytest
import torch

from fusedtp.comm import Signature, VirtualWorld, communicator, reserve
from fusedtp.comm.memory import round_up
from tests.harness import PerRank, world

FIELDS = {"operation": "all_gather_matmul", "engine": "chunked", "dtype": torch.float32, "features": 4}


def gather(comm, value: float, sizes: tuple[int, ...], width: int, pause: float = 0.0) -> torch.Tensor:
    """Do what an operation does: store own rows, publish, wait for each peer, read its rows in place."""
    with comm.workspace.call(Signature(**FIELDS | {"sizes": sizes, "features": width}), 4 * width * max(sizes)) as call:
        if sizes[comm.rank]:
            call.buffer(comm.rank, (sizes[comm.rank], width), torch.float32).fill_(value)
        call.publish_all()
        parts = []
        for p in range(comm.world_size):
            if p != comm.rank:
                call.wait(p)
            time.sleep(pause)
            if sizes[p]:
                parts.append(call.buffer(p, (sizes[p], width), torch.float32).clone())
    return torch.cat(parts) if parts else torch.empty(0, width)


def many_calls(group, seed: int, calls: int, delay: float) -> list[int]:
    """The calls that read wrong data. All ranks draw the same sizes; each rank draws its own pauses."""
    comm, wrong = communicator(group), []
    shared, own = random.Random(seed), random.Random(100 * seed + comm.rank)
    for step in range(calls):
        sizes = tuple(shared.choice([0, 1, 3, 8]) for _ in range(comm.world_size))
        width = shared.choice([1, 7, 64, 700])
        time.sleep(own.random() * delay)
        got = gather(comm, float(step * 10 + comm.rank), sizes, width, own.random() * delay)
        want = torch.cat([torch.full((n, width), float(step * 10 + p)) for p, n in enumerate(sizes)])
        if not torch.equal(got, want):
            wrong.append(step)
    return wrong


def many_calls_on_one_slot(group, seed: int, calls: int, delay: float) -> list[int]:
    from fusedtp.comm import Call

    Call.buffer, two_slots = _buffer_of_slot_0(Call.buffer), Call.buffer
    try:
        return many_calls(group, seed, calls, delay)
    finally:
        Call.buffer = two_slots


def _buffer_of_slot_0(buffer):
    def first(call, *args):
        parity, call.parity = call.parity, 0
        try:
            return buffer(call, *args)
        finally:
            call.parity = parity

    return first


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_calls_of_changing_shape_with_ranks_at_different_speeds(size):
    assert world(size).run(many_calls, size, 100, 0.003, fresh=True) == [[]] * size


def test_the_same_between_threads():
    assert VirtualWorld(3).run(lambda group: many_calls(group, 3, 100, 0.003)) == [[]] * 3


def test_with_one_slot_in_place_of_two_a_fast_rank_overwrites_what_a_slow_one_reads():
    assert any(world(3).run(many_calls_on_one_slot, 5, 100, 0.003, fresh=True))


def waited_for_a_late_rank(group) -> tuple[float, float]:
    """Seconds that a call waited for peers, by its own count, and seconds that it took; rank 1 arrives late."""
    comm = communicator(group)
    gather(comm, 1.0, (1,) * comm.world_size, 4)  # from here on, all ranks are in step
    before, begin = comm.workspace.wait_seconds, time.perf_counter()
    if comm.rank == 1:
        time.sleep(0.3)
        begin = time.perf_counter()
    gather(comm, 2.0, (1,) * comm.world_size, 4)
    return comm.workspace.wait_seconds - before, time.perf_counter() - begin


def test_the_time_for_which_a_rank_waits_is_counted():
    (waited, took), (late, its) = world(2).run(waited_for_a_late_rank)
    assert 0 < waited <= took and 0 <= late <= its < took


def disagree(group, changes: dict) -> None:
    comm = communicator(group)
    gather(comm, 1.0, (1,) * comm.world_size, 4)
    with comm.workspace.call(Signature(**FIELDS | {"sizes": (1,) * comm.world_size} | changes), 16) as call:
        call.handshake()


def still_works(group) -> torch.Tensor:
    comm = communicator(group)
    return gather(comm, float(comm.rank), (1,) * comm.world_size, 1)


def disagree_and_go_on(group, changes: dict) -> tuple[str, torch.Tensor]:
    try:
        disagree(group, changes)
    except ValueError as error:
        return str(error), still_works(group)
    raise AssertionError("no rank may go on with a call that another does not take part in")


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("operation", {"operation": "matmul_reduce_scatter"}),
        ("engine", {"engine": "triton"}),
        ("dtype", {"dtype": torch.bfloat16}),
        ("features", {"features": 5}),
        ("batch", {"batch": 2}),
        ("weights", {"weights": 2}),
        ("needs_grad", {"needs_grad": 1}),
        ("with_bias", {"with_bias": 1}),
        ("tables", {"tables": 1}),
        ("sizes", {"sizes": (1, 1, 2)}),
    ],
)
def test_a_rank_that_differs_is_named_on_every_rank_and_the_group_stays_usable(field, change):
    outcomes = world(3).run(disagree_and_go_on, PerRank([{}, change, {}]))
    for rank, (message, after) in enumerate(outcomes):
        assert field in message and "rank 1" in message, message
        assert f"rank {rank}" in message or rank == 1, message
        assert torch.equal(after.flatten(), torch.tensor([0.0, 1.0, 2.0]))


def disagree_when_growing(group, width: int) -> None:
    comm = communicator(group)
    gather(comm, 1.0, (1,) * comm.world_size, width)


def test_a_difference_in_a_call_that_must_grow_is_named_too():
    outcomes = world(3).outcomes(disagree_when_growing, PerRank([10, 9_000, 10]), fresh=True)
    assert all(outcome.is_a("SignatureMismatch") and outcome.seconds < 30 for outcome in outcomes)
    assert all("features" in outcome.message and "rank 1" in outcome.message for outcome in outcomes)


def grow(group) -> list[int]:
    comm = communicator(group)
    sizes = []
    for nbytes in (10, 10_000, 100, 20_000):
        reserve(group, nbytes)
        sizes.append(comm.workspace.slot_bytes)
    gather(comm, 1.0, (1,) * comm.world_size, 20_000 // 4)
    return [*sizes, comm.workspace.slot_bytes, comm.workspace.nbytes]


def test_reserve_grows_never_shrinks_and_calls_within_it_do_not_allocate():
    for a, b, c, d, e, total in world(2).run(grow, fresh=True):
        assert 10 <= a <= 4096 and 10_000 <= b < 15_000 and c == b and 20_000 <= d < 25_000 and e == d
        assert 2 * d <= total < 2 * d + 100_000


def poison(group) -> bool:
    comm = communicator(group)
    gather(comm, 1.0, (1,) * comm.world_size, 4)
    comm.world.barrier()
    comm.workspace.poison()
    comm.world.barrier()
    with comm.workspace.call(Signature(**FIELDS | {"sizes": (1,) * comm.world_size}), 16) as call:
        return all(call.buffer(p, (4,), torch.float32).isnan().all() for p in range(comm.world_size))


def test_poison_fills_every_rank_with_nan():
    assert world(2).run(poison) == [True, True]


def grow_slowly(group, unit: int) -> tuple[int, int]:
    """Each batch is one page longer: how often memory was allocated, and the first slot size."""
    workspace, sizes = communicator(group).workspace, []
    for pages in range(8, 64):
        workspace.grow(pages * unit)
        sizes.append(workspace.slot_bytes)
        assert pages * unit <= workspace.slot_bytes <= pages * unit * 9 // 8 + unit
    return len(set(sizes)), sizes[0]


def test_batches_that_get_longer_little_by_little_seldom_allocate():
    unit = round_up(1)
    for grown, first in world(2).run(grow_slowly, unit, fresh=True):
        assert first == 8 * unit and grown < 20  # out of 56; log(8) / log(9 / 8) = 18


def grown_without_a_switch(group) -> list[str]:
    workspace = communicator(group).workspace
    workspace.control.multicast = 4096
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        workspace.grow(1 << 16)
    return [str(each.message) for each in told]


def test_slots_that_a_switch_does_not_reach_are_told_once():
    """The result of multimem is still right, but slower than the user asked for."""
    first, second = world(2).run(grown_without_a_switch, fresh=True)
    assert len(first) == 1 and "no multicast address" in first[0] and second == []
