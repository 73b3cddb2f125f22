"""Timed waits, copies and users' kernels: no wait goes unnoticed, and a kernel that cannot be timed is reported."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
import torch
import triton

from fusedtp.bench.timed import ENGINE, GATHER, REDUCE, SCATTER, Problem, fused_run
from fusedtp.sim import Await, Copy, Launch, Run, Signal, SimulationFault, UnsupportedKernel, symmetric
from fusedtp.sim.case import Work
from fusedtp.sim.timed import Engine
from fusedtp.sim.timed.timeline import WAIT

from . import timed_kernels as kernels
from .timed_support import SMALL, time


def exchange_run(w: int = 3, n: int = 64, silent: int | None = None) -> Run:
    """The exchange over w ranks; rank `silent` does not set its flag."""
    inboxes = symmetric("inbox", w, (n,))
    flags = symmetric("flag", w, (1,), torch.int32, poisoned=False)
    work = []
    for rank in range(w):
        args = dict(
            src=torch.zeros(n), inboxes=inboxes.pointers, flags=flags.pointers, dst=torch.zeros(n), rank=rank, W=w, N=n,
            PUBLISH=rank != silent,
        )  # fmt: skip
        work.append([Launch(kernels.exchange, 1, args)])
    return Run(work, [inboxes, flags])


def test_a_missing_publish_is_a_deadlock_that_names_the_flag() -> None:
    with pytest.raises(SimulationFault) as caught:
        Engine(exchange_run(silent=1), SMALL).run()
    fault = caught.value.fault
    assert fault.rule == "deadlock"
    (wait,) = fault.waits
    assert (wait.rank, wait.tensor, wait.index, wait.seen) == (2, "flag of rank 2", (0,), "0")
    assert "timed_kernels.py" in str(wait.site) and "exchange" in str(wait.site)


def test_a_forgotten_signal_of_the_host_is_a_deadlock() -> None:
    run = fused_run(Problem(GATHER, 256, (128,), 128, 2, transport=ENGINE), SMALL)
    last = max(i for i, work in enumerate(run.work[0]) if isinstance(work, Signal))
    del run.work[0][last]
    with pytest.raises(SimulationFault, match="deadlock"):
        Engine(run, SMALL).run()


def test_the_time_of_an_exchange_is_the_sum_of_its_steps() -> None:
    """Launch, load, store over the link, flag, the waiter's poll, load, store: each once."""
    n, node = 64, SMALL.but(memory_latency=1e-6, link_latency=10e-6, launch_latency=100e-6)
    got = Engine(exchange_run(n=n), node).run()
    move = 2 * 4 * n / node.sm_bandwidth
    seen = 100e-6 + 1e-6 + move + 10e-6 + 10e-6  # the data has landed, then the flag
    want = seen + 1e-6 + 1e-6 + move
    assert got.total == pytest.approx(want, rel=1e-6)


def tell_all_run(w: int, silent: int | None = None) -> Run:
    """Every rank but `silent`, which does nothing, sets a flag at all ranks and polls all of its own."""
    flags = symmetric("flag", w, (w,), torch.int32, poisoned=False)
    size = 1 << (w - 1).bit_length()
    work: list[list[Work]] = []
    for rank in range(w):
        args = dict(flags=flags.pointers, dst=torch.zeros(size), rank=rank, W=w, P=size)
        work.append([] if rank == silent else [Launch(kernels.tell_all, 1, args)])
    return Run(work, [flags])


@pytest.mark.parametrize("w", [2, 3, 8])
def test_an_atomic_on_a_tile_is_one_instruction(w: int) -> None:
    """For any number of words: all flags leave at once, and one poll sees them all."""
    node = SMALL.but(memory_latency=1e-6, link_latency=10e-6, launch_latency=100e-6)
    got = Engine(tell_all_run(w), node).run()
    assert got.total == pytest.approx(100e-6 + 1e-6 + 10e-6 + 1e-6, rel=1e-4)  # launch, addresses, flags, look


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_tile_of_flags_of_which_one_is_missing_is_a_deadlock_that_names_it(silent: int) -> None:
    with pytest.raises(SimulationFault) as caught:
        Engine(tell_all_run(3, silent), SMALL).run()
    fault = caught.value.fault
    assert fault.rule == "deadlock"
    waits = {(each.rank, each.tensor, each.index, each.seen) for each in fault.waits}
    assert waits == {(rank, f"flag of rank {rank}", (silent,), "0") for rank in {0, 1, 2} - {silent}}


