"""Which reports count as diagnoses: for every kind of mutant one that must, and unrelated faults that must not."""

import dataclasses
from typing import Any

import pytest

from fusedtp.sim import Access, Fault, Site
from fusedtp.sim.faults import Mismatch, Moment, Wait
from tests.mutants import Mutant, Sources, mutants
from tests.mutants.evidence import Blocked, Evidence, Status, Touch, gather
from tests.mutants.fit import EXPECTED, objections, shown

KERNEL = "two_shot_kernel"  # stages 0 send, 1 reduce, 2 collect


def touch(what: str, stage: int | None, call: int = 3, **of: Any) -> Touch:
    known = dict(rank=0, owner=0, memory="slots", kernel=KERNEL, function="f") | of
    return Touch(stage=stage, what=what, call=call, **known)


def load(stage: int, call: int = 3, **of: Any) -> Touch:
    return touch("load", stage, call, **of)


def store(stage: int, call: int = 3, rank: int = 1, **of: Any) -> Touch:
    return touch("store", stage, call, rank=rank, **of)


def shows(rule: str, *touches: Touch, here: int = 1, agreeing: bool = True, message: str = "") -> Evidence:
    """A fault of a mutant whose line runs in stage `here`."""
    mutant = Mutant("", "", 1, 0, "f", "", "", (), "")
    stages = {KERNEL: frozenset({here})}
    return Evidence(mutant, stages, Fault(rule, message), agreeing, KERNEL, 2, touches=touches)


def race(*touches: Touch, here: int = 1) -> Evidence:
    both = all(each.stores for each in touches)
    return shows("write-write race" if both else "read-write race", *touches, here=here)


def never(stage: int, here: int = 1) -> Evidence:
    return shows("never written", load(stage), here=here)


def deadlock(*waits: Blocked, here: int = 1, agreeing: bool = True, message: str = "") -> Evidence:
    return dataclasses.replace(shows("deadlock", here=here, agreeing=agreeing, message=message), waits=waits)


def waits(
    stage: int, chunk: int, ahead: int = -1, *, rank: int = 0, owner: int = 0, source: int = 1
) -> Blocked:
    return Blocked(rank, owner, source, chunk, stage, KERNEL, 1, ahead)


def recorded(*status: Status, rule: str = "timed out", agreeing: bool = True) -> Evidence:
    return dataclasses.replace(shows(rule, agreeing=agreeing), statuses=status)


def wrong(seen: str, here: int = 2, others: bool = False) -> Evidence:
    fault = Fault("wrong value", "", mismatch=Mismatch("y of call 0", 0, (3, 0), "1.0", seen, 1))
    return dataclasses.replace(shows("", here=here), fault=fault, others_rows=others)


def scoped(memory: str, scope: str, ranks: tuple[int, int], function: str = "f") -> Evidence:
    atomics = [
        touch(
            f"atomic_add (relaxed, {s})",
            None,
            rank=r,
            memory=memory,
            function=function if s == scope else "g",
        )
        for r, s in zip(ranks, (scope, "sys"), strict=True)
    ]
    return shows("scope", *atomics)


SIGNATURE = (load(1, memory="signatures"), store(0, memory="signatures"))
FALSE = recorded(Status(2, 64, 0))
SILENT = recorded(Status(0, 0, 0, 64, 8), rule="wrong value", agreeing=False)
MISREAD = recorded(Status(2, 64, 0, 64, 8), rule="wrong value", agreeing=False)
MISPLACED = recorded(Status(2, 0, 8, 64, 8), rule="wrong value", agreeing=False)
EARLY = race(load(1), store(0))
EARLY_BELOW = race(load(1), store(0), here=0)
RAN_AHEAD = race(load(1, call=1), store(0, call=3))
ONE_AHEAD = race(load(1, call=2), store(0, call=3))
NO_ARRIVAL, NO_DATA_BELOW, NO_DATA = (
    deadlock(waits(1, 0)), deadlock(waits(1, 2), here=0), deadlock(waits(1, 2)),
)  # fmt: skip
STUCK = deadlock(waits(1, 2), agreeing=False)
OVERSHOT = deadlock(waits(1, 0, ahead=1))
SAME_RESULTS = race(store(1, memory="outputs"), store(2, memory="outputs"))
SAME_PLACE = race(store(0, rank=0), store(0, rank=1), here=0)

