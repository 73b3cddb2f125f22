"""The findings of the simulator: accesses, faults and the exceptions that carry them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from textwrap import indent
from typing import NamedTuple


class Site(NamedTuple):
    """A line of the user's source, and the kernel's line that led to it (the same line if not in a helper).

    kernel_file   "" stands for `file`
    """

    file: str
    line: int
    function: str
    kernel_line: int
    kernel_file: str = ""

    @property
    def kernel_place(self) -> tuple[str, int]:
        """File and line of the kernel."""
        return self.kernel_file or self.file, self.kernel_line

    def __str__(self) -> str:
        words = f"{short_path(self.file)}:{self.line} in {self.function}"
        file, line = self.kernel_place
        if (file, line) == (self.file, self.line):
            return words
        return f"{words}, called at {'line ' if file == self.file else short_path(file) + ':'}{line}"


def short_path(file: str) -> str:
    """The path relative to the current folder, if it lies below."""
    return file.removeprefix(os.path.join(os.getcwd(), ""))


@dataclass(frozen=True)
class Access:
    """One load, store or atomic of one program.

    what     "load", "store", "atomic_add", ..., with order and scope for an atomic
    tensor   allocation and owning rank; "" if no memory is accessed; "memory" if the address lies in no tensor
    first, last   first and last relevant element, as index tuples of the tensor
    """

    rank: int
    launch: str
    program: int
    site: Site
    what: str
    tensor: str
    first: tuple[int, ...]
    last: tuple[int, ...]
    step: int
    value: str = ""

    @property
    def said(self) -> str:
        return f"{self.what} {place_of(self.tensor, self.first, self.last)}".rstrip()

    def __str__(self) -> str:
        value = f" = {self.value}" if self.value else ""
        return f"rank {self.rank}, {self.launch}, program {self.program}: {self.said}{value}\n    at {self.site}"


def place_of(tensor: str, first: tuple[int, ...], last: tuple[int, ...]) -> str:
    """Elements of a tensor in words; "" for none."""
    if not first or tensor in ("", "memory"):
        return f"address {first[0]:#x}" if first else tensor
    return f"{tensor} {[*map(int, first)]}" + ("" if first == last else f" to {[*map(int, last)]}")


@dataclass(frozen=True)
class Wait:
    """A blocked program: the word it polls and the value it sees there."""

    rank: int
    launch: str
    program: int
    site: Site
    tensor: str
    index: tuple[int, ...]
    seen: str
    last_writer: str = ""

    @property
    def said(self) -> str:
        written = self.last_writer or "not written during this run"
        return f"waits for {place_of(self.tensor, self.index, self.index)}, sees {self.seen} ({written})"

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.launch}, program {self.program} {self.said}\n    at {self.site}"


@dataclass(frozen=True)
class Mismatch:
    """An output that differs from the reference.

    name    the tensor, on `rank`
    index   the first element that differs, with the values wanted and seen there; count: number of differences
    address address of that element; 0: unknown
    """

    name: str
    rank: int
    index: tuple[int, ...]
    wanted: str
    seen: str
    count: int
    address: int = field(default=0, compare=False, repr=False)

    def __str__(self) -> str:
        more = f" and {self.count - 1} more elements" if self.count > 1 else ""
        return f"{self.name} of rank {self.rank} {list(self.index)}{more}"


class Moment(NamedTuple):
    """One line of a trace: the action of a program at a step of the schedule.

    kind     "start", "end", "load", "store", "atomic", "copy", "wait" (falls asleep), "wake"
    tensor   as in Access, with first and last; for "wait", the word that is polled
    begin, end   simulated time; both 0 if time is not simulated and only the order counts
    """

    step: int
    rank: int
    launch: str
    program: int
    what: str
    site: Site | None = None
    begin: float = 0.0
    end: float = 0.0
    kind: str = ""
    tensor: str = ""
    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()

    def shows(self, access: Access) -> bool:
        """Whether it is this access."""
        fields = ("step", "rank", "program", "site", "tensor")
        return all(getattr(self, field) == getattr(access, field) for field in fields)


RULES = {
    "write-write race": "two programs, or copies, write the same bytes and nothing orders them",
    "read-write race": "one program, or warp, reads what another writes and nothing orders them",
    "scope": "two ranks use one word with atomics whose scope does not reach the other rank",
    "never written": "a load reads memory that was never written",
    "out of bounds": "an access outside every allocation that the case named",
    "misaligned": "an access whose address is not a multiple of its size",
    "missing proxy fence": "an asynchronous access follows one by threads with no proxy fence in between",
    "deadlock": "every live program waits and nothing can wake it",
    "no progress": "the limit of steps or turns was reached: a loop does not end, or runs very long",
    "wrong value": "the result differs from the reference",
    "assertion": "a device_assert failed, or the kernel did something that stops it on a GPU",
    "raised": "the case or its reference raised",
    "timed out": "a kernel recorded a failed wait or another signature",
}

WAIVABLE = ("write-write race", "read-write race", "scope", "never written")  # a run can go on past these


def finding(rule: str, sites: Iterable[Site]) -> str:
    """The name of a finding: the rule and the source lines. It is the same in every schedule and on every machine.

    A line of a helper is followed by the line of the kernel: "read-write race put.py:8@ring.py:12 ring.py:21".
    """

    def place(file: str, line: int) -> tuple[str, int]:
        return os.path.basename(file), line

    def word(file: str, line: int) -> str:
        return f"{file}:{line}" if line > 0 else "host"

    ends = sorted({(place(site.file, site.line), place(*site.kernel_place)) for site in sites})
    words = [word(*at) if at == kernel else f"{word(*at)}@{word(*kernel)}" for at, kernel in ends]
    return " ".join([rule, *words])


def unwaivable(name: str) -> str:
    """Why a finding of this name cannot be waived; "" if it can."""
    rule = next((rule for rule in RULES if f"{name} ".startswith(f"{rule} ")), "")
    if rule not in WAIVABLE and rule:
        return f"{name!r} cannot be waived: no run can continue past it. Waivable are: {', '.join(WAIVABLE)}"
    if rule in ("", name):
        return f"{name!r} must be a rule and its lines, in quotes, such as 'read-write race ring.py:12 ring.py:21'"
    return ""


@dataclass(frozen=True)
class Fault:
    """One finding.

    rule      a key of RULES
    accesses  both accesses of a race; the one faulty access; the last write of a wrong value
    waits     the waits of a deadlock
    mismatch  the wrong value
    cause     race: the missing part of the signal between the two accesses; no progress: what the loop loads
    target    target of the compiled code
    waive     names of findings that did not stop the schedule
    switches  context switches of the shortest schedule found that shows it
    """

    rule: str
    message: str
    accesses: tuple[Access, ...] = ()
    waits: tuple[Wait, ...] = ()
    mismatch: Mismatch | None = None
    cause: str = ""
    strategy: str = ""
    seed: int = 0
    resident: str = ""
    weak: bool = False
    fine: bool = False
    target: str = ""
    waive: tuple[str, ...] = ()
    switches: int = 0
    trace: tuple[Moment, ...] = field(default=(), repr=False)

    @property
    def ends(self) -> tuple[Access | Wait, ...]:
        """The accesses and waits of the fault, each with its source line."""
        return *self.accesses, *self.waits

    @property
    def name(self) -> str:
        """The same for the same fault in another schedule."""
        return finding(self.rule, [end.site for end in self.ends])

    def __str__(self) -> str:
        lines = [f"{self.rule}: {self.message}"]
        lines += [f"  cause: {self.cause}"] if self.cause else []
        lines += [indent(str(end), "  ") for end in self.ends]
        lines += [f"  wanted {self.mismatch.wanted}, seen {self.mismatch.seen}"] if self.mismatch else []
        lines += [f"  name: {self.name}"] if self.rule in WAIVABLE else []
        if self.strategy:
            waive = f", waive={self.waive!r}" if self.waive else ""
            lines.append(
                f"  replay: strategy={self.strategy!r}, seed={self.seed}, resident={self.resident}, weak={self.weak}, "
                f"fine={self.fine}, target={self.target!r}{waive}; {self.switches} context switches"
            )
        return "\n".join(lines)


class SimulationFault(AssertionError):
    """A schedule showed a fault, stored in `fault`. An AssertionError, so that pytest and hypothesis shrink it."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


class UnsupportedKernel(ValueError):
    """The simulator cannot run this kernel: an unknown opcode, an external call, or a failed compilation."""
