"""Right kernels raise no alarm. Wrong ones are found by rule and line, each within a stated number of schedules.

FUSEDTP_CORPUS_SCHEDULES=200 runs the full proof: this many schedules of each right kernel, for sm_80 and sm_90, and
each mistake from a 40th as many seeds.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from fusedtp.sim import Case, Outcome, Schedule, UnsupportedKernel, explore
from fusedtp.sim.explore import schedules
from fusedtp.sim.faults import Fault
from fusedtp.sim.report import report
from tests.sim.ptx.corpus import right, wrong
from tests.sim.ptx.corpus.first_found import first_found
from tests.sim.ptx.running import BEFORE_3_8

SCHEDULES = int(os.environ.get("FUSEDTP_CORPUS_SCHEDULES", "6"))
NOT_RELEASED, NOT_ACQUIRED, NOT_READ = "not release what", "not acquire what", "has read no word"
CAUSES = {
    "message: relaxed release": NOT_RELEASED,
    "message: acquire in place of release": NOT_RELEASED,
    "message: relaxed acquire": NOT_ACQUIRED,
    "message: release in place of acquire": NOT_ACQUIRED,
    "message: waits for 0": NOT_READ,
    "message: polls own flag": NOT_READ,
    "relaxed_polls: no acquire": NOT_ACQUIRED,
    "by_thread_0: no barrier before the release": "no barrier before it joins",
    "by_thread_0: no barrier after the acquire": "no barrier after it joins the others",
    "by_thread_0: relaxed store": NOT_RELEASED,
    "fenced_flag: no fence": NOT_RELEASED,
    "fenced_flag: fence at gpu scope": "do not reach each other",
    "signal_pad: put is relaxed": NOT_RELEASED,
    "signal_pad: take is relaxed": NOT_ACQUIRED,
    "double_buffer: one credit too few": "did not see",
    "lock: no lock": NOT_READ,
    "lock: takes relaxed": NOT_ACQUIRED,
    "lock: gives back relaxed": NOT_RELEASED,
    "last_block: relaxed": NOT_RELEASED,
    "last_block: release alone": NOT_ACQUIRED,
    "last_block: acquire alone": NOT_RELEASED,
    "chain: waits relaxed": NOT_ACQUIRED,
    "chain: passed on relaxed": NOT_RELEASED,
}
# what else some schedules show of these: the race in its other order; what comes of a barrier that opens too early
ALSO = {
    "double_buffer: one credit too few": "read-write race",
    "barrier_launches: meets for the first time each time": "wrong value",
}
RIGHT = [name for name in vars(right) if name.startswith("case_")]


NOT_BEFORE_3_8 = {  # Triton 3.7's own passes fail on these for sm_80
    "case_seqlock", *(each.name for each in wrong.WRONG if each.name.startswith("seqlock")), "packed: loads again",
}  # fmt: skip


def explored(case: Case, chosen: list[Schedule]) -> Outcome:
    try:
        return explore(case, chosen, shrink=False)
    except UnsupportedKernel as error:
        if BEFORE_3_8 and case.name in NOT_BEFORE_3_8 and "does not compile" in str(error):
            pytest.skip("Triton 3.7 does not compile it")
        raise


def test_the_first_schedule_that_shows_a_mistake_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [each.name for each in wrong.WRONG]
    assert first_found(names.index("message: relaxed release"), 0, "sm_80") == 1
    monkeypatch.setattr(wrong, "WRONG", [wrong.Wrong(right.case_message, "", within=2)])
    assert first_found(0, 0, "sm_80") == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels_give_no_alarm(name: str) -> None:
    at = RIGHT.index(name)
    targets = ("sm_80", "sm_90") if SCHEDULES >= 100 else ("sm_90",) if at % 4 == 3 else ("sm_80",)
    for target in targets:
        chosen = list(schedules(SCHEDULES, target=target))
        outcome = explored(Case(name, getattr(right, name)), chosen)
        assert outcome.fault is None, report(outcome.fault)
        assert outcome.schedules == SCHEDULES


@pytest.mark.parametrize("each", wrong.WRONG, ids=lambda each: each.name)
def test_mistakes_are_found_and_the_line_is_named(each: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if SCHEDULES < 100:  # deadlocks are told after fewer polls in vain
        monkeypatch.setattr("fusedtp.sim.ptx.machine.LAST_PATIENCE", 50)
    for first in range(max(1, SCHEDULES // 40)):
        chosen = list(schedules(each.within, first_seed=1000 * first, target="sm_80"))
        for fault in shown(each, chosen):
            known = fault.rule in each.rules
            told = known and (BEFORE_3_8 or CAUSES.get(each.name, "") in fault.cause)
            without = known and "race" not in fault.rule  # only races have a cause
            assert told or without or fault.rule == ALSO.get(each.name), str(fault)
            for launch, place in named(fault):
                assert BEFORE_3_8 or each.bug in marks().get(place, {}).get(launch, ()), (
                    f"names {place[1]}, which is not marked\n{fault}"
                )
            if told:
                break
        else:
            pytest.fail(f"not found, with its cause, in {each.within} schedules")


def shown(each: Any, chosen: list[Schedule]) -> Iterator[Fault]:
    """The faults that schedules show of a mistake, one after another."""
    while chosen:
        outcome = explored(Case(each.name, lambda: each.make(each.bug)), chosen)
        chosen = chosen[outcome.schedules :]
        if outcome.fault is not None:
            yield outcome.fault


def named(fault: Fault) -> list[tuple[str, tuple[str, int]]]:
    """The kernel lines that a fault names, each with its kernel. A stream's own actions have no line."""
    ends = [(each.launch, each.site.kernel_place) for each in (*fault.accesses, *fault.waits)]
    assert ends, str(fault)
    return [(launch, place) for launch, place in ends if place[0] != "host"]


class Every:
    """Contains every name."""

    def __contains__(self, name: str) -> bool:
        return True


@cache
def marks() -> dict[tuple[str, int], dict[str, Any]]:
    """(file, line) -> kernel -> mistakes that allow their report to name the line."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for module in (right, wrong):
        function = ""
        for line, text in enumerate(inspect.getsource(module).splitlines(), 1):
            begins = re.match(r"def (\w+)", text)
            function = begins[1] if begins else function
            mark = re.search(r"# BUG(?:: (.*))?$", text)
            if mark:
                names = Every() if mark[1] is None else [name.strip() for name in mark[1].split(",")]
                alone = text.lstrip().startswith("#")
                found[module.__file__ or "", line + alone] = {function: names}
    return found
