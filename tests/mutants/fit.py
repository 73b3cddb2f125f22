"""Which signs a mutant must show: a report that shows none of them is a misdiagnosis, and its mutant a survivor.

The table is derived from the protocol (kernels/signals.py), not from what mutants were seen to do:

- A wait or a signal of DATA orders the stores of one stage before the loads of a later one in the same call. Without
  it these loads come early. It does not bound how far a peer runs ahead, and compares nothing.
- An ARRIVAL does those two things: without it a peer uses a slot again two calls later, and a peer in another call is
  not noticed: nothing is recorded, or data waited for that will never come. Waiting later in the launch keeps the
  bound (each launch still waits for all) and loses only the notice.
- Within a wait for an arrival, the flag orders the SIGNATURE behind it. Read without it, it is this call's unordered,
  or an older one: another call is seen where there is none, or a wrong number recorded.
- A missing signal, one with too low a number, or one that goes elsewhere, is waited for in vain; at the place where it
  does go, it says too early that data is there.
- A number that must match exactly can be overshot. Too few places for two calls collide one call apart.
- A wrong address of data leaves the right one unwritten, and may collide with whose place it takes.
- Slots in a neighbour's memory serve kernels as well; but the neighbour's own copies go there too, unordered.
- What skips a tail leaves it unsent, unread or unstored; a sum that skips one is wrong.

A sign is about the stages that run the mutated line or the one after it, about the calls of the two accesses, and
about whose flag or which rows (signs.py). In `ORDER`, what the ordering lint must say, by the names of its rules.
"""

from __future__ import annotations

from . import signs as s
from .evidence import Evidence

_no_order = (s.early_here, s.early_signature, s.overrun, s.unmet)
_not_noticed = (s.unnoticed, s.stuck_unnoticed)
_stale = (s.early_signature, s.false_alarm, s.misread)

EXPECTED: dict[str, tuple[s.Sign, ...]] = {
    # waits
    "no wait for data": (s.early_here,),
    "wait for data after load": (s.early_here,),
    "no wait for arrival": (s.overrun, s.unmet, *_not_noticed),
    "wait for arrival after load": _not_noticed,
    "no wait for signature": (*_stale, s.overrun, s.unmet, *_not_noticed),
    "wait for signature after load": _stale,
    "no wait at all": (*_no_order, s.false_alarm, s.misread, s.unnoticed),
    "no wait of an empty shard": (s.overrun, *_not_noticed),
    "no receiving": (s.unwritten,),
    # signals
    "no signal": (s.vain_for_arrival, s.vain_for_data_after),
    "no signal of data": (s.vain_for_data_after,),
    "no signal of arrival": (s.vain_for_arrival,),
    "no signal of an empty shard": (s.vain_for_arrival,),
    "no signature": (s.false_alarm, s.misread),
    "signal before store": (s.early_after,),
    "arrival before signature": _stale,
    # order
    "no order": _no_order,
    "no order of signals": (s.early_after, s.early_signature, s.overrun, s.unmet),
    "narrow scope": (s.narrow_flag,),
    "narrow scope of failures": (s.narrow_failure,),
    # numbers
    "one buffer": (s.overrun_by_one,),
    "one signature": (s.signature_overrun_by_one,),
    "signature elsewhere": (s.false_alarm, s.misread, s.signature_overrun_by_one),
    "no new number": (*_no_order, s.overrun_by_one, *_stale, s.unnoticed),
    "low signal": (s.vain_for_arrival, s.vain_for_data_after),
    "low wait": (*_no_order, s.false_alarm, s.misread, s.unnoticed),
    "equality": (s.overshot,),
    "no wrap": (*_no_order, s.false_alarm, s.overshot),
    # who and where
    "signal to another": (s.vain_for_data_after,),
    "signal to another, sent again": (s.vain_for_data_after, s.early_after),
    "arrival to another": (s.vain_for_arrival, s.early_signature),
    "data to another": (s.never_after,),
    "wait for another": (
        s.vain_for_itself, s.unwritten_of_peers, s.miscomputed, s.collision_of_outputs, s.stuck_unnoticed,
    ),
    "wait alone for another": (s.early_here, s.vain_for_itself),
    "arrival of another": (s.vain_for_itself, s.overrun, s.unmet, s.unnoticed),
    "flag of another": (s.vain_elsewhere, s.early_here, s.early_signature, s.overrun, s.false_alarm),
    "flag at another": (s.vain_for_arrival, s.vain_for_data_after, s.early_after, *_stale),
    "signature of another": (*_stale,),
    "wrong slot": (s.never_here, s.never_after, s.overrun_by_one),
    "slot of another": (s.foreign_slot,),
    "place of data stored": (s.collision_of_data, s.never_after),
    "place of data read": (s.early_here, s.miscomputed),
    "place of results": (s.collision_of_outputs,),
    "place of data read and results": (s.early_here, s.collision_of_outputs, s.unwritten_of_peers),
    "place of signature": (s.false_alarm, s.misread, s.early_signature),
    "place recorded": (s.misplaced,),
    "flag of data, signalled": (s.vain_for_data_after, s.early_after),
    "flag of data, awaited": (s.vain_for_data_here, s.early_here),
    "flag of arrival, signalled": (s.vain_for_arrival, s.early_after),
    "flag of arrival, awaited": (s.vain_for_data_here, s.early_signature, s.false_alarm),
    "flag signalled": (s.vain_for_arrival, s.vain_for_data_after, s.early_after),
    "flag awaited": (s.vain_for_data_here, s.early_here, s.early_signature, s.false_alarm),
    "place of flag signalled": (s.vain_for_arrival, s.vain_for_data_after, s.early_after, *_stale),
    "place of flag awaited": (s.vain_for_itself, s.early_here, *_stale, s.overrun),
    # tails and stages
    "tail": (s.vain_for_data_after, s.never_after, s.early_here, s.unwritten),
    "tail of K": (s.miscomputed, s.never_after, s.unwritten),
    "tail of items": (s.outside_here, s.collision_of_outputs, s.unwritten, s.vain_for_data_after),
    "stages": (s.never_started,),
}  # fmt: skip

ORDER = {
    "no order": {"signal-order"},
    "no order of signals": {"signal-order"},
    "narrow scope": {"system-scope"},
    "narrow scope of failures": {"block-scope"},
    "no barrier before release": {"barrier-before-release"},
    "no barrier after acquire": {"barrier-after-acquire"},
    "wait in loop": {"gated-load", "pipelined"},
}


def shown(evidence: Evidence) -> list[str]:
    """Names of the expected signs that the evidence shows."""
    return [sign.__name__ for sign in EXPECTED[evidence.mutant.expects] if sign(evidence)]


def objections(evidence: Evidence) -> list[str]:
    """Why this report does not fit; none if it does."""
    if shown(evidence):
        return []
    wanted = ", ".join(sign.__name__.replace("_", " ") for sign in EXPECTED[evidence.mutant.expects])
    return [f"{evidence.rule!r} is no sign of {evidence.mutant.expects!r}; one would be: {wanted}"]
