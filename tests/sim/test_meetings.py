"""Host-driven calls on GPUs: right under any schedule, and each of their two meetings is needed."""

from dataclasses import replace

import pytest

from fusedtp.checks.cases import meeting_case
from fusedtp.sim import Case, Launch, explore


def without_meeting(world_size: int, which: int) -> Case:
    """The case without the opening (0), the second (1) or the last (2) meeting of each rank's calls."""
    case = meeting_case(world_size)
    calls = (2, 2, 3, 3)  # meetings of each

    def make():
        run = case.make()
        left_out = []
        for i, meetings in enumerate(calls):
            place = which - 3 + meetings
            left_out += [sum(calls[:i]) + place] if place >= 0 else []
        work = []
        for of_rank in run.work:
            meetings = [i for i, w in enumerate(of_rank) if isinstance(w, Launch) and w.name == "meet_kernel"]
            assert len(meetings) == sum(calls)
            gone = {meetings[m] for m in left_out}
            work.append([w for i, w in enumerate(of_rank) if i not in gone])
        return replace(run, work=work)

    return replace(case, make=make)


def outcome_of(world_size: int, schedules: int, left_out: int | None) -> tuple[str, str]:
    """The rule and text of the fault that exploring finds."""
    if left_out is None:
        outcome = explore(meeting_case(world_size), schedules)
    else:
        outcome = explore(without_meeting(world_size, left_out), schedules, shrink=False)
    assert outcome.fault is not None or outcome.schedules == schedules
    return ("", "") if outcome.fault is None else (outcome.fault.rule, str(outcome.fault))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_no_schedule_shows_a_fault(world_size):
    assert outcome_of(world_size, 8, None) == ("", "")


@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_each_of_the_meetings_is_needed(left_out):
    """Otherwise a slot is overwritten, read before its rows are there, or filled while a fused kernel still pushes."""
    rule, text = outcome_of(3, 60, left_out)
    assert rule in ("read-write race", "write-write race", "never written") and "slots of rank" in text, text
