"""Laws of simulated time: no byte moves needlessly, and nothing is faster than it can be."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.bench.timed import ENGINE, GATHER, REDUCE, SCATTER, SWITCH, Problem, machine_of
from fusedtp.checks.lint import _view
from fusedtp.ops.all_gather_matmul import plan_all_gather_matmul
from fusedtp.ops.matmul_all_reduce import plan_few_rows, plan_multimem, plan_one_shot, plan_two_shot
from fusedtp.sim import Copy, Launch, Run, symmetric
from fusedtp.sim.timed import Engine, load_node
from fusedtp.sim.timed.account import SPREAD, STALL, SUM, Entry
from fusedtp.sim.timed.share import Share
from fusedtp.sim.timed.timeline import COMPUTE
from fusedtp.sim.timed.traffic import Cost, Traffic

from . import timed_kernels as kernels
from .timed_support import IDEAL, SMALL, time

world_sizes = st.integers(2, 4)
tokens = st.integers(1, 600)
sizes = st.integers(1, 300)


def up(n: int, block: int) -> int:
    return -(-n // block)


# -- conservation ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=12)
@given(st.sampled_from([GATHER, SCATTER]), world_sizes, tokens, sizes, sizes)
def test_bytes_and_products_are_the_closed_forms(operation: str, w: int, t: int, n: int, k: int) -> None:
    """A gather sends each rank's rows to each peer once, a reduce-scatter each owner's partials; tiles are whole."""
    problem = Problem(operation, t, (n,), k, w)
    c, rows, item = problem.chosen(SMALL), problem.rows, problem.dtype.itemsize
    got = time(problem)

    heights = [t] if problem.few else rows.sizes
    tiles = sum(up(height, c.block_m) for height in heights) * up(n, c.block_n)
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
    if t * n * item <= 1 << 17:  # one shot: every partial to every peer
        want = {(s, d): t * n * item for s in range(w) for d in range(w) if s != d}
    else:  # partials to the owner, the owner's sums to all
        rows = problem.rows.sizes
        want = {(s, d): (rows[d] + rows[s]) * n * item for s in range(w) for d in range(w) if s != d}
    assert got.sent == {pair: nbytes for pair, nbytes in want.items() if nbytes}


@pytest.mark.slow
def test_who_sends_in_a_gather_multiplies_when_all_is_sent() -> None:
    problem = Problem(GATHER, 4096, (2048,), 256, 4)
    config, got = problem.chosen(SMALL), time(problem)
    programs = config.send_programs + config.other_programs
    assert config.send_programs > 0 and programs == SMALL.sms
    for rank in range(4):
        multiplied = {s.program for s in got.segments if s.rank == rank and s.what == COMPUTE}
        assert multiplied == set(range(programs))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 16, 32])
def test_weights_of_few_rows_come_while_rows_travel(tokens: int) -> None:
    """Half a millisecond of loading is hidden behind a millisecond of latency."""
    problem = Problem(GATHER, tokens, (384,), 1024, 4)
    nbytes = 2 * sum(problem.widths) * problem.k
    slow = SMALL.but(link_latency=1e-3, memory_bandwidth=nbytes / 5e-4)
    free = time(problem, slow.but(memory_bandwidth=inf)).total
    assert time(problem, slow).total - free < 1e-4  # x, what is stored, and y


@pytest.mark.slow
@pytest.mark.parametrize("operation", [SCATTER, REDUCE])
def test_sums_over_ranks_leave_no_tail(operation: str) -> None:
    """Most are summed between the products; after the last product all programs together read the rest."""
    problem = Problem(operation, 8192, (1024,), 4096, 4)
    got = time(problem)
    last = {rank: max(s.end for s in got.segments if (s.rank, s.what) == (rank, COMPUTE)) for rank in range(4)}
    for rank in range(4):
        summing = {s.program for s in got.segments if s.rank == rank and s.begin >= last[rank]}
        assert len(summing) >= SMALL.sms // 2
    if operation == SCATTER:
        assert got.total - max(last.values()) < 5e-6


def test_a_small_all_reduce_spreads_its_weights_over_the_machine() -> None:
    """At most two tiles per program in one shot, one tile with few rows, and no narrower than necessary."""
    node = load_node("h100")
    for n, columns in ((8192, 32), (4096, 16), (2048, 16), (256, 16)):
        config = Problem(REDUCE, 8, (n,), 64, 8).chosen(node)
        assert (config.block_n, config.programs) == (columns, min(n // columns, node.sms))
    for n, columns in ((16384, 128), (8192, 64), (4096, 32), (2048, 32)):
        for rows in (128, 256):
            config = Problem(REDUCE, rows, (n,), 64, 8).chosen(node)
            narrow = min(columns, 64) if rows == 256 else columns  # what the registers hold
            assert (config.block_m, config.block_n, config.other_programs) == (rows, narrow, 0)


@pytest.mark.parametrize("tokens", [16, 100, 8192])
def test_an_all_reduce_is_predicted_with_the_configuration_that_is_launched(tokens: int) -> None:
    """16 tokens take one shot, 100 are multiplied together, 8192 take two shots."""
    n, w, node = 4096, 8, load_node("h100")
    x, weight = (torch.empty(extent, 64, dtype=torch.bfloat16, device="meta") for extent in (tokens, n))
    plan = {16: plan_one_shot, 100: plan_few_rows, 8192: plan_two_shot}[tokens]
    launched = plan(_view(w), 1, w, x, weight, None, 12345, None, machine_of(node))[0].config
    assert Problem(REDUCE, tokens, (n,), 64, w).chosen(node) == launched


@pytest.mark.parametrize("tokens", [16, 100, 8192])
def test_a_sum_by_the_switch_is_predicted_with_the_configuration_that_is_launched(tokens: int) -> None:
    n, w, node = 4096, 8, load_node("h100")
    x, weight = (torch.empty(extent, 64, dtype=torch.bfloat16, device="meta") for extent in (tokens, n))
    launched = plan_multimem(_view(w), 1, w, x, weight, None, 12345, None, machine_of(node))[0].config
    assert Problem(REDUCE, tokens, (n,), 64, w, transport=SWITCH).chosen(node) == launched


@pytest.mark.slow
@pytest.mark.parametrize("w, t, n", [(8, 512, 1024), (4, 1000, 520), (2, 64, 64)])
def test_the_switch_takes_every_partial_once_and_gives_every_sum_once(w: int, t: int, n: int) -> None:
    """If only links take time: a rank sends its partials and the sums that it owns, and receives all sums."""
    rate = 1e9
    node = IDEAL.but(link_bandwidth=rate)
    problem = Problem(REDUCE, t, (n,), 64, w, transport=SWITCH)
    config = problem.chosen(node)
    tiles = -(-t // config.block_m) * -(-n // config.block_n)
    owned = -(-tiles // w) / tiles  # of the rank that owns most
    least, took = 2 * t * n * (1 + owned) / rate, time(problem, node).total
    assert least * (1 + 1 / w) / (1 + owned) * (1 - 1e-9) <= took <= least * 1.2
    by_programs = time(Problem(REDUCE, t, (n,), 64, w), node).total
    assert (by_programs > took) == (w > 2)


def test_a_switch_asks_every_link_out_for_a_sum_and_takes_a_store_to_every_link_in() -> None:
    """And every memory. The rank that sums or stores uses one link in the other direction."""
    gpus = [SimpleNamespace(memory=f"memory {r}", egress=f"out {r}", ingress=f"in {r}") for r in range(3)]
    traffic: Any = Traffic(SMALL, gpus)  # type: ignore[arg-type]
    memories = {f"memory {r}": 7 for r in range(3)}
    loads = list(traffic.loads(1, Cost(summed=7)))
    assert len(loads) == 7 and dict(loads) == memories | {f"out {r}": 7 for r in range(3)} | {"in 1": 7}
    stores = list(traffic.stores(1, Cost(spread=7)))
    assert {latency for *_, latency in stores} == {SMALL.link_latency} and len(stores) == 7
    assert {share: n for share, n, _ in stores} == memories | {f"in {r}": 7 for r in range(3)} | {"out 1": 7}
    alone = [traffic.cost(1, [Entry(what, "", 7), Entry(STALL, "", 1)]) for what in (SUM, SPREAD)]
    assert [each.alone >= 2 * SMALL.link_latency for each in alone] == [True, False]
    assert all(each.away(1) for each in alone)


@pytest.mark.parametrize("tokens, few", [(16, True), (512, True), (520, False)])
def test_a_gather_is_predicted_with_the_configuration_that_is_launched(tokens: int, few: bool) -> None:
    w, node = 8, load_node("h100")
    problem = Problem(GATHER, tokens, (1024, 512), 64, w)
    x = torch.empty(problem.rows.sizes[1], 64, dtype=torch.bfloat16, device="meta")
    weights = [torch.empty(n, 64, dtype=torch.bfloat16, device="meta") for n in problem.widths]
    given = _view(w), 1, w, x, weights, [None, None], problem.rows, 12345, False, None, machine_of(node)
    assert problem.few == few and problem.chosen(node) == plan_all_gather_matmul(*given, together=few)[0].config


@pytest.mark.parametrize("tokens", [64, 512])  # few rows, and more
@pytest.mark.parametrize("operation", [GATHER, SCATTER, REDUCE])
def test_tma_moves_what_pointers_move(operation: str, tokens: int) -> None:
    problem = Problem(operation, tokens, (128, 64), 320, 2)
    config = replace(problem.chosen(SMALL), block_m=64, block_n=64)
    one, two = (time(replace(problem, config=replace(config, tma=tma))) for tma in (False, True))
    assert (one.flops, one.sent, one.memory) == (two.flops, two.sent, two.memory)


@pytest.mark.slow
@settings(max_examples=8)
@given(st.sampled_from([GATHER, SCATTER, REDUCE]), world_sizes, tokens, st.integers(300, 900))
def test_skipping_iterations_changes_nothing(operation: str, w: int, t: int, k: int) -> None:
    """Loops of the kernels differ only in their tails, so skipping the middle is exact, to the last bit of time."""
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
    """An address that did not advance would lie before the tensor; a sum that grows unevenly ends the skipping."""
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


@pytest.mark.slow
@settings(max_examples=12)
@given(st.sampled_from([GATHER, SCATTER]), world_sizes, tokens, sizes, sizes)
def test_with_free_communication_only_the_products_take_time(operation: str, w: int, t: int, n: int, k: int) -> None:
    """All programs take tiles from one list, including those that send or sum, because nothing delays them."""
    problem = Problem(operation, t, (n,), k, w)
    c = problem.chosen(IDEAL)
    heights = [t] if problem.few else problem.rows.sizes
    tiles = sum(up(height, c.block_m) for height in heights) * up(n, c.block_n)
    tile = 2 * c.block_m * c.block_n * up(k, c.block_k) * c.block_k
    want = up(tiles, c.send_programs + c.other_programs) * tile / (IDEAL.flops["bf16"] / IDEAL.sms)
    assert time(problem, IDEAL).total == pytest.approx(want, rel=1e-9)


@pytest.mark.slow
@settings(max_examples=12)
@given(st.sampled_from([GATHER, SCATTER, REDUCE]), world_sizes, st.integers(64, 600), st.floats(1e9, 1e12), sizes)
def test_nothing_is_faster_than_its_parts(operation: str, w: int, t: int, link: float, k: int) -> None:
    """max(t_comm, t_matmul) <= t_fused, for the minimum that must move and be multiplied."""
    node, problem = SMALL.but(link_bandwidth=link), Problem(operation, t, (256,), k, w)
    got = time(problem, node)
    received = [sum(b for (s, d), b in got.sent.items() if d == rank) for rank in range(w)]
    assert got.total >= max(received) / link
    assert got.total >= problem.flops / node.flops["bf16"]


@pytest.mark.slow
@settings(max_examples=6)
@given(st.lists(st.floats(1e8, 1e13), min_size=3, max_size=3), st.integers(64, 600))
def test_a_faster_link_is_never_slower(links: list[float], t: int) -> None:
    """If no two transfers share anything (two ranks, a copy stream each, unlimited memory bandwidth), each event is a
    maximum of sums of times that fall with the bandwidth. With sharing there are anomalies, as in any list schedule."""
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
    assert Engine(Run([[copy], []], [memory]), node).run().total == pytest.approx(nbytes / node.link_bandwidth)
