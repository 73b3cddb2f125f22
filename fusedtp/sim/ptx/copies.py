"""Asynchronous copies: cp.async, tensor copies (TMA) and the mbarriers that tell of their end.

PTX ISA 8.8: 9.7.9.25 (cp.async, cp.async.bulk.tensor), 9.7.13.15 (mbarrier).

Late copies read and write at their wait, and what they will overwrite is poison until then: a cp.async at its
wait_group, or now and then at one that does not wait for it; a tensor load once a thread polls its mbarrier; a tensor
store at its wait_group.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from ..faults import Site
from .access import is_shared, updated
from .alu import TYPES, Emitter, handles
from .clocks import ASYNC, Clock, Rows, joined
from .descriptors import TensorMap
from .parse import Address, Imm, Instruction
from .proxies import FENCES_COPIES

Lanes = Any  # that of program.py, which imports this file, as its Program
Program = Any
Array = np.ndarray[Any, Any]
FIBONACCI = 2654435769  # 2^32 over the golden ratio: products with it are spread evenly
REDUCTIONS = ("add", "min", "max", "and", "or", "xor")
POISON = np.uint64(0x7F7F7F7F7F7F7F7F)  # a NaN in every float of 8 to 32 bits


# -- cp.async ----------------------------------------------------------------------------------------------------------


@handles("cp")
def _copy(e: Emitter, i: Instruction) -> list[str] | None:
    if i.has("bulk"):
        return _bulk(e, i)
    if i.has("commit_group"):
        return [f"S.copies.commit({e.mask})"]
    if i.has("wait_group", "wait_all"):
        left = 0 if i.has("wait_all") else _count(i.args[0])
        return [f"S.copies.wait(S, {left}, {e.mask}, {i.has('wait_all')})"]
    if not i.has("ca", "cg") or i.has("mbarrier"):
        return None
    to, of, size, *rest = i.args
    nb = _count(size)
    read = e.read(rest[0], "u32") if rest else f"np.uint32({nb})"
    where = f"{e.address(to)}, {e.address(of)}"
    return [f"S.copies.issue(S, {where}, {nb}, {read}, {e.mask}, {e.const(i.site)})"]


def _count(x: Any) -> int:
    assert isinstance(x, Imm)
    return int(x.text, 0)


class _Copy(NamedTuple):
    """Of each lane: number, group, places in shared memory, addresses, bytes that are read (the rest is 0).

    issued   what the program's threads knew then
    """

    lanes: Array
    groups: Array
    to: Array
    of: Array
    read: Array
    issued: Rows
    size: int
    site: Site

    def part(self, chosen: Array) -> _Copy:
        lanes, groups, to, of, read, issued, size, site = self
        return _Copy(lanes[chosen], groups[chosen], to[chosen], of[chosen], read[chosen], issued, size, site)


class Copies:
    """The cp.async that lanes have issued; groups are a thread's own."""

    def __init__(self, late: bool, threads: int) -> None:
        self.late = late
        self.groups = np.zeros(threads, np.int64)
        self.issued: list[_Copy] = []

    def issue(self, lanes: Lanes, to: Array, of: Array, size: int, read: Array, mask: Any, site: Site) -> None:
        chosen = lanes.chosen(mask)
        read = np.broadcast_to(read, (lanes.count,))[chosen]
        issued = lanes.window.known.frozen()
        copy = _Copy(chosen, self.groups[chosen], to[chosen], of[chosen], read, issued, size, site)
        if self.late:
            lanes.program.write_shared(copy.to, POISON, size, site)
            self.issued.append(copy)
        else:
            self._land(lanes, copy)

    def commit(self, mask: Any) -> None:
        self.groups[... if mask is True else mask] += 1

    def wait(self, lanes: Lanes, left: int, mask: Any, everything: bool = False) -> None:
        kept, landing = [], []
        for copy in self.issued:
            done = copy.groups < self.groups[copy.lanes] - left
            if everything:
                done[:] = True
            if mask is not True:
                done &= mask[copy.lanes]
            if done.all():
                landing.append(copy)
            else:
                kept.append(copy.part(~done))
                if done.any():
                    landing.append(copy.part(done))
        chance = (lanes.program.executed + lanes.program.salt) * FIBONACCI >> 8
        early = kept and chance & 7 == 0
        if early:  # what is not waited for may have landed too, and before the rest
            kept, landing = [], landing + kept
        self.issued = kept
        parts = [*_together(landing)]
        if early:
            random.Random(chance).shuffle(parts)  # the same in the same schedule
        for copy in parts:
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
        generic = lanes.program.generic
        if generic is not None and FENCES_COPIES:
            generic.write(copy.to, copy.size, lanes.first + copy.lanes)
        elif generic is not None:  # what was written there before is gone
            generic.write_async(copy.to, copy.size)


