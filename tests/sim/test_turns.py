"""Exchanges in a row, a fast rank a call ahead: no schedule shows a fault, and seeded faults are found."""

from __future__ import annotations

import pytest
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.checks.cases import turns_case
from fusedtp.checks.dense import Call
from fusedtp.checks.experts import ROUTINGS
from fusedtp.kernels import signals
from fusedtp.sim import Schedule, explore
from tests.sim.exchange import replaced, schedules
from tests.sim.test_fused import fault_of


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "count"), [(1, 2), (3, 6)])
def test_no_schedule_of_exchanges_in_turn_shows_a_fault(world_size, count):
    outcome = explore(turns_case(world_size), count)
    assert outcome.fault is None, outcome.fault
    assert outcome.schedules == count and outcome.switches > 10 * count


@st.composite
def exchanges(draw) -> list[Call]:
    """Three to five calls, so that a slot is reused, with any tokens and routing; a gather may come between."""
    w = draw(st.integers(2, 3))
    calls = []
    for _ in range(draw(st.integers(3, 5))):
        operation = draw(st.sampled_from(["moe_dispatch", "moe_combine", "moe_dispatch", "all_gather_matmul"]))
        sizes = tuple(draw(st.lists(st.integers(0, 5), min_size=w, max_size=w)))
        width = draw(st.integers(1, 5))
        chunk, programs = draw(st.sampled_from([1, 2, 16])), draw(st.sampled_from([(1, 1), (1, 2), (2, 2)]))
        routing = draw(st.sampled_from(ROUTINGS))
        calls.append(Call(operation, sizes, (width,), k=width, chunk=chunk, programs=programs, routing=routing))
    return calls


@pytest.mark.slow
@settings(max_examples=5)
@given(exchanges(), schedules("sm_90"))
def test_any_exchanges_on_one_workspace_under_any_schedule(calls: list[Call], schedule: Schedule):
    fault = fault_of(calls, schedule)
    assert fault is None, fault


@triton.jit
def one_buffer(peers, rank):
    return tl.load(peers.data + rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("slot", "read-write race"),
        ("wait_all_arrivals", "write-write race"),
        ("wait", "read-write race"),
        ("wait_chunk_of_all", "never written"),
        ("arrive", "deadlock"),
    ],
)
def test_a_broken_rotation_is_found(impatient, name, rule):
    """One function of kernels/signals.py is replaced."""
    bodies = {getattr(signals, name): one_buffer if name == "slot" else None}
    fault = explore(replaced(turns_case(3), bodies), 24, shrink=False).fault
    assert fault is not None and fault.rule == rule, fault
