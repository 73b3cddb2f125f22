"""Calls on the GPU path: the host sends no signals, and ranks meet in a kernel, interpreted in several processes."""

import time
from threading import get_ident
from types import SimpleNamespace

import pytest
import torch

import fusedtp
from fusedtp.comm import Signature, VirtualWorld, communicator, device_view
from fusedtp.comm.signature import RAISED
from fusedtp.comm.workspace import COMPARED_CALLS, Workspace
from tests.comm.test_workspace import FIELDS, gather, many_calls
from tests.harness import world


def as_on_a_gpu(group):
    """The group's communicator, which now takes the GPU path; this thread plays its stream."""
    comm = communicator(group)
    comm.workspace.on_cpu, comm.workspace.meets = False, True
    return comm


def many_calls_that_meet(group, seed: int, calls: int) -> tuple[list[int], int, int]:
    """The calls that read wrong data, the epoch, and how many times the data region grew."""
    comm, sizes = as_on_a_gpu(group), set()
    grow = comm.workspace.grow
    comm.workspace.grow = lambda nbytes: (sizes.add(nbytes), grow(nbytes))
    wrong = many_calls(group, seed, calls, 0.003)
    return wrong, int(comm.workspace.epoch[0]) - 1, len(sizes)


def many_calls_that_do_not(group, seed: int, calls: int) -> list[int]:
    comm = as_on_a_gpu(group)
    comm.workspace.grow(1 << 16)
    comm.workspace.meets, comm.world.stream_barrier = False, lambda *_: None
    return many_calls(group, seed, calls, 0.003)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_calls_of_changing_shape_with_ranks_at_different_speeds(size):
    outcomes = world(size).run(many_calls_that_meet, size, 40, fresh=True)
    assert [wrong for wrong, _, _ in outcomes] == [[]] * size
    assert {(epoch, grown) for _, epoch, grown in outcomes} == {(2 * 40 + outcomes[0][2], outcomes[0][2])}
    assert outcomes[0][2] > 1


def test_without_meeting_a_rank_reads_what_is_not_there_yet():
    assert any(world(2).run(many_calls_that_do_not, 4, 40, fresh=True))


def after_fused_kernels(group, engines: tuple[str, ...]) -> list[int]:
    """Epochs after one fused call per engine, after a host-sequenced call, and after another."""
    comm, epochs = as_on_a_gpu(group), []
    fusedtp.reserve(group, 1 << 12)
    x = torch.ones(3, 4)
    for engine in engines:
        fusedtp.matmul_all_reduce(x, x, group, engine=engine)
    for value in (None, 1.0, 2.0):
        if value is not None:
            assert gather(comm, value, (1,) * comm.world_size, 4).eq(value).all()
        epochs.append(int(comm.workspace.epoch[0]) - 1)
    return epochs


@pytest.mark.slow
@pytest.mark.parametrize("engines", [("triton",), ("multimem",), ("triton", "multimem"), ("multimem", "triton")])
def test_all_ranks_meet_once_more_after_a_fused_kernel_and_not_before_one(engines):
    n = len(engines)
    assert world(2).run(after_fused_kernels, engines, fresh=True) == [[n, n + 3, n + 5]] * 2


@pytest.mark.parametrize("engine, meets", [("chunked", True), ("triton", False), ("multimem", False)])
@pytest.mark.parametrize("in_graph", [True, False])
def test_a_fused_call_needs_no_meeting_once_a_graph_counts_too(engine, meets, in_graph):
    """Its kernel reads the call number from the device, because the host no longer knows it."""
    met: list[str] = []
    call = SimpleNamespace(signature=SimpleNamespace(engine=engine), meet=lambda: met.append(engine))
    workspace = SimpleNamespace(_fused_last=False, _in_graph=in_graph)
    Workspace.order_fused(workspace, call)  # type: ignore[arg-type]
    assert bool(met) == (meets and in_graph)
    assert workspace._fused_last == (not meets)


def threads_that_allocate(group) -> tuple[bool, bool, list[float]]:
    """Whether the calling thread allocates regions and address tables, and what a call then reads."""
    comm = as_on_a_gpu(group)
    workspace, regions, tables = comm.workspace, set(), set()
    allocate, make_view = comm.world.allocate, workspace._make_view
    comm.world.allocate = lambda nbytes: (regions.add(get_ident()), allocate(nbytes))[1]
    workspace._make_view = lambda: (tables.add(get_ident()), make_view())[1]
    read = gather(comm, 3.0, (1,) * comm.world_size, 4)  # which meets before it grows
    return get_ident() in regions, get_ident() in tables, read.unique().tolist()


