"""Replayed launches with fixed arguments: right under any schedule, because the device counts the calls."""

from unittest.mock import patch

import pytest

from fusedtp.checks import cases
from fusedtp.checks.cases import exchange_cases, graph_cases, replayed_case
from fusedtp.checks.dense import Call
from fusedtp.sim import explore
from tests.sampling import examples


def faults(world_size: int, schedules: int) -> list[tuple[str, int, str]]:
    outcomes = [explore(case, schedules) for case in graph_cases(world_size)]
    return [(outcome.case, outcome.schedules, str(outcome.fault)) for outcome in outcomes]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "schedules"), [(2, examples(3, 2)), (3, examples(2, 1))])
def test_replays_between_eager_calls_show_no_fault(world_size, schedules):
    for name, done, fault in faults(world_size, schedules):
        assert (done, fault) == (schedules, "None"), name


def baked_in(operation: str) -> str:
    calls = [Call(operation, (3, 2), (5,), k=4, chunk=2)]
    outcome = explore(replayed_case(calls, [None] * 3, counted=False), 20, shrink=False)
    return "" if outcome.fault is None else outcome.fault.rule


@pytest.mark.parametrize("operation", ["all_gather_matmul", "moe_dispatch", "moe_combine"])
def test_a_number_that_the_replay_does_not_count_is_found(operation):
    """Its waits pass on flags of the previous replay."""
    assert baked_in(operation) in ("read-write race", "wrong value")


def with_a_baked_in(number: int, names: list[str]) -> list[str]:
    """The index tensors of a case of exchanges that may stay as captured without a fault being found."""
    case, unseen = exchange_cases(3)[number], []
    for name in names:
        with patch.object(cases, "EXCHANGED", tuple(each for each in cases.EXCHANGED if each != name)):
            if explore(case, 1, shrink=False).fault is None:
                unseen.append(name)
    return unseen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "names"),
    [
        (0, ["orders", "in_sources", "sources", "arrivals"]),
        (2, ["index", "blocks", "origins", "offsets", "to", "at", "choices"]),
    ],
)
def test_a_plan_that_the_replay_does_not_read_anew_is_found(impatient, number, names):
    assert not with_a_baked_in(number, names)
