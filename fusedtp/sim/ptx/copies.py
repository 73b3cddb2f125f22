"""Asynchronous copies: cp.async, tensor copies (TMA) and the mbarriers that tell of their end.

PTX ISA 8.8: 9.7.9.25 (cp.async, cp.async.bulk.tensor), 9.7.13.15 (mbarrier).

Late copies read and write at their wait, and what they will overwrite is poison until then: a cp.async at its
wait_group, a tensor load once a thread polls its mbarrier, a tensor store at its wait_group. Two that are under way to
one place race, whichever has to be waited for first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..faults import Site
from .access import is_shared, updated
from .alu import TYPES, Emitter, handles
from .clocks import ASYNC, Clock, Rows, joined
from .descriptors import TensorMap
from .numerics import REDUCTIONS
from .parse import Address, Imm, Instruction
from .shared import READ, WRITE

Lanes = Any  # that of program.py, which imports this file, as its Program
Program = Any
Array = np.ndarray[Any, Any]
ALL = -1  # groups that a wait leaves under way: none, and nothing either that is in no group yet
POISON = np.uint64(0x7F7F7F7F7F7F7F7F)  # a NaN in every float of 8 to 32 bits


# -- cp.async ----------------------------------------------------------------------------------------------------------


@handles("cp")
def _copy(e: Emitter, i: Instruction) -> list[str] | None:
    if i.has("bulk"):
        return _bulk(e, i)
    if i.has("commit_group"):
        return [f"S.copies.commit({e.mask})"]
    if i.has("wait_group", "wait_all"):
        return [f"S.copies.wait(S, {ALL if i.has('wait_all') else _count(i.args[0])}, {e.mask})"]
    if not i.has("ca", "cg") or i.has("mbarrier"):
        return None
    to, of, size, *rest = i.args
    nb = _count(size)
    read = e.read(rest[0], "u32") if rest else f"np.uint32({nb})"
    return [f"S.copies.issue(S, {e.address(to)}, {e.address(of)}, {nb}, {read}, {e.mask}, {e.const(i.site)})"]


def _count(x: Any) -> int:
    assert isinstance(x, Imm)
    return int(x.text, 0)


class _Copy(NamedTuple):
    """Of each lane: number, group, places in shared memory, addresses, bytes that are read (the rest is 0)."""

    lanes: Array
    groups: Array
    to: Array
    of: Array
    read: Array
    issued: Rows  # what the program's threads knew then
    begun: int  # the tick then
    size: int
    site: Site

    def part(self, chosen: Array) -> _Copy:
        return _Copy._make([*(each[chosen] for each in self[:5]), *self[5:]])


class _Issued:
    """Copies that lanes have issued and not waited for; groups are a thread's own."""

    def __init__(self, threads: int) -> None:
        self.groups = np.zeros(threads, np.int64)
        self.issued: list[Any] = []

    def commit(self, mask: Any) -> None:
        self.groups[... if mask is True else mask] += 1


class Copies(_Issued):
    """cp.async: `issued` holds a _Copy each."""

    def issue(self, lanes: Lanes, to: Array, of: Array, size: int, read: Array, mask: Any, site: Site) -> None:
        chosen = lanes.chosen(mask)
        read = np.broadcast_to(read, (lanes.count,))[chosen]
        shadow, known = lanes.program.shadow, lanes.window.known
        issued, tick = known.frozen(), known.slot.tick
        copy = _Copy(chosen, self.groups[chosen], to[chosen], of[chosen], read, issued, tick, size, site)
        cells = shadow.cells(copy.to, size)
        shadow.follow(READ, cells, lanes.first + chosen, "cp.async", site)
        if lanes.window.line.weak:
            shadow.begin_copy(cells, "cp.async", site)
            lanes.program.write_shared(copy.to, POISON, size, site)
            self.issued.append(copy)
        else:
            self._land(lanes, copy)

    def wait(self, lanes: Lanes, left: int, mask: Any) -> None:
        kept: list[_Copy] = []
        landing: list[_Copy] = []
        for copy in self.issued:
            done = copy.groups < self.groups[copy.lanes] - left
            if mask is not True:
                done &= mask[copy.lanes]
            for part, where in ((done, landing), (~done, kept)):
                if part.any():
                    where.append(copy if part.all() else copy.part(part))
        self.issued = kept
        for copy in landing:
            self._land(lanes, copy)

    @staticmethod
    def _land(lanes: Lanes, copy: _Copy) -> None:
        count = copy.size // 4
        words = np.zeros((len(copy.to), count), np.uint32)
        some = copy.read > 0
        if some.any():
            threads, at = lanes.first + copy.lanes[some], copy.of[some]
            words[some] = lanes.window.load(at, 4, count, threads, "weak", "", copy.site, copy.issued)
            if (copy.read[some] < copy.size).any():
                words.view(np.uint8)[np.arange(copy.size) >= copy.read[:, None]] = 0
        lanes.program.write_shared(copy.to, words, copy.size, copy.site)
        shadow, threads = lanes.program.shadow, lanes.first + copy.lanes
        cells = shadow.cells(copy.to, copy.size)
        shadow.end_copy(cells, threads, "cp.async", copy.site, copy.begun, by_tma=False)


