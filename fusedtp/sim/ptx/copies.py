"""Asynchronous copies: cp.async, tensor copies (TMA) and the mbarriers that signal their completion.

PTX ISA 8.8: 9.7.9.25 (cp.async, cp.async.bulk.tensor), 9.7.13.15 (mbarrier).

Late copies read and write only at their wait; until then their destination is poisoned. The wait is wait_group for a
cp.async and a tensor store, and a poll of the mbarrier for a tensor load. Two copies in flight to the same place race,
in whichever order the kernel waits for them.
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

Lanes = Any  # program.Lanes and program.Program; program.py imports this file
Program = Any
Array = np.ndarray[Any, Any]
ALL = -1  # groups that a wait may leave in flight: none, not even copies that are not committed yet
POISON = np.uint64(0x7F7F7F7F7F7F7F7F)  # NaN in every float format of 8 to 32 bits


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
    """Per lane: number, group, place in shared memory, address, bytes to read (the rest is 0)."""

    lanes: Array
    groups: Array
    to: Array
    of: Array
    read: Array
    issued: Rows  # clocks of the program's threads at issue
    begun: int  # tick at issue
    size: int
    site: Site

    def part(self, chosen: Array) -> _Copy:
        return _Copy._make([*(each[chosen] for each in self[:5]), *self[5:]])


class _Issued:
    """Copies that lanes have issued but not waited for; groups are per thread."""

    def __init__(self, threads: int) -> None:
        self.groups = np.zeros(threads, np.int64)
        self.issued: list[Any] = []

    def commit(self, mask: Any) -> None:
        self.groups[... if mask is True else mask] += 1


class Copies(_Issued):
    """cp.async copies. `issued` holds a _Copy for each instruction."""

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
    """count: arrivals that complete a phase; pending: arrivals still missing; bytes: expected and not yet landed.

    clock, over   clocks released by arrivals of this phase, and of the previous one: 9.7.13.15, semantics of mbarrier
    """

    count: int
    pending: int
    bytes: int = 0
    phase: int = 0
    clock: Clock | None = None
    over: Clock | None = None

    def count_down(self, clock: Clock | None, arrivals: int, nbytes: int) -> None:
        """clock: released by the arrival; nbytes: bytes that copies will bring, or if negative, have brought."""
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
    loads = not i.has("bulk_group")  # stores complete through a bulk group, loads through an mbarrier
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
    """Tensor copies. `issued` holds stores with their lane and group. Program.loads holds loads until any thread polls
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
        """reads: wait only until the stores have read shared memory, 9.7.9.25.5.2."""
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
    """One tensor copy in flight. Its operands, given per lane or for all lanes, are those of the issuing lane.

    shared   address of its box in shared memory; cells: the cells of the box, [1, n]
    issued   clocks of the program's threads at issue; begun: tick at issue
    """

    def __init__(self, lanes: Lanes, lane: int, tensor: Any, shared: Any, at: list[Any], site: Site) -> None:
        self.thread, self.site, self.begun = lanes.first + lane, site, lanes.window.known.slot.tick
        self.by, shift = np.array([self.thread]), lanes.program.shadow.shift
        self.tensor: TensorMap = lanes.program.tensor_map(_of(tensor, lane), self.thread, site)
        self.shared, self.coordinates = _of(shared, lane), tuple(_of(x, lane) for x in at)
        self.issued: Rows = lanes.window.known.frozen()
        each = max(1, (1 << shift) // self.tensor.itemsize)  # elements per cell; 16 bytes stay together
        self.cells = self.tensor.places(self.shared).reshape(1, -1)[:, ::each] >> shift

    def elements(self) -> tuple[Array, Array, Array]:
        """The box's elements: a mask of those inside the tensor, their addresses, and their thread."""
        where, inside = self.tensor.elements(self.coordinates)
        return inside, where[inside], np.full(np.count_nonzero(inside), self.thread)


class TensorStore(TensorCopy):
    """reduces: the operation that combines it with the old values, or ""; words: the data read from shared memory."""

    def __init__(self, lanes: Lanes, lane: int, tensor: Any, of: Any, at: list[Any], site: Site, reduces: str) -> None:
        super().__init__(lanes, lane, tensor, of, at, site)
        self.reduces = reduces
        self.words: Array | None = None

    def read(self, program: Program) -> Array:
        """Its words of shared memory, read at the first call."""
        if self.words is None:
            places = self.tensor.places(self.shared)[..., None] + np.arange(self.tensor.itemsize)
            self.words = program.shared[places].view(f"u{self.tensor.itemsize}")[..., 0]
            program.shadow.note(READ, self.cells, self.by, "tensor store", self.site, unfenced=False)
        return self.words

    def land(self, program: Program) -> None:
        """Elements outside the tensor are not written. A reduction is relaxed at gpu scope: 9.7.9.25.5.4."""
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
    """barrier: address of the mbarrier that signals its completion."""

    def __init__(self, lanes: Lanes, lane: int, tensor: Any, to: Any, at: list[Any], site: Site, barrier: Any) -> None:
        super().__init__(lanes, lane, tensor, to, at, site)
        self.barrier = _of(barrier, lane)

    def land(self, program: Program) -> None:
        """Elements outside the tensor become 0."""
        inside, places, threads = self.elements()
        nb, how = self.tensor.itemsize, ("weak", "", self.site, self.issued, ASYNC)
        words = np.zeros(self.tensor.box, f"u{nb}")
        if len(places):
            words[inside] = program.window.load(places, nb, 1, threads, *how, engine=True)[:, 0]
        to = self.tensor.places(self.shared).reshape(-1)
        program.write_shared(to, words.reshape(-1, 1), nb, self.site)
        program.shadow.end_copy(self.cells, self.by, "tensor load", self.site, self.begun, by_tma=True)
        program.barriers[self.barrier].count_down(program.window.known.copied(), 0, -self.tensor.nbytes)
