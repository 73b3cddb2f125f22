"""Signs: what a report must show to follow from a mutation. Each is a question to the evidence; which count: fit.py.

A protocol has few ways to break, and each leaves a mark of its own:

    read too early      a load of data, or of a signature, and its store in the SAME call, unordered; or nothing stored
    bound lost          accesses of one slot in calls that are two apart; one apart where the slots do not rotate
    waiting in vain     no program can go on, and the words polled are behind the call
    overshot            the same, and a word polled is ahead of the call
    false alarm         a rank takes an agreeing peer for one in another call
    not noticed         a rank does not record that a peer is in another call, or records it wrongly

A race or a wrong value as such is no sign of anything.
"""

from __future__ import annotations

from collections.abc import Callable

from .evidence import COPY, Blocked, Evidence, Touch

Sign = Callable[[Evidence], bool]
READ_WRITE, WRITE_WRITE, NEVER = "read-write race", "write-write race", "never written"
GPU, BLOCK = "gpu", "cta"


def _here(e: Evidence, touch: Touch | Blocked, plus: int = 0) -> bool:
    """Whether it was made `plus` stages after one that runs the mutated line."""
    stages = e.here.get(touch.kernel, frozenset())
    return (touch.stage is None and bool(stages)) or touch.stage in {stage + plus for stage in stages}


def _apart(e: Evidence) -> int:
    """How many calls lie between the two accesses."""
    first, second = e.touches
    return abs(first.call - second.call)


def _read_and_write(e: Evidence, memory: str) -> tuple[Touch, Touch] | None:
    """The load and the store of a race on this memory."""
    if e.rule != READ_WRITE or e.memories != {memory}:
        return None
    first, second = e.touches
    return (first, second) if second.stores else (second, first)


def early_here(e: Evidence) -> bool:
    """The stage of the mutated line reads data of this call that an earlier stage has not stored yet."""
    return never_here(e) or _early(e, lambda load, store: _here(e, load))


def early_after(e: Evidence) -> bool:
    """The stage after that of the mutated line reads what the latter has not stored yet."""
    return never_after(e) or _early(e, lambda load, store: _here(e, store) and _here(e, load, 1))


def _early(e: Evidence, fits: Callable[[Touch, Touch], bool]) -> bool:
    pair = _read_and_write(e, "slots")
    if pair is None or _apart(e) != 0 or pair[0].kernel != pair[1].kernel:
        return False
    load, store = pair
    return load.stage is not None and store.stage is not None and store.stage < load.stage and fits(*pair)


def never_here(e: Evidence) -> bool:
    """The stage of the mutated line reads data that nobody has stored."""
    return e.rule == NEVER and e.memories == {"slots"} and _here(e, e.touches[0])


def never_after(e: Evidence) -> bool:
    """The stage after that of the mutated line reads data that nobody has stored."""
    return e.rule == NEVER and e.memories == {"slots"} and _here(e, e.touches[0], 1)


def unmet(e: Evidence) -> bool:
    """Copies of the host before and after a meeting of the ranks, unordered."""
    return (
        len(e.touches) == 2
        and e.memories == {"slots"}
        and {touch.kernel for touch in e.touches} == {COPY}
        and e.touches[0].rank != e.touches[1].rank
        and _apart(e) == 1
    )


def early_signature(e: Evidence) -> bool:
    """A signature is read that its peer has not stored yet in this call."""
    pair = _read_and_write(e, "signatures")
    return pair is not None and pair[0].rank != pair[1].rank and _apart(e) == 0


def overrun(e: Evidence) -> bool:
    """A peer is in the next call but one, and uses the places that a rank still uses."""
    return _overrun(e, lambda apart: apart >= 2)


def overrun_by_one(e: Evidence) -> bool:
    """A peer is in the next call and uses the data slot that a rank still uses."""
    return _overrun(e, lambda apart: apart == 1) and e.memories == {"slots"}


def signature_overrun_by_one(e: Evidence) -> bool:
    """A peer in the next call replaces the signature that a rank has still to read."""
    return _overrun(e, lambda apart: apart == 1) and e.memories == {"signatures"}


def _overrun(e: Evidence, far: Callable[[int], bool]) -> bool:
    if e.rule not in (READ_WRITE, WRITE_WRITE) or len(e.memories & {"slots", "signatures"}) != 1:
        return False
    by_kernels = all(touch.kernel in e.here for touch in e.touches)
    return by_kernels and e.touches[0].rank != e.touches[1].rank and far(_apart(e))


def foreign_slot(e: Evidence) -> bool:
    """A kernel loads from a slot in another rank's memory, to which that rank copies."""
    pair = _read_and_write(e, "slots")
    if pair is None:
        return False
    load, store = pair
    return (
        load.kernel in e.here
        and load.rank != load.owner
        and store.kernel == COPY
        and store.rank == store.owner
    )


def collision_of_data(e: Evidence) -> bool:
    """Two ranks store to the same place of a slot in one call, at the stage of the mutated line."""
    return (
        e.rule == WRITE_WRITE
        and e.memories == {"slots"}
        and e.touches[0].rank != e.touches[1].rank
        and all(_here(e, touch) for touch in e.touches)
        and _apart(e) == 0
    )


