"""Host-sequenced calls of GPUs: right under any schedule, and each of their two meetings is needed."""

from dataclasses import replace

import pytest

from fusedtp.sim import Case, Launch, explore
from fusedtp.sim.meetings import meeting_case
from tests.sim.support import interpreted


def without_meeting(world_size: int, which: int) -> Case:
    """The case whose ranks leave out the first (0) or the second (1) meeting of every call."""
    case = meeting_case(world_size)

    def make():
        run = case.make()
        work = []
        for of_rank in run.work:
            meetings = [i for i, w in enumerate(of_rank) if isinstance(w, Launch) and w.name == "meet_kernel"]
            work.append([w for i, w in enumerate(of_rank) if i not in meetings[which::2]])
        return replace(run, work=work)

    return replace(case, make=make)


def outcome_of(world_size: int, schedules: int, left_out: int | None) -> tuple[str, str]:
    """The fault that exploring finds, as its rule and text."""
    case = meeting_case(world_size) if left_out is None else without_meeting(world_size, left_out)
    outcome = explore(case, schedules)
    assert outcome.fault is not None or outcome.schedules == schedules
    return ("", "") if outcome.fault is None else (outcome.fault.rule, str(outcome.fault))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_no_schedule_shows_a_fault(world_size):
    assert interpreted(outcome_of, world_size, 16, None, timeout=300) == ("", "")


@pytest.mark.parametrize("left_out", [0, 1])
def test_each_of_the_two_meetings_is_needed(left_out):
    """Without the first a rank reads what is not there yet, without the second a slot is overwritten under a reader."""
    rule, text = interpreted(outcome_of, 3, 60, left_out, timeout=300)
    assert rule in ("read-write race", "never written") and "slots of rank" in text, text