# kind of mutant -> reports that fit it, reports near them that do not
CASES: dict[str, tuple[list[Evidence], list[Evidence]]] = {
    "no wait for data": ([EARLY, never(1)], [race(load(2), store(1)), RAN_AHEAD, never(2), NO_DATA, FALSE]),
    "wait for data after load": ([EARLY], [race(load(1), store(0), here=2), race(*SIGNATURE)]),
    "no wait for arrival": ([RAN_AHEAD, SILENT, STUCK], [EARLY, ONE_AHEAD, FALSE, NO_DATA, MISREAD]),
    "wait for arrival after load": ([SILENT, STUCK], [RAN_AHEAD, EARLY, NO_DATA]),
    "no wait for signature": ([race(*SIGNATURE), FALSE, MISREAD], [EARLY, NO_ARRIVAL, MISPLACED]),
    "wait for signature after load": ([race(*SIGNATURE), FALSE], [EARLY, RAN_AHEAD, SILENT]),
    "no wait at all": ([EARLY, race(*SIGNATURE), RAN_AHEAD], [NO_DATA, SAME_RESULTS, ONE_AHEAD]),
    "no wait of an empty shard": ([RAN_AHEAD, SILENT, STUCK], [EARLY, NO_DATA, FALSE, ONE_AHEAD]),
    "no signal": ([NO_ARRIVAL, NO_DATA_BELOW], [EARLY, OVERSHOT]),
    "no signal of data": ([NO_DATA_BELOW], [NO_ARRIVAL, deadlock(waits(2, 2), here=0), NO_DATA, OVERSHOT]),
    "no signal of arrival": ([NO_ARRIVAL], [NO_DATA_BELOW, OVERSHOT, RAN_AHEAD]),
    "no signal of an empty shard": ([NO_ARRIVAL], [NO_DATA_BELOW, SILENT]),
    "no signature": ([FALSE, MISREAD], [SILENT, race(*SIGNATURE), NO_ARRIVAL]),
    "signal before store": ([EARLY_BELOW, never(1, here=0)], [EARLY, never(2, here=0), RAN_AHEAD]),
    "arrival before signature": ([race(*SIGNATURE), FALSE], [EARLY_BELOW, RAN_AHEAD]),
    "no order": ([EARLY, race(*SIGNATURE), RAN_AHEAD], [SAME_RESULTS, SAME_PLACE, ONE_AHEAD, FALSE]),
    "no order of signals": ([EARLY_BELOW, race(*SIGNATURE)], [SAME_PLACE, NO_ARRIVAL]),
    "narrow scope": (
        [scoped("flags", "gpu", (0, 1))],
        [scoped("failure", "gpu", (0, 1)), scoped("flags", "gpu", (0, 1), "other"), EARLY],
    ),
    "narrow scope of failures": (
        [scoped("failure", "cta", (0, 0))],
        [scoped("flags", "cta", (0, 0)), scoped("failure", "gpu", (0, 0)), scoped("failure", "cta", (0, 1))],
    ),
    "one buffer": ([ONE_AHEAD], [RAN_AHEAD, EARLY, FALSE]),
    "one signature": (
        [race(load(1, 2, memory="signatures"), store(0, memory="signatures"))],
        [ONE_AHEAD, FALSE],
    ),
    "signature elsewhere": ([FALSE, MISREAD], [SILENT, ONE_AHEAD, EARLY]),
    "no new number": ([EARLY, ONE_AHEAD, FALSE], [NO_ARRIVAL, SAME_RESULTS]),
    "low signal": ([NO_ARRIVAL, NO_DATA_BELOW], [EARLY, OVERSHOT, FALSE]),
    "low wait": ([EARLY, RAN_AHEAD, FALSE], [NO_ARRIVAL, ONE_AHEAD]),
    "equality": ([OVERSHOT], [NO_ARRIVAL, NO_DATA, RAN_AHEAD]),
    "no wrap": ([EARLY, OVERSHOT, FALSE], [NO_ARRIVAL, ONE_AHEAD]),
    "signal to another": ([NO_DATA_BELOW], [NO_ARRIVAL, EARLY_BELOW, NO_DATA]),
    "signal to another, sent again": ([NO_DATA_BELOW, EARLY_BELOW], [NO_ARRIVAL, EARLY, RAN_AHEAD]),
    "arrival to another": ([NO_ARRIVAL, race(*SIGNATURE)], [NO_DATA_BELOW, EARLY]),
    "data to another": ([never(1, here=0)], [never(1, here=1), EARLY_BELOW, NO_DATA_BELOW]),
    "wait for another": (
        [deadlock(waits(2, 2, source=0), here=2), wrong("nan", others=True), SAME_RESULTS, STUCK],
        [NO_DATA, wrong("nan"), wrong("nan", here=0, others=True), EARLY],
    ),
    "wait alone for another": (
        [EARLY, never(1), deadlock(waits(2, 2, source=0), here=2)],
        [NO_DATA, SAME_RESULTS, RAN_AHEAD, EARLY_BELOW],
    ),
    "arrival of another": ([deadlock(waits(1, 0, source=0)), RAN_AHEAD], [NO_ARRIVAL, EARLY]),
    "flag of another": ([deadlock(waits(1, 0, owner=1)), EARLY], [NO_ARRIVAL, ONE_AHEAD]),
    "flag at another": ([NO_ARRIVAL, EARLY_BELOW, FALSE], [OVERSHOT, RAN_AHEAD]),
    "signature of another": ([FALSE, race(*SIGNATURE), MISREAD], [EARLY, SILENT, NO_ARRIVAL]),
    "wrong slot": ([never(1), never(2), ONE_AHEAD], [never(0), EARLY, RAN_AHEAD]),
    "slot of another": (
        [race(load(1, owner=1), touch("copy writes", None, rank=1, owner=1, kernel="copy"))],
        [
            race(load(1), touch("copy writes", None, kernel="copy")),
            EARLY,
            race(load(1, owner=1), store(0, owner=1)),
        ],
    ),
    "place of data stored": ([SAME_PLACE, never(1, here=0)], [SAME_RESULTS, EARLY_BELOW, never(2, here=0)]),
    "place of data read": ([EARLY, wrong("2.0", here=1)], [SAME_PLACE, wrong("nan"), never(2)]),
    "place of results": ([SAME_RESULTS], [SAME_PLACE, wrong("nan"), EARLY]),
    "place of data read and results": ([EARLY, wrong("nan", others=True)], [wrong("nan"), RAN_AHEAD]),
    "place of signature": ([FALSE, MISREAD], [SILENT, EARLY, MISPLACED]),
    "place recorded": ([MISPLACED], [MISREAD, SILENT, FALSE]),
    "flag of data, signalled": ([NO_DATA_BELOW, EARLY_BELOW], [NO_ARRIVAL, NO_DATA, EARLY]),
    "flag of data, awaited": ([NO_DATA, EARLY], [NO_ARRIVAL, NO_DATA_BELOW, EARLY_BELOW]),
    "flag of arrival, signalled": ([NO_ARRIVAL, EARLY_BELOW], [NO_DATA_BELOW, RAN_AHEAD]),
    "flag of arrival, awaited": ([NO_DATA, race(*SIGNATURE)], [NO_ARRIVAL, EARLY, RAN_AHEAD]),
    "flag signalled": ([NO_ARRIVAL, NO_DATA_BELOW], [RAN_AHEAD, NO_DATA]),
    "flag awaited": ([NO_DATA, EARLY], [NO_ARRIVAL, RAN_AHEAD]),
    "place of flag signalled": ([NO_ARRIVAL, EARLY_BELOW], [OVERSHOT, ONE_AHEAD]),
    "place of flag awaited": ([deadlock(waits(1, 0, source=0)), EARLY], [NO_ARRIVAL, ONE_AHEAD]),
    "no receiving": ([wrong("nan")], [wrong("nan", 1), wrong("2.0"), NO_ARRIVAL, EARLY]),
    "tail": (
        [NO_DATA_BELOW, never(1, here=0), EARLY, wrong("nan")],
        [NO_ARRIVAL, wrong("nan", 1), wrong("2.0")],
    ),
    "tail of K": ([wrong("2.0"), never(1, here=0)], [EARLY, NO_DATA_BELOW, RAN_AHEAD]),
    "tail of items": (
        [shows("out of bounds", load(1, memory="outputs")), SAME_RESULTS],
        [shows("out of bounds", load(2, memory="outputs")), EARLY, FALSE],
    ),
    "stages": (
        [deadlock(waits(1, 0), message="not started yet: 1 programs of rank 0")],
        [NO_ARRIVAL, deadlock(waits(1, 0, ahead=1), message="not started yet: 1 programs of rank 0"), EARLY],
    ),
}


