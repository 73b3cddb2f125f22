"""The library's fused kernels under adversarial schedules: no fault on any, and a broken protocol is found.

`fusedtp check` runs many more schedules of the same cases.
"""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.checks import experts
from fusedtp.checks.cases import compiled_cases, fused_case, operands, plan, slot_bytes
from fusedtp.checks.dense import DECLARED, Call, SimulatedWorld, in_fp8, launched
from fusedtp.checks.lint import OWN
from fusedtp.kernels import multimem, signals
from fusedtp.ops.operation import OPERATIONS
from fusedtp.sim import Case, Fault, Run, Schedule, SimulationFault, explore, run_schedule
from fusedtp.sim.explore import compiler_for
from fusedtp.sim.explore import schedules as schedules_in_turn
from tests.sampling import SAMPLED, examples
from tests.seeded.trials import FUSED
from tests.sim.exchange import replaced, schedules

NOT_IN_FP8 = [name for name in DECLARED if not in_fp8(name)]


def test_checks_follow_from_what_operations_declare():
    """A new operation with a fused kernel is simulated and linted without a change of the checks.

    The operations of experts have cases by hand, in checks/experts.py.
    """
    fused = {name for name, operation in OPERATIONS.items() if "triton" in operation.engines}
    fused -= {*experts.OPERATIONS, "moe_plan"}
    assert fused == {operation.name for operation, _ in DECLARED.values()}
    assert set(DECLARED) <= {case.name for case in compiled_cases(2, "sm_90")}
    functions = {kernel.function for _, kernel in DECLARED.values()}
    assert functions <= set(OWN) and functions <= set(FUSED)


def case_of(name: str, world_size: int, target: str) -> Case:
    return next(case for case in compiled_cases(world_size, target) if case.name == name)


ON_FOUR = ("one_shot_all_reduce", "mixed") if SAMPLED else (*NOT_IN_FP8, "mixed")
SCHEDULED = [
    *((name, 2, "sm_90", examples(12, 2)) for name in (*DECLARED, *experts.OPERATIONS, "mixed")),
    *((name, 4, "sm_80", examples(6, 2)) for name in ON_FOUR),
    *((name, 8, "sm_80", 1) for name in (*NOT_IN_FP8, "mixed")),
    ("all_gather_wgrad", 1, "sm_90", 3),
    ("switch_all_reduce", 2, "sm_90", examples(12, 5)),
    ("switch_all_reduce", 4, "sm_90", examples(6, 2)),
]
SLOW = {(name, ranks): pytest.mark.slow if ranks > 2 or name == "mixed" else () for name, ranks, *_ in SCHEDULED}


@pytest.mark.parametrize(
    ("name", "world_size", "target", "count"),
    [
        pytest.param(name, world_size, *rest, id=f"{name}-{world_size}-{rest[0]}", marks=SLOW[name, world_size])
        for name, world_size, *rest in SCHEDULED
    ],
)
def test_no_schedule_of_a_fused_kernel_shows_a_fault(name, world_size, target, count):
    """In lockstep and warp by warp, with all late effects; the results equal the single-device formula's."""
    outcome = explore(case_of(name, world_size, target), schedules_in_turn(count, target=target))
    assert outcome.fault is None, outcome.fault
    assert outcome.schedules == count and outcome.switches > (20 if world_size > 1 else 1) * count


def test_sm_90_multiplies_by_wgmma_from_tensor_copies():
    """The code contains the instructions that the sm_90 cases are meant to run."""
    run_schedule(case_of("all_gather_wgrad", 1, "sm_90").make(), Schedule())
    texts = [text for text, *_ in compiler_for("sm_90")._made.values()]
    assert any("wgmma.mma_async" in text and "cp.async.bulk.tensor" in text for text in texts)


@st.composite
def workspaces(draw) -> list[Call]:
    """One to three calls of any operation on one workspace."""
    w = draw(st.integers(2, 4))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16]))
    width = st.sampled_from([3, 17, 20])  # few that Triton compiles apart
    calls = []
    for _ in range(draw(st.integers(1, 3))):
        operation = draw(st.sampled_from([*DECLARED]))
        kernel = DECLARED[operation][1]
        gathers = kernel.gathers
        calls.append(
            Call(
                operation,
                tuple(draw(st.lists(st.integers(0, 20), min_size=w, max_size=w))),
                tuple(draw(st.lists(width, min_size=1, max_size=2 if gathers else 1))),
                k=draw(st.sampled_from([1, 5, 16, 20])),
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
@settings(max_examples=examples(60, 20))
@given(workspaces(), schedules("sm_90"))
def test_any_calls_on_one_workspace_under_any_schedule(calls, schedule):
    fault = fault_of(calls, schedule)
    assert fault is None, fault


def other_call(operation: str) -> Run:
    """Rank 1 passes another signature than ranks 0 and 2; everything else is equal."""
    call = Call(operation, (16, 9, 5), chunk=16 if DECLARED[operation][1].gathers else 1)
    world, given = SimulatedWorld(3, slot_bytes(call), 64), operands(call, 0)
    planned = [plan(call, given, world, rank, 7 + (rank == 1))[0] for rank in range(3)]
    work = [[launched(each)] for each in planned]
    return Run(work, world.memory, lambda: (), world.recorded)


def faults_of_other_call(operation: str) -> list[str]:
    found = []
    for schedule in schedules_in_turn(examples(27, 9)):
        with pytest.raises(SimulationFault) as raised:
            run_schedule(other_call(operation), schedule)
        found.append(str(raised.value.fault))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("operation", DECLARED)
def test_that_a_rank_is_in_another_call_is_said_first_whatever_comes_of_it(operation):
    """After that, data arrive that no rank waits for, and race; the kernels have recorded the reason."""
    for said in faults_of_other_call(operation):
        notes = re.findall(r"rank (\d) recorded status 2: a peer is in another call \(peer (\d), ", said)
        assert said.startswith("timed out: rank ") and notes, said
        assert all(("1" in note) and note[0] != note[1] for note in notes), said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("wait_chunks", {"never written", "read-write race"}),
        ("publish", {"deadlock"}),
        ("arrive", {"deadlock"}),
    ],
)
def test_a_broken_protocol_is_found(impatient, name, rule):
    """One function of kernels/signals.py does nothing."""
    case = replaced(case_of("all_gather_matmul", 2, "sm_90"), {getattr(signals, name): None})
    fault = explore(case, 12, shrink=False).fault
    assert fault is not None and fault.rule in rule, fault
    assert fault.accesses or fault.waits


@pytest.mark.slow
def test_a_sum_by_the_switch_needs_a_fence_between_the_two_addresses_of_a_slot():
    whole = case_of("switch_all_reduce", 2, "sm_90")
    fault = explore(replaced(whole, {multimem.other_address: None}), 12, shrink=False).fault
    assert fault is not None and "with no fence.proxy.alias" in str(fault), fault
