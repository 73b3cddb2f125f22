"""Laws of simulated time: nothing moves that need not, nothing is faster than it can be, nobody waits unnoticed."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.sim import Await, Copy, Launch, Run, Signal, SimulationFault, UnsupportedKernel, symmetric
from fusedtp.sim.timed import Engine, Node, Timeline, load_node, machines
from fusedtp.sim.timed.__main__ import main
from fusedtp.sim.timed.cases import ENGINE, GATHER, REDUCE, SCATTER, Problem, fused_run, matmul_run
from fusedtp.sim.timed.measure import alternatives, measure
from fusedtp.sim.timed.node import read_node
from fusedtp.sim.timed.share import Share
from fusedtp.sim.timed.timeline import WAIT

from . import timed_kernels as kernels

SMALL = load_node("h100").but(name="small", sms=12)
IDEAL = SMALL.but(
    name="ideal", memory_bandwidth=inf, sm_bandwidth=inf, link_bandwidth=inf, copy_bandwidth=inf, memory_latency=0.0,
    link_latency=0.0, launch_latency=0.0, copy_latency=0.0,
)  # fmt: skip

world_sizes = st.integers(2, 4)
tokens = st.integers(1, 600)
sizes = st.integers(1, 300)


def time(problem: Problem, node: Node = SMALL, **options: bool) -> Timeline:
    return Engine(fused_run(problem, node), node, **options).run()


def up(n: int, block: int) -> int:
    return -(-n // block)


# -- conservation ------------------------------------------------------------------------------------------------------


@settings(max_examples=12)
@given(st.sampled_from([GATHER, SCATTER]), world_sizes, tokens, sizes, sizes)
def test_bytes_and_products_are_the_closed_forms(operation: str, w: int, t: int, n: int, k: int) -> None:
    """A gather sends every rank's rows to every peer once, a reduce-scatter every owner's partials; tiles are whole."""
    problem = Problem(operation, t, (n,), k, w)
    c, rows, item = problem.chosen(SMALL), problem.rows, problem.dtype.itemsize
    got = time(problem)

    tiles = sum(up(size, c.block_m) for size in rows.sizes) * up(n, c.block_n)
    flops = 2 * tiles * c.block_m * c.block_n * up(k, c.block_k) * c.block_k
    assert got.flops == (flops,) * w
    width = (lambda s, d: rows.sizes[s] * k) if operation == GATHER else (lambda s, d: rows.sizes[d] * n)
    want = {(s, d): width(s, d) * item for s in range(w) for d in range(w) if s != d and width(s, d)}
    assert got.sent == want


@settings(max_examples=6)
@given(world_sizes, tokens, sizes, sizes)
def test_an_all_reduce_sends_what_its_shots_need(w: int, t: int, n: int, k: int) -> None:
    problem = replace(Problem(REDUCE, t, (n,), k, w), dtype=torch.float32)
    got, item = time(problem), 4
    if t * n * item <= 1 << 18:  # one shot: every partial to every peer
        want = {(s, d): t * n * item for s in range(w) for d in range(w) if s != d}
    else:  # partials to the owner, the owner's sums to all
        rows = problem.rows.sizes
        want = {(s, d): (rows[d] + rows[s]) * n * item for s in range(w) for d in range(w) if s != d}
    assert got.sent == {pair: nbytes for pair, nbytes in want.items() if nbytes}


@settings(max_examples=8)
@given(st.sampled_from([GATHER, SCATTER, REDUCE]), world_sizes, tokens, st.integers(300, 900))
def test_skipping_iterations_changes_nothing(operation: str, w: int, t: int, k: int) -> None:
    """The kernels' loops differ in their tails only, so skipping the middle is exact, to the last bit of time."""
    problem = Problem(operation, t, (96,), k, w)
    fast, slow = time(problem), time(problem, exact=True)
    assert (fast.total, fast.flops, fast.sent, fast.memory) == (
        slow.total,
        slow.flops,
        slow.sent,
        slow.memory,
    )
    assert fast.segments == slow.segments


