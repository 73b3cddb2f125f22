"""What a report must say to count as having found a mutant: which rules, about which memory, in which kernels.

A fault that does not fit is a misdiagnosis and counts as a survivor. The memories are those of worlds.py: slots,
flags, signatures, failure, status; "outputs" is whatever a case compares.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..faults import Fault

RACE = ("read-write race", "write-write race")
NEVER, DEADLOCK, WRONG, SCOPE, OUTSIDE, FAILED = (
    "never written", "deadlock", "wrong value", "scope", "out of bounds", "timed out",
)  # fmt: skip


def _rules(**memories: str) -> dict[str, set[str]]:
    """rule -> memories; race stands for both kinds."""
    names = dict(never=NEVER, deadlock=DEADLOCK, wrong=WRONG, scope=SCOPE, outside=OUTSIDE, failed=FAILED)
    found = {names[key]: set(text.split()) for key, text in memories.items() if key != "race"}
    return found | {rule: set(memories["race"].split()) for rule in RACE if "race" in memories}


_early = _rules(race="slots", never="slots")  # something was read before it was there
# an arrival bounds how far a peer can run ahead, orders the signatures, and is what notices another call; without it
# a rank that comes later may be taken for one in another call ("timed out" is the rule of a recorded failure)
_unnoticed = _rules(race="slots signatures", deadlock="flags", failed="status", wrong="status")
_any_place = dict(
    race="slots signatures outputs", never="slots", deadlock="flags", wrong="outputs status", failed="status"
)

EXPECTED = {
    "no wait for data": _early,
    "no wait for arrival": _unnoticed,
    "no wait at all": _rules(race="slots signatures", never="slots", failed="status"),
    "wait for data after load": _early,
    "wait for arrival after load": _unnoticed,
    "no wait of an empty shard": _unnoticed,
    "no signal": _rules(deadlock="flags"),
    "no signal of an empty shard": _rules(deadlock="flags"),
    "no signature": _rules(failed="status", wrong="status"),
    "signal before store": _rules(race="slots signatures", never="slots"),
    "no order": _rules(race="slots signatures"),
    "narrow scope": _rules(scope="flags", race="slots signatures"),
    "narrow scope of failures": _rules(scope="failure"),
    "one buffer": _rules(race="slots signatures", failed="status", wrong="status"),
    "low epoch": _rules(
        race="slots signatures", never="slots", deadlock="flags", failed="status", wrong="status"
    ),
    "equality": _rules(deadlock="flags"),
    "no wrap": _rules(race="slots signatures", never="slots", failed="status"),
    "tail": _rules(
        wrong="outputs", deadlock="flags", race="slots outputs", never="slots", outside="outputs slots"
    ),
    "stages": _rules(deadlock="flags"),
    "wrong peer": _rules(**_any_place),
    "wrong slot": _rules(race="slots", never="slots"),
    "wrong place": _rules(**_any_place),
    "wrong signature place": _rules(race="signatures", failed="status", wrong="status"),
    "wrong flag": _rules(deadlock="flags", race="slots signatures", never="slots", failed="status"),
}

# what the ordering lint must say, by the names of its rules
ORDER = {
    "no order": {"signal-order"},
    "narrow scope": {"system-scope"},
    "narrow scope of failures": {"block-scope"},
    "no barrier": {"barrier-before-release", "barrier-after-acquire"},
    "wait in loop": {"gated-load", "pipelined"},
}

WORKSPACE = ("slots", "flags", "signatures", "epoch", "failure", "status")


def memories(fault: Fault) -> set[str]:
    """Names of the memories that a report is about; "outputs" for tensors that are not the workspace."""
    if fault.rule in (WRONG, FAILED):
        named = [fault.message.split()[0]]
    elif fault.rule == OUTSIDE:
        named = re.findall(r"(?:end of|before) (\S+) of rank", fault.message)
    else:
        named = [access.tensor.split()[0] for access in fault.accesses]
        named += [wait.tensor.split()[0] for wait in fault.waits]
    return {name if name in WORKSPACE else "outputs" for name in named}


def objections(expects: str, kernels: Iterable[str], fault: Fault) -> list[str]:
    """Why this report does not fit a mutant that `expects` such faults in these kernels; none if it does."""
    allowed = EXPECTED[expects]
    if fault.rule not in allowed:
        return [f"{fault.rule!r} is no sign of {expects!r}"]
    found = []
    if not memories(fault) <= allowed[fault.rule]:
        found.append(
            f"about {', '.join(sorted(memories(fault)))}, not {' or '.join(sorted(allowed[fault.rule]))}"
        )
    launches = {access.launch for access in fault.accesses} | {wait.launch for wait in fault.waits}
    if launches and not launches & set(kernels):
        found.append(f"in {', '.join(sorted(launches))}, which the mutation does not touch")
    return found
