"""Exchanges one after another, a fast rank a call ahead: no schedule shows a fault, and seeded ones are found."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.checks.cases import turns_case
from fusedtp.checks.dense import Call
from fusedtp.checks.experts import ROUTINGS
from fusedtp.sim import Fault, Schedule, explore
from tests.harness import world
from tests.interpreting import interpreted
from tests.sim.test_fused import fault_of
from tests.sim.test_machine import schedules


def share_of_schedules(group, world_size: int, count: int) -> str:
    """Each process takes its own seeds."""
    outcome = explore(turns_case(world_size), count, first_seed=count * group.rank())
    assert outcome.fault is not None or outcome.switches > 20 * count
    return str(outcome.fault)


@pytest.mark.parametrize(("world_size", "count"), [(1, 1), (3, 3)])
def test_no_schedule_of_exchanges_in_turn_shows_a_fault(world_size, count):
    assert world(2).run(share_of_schedules, world_size, count, timeout=300) == ["None"] * 2


@st.composite
def exchanges(draw) -> list[Call]:
    """Three to five calls, so that a slot is used again, of any tokens and routing; a gather may come between."""
    w = draw(st.integers(2, 3))
    calls = []
    for _ in range(draw(st.integers(3, 5))):
        operation = draw(
            st.sampled_from(["moe_dispatch", "moe_combine", "moe_dispatch", "all_gather_matmul"])
        )
        sizes = tuple(draw(st.lists(st.integers(0, 5), min_size=w, max_size=w)))
        width = draw(st.integers(1, 5))
        chunk, programs = draw(st.sampled_from([1, 2, 16])), draw(st.sampled_from([(1, 1), (1, 2), (2, 2)]))
        routing = draw(st.sampled_from(ROUTINGS))
        calls.append(
            Call(operation, sizes, (width,), k=width, chunk=chunk, programs=programs, routing=routing)
        )
    return calls


@settings(max_examples=5)
@given(exchanges(), schedules)
def test_any_exchanges_on_one_workspace_under_any_schedule(calls: list[Call], schedule: Schedule):
    fault = interpreted(fault_of, calls, schedule, timeout=300)
    assert fault is None, fault


def broken(name: str) -> Fault | None:
    """What exploring finds where a function of kernels/signals.py is another."""
    import triton.language as tl

    from fusedtp.kernels import signals

    others = {
        "slot": lambda peers, rank: tl.load(peers.data + rank),  # one buffer, not two
        "wait_all_arrivals": lambda peers: None,
        "wait_chunks": lambda *arguments: None,
        "arrive": lambda peers: None,
    }
    with patch.object(signals, name, others[name]):
        return explore(turns_case(3), 24, shrink=False).fault


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("slot", "read-write race"),
        ("wait_all_arrivals", "read-write race"),
        ("wait_chunks", "never written"),
        ("arrive", "deadlock"),
    ],
)
def test_a_broken_rotation_is_found(name, rule):
    fault = interpreted(broken, name, timeout=300)
    assert fault is not None and fault.rule == rule, fault