@pytest.mark.parametrize("kernel", [kernels.walks, kernels.strides])
@pytest.mark.parametrize("blocks", [1, 5, 6, 7, 40])
def test_what_a_loop_carries_is_where_it_would_be(kernel: object, blocks: int) -> None:
    """An address that was not moved on would lie before the tensor; a sum that grows unevenly stops the skipping."""
    b = 16
    counter = torch.zeros(2, dtype=torch.int32)
    args = dict(src=torch.zeros(blocks * b), counter=counter, N=blocks * b, B=b)
    got = Engine(Run([[Launch(kernel, 1, args)]]), SMALL).run()
    assert counter[0] == 3 * blocks
    assert counter[1] == (sum(range(0, blocks * b, b)) if kernel is kernels.walks else 0)
    assert got.memory[0] >= 4 * b * (blocks + 1)


def test_a_run_is_the_same_every_time() -> None:
    problem = Problem(GATHER, 300, (200, 100), 256, 4)
    assert time(problem) == time(problem)


# -- bounds ------------------------------------------------------------------------------------------------------------


@settings(max_examples=8)
@given(world_sizes, tokens, sizes, sizes)
def test_with_free_communication_only_the_products_take_time(w: int, t: int, n: int, k: int) -> None:
    """Programs walk one list of all ranks' tiles, so the one with the most tiles ends last."""
    problem = Problem(GATHER, t, (n,), k, w)
    c = problem.chosen(IDEAL)
    tiles = sum(up(size, c.block_m) for size in problem.rows.sizes) * up(n, c.block_n)
    tile = 2 * c.block_m * c.block_n * up(k, c.block_k) * c.block_k
    want = up(tiles, c.other_programs) * tile / (IDEAL.flops["bf16"] / IDEAL.sms)
    assert time(problem, IDEAL).total == pytest.approx(want, rel=1e-9)


@settings(max_examples=12)
@given(
    st.sampled_from([GATHER, SCATTER, REDUCE]), world_sizes, st.integers(64, 600), st.floats(1e9, 1e12), sizes
)
def test_nothing_is_faster_than_its_parts(operation: str, w: int, t: int, link: float, k: int) -> None:
    """max(t_comm, t_matmul) <= t_fused for the least that must move and be multiplied."""
    node, problem = SMALL.but(link_bandwidth=link), Problem(operation, t, (256,), k, w)
    got = time(problem, node)
    received = [sum(b for (s, d), b in got.sent.items() if d == rank) for rank in range(w)]
    assert got.total >= max(received) / link
    assert got.total >= problem.flops / node.flops["bf16"]


@settings(max_examples=6)
@given(st.lists(st.floats(1e8, 1e13), min_size=3, max_size=3), st.integers(64, 600))
def test_a_faster_link_is_never_slower(links: list[float], t: int) -> None:
    """Where no two transfers share anything (two ranks, a copy stream each, boundless memory): each event then is a
    maximum of sums of times that fall with the bandwidth. With shares there are anomalies, as in any list schedule."""
    node = SMALL.but(memory_bandwidth=inf)
    problem = Problem(GATHER, t, (300,), 200, 2, transport=ENGINE)
    totals = [time(problem, node.but(link_bandwidth=b, copy_bandwidth=b)).total for b in sorted(links)]
    assert all(slow >= fast * (1 - 1e-12) for slow, fast in pairwise(totals))
    assert totals[0] > totals[-1] or links[0] == links[-1] or totals[0] == pytest.approx(totals[-1])


