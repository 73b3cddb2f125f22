"""The library's fused kernels under adversarial schedules: no fault on any, and a broken protocol is found.

`fusedtp check` runs many more schedules of the same cases.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.sim import Fault, Outcome, Schedule, SimulationFault, explore, run_schedule
from fusedtp.sim.cases import Call, fused_case, fused_cases
from tests.harness import world
from tests.sim.support import interpreted
from tests.sim.test_machine import schedules

KERNELS = [
    "all_gather_matmul", "matmul_reduce_scatter", "one_shot_all_reduce", "two_shot_all_reduce", "all_gather_wgrad",
    "mixed",
]  # fmt: skip


def share_of_schedules(group, name: str, world_size: int, count: int) -> list[Outcome]:
    """Each process takes its own seeds."""
    (case,) = [case for case in fused_cases(world_size) if case.name == name]
    outcome = explore(case, count, first_seed=count * group.rank())
    return [outcome]


@pytest.mark.parametrize(("world_size", "count"), [(2, 12), (4, 6), (8, 1)])
@pytest.mark.parametrize("name", KERNELS)
def test_no_schedule_of_a_fused_kernel_shows_a_fault(name, world_size, count):
    for (outcome,) in world(2).run(share_of_schedules, name, world_size, count, timeout=300):
        assert outcome.fault is None, outcome.fault
        assert outcome.schedules == count and outcome.switches > 20 * count


@st.composite
def workspaces(draw) -> list[Call]:
    """One to three calls of any operation on one workspace."""
    w = draw(st.integers(2, 4))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16]))
    calls = []
    for _ in range(draw(st.integers(1, 3))):
        operation = draw(st.sampled_from(KERNELS[:-1]))
        gathers = operation.startswith("all_gather")
        calls.append(
            Call(
                operation,
                tuple(draw(st.lists(st.integers(0, 20), min_size=w, max_size=w))),
                tuple(draw(st.lists(st.integers(1, 20), min_size=1, max_size=2 if gathers else 1))),
                k=draw(st.integers(1, 20)),
                batch=draw(st.integers(1, 2))
                if operation in ("all_gather_matmul", "matmul_reduce_scatter")
                else 1,
                bias=draw(st.booleans()),
                keep=draw(st.booleans()),
                dtype=dtype,
                chunk=draw(st.sampled_from([1, 2])) if not gathers else draw(st.sampled_from([4, 16])),
                programs=draw(st.sampled_from([(1, 1), (1, 2), (2, 2)])),
            )
        )
    return calls


def fault_of(calls: list[Call], schedule: Schedule) -> Fault | None:
    try:
        run_schedule(fused_case("drawn", calls).make(), schedule)
    except SimulationFault as error:
        return error.fault
    return None


@settings(max_examples=60)
@given(workspaces(), schedules)
def test_any_calls_on_one_workspace_under_any_schedule(calls, schedule):
    fault = interpreted(fault_of, calls, schedule, timeout=300)
    assert fault is None, fault


def without(name: str) -> Fault | None:
    """What exploring finds when a function of kernels/signals.py does nothing."""
    from fusedtp.kernels import signals

    with patch.object(signals, name, lambda *arguments: None):
        (case,) = [case for case in fused_cases(2) if case.name == "all_gather_matmul"]
        return explore(case, 12).fault


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("wait_chunks", {"never written", "read-write race"}),
        ("publish", {"deadlock"}),
        ("arrive", {"deadlock"}),
    ],
)
def test_a_broken_protocol_is_found(name, rule):
    fault = interpreted(without, name)
    assert fault is not None and fault.rule in rule, fault
    assert fault.accesses or fault.waits
