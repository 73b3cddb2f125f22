"""Known bugs of the field, each as a small kernel with a twin that is right.

    single buffer       one receive buffer, overwritten by a peer that is a call ahead
    empty shard         two rotating buffers, but a rank without rows does not signal
    equality            a wait for one number, which a fast peer has already overwritten
    reset               a flag set back to 0 after its peer signalled the next call
    device lock         a lock of device scope between devices
    relaxed signal      a relaxed flag after plain stores
    replayed epoch      the host chose the call's number, and a graph replays it
    grid wait           every program sends, then waits for programs that may not have started
    short signals       fewer flags than programs
    hoisted load        a wait in the pipelined loop; only compiled code shows it, see lint/

`judge` runs one of them under many schedules. Expectations name the rule, the memory and the source lines by their
text, so that a report which finds something else does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..case import Case, Launch, Run, compare
from ..explore import Outcome, Schedule, explore
from ..faults import Fault
from ..memory import Memory, symmetric

if TYPE_CHECKING:
    from ..lint import Compiler

N = 8
CALLS = 4


@dataclass(frozen=True)
class KnownBug:
    """One bug and what its report must say.

    make       fixed -> a fresh run
    rule       of fusedtp.sim.RULES
    memory     the name of the memory that the report must name
    lines      what stands in the source lines of the two accesses, or of the blocked waits
    says       words that the report must hold
    """

    name: str
    summary: str
    make: Callable[[bool], Run]
    rule: str
    memory: str
    lines: tuple[str, ...]
    says: tuple[str, ...] = ()

    def case(self, fixed: bool) -> Case:
        return Case(f"{self.name}{' (fixed)' if fixed else ''}", lambda: self.make(fixed))

    def objections(self, fault: Fault | None) -> list[str]:
        """What in the report is not as it must be; none if the diagnosis is right."""
        if fault is None:
            return ["nothing was found"]
        wrong = [] if fault.rule == self.rule else [f"rule is {fault.rule!r}, not {self.rule!r}"]
        sites = [a.site for a in fault.accesses] + [w.site for w in fault.waits]
        seen = [_source_line(site.file, site.kernel_line) for site in sites]
        wrong += [f"no line with {text!r}" for text in self.lines if not any(text in line for line in seen)]
        wrong += [
            f"line {line!r} has no part in it" for line in seen if not any(t in line for t in self.lines)
        ]
        wrong += [f"does not name {text!r}" for text in (self.memory, *self.says) if text not in str(fault)]
        return wrong


def _source_line(file: str, line: int) -> str:
    return Path(file).read_text().splitlines()[line - 1].strip() if line else ""


def judge(name: str, fixed: bool, schedules: int | Sequence[Schedule] = 200) -> tuple[Outcome, list[str]]:
    """Explore a bug or its twin; returns the outcome and `objections` (of a twin: the fault, if there is one)."""
    bug = next(each for each in known_bugs() if each.name == name)
    outcome = explore(bug.case(fixed), schedules)
    if fixed:
        return outcome, [] if outcome.fault is None else [str(outcome.fault)]
    return outcome, bug.objections(outcome.fault)


def known_bugs() -> list[KnownBug]:
    """Those that schedules show. Kernels are imported when a run is made: TRITON_INTERPRET=1 must be set by then."""
    store, load = "tl.store(numbers(boxes, 1 - rank)", "tl.load(numbers(boxes, rank)"
    wait = "wait(words(flags, rank)"
    race = "read-write race"
    return [
        KnownBug(
            "single buffer", "a fast peer sends into the buffer that is still being read",
            lambda fixed: _exchange("exchange", SLOTS=2 if fixed else 1), race, "boxes", (store, load),
        ),
        KnownBug(
            "empty shard", "a rank without rows does not signal, and its peer's rotation is unbounded",
            lambda fixed: _exchange("from_rank_0", one_way=True, ALWAYS=fixed), race, "boxes",
            ("tl.store(numbers(boxes, 1)", "tl.load(numbers(boxes, 1)"),
        ),
        KnownBug(
            "equality", "the wait wants exactly this call's number, the peer is a call ahead",
            lambda fixed: _exchange("equality", AT_LEAST=fixed), "deadlock", "flags",
            ("while tl.atomic_add(words(flags, rank)",), ("last written by rank",),
        ),
        KnownBug(
            "reset", "setting the flag back erases the peer's signal of the next call",
            lambda fixed: _exchange("reset", COUNT=fixed), "deadlock", "flags", (wait,),
            ("sees 0 (last written by rank",),
        ),
        KnownBug(
            "device lock", "a lock of device scope between devices",
            _locked_sum, "scope", "locks", ("(lock, 0,",), ("gpu",),
        ),
        KnownBug(
            "relaxed signal", "the flag may arrive before what was stored before it",
            lambda fixed: _exchange("one_way", calls=1, SEM="release" if fixed else "relaxed"), race, "boxes",
            (store, load),
        ),
        KnownBug(
            "replayed epoch", "a graph replays the number that the host chose, and no wait waits",
            _replayed, race, "boxes", (store, load),
        ),
        KnownBug(
            "grid wait", "each program waits for all programs of the peer, and not all are resident",
            lambda fixed: _exchange("all_push", calls=2, grid=2, flags=2, STAGED=fixed), "deadlock", "flags",
            (wait,), ("not started yet: 1 programs of rank", "at most 1 resident"),
        ),
        KnownBug(
            "short signals", "fewer flags than programs",
            lambda fixed: _exchange("flag_per_program", calls=3, grid=3, flags=3 if fixed else 2),
            "out of bounds", "flags", ("signal(words(flags, 1 - rank)",), ("past the end of",),
        ),
    ]  # fmt: skip


def _kernel(name: str) -> Any:
    from . import kernels

    return getattr(kernels, name)


def _rows(calls: int) -> list[Tensor]:
    """What each rank sends, [calls, N]; all numbers differ."""
    return [torch.arange(calls * N, dtype=torch.float32).view(calls, N) + 1000 * (r + 1) for r in range(2)]


def _exchange(
    kernel: str, *, calls: int = CALLS, grid: int = 1, flags: int = 1, one_way: bool = False, **switch: Any
) -> Run:
    """A launch a rank of a kernel that exchanges rows; with one_way only rank 1 receives."""
    x = _rows(calls)
    y = [torch.full((calls, N), torch.nan) for _ in range(2)]
    boxes, words = _memory(slots=max(calls, 2), flags=flags)
    if "CALLS" in _kernel(kernel).arg_names:
        switch["CALLS"] = calls
    work = [
        [
            Launch(
                _kernel(kernel), grid,
                dict(x=x[r], boxes=boxes.pointers, flags=words.pointers, y=y[r], rank=r, N=N, **switch),
            )
        ]
        for r in range(2)
    ]  # fmt: skip
    got, want = (y[1:], x[:1]) if one_way else (y, x[::-1])
    return Run(work, [boxes, words], lambda: compare("y", got, want))


def _memory(slots: int, flags: int) -> tuple[Memory, Memory]:
    return symmetric("boxes", 2, (slots, N)), symmetric("flags", 2, (flags,), torch.int32, poisoned=False)


def _locked_sum(fixed: bool) -> Run:
    total = symmetric("total", 2, (1,), poisoned=False)
    locks = symmetric("locks", 2, (1,), torch.int32, poisoned=False)
    args = dict(total=total.pointers, locks=locks.pointers, CALLS=2, SCOPE="sys" if fixed else "gpu")
    work = [[Launch(_kernel("locked_sum"), 1, args)] for _ in range(2)]
    return Run(work, [total, locks], lambda: compare("total", total.tensors[:1], [torch.tensor([4.0])]))


def _replayed(fixed: bool) -> Run:
    """Both ranks replay one launch: same arguments, twice."""
    x = _rows(1)
    y = [torch.full((1, N), torch.nan) for _ in range(2)]
    boxes, words = _memory(slots=2, flags=1)
    counters = [torch.zeros(1, dtype=torch.int32) for _ in range(2)]
    work = []
    for r in range(2):
        args = dict(
            x=x[r], boxes=boxes.pointers, flags=words.pointers, y=y[r], rank=r, epoch=1, counter=counters[r],
            N=N, OWN_COUNT=fixed,
        )  # fmt: skip
        work.append([Launch(_kernel("replayed"), 1, args)] * 2)
    return Run(work, [boxes, words], lambda: compare("y", y, x[::-1]))


HOISTED = "hoisted load"


def hoisted(fixed: bool, target: str = "sm_90", using: Compiler | None = None) -> list[str]:
    """What is wrong in the lint's report of the load that is moved before its wait; none if the diagnosis is right.

    fixed    the twin, whose report must be empty
    target   a name of lint.TARGETS
    using    compiling processes that are kept from call to call, as `lint.compiler()` gives them
    Raises lint.CompileError.
    """
    from .. import lint

    path = Path(__file__).with_name("compiled.py")
    numbers = dict.fromkeys(("limit", "K"), "i32")
    case = lint.CompileCase(
        "gated_matmul", target, HOISTED, path=str(path),
        signature={**dict.fromkeys(("inbox", "w"), "*fp16"), "y": "*fp32", "flags": "*i32", **numbers},
        constexprs=dict(M=128, BLOCK_K=64, CHUNK=1024, OUTSIDE=fixed),
        options=dict(num_warps=8, num_stages=2 if target == "gfx942" else 3),
        aligned=("inbox", "w", "y", "K"), shared=("inbox", "flags"),
    )  # fmt: skip
    (report,) = lint.check_case(case, using=using)
    found = [finding for finding in report.findings if finding.rule == "gated-load"]
    if fixed:
        return [str(finding) for finding in report.findings]
    lines = [_source_line(*finding.frames[0]) for finding in found if finding.frames]
    if not found:
        return ["no load is found ahead of its wait", *map(str, report.findings)]
    return [] if any("tl.load(inbox" in line for line in lines) else [f"points at {lines}"]
