"""Gathers with rows moved by copies: right under any schedule, and each order that they rely on is needed."""

from dataclasses import replace
from unittest.mock import patch

import pytest

from fusedtp.checks.cases import fused_case
from fusedtp.checks.dense import Call
from fusedtp.kernels import signals
from fusedtp.sim import Case, Copy, Launch, Run, explore
from fusedtp.sim.case import Await, Signal
from tests.sim.exchange import replaced

GATHERS = ["all_gather_matmul", "all_gather_wgrad"]


def case_of(operation: str, w: int) -> Case:
    """Five calls on one workspace. Some ranks have no rows, the second call has no columns, programs send in the third.

    The last two have few rows, after many: a call's data still in flight would land where no flag covers them.
    """
    every, some = tuple(range(w)), tuple(range(0, w, 2))
    sizes = [(7,) * w, tuple(0 if r == 1 else 9 for r in range(w)), (5,) * w, (12, *[1] * (w - 1)), (1,) * w]
    copied = [every, some, (), every, every]
    calls = [
        Call(operation, s, (0 if i == 1 else 5,), k=4, bias=False, chunk=2, copied=c)
        for i, (s, c) in enumerate(zip(sizes, copied, strict=True))
    ]
    return fused_case(f"copies of {operation}", calls)


def changed(run: Run, fault: str) -> Run:
    """The run with one of the host's orderings removed, on all ranks."""
    work = []
    for of_rank in run.work:
        mine = list(of_rank)
        if fault == "flags first":
            mine = flags_first(mine)
        elif fault == "does not wait for the call before":
            mine = [each for each in mine if not (isinstance(each, Await) and each.stream == "copy")]
        elif fault == "nobody waits for the copies":
            mine = [each for each in mine if not (isinstance(each, Await) and each.stream == "0")]
        elif fault == "one copy stream a peer":  # flags no longer follow their rows
            mine = [replace(e, stream="flags") if isinstance(e, Signal) and e.stream == "copy" else e for e in mine]
        work.append(mine)
    return replace(run, work=work)


def flags_first(work: list) -> list:
    """Swap each copy with the flag that follows it."""
    out: list = []
    for each in work:
        if isinstance(each, Signal) and out and isinstance(out[-1], Copy):
            out.insert(len(out) - 1, each)
        else:
            out.append(each)
    return out


def found(operation: str, world_size: int, schedules: int, fault: str = "") -> tuple[str, str]:
    """The rule and text of the fault that exploring finds."""
    case = case_of(operation, world_size)
    if fault == "nobody arrives":
        outcome = explore(replaced(case, {signals.arrive: None}), schedules, shrink=False)
    elif fault == "the other slot":
        with patch("fusedtp.checks.cases.beside_copies", other_slot()):
            outcome = explore(case, schedules, shrink=False)
    else:
        outcome = explore(replace(case, make=lambda: changed(case.make(), fault)), schedules, shrink=False)
    return ("", "") if outcome.fault is None else (outcome.fault.rule, str(outcome.fault))


def other_slot():
    """A host whose count of epochs is off by one. Its flags are the device's own and stay right."""
    from fusedtp.checks import dense

    kept = dense.place_of

    def wrong(world, part, x, begin, number):
        return kept(world, part, x, begin, number + 1)

    def beside(*arguments):
        with patch.object(dense, "place_of", wrong):
            return dense.beside_copies(*arguments)

    return beside


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "world_size", "schedules"), [(GATHERS[0], 2, 12), (GATHERS[0], 4, 4), (GATHERS[1], 3, 8)]
)
def test_no_schedule_shows_a_fault(operation, world_size, schedules):
    assert found(operation, world_size, schedules) == ("", "")


RACES = {"read-write race", "write-write race", "never written"}
FAULTS = {
    "flags first": RACES,
    "does not wait for the call before": RACES,
    "nobody waits for the copies": RACES,
    "one copy stream a peer": RACES,
    "the other slot": RACES | {"wrong value"},
    "nobody arrives": {"deadlock"},
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_each_order_is_needed(impatient, fault):
    rule, text = found("all_gather_matmul", 3, 60, fault)
    assert rule in FAULTS[fault], (rule, text)
    assert "slots of rank" in text or rule == "deadlock", text


def test_every_launch_sends_nothing_itself():
    """If copies move a rank's rows, no program of its launch sends."""
    counts = senders()
    assert counts == [[0, 0, 1, 0, 0], [0, 1, 1, 0, 0]]


def senders() -> list[list[int]]:
    run = case_of("all_gather_matmul", 2).make()
    launches = [[each for each in w if isinstance(each, Launch) and "send_programs" in each.args] for w in run.work]
    return [[each.args["send_programs"] for each in of_rank] for of_rank in launches]