def collision_of_outputs(e: Evidence) -> bool:
    """Two programs of a rank store the same results in one call, one at the stage of the mutated line."""
    return (
        e.rule == WRITE_WRITE
        and e.memories == {"outputs"}
        and e.touches[0].rank == e.touches[1].rank
        and any(_here(e, touch) for touch in e.touches)
        and _apart(e) == 0
    )


def _vain(e: Evidence, fits: Callable[[Blocked], bool]) -> bool:
    """A deadlock, whose first waits are for words that are behind, one of them such a one."""
    return (
        e.rule == "deadlock"
        and bool(e.waits)
        and all(wait.ahead < 0 for wait in e.first_waits)
        and any(wait.kernel in e.here and fits(wait) for wait in e.first_waits)
    )


def vain_for_arrival(e: Evidence) -> bool:
    """A rank waits for a peer's arrival, all being in the same call or none having been able to say otherwise."""
    return _vain(e, lambda wait: wait.chunk == 0)


def vain_for_data_after(e: Evidence) -> bool:
    """The stage after that of the mutated line waits for data, everyone having arrived."""
    return _vain(e, lambda wait: wait.chunk > 0 and _here(e, wait, 1)) and _only_data(e)


def vain_for_data_here(e: Evidence) -> bool:
    """The stage of the mutated line waits for data, everyone having arrived."""
    return _vain(e, lambda wait: wait.chunk > 0 and _here(e, wait)) and _only_data(e)


def _only_data(e: Evidence) -> bool:
    return all(wait.chunk > 0 for wait in e.first_waits)


def vain_for_itself(e: Evidence) -> bool:
    """The stage of the mutated line waits for a signal of its own rank, which sends itself none."""
    return _vain(e, lambda wait: wait.source == wait.rank and _here(e, wait))


def vain_elsewhere(e: Evidence) -> bool:
    """A rank polls the flags of another one."""
    return _vain(e, lambda wait: wait.owner != wait.rank)


def never_started(e: Evidence) -> bool:
    """A rank waits while programs that it waits for have no room to start."""
    return _vain(e, lambda wait: True) and "not started yet" in e.fault.message


def overshot(e: Evidence) -> bool:
    """A rank waits for a number that its peer has passed."""
    return e.rule == "deadlock" and any(wait.ahead > 0 and wait.kernel in e.here for wait in e.waits)


def false_alarm(e: Evidence) -> bool:
    """A rank has taken an agreeing peer for one in another call."""
    return e.rule == "timed out" and e.agreeing and {status.code for status in e.statuses} == {2}


def unnoticed(e: Evidence) -> bool:
    """A rank has recorded nothing although a peer is in another call."""
    return _status(e) and e.statuses[0].code == 0


def misread(e: Evidence) -> bool:
    """A rank has recorded another signature than the peer's."""
    return _status(e) and e.statuses[0].code == 2 and e.statuses[0].seen != e.statuses[0].wanted_seen


def misplaced(e: Evidence) -> bool:
    """A rank has recorded the right signature and the wrong flag."""
    status = e.statuses[0] if e.statuses else None
    return (
        _status(e)
        and status is not None
        and (status.code, status.seen) == (2, status.wanted_seen)
        and status.index != status.wanted_index
    )


def _status(e: Evidence) -> bool:
    return e.rule == "wrong value" and not e.agreeing and bool(e.statuses)


def stuck_unnoticed(e: Evidence) -> bool:
    """The stage of the mutated line waits in vain, not having noticed that a peer is in another call."""
    return not e.agreeing and _vain(e, lambda wait: _here(e, wait))


def narrow_flag(e: Evidence) -> bool:
    """Two ranks use a flag, one of them by the mutated line, whose scope is its own device."""
    return _narrow(e, "flags", GPU) and e.touches[0].rank != e.touches[1].rank


def narrow_failure(e: Evidence) -> bool:
    """Two programs of a rank use the word of failures, one of them by the mutated line, for itself alone."""
    return _narrow(e, "failure", BLOCK) and e.touches[0].rank == e.touches[1].rank


def _narrow(e: Evidence, memory: str, scope: str) -> bool:
    return (
        e.rule == "scope"
        and e.memories == {memory}
        and any(t.what.endswith(f", {scope})") and t.function == e.mutant.function for t in e.touches)
    )


def unwritten(e: Evidence) -> bool:
    """Results that nobody has stored, and the mutated line runs in the stage that stores them."""
    return _unwritten(e) and e.kernel in e.here and e.last_stage in e.here[e.kernel]


def unwritten_of_peers(e: Evidence) -> bool:
    """The same, and none of them is of this rank's own rows."""
    return unwritten(e) and e.others_rows


def _unwritten(e: Evidence) -> bool:
    """They are NaN, as the case left them."""
    wrong = e.fault.mismatch
    return wrong is not None and not e.statuses and wrong.seen == "nan" != wrong.wanted


def miscomputed(e: Evidence) -> bool:
    """Results that were stored, with other values than they should have, by a kernel that runs the mutated line."""
    wrong = e.fault.mismatch
    return wrong is not None and not e.statuses and wrong.seen != "nan" and e.kernel in e.here


def outside_here(e: Evidence) -> bool:
    """The stage of the mutated line reaches past the ends of its operands, results or slot."""
    return (
        e.rule == "out of bounds"
        and e.memories <= {"outputs", "slots", "flags"}
        and all(_here(e, touch) for touch in e.touches)
    )