def test_a_slow_link_is_what_takes_the_time() -> None:
    problem, link = Problem(GATHER, 512, (256,), 256, 4), 1e8
    took, wire = time(problem, SMALL.but(link_bandwidth=link)).total, problem.traffic / link
    assert wire <= took <= wire + 2 * time(problem).total


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.integers(1, 100))
def test_transfers_that_want_too_much_share_in_proportion(wants: list[int], capacity: int) -> None:
    """All begin together and would take a second alone: they take as long as the capacity needs for all of them."""

    class Clock:
        def __init__(self) -> None:
            self.now, self.queue = 0.0, []

        def at(self, time: float, action) -> None:  # type: ignore[no-untyped-def]
            self.queue.append((time, len(self.queue), action))

    clock, ended = Clock(), []
    share = Share(clock, capacity)
    for want in wants:
        share.add(want, 1.0, lambda: ended.append(clock.now))
    while clock.queue:
        clock.queue.sort(reverse=True)
        clock.now, _, action = clock.queue.pop()
        action()
    assert len(ended) == len(wants)
    assert max(ended) == pytest.approx(max(1.0, sum(wants) / capacity, max(wants) / capacity))
    assert share.gone() == pytest.approx(sum(wants))


def test_a_transfer_that_nothing_holds_back_takes_the_capacity() -> None:
    nbytes, node = 1 << 24, SMALL.but(copy_bandwidth=inf, copy_latency=0.0)
    memory = symmetric("box", 2, (nbytes,), torch.uint8)
    copy = Copy(memory.tensors[1], torch.zeros(nbytes, dtype=torch.uint8))
    assert Engine(Run([[copy], []], [memory]), node).run().total == pytest.approx(
        nbytes / node.link_bandwidth
    )


# -- waits -------------------------------------------------------------------------------------------------------------


def exchange_run(w: int = 3, n: int = 64, silent: int | None = None) -> Run:
    """The exchange over w ranks; rank `silent` forgets its flag."""
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
    assert (wait.rank, wait.tensor, wait.index, wait.seen) == (2, "flag of rank 2 ", (0,), "0")
    assert "timed_kernels.py" in str(wait.site) and "exchange" in str(wait.site)


def test_a_forgotten_signal_of_the_host_is_a_deadlock() -> None:
    run = fused_run(Problem(GATHER, 256, (128,), 128, 2, transport=ENGINE), SMALL)
    last = max(i for i, work in enumerate(run.work[0]) if isinstance(work, Signal))
    del run.work[0][last]
    with pytest.raises(SimulationFault, match="deadlock"):
        Engine(run, SMALL).run()


def test_the_time_of_an_exchange_is_the_sum_of_its_steps() -> None:
    """Launch, load, store over the link, flag, the waiter's look, load, store: each once."""
    n, node = 64, SMALL.but(memory_latency=1e-6, link_latency=10e-6, launch_latency=100e-6)
    got = Engine(exchange_run(n=n), node).run()
    move = 2 * 4 * n / node.sm_bandwidth
    seen = 100e-6 + 1e-6 + move + 10e-6 + 10e-6  # the data has landed, then the flag
    want = seen + 1e-6 + 1e-6 + move
    assert got.total == pytest.approx(want, rel=1e-6)


def test_waiting_longer_costs_no_more_events() -> None:
    short, long = (Engine(exchange_run(), SMALL.but(link_latency=s)).run() for s in (1e-5, 1e-1))
    assert long.total > 100 * short.total
    assert long.switches == short.switches


def test_waits_end_when_the_flag_is_seen() -> None:
    latency = 1e-3
    got = Engine(exchange_run(), SMALL.but(link_latency=latency)).run()
    waits = [s.end - s.begin for s in got.segments if s.what == WAIT]
    assert waits == pytest.approx(3 * [latency], rel=0.01)


@pytest.mark.parametrize("operation", [GATHER, SCATTER, REDUCE])
def test_the_critical_path_is_the_whole_time(operation: str) -> None:
    got = time(Problem(operation, 512, (256,), 512, 4))
    path = got.critical_path()
    assert path[0].begin == 0 and path[-1].end == got.total
    assert all(a.end == b.begin for a, b in pairwise(path))
    assert sum(got.critical().values()) == pytest.approx(got.total)


def test_moments_are_the_segments() -> None:
    got = time(Problem(GATHER, 200, (64,), 64, 2))
    moments = [m for m in got.moments() if m.kind not in ("start", "end")]
    assert [(m.rank, m.program, m.begin, m.end) for m in moments] == [
        (s.rank, s.program, s.begin, s.end) for s in got.segments
    ]