def test_what_a_workspace_keeps_is_allocated_outside_of_a_graph_s_pool():
    """torch.compile(mode="reduce-overhead") warms up with all of the thread's allocations in its pool, and raises if
    any stay there.
    """
    assert world(2).run(threads_that_allocate, fresh=True) == [(False, False, [3.0])] * 2


def without_room(group) -> tuple[str, bool]:
    """Growth that fails on all ranks, on a workspace that a graph refers to."""
    comm = as_on_a_gpu(group)
    comm.workspace.grow(1 << 10)
    comm.workspace._in_graph = True

    def full(nbytes: int) -> None:
        raise RuntimeError(f"no room for {nbytes} bytes")

    comm.world.allocate = full
    try:
        comm.workspace.grow(1 << 14)
    except RuntimeError as error:
        return str(error), comm.workspace._in_graph
    return "", False


def test_growth_that_fails_leaves_the_workspace_as_it_was():
    assert world(2).run(without_room, fresh=True) == [("no room for 32768 bytes", True)] * 2


def disagree(group, odd_rank: int, collective: bool, grown: bool) -> tuple[str, str, float]:
    """One call in which a rank has another width; return its error and the error of the next check of the group."""
    comm = as_on_a_gpu(group)
    if grown:
        comm.workspace.grow(1 << 12)
    width = 5 if comm.rank == odd_rank else 4
    signature = Signature(**FIELDS | {"sizes": (1,) * comm.world_size, "features": width})
    begin, early = time.monotonic(), ""
    try:
        if collective:
            with comm.agreed(signature):
                pass
        else:
            with comm.workspace.call(signature, 1 << (12 if grown else 10 + comm.rank)) as call:
                call.publish_all()
    except ValueError as error:
        early = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begin
    try:
        fusedtp.check(group)
    except ValueError as error:
        return early, f"{type(error).__name__}: {error}", seconds
    return early, "nothing", seconds


@pytest.mark.parametrize("collective", [False, True])
def test_ranks_that_disagree_are_named_when_the_host_next_looks(collective):
    outcomes = world(3).run(disagree, 1, collective, True, fresh=True)
    for rank, (_, later, seconds) in enumerate(outcomes):
        assert later.startswith("SignatureMismatch") and f"rank {rank}" in later and seconds < 30, later
    assert "waited for rank 1, which had published another signature" in outcomes[0][1]


def test_ranks_that_disagree_do_not_grow():
    """Growth is collective: a rank that grows alone would wait forever."""
    for early, later, seconds in world(2).run(disagree, 0, False, False, fresh=True):
        assert early.startswith("SignatureMismatch") and later == early and seconds < 30, (early, later)


def left_by(group, raisers: tuple[int, ...], engine: str) -> tuple[str, str, float, bool]:
    """A call in which `raisers` raise. Return this rank's error, the error of the next check, the seconds until the
    call returned, and whether the following call is right.
    """
    comm = as_on_a_gpu(group)
    fusedtp.set_timeout(group, 10.0)
    fusedtp.reserve(group, 1 << 12)
    begin, early = time.monotonic(), ""
    try:
        if comm.rank in raisers:
            with comm.workspace.call(Signature(**FIELDS | {"sizes": (1,) * comm.world_size}), 64) as call:
                if engine == "triton":
                    call.kernel_view()
                raise RuntimeError("out of memory")
        elif engine == "triton":
            fusedtp.matmul_all_reduce(torch.ones(3, 4), torch.ones(3, 4), group, engine=engine)
        else:
            gather(comm, 1.0, (1,) * comm.world_size, 4)
    except RuntimeError as error:
        early = str(error)
    seconds = time.monotonic() - begin
    try:
        fusedtp.check(group)
    except Exception as error:
        return early, f"{type(error).__name__}: {error}", seconds, False
    return early, "", seconds, bool(gather(comm, 2.0, (1,) * comm.world_size, 4).eq(2.0).all())


@pytest.mark.parametrize("engine", ["chunked", "triton"])
def test_a_rank_that_raises_in_a_call_is_named_at_once_and_the_group_is_at_its_end(engine):
    """The error comes before the timeout. If the group went on, the rank's next call would be taken for this one."""
    outcomes = world(3).run(left_by, (1,), engine, fresh=True)
    for rank, (early, later, seconds, _) in enumerate(outcomes):
        assert early == ("out of memory" if rank == 1 else "") and seconds < 8, (rank, early, seconds)
        assert later.startswith("PeerFailed") and "rank 1 raised in a call" in later, (rank, later)