@pytest.mark.parametrize("lines", [0, 8, 16, 32])
@pytest.mark.parametrize("latency", [1e-5, 1e-4, 1e-3])
def test_what_is_prefetched_comes_during_a_wait(lines: int, latency: float) -> None:
    """Reading 32 lines takes 320 us: from the wait on for those that were not prefetched, from the start for all."""
    n, line = 1024, 1e-5
    node = SMALL.but(
        memory_latency=0.0, link_latency=latency, launch_latency=0.0, memory_bandwidth=128 / line, sm_bandwidth=inf
    )
    flags = symmetric("flag", 2, (1,), torch.int32, poisoned=False)
    work: list[list[Work]] = []
    for rank in range(2):
        args = dict(src=torch.zeros(n), flags=flags.pointers, dst=torch.zeros(n), rank=rank, W=2, N=n, LINES=lines)
        work.append([Launch(kernels.reads_after_a_flag, 1, args)])
    got = Engine(Run(work, [flags]), node).run()
    assert got.total == pytest.approx(max(latency + (32 - lines) * line, 32 * line), rel=0.02)


def test_waiting_longer_costs_no_more_events() -> None:
    short, long = (Engine(exchange_run(), SMALL.but(link_latency=s)).run() for s in (1e-5, 1e-1))
    assert long.total > 100 * short.total
    assert long.switches == short.switches


def test_waits_end_when_the_flag_is_seen() -> None:
    latency = 1e-3
    got = Engine(exchange_run(), SMALL.but(link_latency=latency)).run()
    waits = [s.end - s.begin for s in got.segments if s.what == WAIT]
    assert waits == pytest.approx(3 * [latency], rel=0.01)


@pytest.mark.parametrize("links", [1.5, 2.0])
def test_a_short_wait_of_the_library_only_polls(links: float) -> None:
    """A gather crosses the link twice, with its rows and its flag; its wait reads nothing but the flags."""
    look, problem = 1e-6, Problem(GATHER, 16, (64,), 64, 2)
    near, far = (time(problem, SMALL.but(memory_latency=look, link_latency=n * look)).total for n in (1.0, links))
    assert far - near <= 2 * (links - 1) * look + 0.1 * look


@pytest.mark.parametrize("operation", [GATHER, SCATTER, REDUCE])
def test_the_critical_path_is_the_whole_time(operation: str) -> None:
    got = time(Problem(operation, 512, (256,), 512, 4))
    path = got.critical_path()
    assert path[0].begin == 0 and path[-1].end == got.total
    assert all(a.end == b.begin for a, b in pairwise(path))
    assert sum(got.critical().values()) == pytest.approx(got.total)
    joined = got.critical_stretches()
    assert joined[0].begin == 0 and joined[-1].end == got.total
    for a, b in pairwise(joined):
        assert a.end == b.begin and (a.what, a.rank, a.launch) != (b.what, b.rank, b.launch)


def test_moments_are_the_segments() -> None:
    got = time(Problem(GATHER, 200, (64,), 64, 2))
    moments = [m for m in got.moments() if m.kind not in ("start", "end")]
    assert [(m.rank, m.program, m.begin, m.end) for m in moments] == [
        (s.rank, s.program, s.begin, s.end) for s in got.segments
    ]


# -- kernels of users --------------------------------------------------------------------------------------------------