# -- mbarrier ----------------------------------------------------------------------------------------------------------


@dataclass
class Barrier:
    """count: arrivals that complete a phase; pending: those still missing; bytes: of copies that have not landed.

    clock, over   what arrivals of this phase, and of the one before, release: 9.7.13.15, semantics of mbarrier
    """

    count: int
    pending: int
    bytes: int = 0
    phase: int = 0
    clock: Clock | None = None
    over: Clock | None = None

    def count_down(self, clock: Clock | None, arrivals: int, nbytes: int) -> None:
        """clock: what arrives releases; nbytes: that copies will bring, or less than 0, have brought."""
        if clock is not None:
            self.clock = clock if self.clock is None else joined(self.clock, clock)
        self.pending, self.bytes = self.pending - arrivals, self.bytes + nbytes
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase ^ 1
            self.over, self.clock = self.clock, None


@handles("mbarrier")
def _mbarrier(e: Emitter, i: Instruction) -> list[str] | None:
    what = i.parts[1]
    if not is_shared(i):
        return None
    if what == "init":
        return [f"S.mbarrier_init({e.address(i.args[0])}, {e.read(i.args[1], 'u32')}, {e.mask})"]
    if what == "inval":
        return [f"S.mbarrier_inval({e.address(i.args[0])}, {e.mask})"]
    if what in ("arrive", "expect_tx"):
        at = next(x for x in i.args if isinstance(x, Address))
        rest = i.args[i.args.index(at) + 1 :]
        given = e.read(rest[0], "u32") if rest else "1"
        counts = f"{int(what == 'arrive')}, {given}" if i.has("expect_tx") else f"{given}, 0"  # arrivals, bytes
        return [f"S.mbarrier_arrive({e.address(at)}, {counts}, {e.mask}, {e.const(i.site)})"]
    if what in ("try_wait", "test_wait") and i.has("parity"):
        d, where, parity = i.args[:3]
        call = f"S.mbarrier_wait({e.address(where)}, {e.read(parity, 'u32')}, {e.mask}, {e.const(i.site)})"
        return [f"t = {call}", *e.put(d, "pred", "t")]
    return None


# -- tensor copies -----------------------------------------------------------------------------------------------------


def _bulk(e: Emitter, i: Instruction) -> list[str] | None:
    if i.has("commit_group"):
        return [f"S.bulk.commit({e.mask})"]
    if i.has("wait_group"):
        return [f"S.bulk.wait(S, {_count(i.args[0])}, {e.mask}, {i.has('read')})"]
    if not i.has("tensor") or i.has("im2col", "multicast::cluster", "prefetch", "tile::gather4", "tile::scatter4"):
        return None
    loads = not i.has("bulk_group")  # which tells of the end of stores, as an mbarrier does of that of loads
    tensor, shared = (i.args[1], i.args[0]) if loads else i.args[:2]
    assert isinstance(tensor, Address)
    coordinates = ", ".join(e.read(x, "s32") for x in tensor.coordinates)
    given = f"{e.read(tensor.base, 'u64')}, {e.address(shared)}, [{coordinates}]"
    if loads:
        return [f"S.bulk.load(S, {given}, {e.address(i.args[2])}, {e.mask}, {e.const(i.site)})"]
    reduces = i.among(REDUCTIONS)
    if i.has("reduce") and not reduces:
        return None
    return [f"S.bulk.store(S, {given}, {reduces!r}, {e.mask}, {e.const(i.site)})"]


class BulkCopies(_Issued):
    """Tensor copies. `issued` holds stores, with their lane and group; loads wait in the program, for whoever polls
    their mbarrier.
    """

    def load(self, lanes: Lanes, tensor: Any, to: Any, at: list[Any], barrier: Any, mask: Any, site: Site) -> None:
        for lane in lanes.chosen(mask).tolist():
            copy = TensorLoad(lanes, lane, tensor, to, at, site, barrier)
            lanes.program.shadow.touch_async(WRITE, copy.cells, copy.by, "tensor load", site)
            if lanes.window.line.weak:
                lanes.program.shadow.begin_copy(copy.cells, "tensor load", site)
                places = copy.tensor.places(copy.shared).reshape(-1)
                lanes.program.write_shared(places, POISON, copy.tensor.itemsize, site)
                lanes.program.loads.append(copy)
            else:
                copy.land(lanes.program)

    def store(self, lanes: Lanes, tensor: Any, of: Any, at: list[Any], reduces: str, mask: Any, site: Site) -> None:
        for lane in lanes.chosen(mask).tolist():
            copy = TensorStore(lanes, lane, tensor, of, at, site, reduces)
            lanes.program.shadow.touch_async(READ, copy.cells, copy.by, "tensor store", site)
            if not lanes.window.line.weak:
                copy.read(lanes.program)
            self.issued.append((lane, int(self.groups[lane]), copy))

    def wait(self, lanes: Lanes, left: int, mask: Any, reads: bool) -> None:
        """reads: only until shared memory is read, 9.7.9.25.5.2."""
        kept = []
        for lane, group, store in self.issued:
            over = (mask is True or mask[lane]) and group < self.groups[lane] - left
            if over:
                store.read(lanes.program)
            if over and not reads:
                store.land(lanes.program)
            else:
                kept.append((lane, group, store))
        self.issued = kept