def _together(copies: list[_Copy]) -> Iterator[_Copy]:
    """Copies in a row by one line, of one group, issued with the same knowledge, as one."""

    def same(copy: _Copy) -> tuple[int, int, Site, int]:
        return id(copy.issued), copy.size, copy.site, copy.groups[0]

    for (_, size, site, _), group in groupby(copies, same):
        first, *rest = group
        if rest:
            alike: Any = zip(*(copy[:5] for copy in (first, *rest)), strict=True)
            lanes, groups, to, of, read = (np.concatenate(each) for each in alike)
            first = _Copy(lanes, groups, to, of, read, first.issued, size, site)
        yield first


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

    def arrive(self, clock: Clock) -> None:
        self.clock = clock if self.clock is None else joined(self.clock, clock)

    def check(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase ^ 1
            self.over, self.clock = self.clock, None


@handles("mbarrier")
def _mbarrier(e: Emitter, i: Instruction) -> list[str] | None:
    what = i.parts[1]
    if not is_shared(i):
        return None
    if what in ("init", "inval"):
        count = e.read(i.args[1], "u32") if what == "init" else "np.uint32(0)"
        return [f"S.mbarrier_{what}({e.address(i.args[0])}, {count}, {e.mask}, {e.const(i.site)})"]
    if what in ("arrive", "expect_tx"):
        at = next(x for x in i.args if isinstance(x, Address))
        rest = i.args[i.args.index(at) + 1 :]
        bytes_ = e.read(rest[0], "u32") if i.has("expect_tx") else "np.uint32(0)"
        count = e.read(rest[0], "u32") if rest and not i.has("expect_tx") else "np.uint32(1)"
        arrivals = count if what == "arrive" else "np.uint32(0)"
        return [f"S.mbarrier_arrive({e.address(at)}, {arrivals}, {bytes_}, {e.mask}, {e.const(i.site)})"]
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
    if not i.has("tensor") or i.has("im2col", "multicast::cluster", "prefetch"):
        return None
    loads = i.parts.index("global") > min(n for n, part in enumerate(i.parts) if part.startswith("shared"))
    tensor = i.args[1] if loads else i.args[0]
    shared = i.args[0] if loads else i.args[1]
    assert isinstance(tensor, Address)
    coordinates = ", ".join(e.read(x, "s32") for x in tensor.coordinates)
    given = f"{e.read(tensor.base, 'u64')}, {e.address(shared)}, [{coordinates}]"
    if loads:
        barrier = e.address(i.args[2])
        return [f"S.bulk.load(S, {given}, {barrier}, {e.mask}, {e.const(i.site)})"]
    reduces = next((part for part in i.parts if part in REDUCTIONS), "")
    if i.has("reduce") and not reduces:
        return None
    return [f"S.bulk.store(S, {given}, {reduces!r}, {e.mask}, {e.const(i.site)})"]


class BulkCopies:
    """Tensor copies that lanes have issued. Loads wait in the program, for whoever polls their mbarrier."""

    def __init__(self, late: bool, threads: int) -> None:
        self.late = late
        self.groups = np.zeros(threads, np.int64)
        self.stores: list[tuple[int, int, TensorStore]] = []  # lane, group

    def load(self, lanes: Lanes, tensor: Any, to: Any, at: list[Any], barrier: Any, mask: Any, site: Site) -> None:
        for lane in lanes.chosen(mask).tolist():
            described = lanes.program.tensor_map(_of(tensor, lane), lanes.first + lane, site)
            copy = TensorLoad(
                described, _of(to, lane), tuple(_of(x, lane) for x in at), _of(barrier, lane), lanes.first + lane,
                lanes.window.known.frozen(), site,
            )  # fmt: skip
            if self.late:
                places = described.places(copy.to).reshape(-1)
                lanes.program.write_shared(places, POISON, described.itemsize, site)
                lanes.program.loads.append(copy)
            else:
                copy.land(lanes.program)

    def store(self, lanes: Lanes, tensor: Any, of: Any, at: list[Any], reduces: str, mask: Any, site: Site) -> None:
        for lane in lanes.chosen(mask).tolist():
            thread = lanes.first + lane
            described = lanes.program.tensor_map(_of(tensor, lane), thread, site)
            start, coordinates = _of(of, lane), tuple(_of(x, lane) for x in at)
            lanes.program.read_async(described.places(start), "tensor store", site)
            issued = lanes.window.known.frozen()
            store = TensorStore(described, start, coordinates, thread, issued, site, reduces)
            if not self.late:
                store.read(lanes.program)
            self.stores.append((lane, int(self.groups[lane]), store))

    def commit(self, mask: Any) -> None:
        self.groups[... if mask is True else mask] += 1

    def wait(self, lanes: Lanes, left: int, mask: Any, reads: bool) -> None:
        """reads: only until shared memory is read, 9.7.9.25.5.2."""
        kept = []
        for lane, group, store in self.stores:
            over = (mask is True or mask[lane]) and group < self.groups[lane] - left
            if over:
                store.read(lanes.program)
            if over and not reads:
                store.land(lanes.program)
            else:
                kept.append((lane, group, store))
        self.stores = kept

    def end(self, program: Program) -> None:
        """The program ends: what it has not waited for lands."""
        for _, _, store in self.stores:
            store.land(program)
        self.stores = []


def _of(value: Any, lane: int) -> int:
    value = np.asarray(value)
    return int(value[lane] if value.ndim else value)


@dataclass
class TensorStore:
    """One tensor store on its way.

    reduces   the operation by which it is joined with what stands there, or ""
    words     what it has read of shared memory
    """

    tensor: TensorMap
    of: int
    coordinates: tuple[int, ...]
    thread: int
    issued: Rows
    site: Site
    reduces: str
    words: Array | None = None

    def read(self, program: Program) -> None:
        if self.words is None:
            places = self.tensor.places(self.of)[..., None] + np.arange(self.tensor.itemsize)
            self.words = program.shared[places].view(f"u{self.tensor.itemsize}")[..., 0]

    def land(self, program: Program) -> None:
        """Elements outside of the tensor are not written. A reduction is relaxed, of gpu scope: 9.7.9.25.5.4."""
        self.read(program)
        assert self.words is not None
        where, inside = self.tensor.elements(self.coordinates)
        places, words, threads = where[inside], self.words[inside], np.full(int(inside.sum()), self.thread)
        if self.reduces and len(places):
            dtype = np.dtype(TYPES[self.tensor.type][1])
            new, _ = updated(self.reduces, self.tensor.type, [words.view(dtype)])
            how = "relaxed", "gpu", self.site, f"tensor {self.reduces}", False, ASYNC
            program.window.atomic(places, threads, new, dtype, *how, issued=self.issued)
        elif len(places):
            program.window.store(places, words[:, None], threads, "weak", "", self.site, self.issued, ASYNC)


class TensorLoad(NamedTuple):
    """One tensor load on its way."""

    tensor: TensorMap
    to: int
    coordinates: tuple[int, ...]
    barrier: int
    thread: int
    issued: Rows
    site: Site

    def land(self, program: Program) -> None:
        """Elements outside of the tensor become 0."""
        where, inside = self.tensor.elements(self.coordinates)
        itemsize = self.tensor.itemsize
        words = np.zeros(self.tensor.box, f"u{itemsize}")
        window, threads = program.window, np.full(int(inside.sum()), self.thread)
        if inside.any():
            words[inside] = window.load(
                where[inside], itemsize, 1, threads, "weak", "", self.site, self.issued, ASYNC, engine=True
            )[:, 0]
        places = self.tensor.places(self.to).reshape(-1)
        program.write_shared(places, words.reshape(-1, 1), itemsize, self.site)
        if program.generic is not None:
            program.generic.write_async(places)
        barrier = program.barriers[self.barrier]
        barrier.bytes -= self.tensor.nbytes
        barrier.arrive(window.known.copied())
        barrier.check()
