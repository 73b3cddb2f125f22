"""Fused kernels with all data present: under the interpreter they compute correctly and wait for missing data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from fusedtp.bench import arrived, ways
from fusedtp.bench import rank as ranks
from fusedtp.bench.cases import Case, linear
from fusedtp.bench.options import Options, plan_of
from fusedtp.bench.rows import Row
from fusedtp.bench.shapes import Layer
from fusedtp.bench.suites import fused
from fusedtp.ops.operation import OPERATIONS
from fusedtp.ops.rows import Rows
from tests.harness import world
from tests.interpreting import interpreted

CPU = torch.device("cpu")


def integers(*shape: int, seed: int) -> torch.Tensor:
    """Integers so small that every sum is exact."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def both_twice(rank: int, sizes: tuple[int, ...]) -> list[bool]:
    """Whether each way of each operation is exact, in two calls with different operands."""
    rows, w, n, k = Rows(sizes), len(sizes), 24, 20
    full, parts = integers(rows.total, k, seed=1), integers(w, rows.local(rank), n, seed=2)
    begin, own = rows.offset(rank), rows.local(rank)
    columns, others = integers(n, k, seed=3), parts.sum(0) - parts[rank]
    gather = arrived.gather(rank, rows, full, columns)
    scatter = arrived.scatter(rank, rows, parts, integers(rows.total, k, seed=4), columns)
    found = []
    for seed in (5, 6):
        full[begin : begin + own] = integers(own, k, seed=seed)
        x, want = full[begin : begin + own].clone(), full @ columns.t()
        full[begin : begin + own] = float("nan")  # the kernel must take its own rows from x
        found.append(torch.equal(gather.fused(x, columns), want))
        full[begin : begin + own] = x
        found.append(torch.equal(gather.plain(x, columns), want))
        x = integers(rows.total, k, seed=seed + 10)
        want = (x @ columns.t())[begin : begin + own] + others
        parts[rank] = float("nan")  # until the kernel has its own product
        found.append(torch.equal(scatter.fused(x, columns), want))
        found.append(torch.equal(scatter.plain(x, columns), want))
    return found


@pytest.mark.parametrize(("rank", "sizes"), [(0, (16, 16, 16)), (1, (9, 9, 5)), (2, (9, 9, 5))])
def test_both_ways_of_both_operations_are_exact(rank: int, sizes: tuple[int, ...]) -> None:
    assert interpreted(both_twice, rank, sizes) == 8 * [True]


def one_is_late(which: str) -> int:
    """The status that the kernel records if one flag or one signature of rank 0 is missing."""
    usual = arrived.view_of

    def view_of(*args: Any) -> Any:
        view, (flags, arrivals) = usual(*args)
        if which == "flag":
            flags[1, 0, 1] = 0
        elif which == "signature":
            arrivals[1, :, 0] += 1 << 32
        seen.append(view)
        return replace(view, timeout_s=0.05), (flags, arrivals)

    seen: list[Any] = []
    with mock.patch.object(arrived, "view_of", view_of):
        pair = arrived.gather(1, Rows((8, 8)), integers(16, 16, seed=1), integers(16, 16, seed=2))
        pair.fused(integers(8, 16, seed=3), integers(16, 16, seed=2))
    return int(seen[0].status[0])


def test_the_kernel_polls_flags_and_compares_signatures() -> None:
    """Otherwise there would be no cost to measure."""
    assert [interpreted(one_is_late, which) for which in ("nothing", "flag", "signature")] == [0, 1, 2]


BOTH = ("all_gather_matmul", "matmul_reduce_scatter")


def small(operation: str) -> Case:
    kind = "column" if operation == "all_gather_matmul" else "row"
    return linear(operation, "float32", 16, Layer("tiny", "x", kind, 16, 16), 2)


def cases(group: Any) -> list[Row]:
    """Rows of one small case in both suites."""
    plan = plan_of(Options(smoke=True, device="cpu", world="processes", tp="2", engine="triton", minutes=0.0))
    rank = ranks.Rank(plan, group)
    rank.roofs = {"float32": 1.0, "copy": 1.0}
    return [row for operation in BOTH for row in fused.measure(rank, small(operation))]


@pytest.mark.slow
def test_rows_of_the_suites_have_the_ratio_of_the_medians() -> None:
    rows = world(2).run(cases, timeout=120)[0]
    for operation in BOTH:
        of = {row.engine: row for row in rows if row.suite == fused.suite_of(operation)}
        there, plain = of[fused.ARRIVED], of[fused.PLAIN]
        assert there.seconds is not None and plain.seconds is not None
        assert there.overhead == there.seconds.median / plain.seconds.median
        assert there.error_share is not None and 0 <= there.error_share <= 1
        assert there.flops == plain.flops == 2 * 16 * 16 * 16 * 2 and there.hidden_share is None
        assert of["fusedtp triton"].hidden_share is not None and plain.overhead is None


def test_of_a_virtual_world_only_the_first_rank_has_the_device() -> None:
    """The other ranks call nothing and report the same. Whatever needs a GPU is replaced by a stand-in."""
    case, op = small("all_gather_matmul"), OPERATIONS["all_gather_matmul"]
    usual = case.example.call
    calls: list[int] = []

    def gather(rank: int, rows: Rows, full: torch.Tensor, w: torch.Tensor) -> arrived.Pair:
        def way(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            calls.append(rank)
            return full @ w.t()

        return arrived.Pair(way, way, None)

    def body(rank: ranks.Rank) -> tuple[list[Row], list[list[float]]]:
        rank.roofs = {"float32": 1.0, "copy": 1.0}
        rows = fused.measure(rank, case)
        medians = [row.seconds.median for row in rows if row.seconds is not None]
        assert rank.comm is not None
        return rows, rank.comm.world.exchange(medians)

    plan = plan_of(Options(smoke=True, device="cpu", world="virtual", tp="2", engine="triton", minutes=0.0))
    with (
        mock.patch.object(ways, "interpreting", lambda: True),
        mock.patch.object(fused.arrived, "gather", gather),
        mock.patch.object(op, "example", case.example._replace(call=lambda *args: usual(*args[:-1], "chunked"))),
    ):
        rows, (mine, theirs) = ranks.run(plan, 2, body)
    found = {row.engine: row for row in rows}
    assert set(calls) == {0} and mine == theirs
    assert found[fused.ARRIVED].flops == 2 * 16 * 16 * 16 and found["fusedtp triton"].flops == 4 * 16**3
    assert 0 <= (found[fused.ARRIVED].error_share or 0) <= 1