def _of(value: Any, lane: int) -> int:
    value = np.asarray(value)
    return int(value[lane] if value.ndim else value)


class TensorCopy:
    """One tensor copy on its way. Of a value for each lane, or one for all, it keeps that of the lane that issues it.

    shared   address of its box in shared memory; cells: of it, [1, n]
    issued   what the program's threads knew then; begun: the tick then
    """

    def __init__(self, lanes: Lanes, lane: int, tensor: Any, shared: Any, at: list[Any], site: Site) -> None:
        self.thread, self.site, self.begun = lanes.first + lane, site, lanes.window.known.slot.tick
        self.by, shift = np.array([self.thread]), lanes.program.shadow.shift
        self.tensor: TensorMap = lanes.program.tensor_map(_of(tensor, lane), self.thread, site)
        self.shared, self.coordinates = _of(shared, lane), tuple(_of(x, lane) for x in at)
        self.issued: Rows = lanes.window.known.frozen()
        each = max(1, (1 << shift) // self.tensor.itemsize)  # elements of a cell, 16 bytes being together
        self.cells = self.tensor.places(self.shared).reshape(1, -1)[:, ::each] >> shift

    def elements(self) -> tuple[Array, Array, Array]:
        """Of the box's elements: which lie in the tensor, the addresses of these, and their thread."""
        where, inside = self.tensor.elements(self.coordinates)
        return inside, where[inside], np.full(np.count_nonzero(inside), self.thread)


class TensorStore(TensorCopy):
    """reduces: the operation by which it is joined with what stands there, or ""; words: what it has read."""

    def __init__(self, lanes: Lanes, lane: int, tensor: Any, of: Any, at: list[Any], site: Site, reduces: str) -> None:
        super().__init__(lanes, lane, tensor, of, at, site)
        self.reduces = reduces
        self.words: Array | None = None

    def read(self, program: Program) -> Array:
        """Its words of shared memory, as they are when this is first asked."""
        if self.words is None:
            places = self.tensor.places(self.shared)[..., None] + np.arange(self.tensor.itemsize)
            self.words = program.shared[places].view(f"u{self.tensor.itemsize}")[..., 0]
            program.shadow.note(READ, self.cells, self.by, "tensor store", self.site, unfenced=False)
        return self.words

    def land(self, program: Program) -> None:
        """Elements outside of the tensor are not written. A reduction is relaxed, of gpu scope: 9.7.9.25.5.4."""
        inside, places, threads = self.elements()
        words = self.read(program)[inside]
        if self.reduces and len(places):
            dtype = np.dtype(TYPES[self.tensor.type][1])
            new, _ = updated(self.reduces, self.tensor.type, [words.view(dtype)])
            how = "relaxed", "gpu", self.site, f"tensor {self.reduces}", False, ASYNC
            program.window.atomic(places, threads, new, dtype, *how, issued=self.issued)
        elif len(places):
            program.window.store(places, words[:, None], threads, "weak", "", self.site, self.issued, ASYNC)


class TensorLoad(TensorCopy):
    """barrier: address of the mbarrier that it tells of its end."""

    def __init__(self, lanes: Lanes, lane: int, tensor: Any, to: Any, at: list[Any], site: Site, barrier: Any) -> None:
        super().__init__(lanes, lane, tensor, to, at, site)
        self.barrier = _of(barrier, lane)

    def land(self, program: Program) -> None:
        """Elements outside of the tensor become 0."""
        inside, places, threads = self.elements()
        nb, how = self.tensor.itemsize, ("weak", "", self.site, self.issued, ASYNC)
        words = np.zeros(self.tensor.box, f"u{nb}")
        if len(places):
            words[inside] = program.window.load(places, nb, 1, threads, *how, engine=True)[:, 0]
        to = self.tensor.places(self.shared).reshape(-1)
        program.write_shared(to, words.reshape(-1, 1), nb, self.site)
        program.shadow.end_copy(self.cells, self.by, "tensor load", self.site, self.begun, by_tma=True)
        program.barriers[self.barrier].count_down(program.window.known.copied(), 0, -self.tensor.nbytes)