# -- kernels of users --------------------------------------------------------------------------------------------------


def test_indices_and_counters_are_real() -> None:
    """Rows whose index is negative are masked: neither loaded nor counted."""
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
    [(kernels.branches_on_data, "depends on"), (kernels.sorts, "tl.sort is not known")],
)
def test_what_cannot_be_timed_says_so(kernel: object, words: str) -> None:
    args = dict(src=torch.zeros(8), dst=torch.zeros(8), N=8)
    with pytest.raises(UnsupportedKernel, match=words):
        Engine(Run([[Launch(kernel, 1, args)]]), SMALL).run()


def test_an_access_past_the_end_is_named() -> None:
    src = torch.zeros(8)
    with pytest.raises(SimulationFault, match="out of bounds"):
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
    nbytes, node = 1 << 20, SMALL.but(copy_latency=1e-3, memory_bandwidth=inf)
    memory = symmetric("box", 2, (nbytes,), torch.uint8)
    copies = [Copy(memory.tensors[1], torch.zeros(nbytes, dtype=torch.uint8)) for _ in range(3)]
    got = Engine(Run([copies, []], [memory]), node).run()
    assert got.total == pytest.approx(3 * (1e-3 + nbytes / node.copy_bandwidth))
    assert got.sent == {(0, 1): 3 * nbytes}


# -- data files and command --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", machines())
def test_machines_are_complete(name: str) -> None:
    node = load_node(name)
    assert node.sms > 100 and node.flops["bf16"] > 1e14
    got = Engine(matmul_run(Problem(GATHER, 256, (256,), 256), node), node).run()
    assert got.total > 0


def test_a_damaged_machine_lists_all_its_faults(tmp_path: Path) -> None:
    entries = json.loads((Path(__file__).parents[2] / "fusedtp/sim/timed/machines/h100.json").read_text())
    del entries["sms"]["source"], entries["l2_bytes"]
    entries["link_bandwidth"]["value"] = 0
    entries["colour"] = {"value": 1, "source": "none"}
    with pytest.raises(ValueError) as caught:
        read_node("mine", json.dumps(entries))
    for words in (
        "sms has no source", "l2_bytes is missing", "link_bandwidth is not positive", "colour is not known"
    ):  # fmt: skip
        assert words in str(caught.value)


@pytest.mark.parametrize("compare", ["none", "transport", "chunk", "programs", "order"])
def test_comparisons_vary_what_they_name(compare: str) -> None:
    problem = Problem(GATHER, 512, (256,), 256, 4)
    found = dict(alternatives(problem, SMALL, compare))
    assert found.pop("as launched") == problem
    assert len(found) == {"none": 0, "transport": 1}.get(compare, len(found)) and (found or compare == "none")
    assert len({(p.chosen(SMALL), p.transport, p.order) for p in [problem, *found.values()]}) == 1 + len(
        found
    )


def test_hidden_is_what_fusing_saves_of_the_shorter_part() -> None:
    got = measure(Problem(GATHER, 512, (256,), 256, 4), SMALL)
    saved = got.communication + got.matmul - got.fused.total
    assert got.hidden == pytest.approx(saved / min(got.communication, got.matmul))


def test_the_command_prints_a_row_for_each_choice(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "timeline.html"
    arguments = ["--shape", "512x256", "--tokens", "256", "--tp", "2", "--compare", "transport"]
    assert main([*arguments, "--timeline", str(page)]) == 0
    out = capsys.readouterr().out
    assert "hidden" in out and "engine" in out
    assert "all_gather_matmul_kernel" in page.read_text()


def test_the_command_refuses_with_every_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--machine", "abacus", "--tokens", "0", "--tp", "1"]) == 2
    out = capsys.readouterr().out
    assert all(word in out for word in ("abacus", "--tokens", "--tp"))
    assert main(["--shape", "wide"]) == 2
