"""What a report says, in the terms of the protocol: whose memory, in which stage of which kernel, in which call.

A report names source lines and programs. To tell a read that came too early from a peer that ran two calls ahead one
must know in which call each access was made; the schedule is run once more, traced, to count that.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fusedtp.sim.faults import Access, Fault, Mismatch, Moment, Site

from .mutant import Mutant
from .source import Sources
from .stages import branches, stage_at, stages_of

WORKSPACE = ("slots", "flags", "signatures", "epoch", "failure", "status")
COPY = "copy"  # a copy by the host, as reports name it
BUMP = "bump_epoch"  # begins every call


@dataclass(frozen=True)
class Touch:
    """One access of a report. stage is None where no kernel made it, or all its stages run the line.

    memory   a name of WORKSPACE, "outputs" for a tensor that is none of it
    owner    the rank whose memory it is
    call     how many launches its rank has begun; 0 where that was not counted
    """

    rank: int
    owner: int
    memory: str
    kernel: str
    stage: int | None
    function: str
    what: str
    call: int

    @property
    def stores(self) -> bool:
        return self.what in ("store", "copy writes")


@dataclass(frozen=True)
class Blocked:
    """A wait for a flag.

    call    of the waiter, counted from that of rank 0
    ahead   how far the word is from the number of the waiter's call; negative: not there yet
    """

    rank: int
    owner: int  # whose memory it polls
    source: int
    chunk: int
    stage: int | None
    kernel: str
    call: int
    ahead: int


@dataclass(frozen=True)
class Status:
    """What a rank has recorded of a failed call, and in a trial of two calls what it should have."""

    code: int
    index: int
    seen: int
    wanted_index: int = 0
    wanted_seen: int = 0


@dataclass(frozen=True)
class Evidence:
    """A fault of a mutant.

    here       kernel -> the stages that run the mutated line
    agreeing   all ranks were in the same call, and any failure recorded is a false one
    kernel     of the trial, and the number of its last stage, which stores the results
    others_rows   of wrong results: the first one is in a row that belongs to another rank
    """

    mutant: Mutant
    here: Mapping[str, frozenset[int]]
    fault: Fault
    agreeing: bool = True
    kernel: str = ""
    last_stage: int = 0
    others_rows: bool = False
    touches: tuple[Touch, ...] = ()
    waits: tuple[Blocked, ...] = ()
    statuses: tuple[Status, ...] = ()

    @property
    def rule(self) -> str:
        return self.fault.rule

    @property
    def memories(self) -> set[str]:
        return {touch.memory for touch in self.touches}

    @property
    def first_waits(self) -> list[Blocked]:
        """Waits of the ranks that are in the earliest call: what they wait for, nobody else's wait explains."""
        return [wait for wait in self.waits if wait.call == min(each.call for each in self.waits)]


def gather(
    mutant: Mutant,
    original: Sources,
    fault: Fault,
    *,
    agreeing: bool,
    kernel: str = "",
    own_rows: Callable[[int, int], range] | None = None,
    epochs: Iterable[int] = (),
    statuses: Iterable[tuple[int, ...]] = (),
    traced: Callable[[], Iterable[Moment]] = tuple,
) -> Evidence:
    """What there is to know of a fault.

    kernel, agreeing     of the trial
    own_rows             call, rank -> rows of the results that are the rank's own
    epochs, statuses     by rank, as the fault left them
    traced               runs the schedule again
    """
    sources = Sources(original.edited(mutant.edits))
    epochs, moments = tuple(epochs), tuple(traced()) if len(fault.accesses) > 1 else ()

    def stage(launch: str, site: Site) -> int | None:
        if launch not in sources.kernels:
            return None
        return stage_at(sources, launch, site.kernel_line)

    return Evidence(
        mutant,
        stages_of(original, mutant.function, mutant.line),
        fault,
        agreeing,
        kernel,
        len(branches(sources, kernel)[2]) - 1 if kernel else 0,
        _of_another_rank(fault.mismatch, own_rows),
        tuple(
            Touch(
                a.rank, _owner(a.tensor), memory_of(a.tensor, fault), a.launch, stage(a.launch, a.site),
                a.site.function, a.what, _call(a, moments),
            )
            for a in fault.accesses
        ),
        tuple(
            Blocked(
                w.rank, _owner(w.tensor), w.index[0], w.index[-1], stage(w.launch, w.site), w.launch,
                _signed(epochs[w.rank] - epochs[0]), _signed(int(w.seen) - epochs[w.rank]),
            )
            for w in fault.waits
        ),
        _statuses(fault, statuses),
    )  # fmt: skip


def _owner(tensor: str) -> int:
    """Of "slots of rank 1"; -1 for an address outside every allocation."""
    return int(tensor.split()[-1]) if " of rank " in tensor else -1


def memory_of(tensor: str, fault: Fault) -> str:
    """The memory's name; of an address outside every allocation that of the nearest one, which the message names."""
    name = tensor.split()[0]
    if name == "memory":
        _, _, after = fault.message.partition(" of " if " of " in fault.message else "before ")
        name = after.split()[0]
    return name if name in WORKSPACE else "outputs"


def _call(access: Access, moments: tuple[Moment, ...]) -> int:
    """Launches of this program that had begun; for a copy, the calls of its rank, each of which begins with a bump."""
    return sum(
        m.kind == "start"
        and m.rank == access.rank
        and m.step <= access.step
        and (m.launch == BUMP if access.launch == COPY else m[2:4] == (access.launch, access.program))
        for m in moments
    )


def _of_another_rank(mismatch: Mismatch | None, own_rows: Callable[[int, int], range] | None) -> bool:
    """Whether the first wrong result, of "y of call 1", is in a row of another rank."""
    if mismatch is None or own_rows is None or not mismatch.name[-1].isdecimal():
        return False
    return mismatch.index[0] not in own_rows(int(mismatch.name.split()[-1]), mismatch.rank)


def _signed(difference: int) -> int:
    """As int32 wraps."""
    return (difference + (1 << 31)) % (1 << 32) - (1 << 31)


def _statuses(fault: Fault, given: Iterable[tuple[int, ...]]) -> tuple[Status, ...]:
    wrong = fault.mismatch
    if wrong is None:
        return tuple(Status(code, index, seen) for code, _peer, index, _wanted, seen in given if code)
    if wrong.name != "status":
        return ()
    wanted, seen = ast.literal_eval(wrong.wanted), ast.literal_eval(wrong.seen)
    return (Status(seen[0], seen[2], seen[4], wanted[2], wanted[4]),)