def test_indices_and_counters_are_real() -> None:
    """Rows with a negative index are masked: neither loaded nor counted."""
    m, k, programs = 4, 16, 3
    rows = torch.tensor([5, -1, 0, 3, 2, 2, -7, 1, 4, 4, 4, 4], dtype=torch.int32)
    counter = torch.zeros(1, dtype=torch.int32)
    args = dict(src=torch.zeros(6, k), rows=rows, dst=torch.zeros(12, k), counter=counter, K=k, M=m)
    got = Engine(Run([[Launch(kernels.gather_rows, programs, args)]]), SMALL).run()
    assert counter.item() == programs
    stored = 4 * 12 * k
    assert got.memory[0] >= stored and got.flops == (0,)


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (kernels.branches_on_data, r"depends on.* at .*timed_kernels.py:\d+ in branches_on_data"),
        (kernels.sorts, r"does not support tl\.sort"),
        (
            kernels.polls_by_ptx,
            r"does not support inline PTX that accesses memory: 'ld\.acquire\.sys.* in polls_by_ptx",
        ),
        (kernels.branches_on_ptx, "depends on"),
        (kernels.takes_no_attribute, r"no attribute 'atomic_add', at .*timed_kernels.py:\d+ in takes_no_attribute"),
    ],
)
def test_what_cannot_be_timed_says_so(kernel: object, words: str) -> None:
    args = dict(src=torch.zeros(8), dst=torch.zeros(8), N=8)
    with pytest.raises(UnsupportedKernel, match=words):
        Engine(Run([[Launch(kernel, 1, args)]]), SMALL).run()


@pytest.mark.parametrize(("config", "programs"), [(None, 3), (1, 2)])
def test_autotuned_kernels_and_grids_that_are_functions(config: int | None, programs: int) -> None:
    """The first config is used, or the one that the launch names."""
    counter = torch.zeros(1, dtype=torch.int32)
    args = dict(src=torch.zeros(11), dst=torch.zeros(11), counter=counter, n=11)
    grid = lambda meta: (triton.cdiv(meta["n"], meta["B"]),)  # noqa: E731
    Engine(Run([[Launch(kernels.tuned, grid, args, tuned=config)]]), SMALL).run()
    assert counter.item() == programs


@pytest.mark.parametrize(
    ("by", "ends", "waits"), [(">=", 2, 3), ("==", 2, 1), ("!=", 0, 2), ("&", 6, 1), ("nor", 1, -3)]
)
def test_a_stream_waits_by_any_comparison(by: str, ends: int, waits: int) -> None:
    """The awaited flag becomes 2."""
    for value in (ends, waits):
        flag = torch.zeros(1, dtype=torch.int32)
        run = Run([[Signal(flag, 2), Await(flag, value, by=by)]])
        if value == ends:
            Engine(run, SMALL).run()
        else:
            with pytest.raises(SimulationFault, match="deadlock"):
                Engine(run, SMALL).run()


def test_an_access_past_the_end_is_named() -> None:
    src = torch.zeros(8)
    with pytest.raises(SimulationFault, match=r"out of bounds: \d+ bytes past the end"):
        Engine(Run([[Launch(kernels.past_the_end, 1, dict(src=src, N=8))]]), SMALL).run()


def test_a_signal_wakes_who_awaits_it_while_others_work() -> None:
    """Rank 1 copies as soon as rank 0 has signalled, long before rank 0's other stream is done."""
    box = symmetric("box", 2, (1 << 20,), torch.uint8)
    flag = symmetric("flag", 2, (1,), torch.int32, poisoned=False)
    long, short = (torch.zeros(n, dtype=torch.uint8) for n in (1 << 20, 16))
    first = [Copy(box.tensors[1], long), Signal(flag.tensors[1], 3, stream="other")]
    second = [Await(flag.tensors[1], 2), Copy(box.tensors[0][:16], short)]
    node = SMALL.but(copy_bandwidth=1e6)
    got = Engine(Run([first, second], [box, flag]), node).run()
    ends = {s.rank: s.end for s in got.segments if s.launch == "copy"}
    latency = node.link_latency + node.memory_latency + node.copy_latency
    assert ends[1] == pytest.approx(latency + 16 / 1e6)
    assert ends[0] > 1


def test_copies_of_a_stream_follow_one_another() -> None:
    nbytes, node = 1 << 20, SMALL.but(copy_latency=1e-3, memory_bandwidth=inf, link_bandwidth=inf)
    memory = symmetric("box", 2, (nbytes,), torch.uint8)
    copies = [Copy(memory.tensors[1], torch.zeros(nbytes, dtype=torch.uint8)) for _ in range(3)]
    got = Engine(Run([copies, []], [memory]), node).run()
    assert got.total == pytest.approx(3 * (1e-3 + nbytes / node.copy_bandwidth))
    assert got.sent == {(0, 1): 3 * nbytes}
