"""The results of `fusedtp check` as one JSON document, for scripts and CI.

{"exit_code": 1, "lint": [...], "cases": [{
    "case", "world_size", "target"      the case, its number of ranks, and the target of the compiled code
    "verdict"                           "ok", "refused", "out of time", "not all" (by --exhaust), "raised" (by the
                                        case), or the fault's rule
    "schedules", "switches", "seconds"  the cost of the check
    "words"                             the reason of a refusal, the traceback, or where time ran out; else ""
    "fault"                             null, or its name, rule, message, accesses, waits, mismatch and the schedule
    "replay"                            the command that replays the fault, else ""
    "waived"                            how often each finding of --waive occurred, by name
}]}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fusedtp.sim.faults import Access, Fault, Site, Wait
from fusedtp.sim.report import replay

from .workers import Result


def as_json(results: Sequence[Result], lint: Sequence[str], code: int) -> dict[str, Any]:
    """The document, as an argument of json.dumps."""
    return {"exit_code": code, "lint": list(lint), "cases": [_case(each) for each in results]}


def _case(result: Result) -> dict[str, Any]:
    found, part = result.found, result.part
    fault = part.fault
    return {
        "case": found.name,
        "world_size": found.world_size,
        "target": found.target,
        "verdict": result.verdict,
        "schedules": result.schedules,
        "switches": result.switches,
        "seconds": round(result.seconds, 3),
        "words": found.refused or part.refused or found.raised or part.raised or found.late or part.late,
        "fault": None if fault is None else _fault(fault),
        "replay": "" if fault is None else next(iter(replay(fault, found.name, found.asked)), ""),
        "waived": result.waived,
    }


def _fault(fault: Fault) -> dict[str, Any]:
    """The fault without its trace; sites have file, line and function, and the kernel's line that led there."""
    made = asdict(fault) | {"name": fault.name}
    del made["trace"]
    ends: dict[str, Sequence[Access | Wait]] = {"accesses": fault.accesses, "waits": fault.waits}
    for key, each in ends.items():
        for end, entry in zip(each, made[key], strict=True):
            entry["site"] = _site(end.site)
    return made


def _site(site: Site) -> dict[str, Any]:
    file, line = site.kernel_place
    return {
        "file": site.file,
        "line": site.line,
        "function": site.function,
        "kernel_file": file,
        "kernel_line": line,
    }