def judged(expects: str, evidence: Evidence) -> list[str]:
    return objections(
        dataclasses.replace(evidence, mutant=dataclasses.replace(evidence.mutant, expects=expects))
    )


def test_every_kind_of_mutant_is_here() -> None:
    assert set(CASES) == set(EXPECTED)
    assert {m.expects for m in mutants(Sources.read()) if "schedules" in m.judges} == set(EXPECTED)


@pytest.mark.parametrize("expects", EXPECTED)
def test_what_follows_from_a_mutation_fits_and_what_is_near_does_not(expects: str) -> None:
    follow, near = CASES[expects]
    for evidence in follow:
        assert not judged(expects, evidence), evidence
    for evidence in near:
        assert judged(expects, evidence), evidence


@pytest.mark.parametrize("expects", EXPECTED)
def test_a_crash_another_kernel_and_another_memory_never_fit(expects: str) -> None:
    follow, _near = CASES[expects]
    assert judged(expects, shows("raised"))
    for evidence in follow:
        if evidence.touches:
            elsewhere = [dataclasses.replace(t, kernel="other_kernel") for t in evidence.touches]
            if evidence.memories & {"slots", "outputs"}:
                assert judged(expects, dataclasses.replace(evidence, touches=tuple(elsewhere)))
            others = [dataclasses.replace(t, memory="epoch") for t in evidence.touches]
            assert judged(expects, dataclasses.replace(evidence, touches=tuple(others)))


