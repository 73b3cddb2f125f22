"""The library's fused kernels under adversarial schedules: no fault on any, and a broken protocol is found.

`fusedtp check` runs many more schedules of the same cases.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.checks import experts
from fusedtp.checks.cases import fused_case, fused_cases, operands, plan, slot_bytes
from fusedtp.checks.dense import DECLARED, Call, SimulatedWorld, launches
from fusedtp.checks.lint import OWN
from fusedtp.ops.operation import OPERATIONS
from fusedtp.sim import Fault, Outcome, Run, Schedule, SimulationFault, explore, run_schedule
from fusedtp.sim.explore import schedules as schedules_in_turn
from tests.harness import world
from tests.sampling import examples
from tests.seeded.trials import FUSED
from tests.sim.support import interpreted
from tests.sim.test_machine import schedules

KERNELS = [*DECLARED, "mixed"]


def test_checks_follow_from_what_operations_declare():
    """A new operation with a fused kernel is simulated, linted and mutated without an edit of the checks.

    Those of experts have cases by hand, in checks/experts.py.
    """
    fused = {name for name, operation in OPERATIONS.items() if "triton" in operation.engines}
    fused -= {*experts.OPERATIONS, "moe_plan"}
    assert fused == {operation.name for operation, _ in DECLARED.values()}
    assert set(DECLARED) <= {case.name for case in fused_cases(2)}
    functions = {kernel.function for _, kernel in DECLARED.values()}
    assert functions <= set(OWN) and functions <= set(FUSED)


def share_of_schedules(group, name: str, world_size: int, count: int) -> Outcome:
    """Each process takes its part: together every strategy, residency and lateness of stores where count is 6."""
    (case,) = [case for case in fused_cases(world_size) if case.name == name]
    return explore(case, [*schedules_in_turn(count)][group.rank() :: group.size()])


@pytest.mark.parametrize(("world_size", "count"), [(2, 12), (4, 6), (8, 1)])
@pytest.mark.parametrize("name", KERNELS)
def test_no_schedule_of_a_fused_kernel_shows_a_fault(name, world_size, count):
    shares = world(min(2, count)).run(share_of_schedules, name, world_size, count, timeout=300)
    for outcome in shares:
        assert outcome.fault is None, outcome.fault
        assert outcome.switches > 20 * outcome.schedules > 0
    assert sum(outcome.schedules for outcome in shares) == count


@st.composite
def workspaces(draw) -> list[Call]:
    """One to three calls of any operation on one workspace."""
    w = draw(st.integers(2, 4))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16]))
    calls = []
    for _ in range(draw(st.integers(1, 3))):
        operation = draw(st.sampled_from(KERNELS[:-1]))
        kernel = DECLARED[operation][1]
        gathers = kernel.gathers
        calls.append(
            Call(
                operation,
                tuple(draw(st.lists(st.integers(0, 20), min_size=w, max_size=w))),
                tuple(draw(st.lists(st.integers(1, 20), min_size=1, max_size=2 if gathers else 1))),
                k=draw(st.integers(1, 20)),
                batch=draw(st.integers(1, 2)) if kernel.in_runs else 1,
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


@pytest.mark.slow
@settings(max_examples=examples(60, 30))
@given(workspaces(), schedules)
def test_any_calls_on_one_workspace_under_any_schedule(calls, schedule):
    fault = interpreted(fault_of, calls, schedule, timeout=300)
    assert fault is None, fault


def other_call(operation: str) -> Run:
    """Rank 1 gives another signature than ranks 0 and 2, everything else alike."""
    call = Call(operation, (16, 9, 5), chunk=16 if DECLARED[operation][1].gathers else 1)
    world, given = SimulatedWorld(3, slot_bytes(call), 64), operands(call, 0)
    planned = [plan(call, given, world, rank, 7 + (rank == 1))[0] for rank in range(3)]
    work = [launches(each, world.epochs.tensors[rank]) for rank, each in enumerate(planned)]
    return Run(work, world.memory, lambda: (), world.recorded)


def faults_of_other_call(operation: str) -> list[str]:
    found = []
    for schedule in itertools.islice(schedules_in_turn(1000), 0, 1000, 37):
        with pytest.raises(SimulationFault) as raised:
            run_schedule(other_call(operation), schedule)
        found.append(str(raised.value.fault))
    return found


@pytest.mark.parametrize("operation", KERNELS[:-1])
def test_that_a_rank_is_in_another_call_is_said_first_whatever_comes_of_it(operation):
    """From then on data come that nobody waits for, and races with them; the kernels have noted why."""
    for said in interpreted(faults_of_other_call, operation, timeout=300):
        notes = re.findall(r"status of rank (\d) \[0\] says 2: a peer is in another call \(peer (\d), ", said)
        assert said.startswith("timed out: status of rank ") and notes, said
        assert all(("1" in note) and note[0] != note[1] for note in notes), said


def costs(rounds: int) -> tuple[float, float]:
    """CPU seconds of one rank alone, in the simulator and in Triton's interpreter by itself; the least of several."""
    case = fused_case(
        "alone", [Call("all_gather_matmul", (48,), (33, 17), k=40), Call("all_gather_wgrad", (48,))]
    )

    def interpret() -> None:
        for launch in case.make().work[0]:
            launch.kernel[launch.shape](**launch.args)

    def spent(function: Callable[[], object]) -> float:
        begin = time.process_time()
        function()
        return time.process_time() - begin

    simulated = [spent(lambda: run_schedule(case.make(), Schedule())) for _ in range(rounds)]
    return min(simulated), min(spent(interpret) for _ in range(rounds))


def test_the_detector_makes_interpretation_at_most_three_times_slower():
    simulated, plain = interpreted(costs, 5)
    assert simulated <= 3 * plain, (simulated, plain)


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