@pytest.mark.parametrize("engine", ["chunked", "triton"])
def test_where_all_ranks_raise_in_a_call_the_group_stays_usable(engine):
    outcomes = world(3).run(left_by, (0, 1, 2), engine, fresh=True)
    assert [outcome[:2] for outcome in outcomes] == [("out of memory", "")] * 3
    assert all(right for *_, right in outcomes)


def refused_by(group, raisers: tuple[int, ...], engine: str, times: int) -> tuple[str, bool]:
    """All-reduces in which `raisers` have a weight that does not fit; the others begin when these have raised.

    Returns the error of a check after the raisers' next call, and whether that call is right.
    """
    comm = as_on_a_gpu(group)
    fusedtp.set_timeout(group, 30.0)
    fusedtp.reserve(group, 1 << 12)
    raises = comm.rank in raisers
    for _ in range(times):
        if not raises:
            comm.world.barrier()
        try:
            fusedtp.matmul_all_reduce(torch.ones(3, 4), torch.ones(3, 4 + raises), group, engine=engine)
        except ValueError as error:
            assert raises and "the weight (3, 5) takes 5" in str(error)
        if raises:
            comm.world.barrier()
    comm.world.barrier()  # the raisers make their next call when their peers have left this one
    try:
        right = raises and bool(gather(comm, 2.0, (1,) * comm.world_size, 4).eq(2.0).all())
        fusedtp.check(group)
    except Exception as error:
        return f"{type(error).__name__}: {error}", False
    return "", right


@pytest.mark.parametrize("engine", ["chunked", "triton"])
def test_a_rank_that_raises_before_a_call_is_named_by_its_peers_and_waits_for_none(engine):
    """Its stream may not wait either: peers in a plain collective never meet it."""
    for rank, (told, _) in enumerate(world(3).run(refused_by, (1,), engine, 1, fresh=True)):
        assert told.startswith("PeerFailed") and "rank 1 raised in a call" in told, (rank, told)


def arrived(group) -> tuple[str, bool]:
    """Rank 1 refuses a call that rank 0 makes, and goes on: its error, and whether rank 0 can still see the refusal."""
    comm = as_on_a_gpu(group)
    fusedtp.set_timeout(group, 30.0)
    fusedtp.reserve(group, 1 << 12)
    own, told = comm.workspace._arrivals[comm.rank], ""
    if comm.rank == 1:
        comm.refuse(comm.begun)
        comm.world.barrier()
        comm.world.barrier()
        with pytest.raises(RuntimeError) as raised:
            gather(comm, 2.0, (1, 1), 4)
        told = type(raised.value).__name__
        comm.world.barrier()
        return told, True
    comm.world.barrier()
    fusedtp.matmul_all_reduce(torch.ones(3, 4), torch.ones(3, 4), group, engine="chunked")
    comm.world.barrier()
    comm.world.barrier()
    return told, bool((own[:, 1] >> 32 == RAISED.hash32).any())


def test_a_rank_that_raised_before_a_call_does_not_arrive_again():
    """It would arrive by its next calls where a slow peer has yet to see the refusal."""
    assert world(2).run(arrived, fresh=True) == [("", True), ("PeerFailed", True)]


def test_where_all_ranks_raise_before_a_call_the_group_stays_usable():
    assert world(3).run(refused_by, (0, 1, 2), "triton", 3, fresh=True) == [("", True)] * 3


@pytest.mark.parametrize("call", [5, 6, -1, -(2**31)])
def test_a_rank_that_raises_before_a_call_tells_it_of_that_call_only(call):
    """Peers may still read the arrivals of the call before, which have the other parity. Call numbers wrap."""
    word = lambda number: 7 << 32 | number & 0xFFFFFFFF  # noqa: E731
    own = [torch.tensor([11, 12]), torch.tensor([[11, 0], [12, 0]])[:, 0]]
    device_view.announce(torch.tensor([call, 0], dtype=torch.int32), own, 7)
    want = [word(call) if parity == call & 1 else 11 + parity for parity in (0, 1)]
    assert [words.tolist() for words in own] == [want] * 2