def test_copies_around_a_meeting_race_in_neighbouring_phases_only() -> None:
    before, after = (
        touch("copy writes", None, 2, kernel="copy", rank=1),
        touch("copy reads", None, 3, kernel="copy"),
    )
    assert not judged("no wait for arrival", race(before, after))
    assert judged("no wait for arrival", race(before, dataclasses.replace(after, call=5)))
    assert judged("no wait for data", race(before, after))


def test_evidence_counts_the_calls_and_finds_the_stages_of_a_report() -> None:
    sources = Sources.read()
    mutant = next(
        m for m in mutants(sources) if m.function == "one_shot_kernel" and m.expects == "no wait for data"
    )
    kernel = sources.files["matmul_all_reduce.py"].text.splitlines()
    lines = [i for i, line in enumerate(kernel, start=1) if "signals.slot(" in line][
        :2
    ]  # of senders, of readers
    accesses = [
        Access(rank, "one_shot_kernel", rank, Site("matmul_all_reduce.py", at, "one_shot_kernel", at), what,
               "slots of rank 0 ", (0,), (0,), step)
        for rank, (at, what, step) in enumerate(zip(lines, ("store", "load"), (30, 9), strict=True))
    ]  # fmt: skip
    starts = [
        Moment(step, rank, "one_shot_kernel", rank, "starts", kind="start")
        for step in (1, 20)
        for rank in (0, 1)
    ]
    fault = Fault("read-write race", "", tuple(accesses))
    found = gather(mutant, sources, fault, agreeing=True, kernel="one_shot_kernel", traced=lambda: starts)
    assert found.here == {"one_shot_kernel": {1}}
    assert [(t.stage, t.call, t.memory) for t in found.touches] == [(0, 2, "slots"), (1, 1, "slots")]
    assert not shown(found), "an earlier call's load is not too early"


def test_evidence_tells_whether_a_word_is_behind_or_ahead_and_whose_rows_are_wrong() -> None:
    sources = Sources.read()
    mutant = next(m for m in mutants(sources) if m.expects == "equality")
    site = Site("signals.py", 1, "wait", 1)
    waiting = [
        Wait(rank, "one_shot_kernel", 1, site, f"flags of rank {rank} ", (1 - rank, 0), str(seen))
        for rank, seen in enumerate((-(2**31), 2**31 - 1))
    ]
    fault = Fault("deadlock", "", waits=tuple(waiting))
    found = gather(mutant, sources, fault, agreeing=True, epochs=(2**31 - 1, -(2**31)))
    assert [(w.source, w.chunk, w.call, w.ahead) for w in found.waits] == [(1, 0, 0, 1), (0, 0, 1, -1)]
    assert shown(found) == ["overshot"]
    for row, others in ((2, False), (3, True)):
        fault = Fault("wrong value", "", mismatch=Mismatch("y of call 0", 1, (row, 0), "1.0", "nan", 1))
        assert (
            gather(mutant, sources, fault, agreeing=True, own_rows=lambda c, r: range(3)).others_rows
            is others
        )