def refused_before_a_capture(group) -> str:
    comm = as_on_a_gpu(group)
    fusedtp.reserve(group, 1 << 12)
    comm.refuse(comm.begun)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as told:
        patch.setattr("fusedtp.comm.workspace.is_capturing", lambda: True)
        gather(comm, 1.0, (1,) * comm.world_size, 4)
    assert gather(comm, 2.0, (1,) * comm.world_size, 4).eq(2.0).all()
    fusedtp.check(group)
    return str(told.value)


def test_no_graph_captures_the_meeting_of_a_call_that_was_refused():
    """Every replay would begin with it."""
    for told in world(2).run(refused_before_a_capture, fresh=True):
        assert "make a call before CUDA graph capture" in told


def raised_after_collectives(group, compared: int) -> tuple[bool, int]:
    """An error after the last of some plain collectives, of which the first were compared."""
    comm = as_on_a_gpu(group)
    for _ in range(compared + 1):
        begun = comm.begun
        with comm.agreed(Signature(**FIELDS | {"sizes": (1,) * comm.world_size, "engine": "collective"})):
            pass
        comm.refuse(begun)
    return comm.workspace._refused is None, comm.workspace.number


def test_an_error_after_a_plain_collective_is_none_before_the_next_call():
    """The peers have ended that collective, and would take the error for one of another call."""
    assert world(2).run(raised_after_collectives, COMPARED_CALLS, fresh=True) == [(True, COMPARED_CALLS)] * 2


def late(group, seconds: float) -> str:
    comm = as_on_a_gpu(group)
    fusedtp.set_timeout(group, 1.0)
    comm.workspace.grow(1 << 10)
    if comm.rank == 1:
        time.sleep(seconds)
    with comm.workspace.call(Signature(**FIELDS | {"sizes": (1, 1)}), 16) as call:
        call.publish_all()
    try:
        fusedtp.check(group)
    except fusedtp.SignalTimeout as error:
        return str(error)
    return "nothing"


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_within_the_timeout():
    outcomes = world(2).run(late, 2.5, fresh=True)
    assert "waited for rank 1, which had not signalled" in outcomes[0], outcomes


def test_threads_of_one_process_compare_all_words_when_a_call_begins():
    def body(group):
        comm = communicator(group)
        comm.workspace.on_cpu = False
        width = 5 if comm.rank == 2 else 4
        try:
            with comm.workspace.call(Signature(**FIELDS | {"sizes": (1, 1, 1), "features": width}), 1 << 10):
                return "began"
        except fusedtp.SignatureMismatch as error:
            return str(error)

    outcomes = VirtualWorld(3).run(body)
    assert "features is 4 on rank 0 and 5 on rank 2" in outcomes[0]
    assert "features is 5 on rank 2 and 4 on rank 0" in outcomes[2]


def test_a_thread_that_does_not_come_is_named_within_the_timeout():
    def body(group):
        comm = communicator(group)
        comm.workspace.on_cpu = False
        fusedtp.set_timeout(group, 1.0)
        if comm.rank == 1:
            return "away"
        with (
            pytest.raises(fusedtp.SignalTimeout) as told,
            comm.workspace.call(Signature(**FIELDS | {"sizes": (1, 1, 1)}), 16),
        ):
            pass
        with pytest.raises(fusedtp.SignalTimeout):
            fusedtp.check(group)
        return str(told.value)

    outcomes = VirtualWorld(3).run(body)
    assert outcomes[1] == "away"
    assert any("1 s for rank 1" in each for each in outcomes), outcomes


def test_a_thread_that_raises_is_the_one_that_the_run_raises():
    def body(group):
        if group.rank() == 2:
            raise KeyError("mine")
        communicator(group).world.barrier()

    with pytest.raises(KeyError, match="mine"):
        VirtualWorld(3).run(body)


def one_shot(group) -> tuple[int, bool]:
    """How often streams met in an all-reduce on ranks without a meeting kernel, and whether its sum is right."""
    comm, met = as_on_a_gpu(group), []
    fusedtp.reserve(group, 1 << 12)
    comm.workspace.meets = False
    comm.world.stream_barrier = lambda *_: (met.append(None), comm.world.barrier())
    x, w = torch.full((3, 4), comm.rank + 1.0), torch.ones(5, 4)
    y = fusedtp.matmul_all_reduce(x, w, group, engine="chunked")
    return len(met), bool(y.eq(4 * 3.0).all())


def test_a_sum_in_one_shot_meets_before_it_reads_and_before_others_write():
    assert world(2).run(one_shot, fresh=True) == [(2, True)] * 2
