"""Memory as the machine's programs see it: named tensors at their real addresses, and late effects.

While a schedule runs, all tensors lie one after another on a line of bytes. An address becomes a place on the line by
the tensor that holds it, so that no access leaves its tensor. `land` copies the line back into the tensors.

Late effects: what PTX lets a program see later than it was written (PTX ISA 8.8, section 8, "Memory Consistency
Model"). Each is an event that a plain machine would not have:

    late stores   a store is pending in its program until a release orders it: of the thread that stored, or of any
                  thread of the program after a barrier. Its own program sees it at once.
    old loads     a plain load may give the value from before the last write of another program, unless its thread has
                  acquired since that write, or met at a barrier a thread that has.

Both hold for programs, not for single threads: within a program stores are seen at once. Of a word's history the last
value alone is kept. Atomics and strong loads read the newest value, so all order on one word is one order for all.

Everything that a program does to memory goes through `Window`, with threads, order and scope, which is where clocks
would see it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..faults import Access, Fault, SimulationFault, Site
from ..memory import Allocation, Map

LINE = 128  # tensors begin on the line at a multiple of it, plus what their address has modulo it
NEVER = -1  # no one has written this byte
Words = np.ndarray[Any, Any]
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Effects:
    """Which late effects a machine has. copies: asynchronous copies and products land at their wait, no earlier."""

    stores: bool = True
    loads: bool = True
    copies: bool = True


NONE = Effects(False, False, False)


class Pending:
    """A store that other programs do not see.

    places, values   of each element, values of the width that was stored
    threads          who stored each; None once a barrier came since
    low, high        bytes that it touches lie in [low, high)
    """

    __slots__ = ("high", "low", "places", "threads", "values")

    def __init__(self, places: Words, values: Words, threads: Words | None) -> None:
        self.places, self.values, self.threads = places, values, threads
        self.low, self.high = int(places.min()), int(places.max()) + values.dtype.itemsize

    def part(self, chosen: Words, threads: Words | None) -> Pending:
        return Pending(self.places[chosen], self.values[chosen], threads)

    def without(self, gone: Words) -> Pending:
        assert self.threads is not None
        return self.part(~gone, self.threads[~gone])


class Line:
    """The bytes of all tensors, and when each was last written."""

    def __init__(self, tensors: Map, effects: Effects) -> None:
        self.effects, self.allocations = effects, tensors.allocations
        self.starts: list[int] = []
        size = 0
        for each in self.allocations:
            size = -(-size // LINE) * LINE + each.base % LINE
            self.starts.append(size)
            size += each.nbytes
        size = (-(-size // 8) + 1) * 8
        self.bytes = np.zeros(size, np.uint8)
        self.views = {nb: self.bytes.view(dtype) for nb, dtype in UNSIGNED.items()}
        self.when = np.zeros(size, np.int32)
        for each, start in zip(self.allocations, self.starts, strict=True):
            self.bytes[start : start + each.nbytes] = _bytes_of(each)
            if each.poisoned:
                self.when[start : start + each.nbytes] = NEVER
        self.old = self.bytes.copy() if effects.loads else self.bytes
        self.who = np.full(size if effects.loads else 0, NEVER, np.int32)
        self.bases = np.array([each.base for each in self.allocations], np.int64)
        self.ends = np.array([each.base + each.nbytes for each in self.allocations], np.int64)
        self.shifts = np.array(self.starts, np.int64) - self.bases
        self.sequence = 0  # of writes that became visible
        self.changes = 0  # those that changed a value

    def land(self) -> None:
        """Copy the line back into the tensors."""
        for each, start in zip(self.allocations, self.starts, strict=True):
            _bytes_of(each)[:] = self.bytes[start : start + each.nbytes]

    def locate(self, addresses: Words, nbytes: int) -> tuple[Words, int]:
        """int64 addresses -> places, and the allocation if it is one; else -1. Raises IndexError(bad element)."""
        low, high = int(addresses.min()), int(addresses.max())
        index = int(self.bases.searchsorted(low, "right")) - 1
        if index >= 0 and high + nbytes <= self.ends[index]:
            return addresses + self.shifts[index], index
        each = self.bases.searchsorted(addresses, "right") - 1
        wrong = (each < 0) | (addresses + nbytes > self.ends[each])
        if wrong.any():
            raise IndexError(int(np.argmax(wrong)))
        return addresses + self.shifts[each], -1

    def _holder(self, place: int) -> tuple[Allocation, int]:
        """The allocation that holds a place, and the byte of it."""
        at = int(np.searchsorted(np.array(self.starts), place, "right")) - 1
        return self.allocations[at], place - self.starts[at]

    def element(self, place: int) -> tuple[str, tuple[int, ...]]:
        """Name of the tensor and index of the element that holds a place."""
        allocation, byte = self._holder(place)
        return allocation.label, allocation.index_of(byte + allocation.place)

    def value(self, place: int) -> Any:
        """The element that holds a place, as its tensor has it."""
        allocation, byte = self._holder(place)
        size = allocation.tensor.element_size()
        first = place - byte % size
        return torch.from_numpy(self.bytes[first : first + size].copy()).view(allocation.tensor.dtype).item()

    def put(self, places: Words, values: Words, writer: int) -> None:
        """Write what all shall see. Values of the width that is written."""
        if not len(places):
            return
        nb = values.dtype.itemsize
        view, at = self.views[nb], places >> (nb.bit_length() - 1)
        self.sequence += 1
        if self.effects.loads:
            self.old.view(values.dtype)[at] = view[at]
            for part in range(nb):
                self.when[places + part] = self.sequence
                self.who[places + part] = writer
        elif (self.when[places] < 0).any():
            for part in range(nb):
                self.when[places + part] = 0
        if (view[at] != values).any():
            self.changes += 1
        view[at] = values

    def newest(self, places: Words, nb: int) -> Words:
        return self.views[nb][places >> (nb.bit_length() - 1)]

    def oldest(self, places: Words, nb: int, seen: Words, reader: int) -> Words:
        """What a reader may still get that has acquired nothing since `seen`. seen: broadcasts to places."""
        value = self.newest(places, nb)
        if not self.effects.loads or self.sequence <= seen.min():
            return value
        parts = places[..., None] + np.arange(nb)
        stale = (self.when[parts] > seen[..., None]) & (self.who[parts] != reader)
        if not stale.any():
            return value
        mixed = np.where(stale, self.old[parts], value[..., None].view(np.uint8))
        return np.ascontiguousarray(mixed).view(value.dtype)[..., 0]


def _bytes_of(allocation: Allocation) -> Words:
    """Its tensor's storage."""
    whole = torch.empty(0, dtype=torch.uint8).set_(
        allocation.tensor.untyped_storage(), 0, (allocation.nbytes,), (1,)
    )
    found: Words = whole.numpy()
    return found


class Window:
    """One program's view of the line.

    number   of the program, among all
    where    (rank, launch, program), for reports
    """

    def __init__(self, line: Line, number: int, where: tuple[int, str, int], threads: int) -> None:
        self.line, self.number, self.where = line, number, where
        self.late = line.effects.stores
        self.seen = np.full(threads, line.sequence)  # of each thread: writes up to here are seen
        self.pending: dict[int, list[Pending]] = {}  # by allocation; -1: of several
        self.touched: set[int] = set()  # words that it polled since it last saw a change
        self.vain = 0  # polls of such words
        self.changes = -1
        self.polled: tuple[int, Site] | None = None  # place of the last of these, and where

    # -- accesses ----------------------------------------------------------------------------------------------------

    def places(self, addresses: Words, nbytes: int, what: str, site: Site) -> tuple[Words, int]:
        """Where addresses lie. Raises SimulationFault for one outside of all tensors, or not aligned."""
        if (addresses & (nbytes - 1)).any():
            wrong = int(addresses[(addresses & (nbytes - 1)) != 0][0])
            raise self._fault(
                "misaligned", f"{what} at {wrong:#x}, no multiple of {nbytes} bytes", what, site, wrong
            )
        try:
            return self.line.locate(addresses, nbytes)
        except IndexError as error:
            wrong = int(addresses[error.args[0]])
            words = self._nearest(wrong)
            raise self._fault(
                "out of bounds", f"{what} of {nbytes} bytes, {words}", what, site, wrong
            ) from None

    def load(self, addresses: Words, nb: int, count: int, threads: Words, order: str, site: Site) -> Words:
        """[n] addresses -> [n, count] words of nb bytes. order: "weak", "relaxed" or "acquire"."""
        places, within = self.places(addresses, nb * count, "load", site)
        every = places[:, None] + np.arange(0, nb * count, nb)
        if order != "weak":
            self._polls(places, site)
            self._show_own(within, every)
            value = self.line.newest(every, nb)
            if order == "acquire":
                self.acquire(threads)
            return value
        own = self._overlapping(within, every) if self.pending else []
        seen = self.seen[threads][:, None]
        if own:
            return self._read_own(own, lambda: self.line.oldest(every, nb, seen, self.number))
        if (self.line.when[every] < 0).any():
            self._never(every, site)
        return self.line.oldest(every, nb, seen, self.number)

    def store(self, addresses: Words, values: Words, threads: Words, order: str, site: Site) -> None:
        """values [n, count] at [n] addresses."""
        nb, count = values.dtype.itemsize, values.shape[1]
        places, within = self.places(addresses, nb * count, "store", site)
        every = places[:, None] + np.arange(0, nb * count, nb)
        if order == "release":
            self.release(threads)
        if order != "weak":
            self._show_own(within, every)
        self.vain = 0  # it gets on
        flat, kept = every.reshape(-1), values.reshape(-1)
        if self.late and order == "weak":
            item = Pending(flat, kept.copy(), np.repeat(threads, count))
            self.pending.setdefault(within, []).append(item)
        else:
            self.line.put(flat, kept, self.number)

    def atomic(
        self,
        addresses: Words,
        threads: Words,
        new: Callable[[int, Any], Any],
        dtype: np.dtype[Any],
        order: str,
        site: Site,
    ) -> Words:
        """Each thread in turn: what stood there, replaced by new(number in the list, old)."""
        nb = dtype.itemsize
        places, within = self.places(addresses, nb, "atomic", site)
        self._polls(places, site)
        self._show_own(within, places)
        if (self.line.when[places] < 0).any():
            self._never(places, site)
        view = self.line.views[nb].view(dtype)
        old = np.empty(len(places), dtype)
        for number, place in enumerate(places.tolist()):
            if order in ("release", "acq_rel"):
                self.release(threads[number : number + 1])
            old[number] = now = view[place >> (nb.bit_length() - 1)]
            value = np.array([new(number, now)], dtype)
            if value[0] != now:
                self.line.put(places[number : number + 1], value.view(UNSIGNED[nb]), self.number)
            if order in ("acquire", "acq_rel"):
                self.acquire(threads[number : number + 1])
        return old

    # -- order -------------------------------------------------------------------------------------------------------

    def acquire(self, threads: Words) -> None:
        """What was visible so far is seen by these threads."""
        self.seen[threads] = self.line.sequence

    def release(self, threads: Words) -> None:
        """What these threads stored, and what the program stored before its last barrier, becomes visible."""
        for items in self.pending.values():
            kept = []
            for item in items:
                own = None if item.threads is None else np.isin(item.threads, threads)
                if own is None or own.all():
                    self._show(item)
                    continue
                if own.any():
                    self._show(item.part(own, None))
                    item = item.without(own)
                kept.append(item)
            items[:] = kept

    def fence(self, threads: Words) -> None:
        self.release(threads)
        self.acquire(threads)

    def barrier(self, threads: Words) -> None:
        """These threads have met: each is ordered after what the others did and saw."""
        self.seen[threads] = self.seen[threads].max()
        for items in self.pending.values():
            if len(threads) == len(self.seen):
                for item in items:
                    item.threads = None
            else:
                items[:] = [part for item in items for part in self._met(item, threads)]

    @staticmethod
    def _met(item: Pending, threads: Words) -> list[Pending]:
        """After a barrier of some threads: their stores go with any release of the program."""
        met = None if item.threads is None else np.isin(item.threads, threads)
        if met is None or not met.any():
            return [item]
        if met.all():
            item.threads = None
            return [item]
        return [item.part(met, None), item.without(met)]

    def end(self) -> None:
        """All stores become visible, as at the end of a launch."""
        for items in self.pending.values():
            for item in items:
                self._show(item)
        self.pending.clear()

    def drift(self, rng: random.Random) -> None:
        """Some pending store becomes visible, by itself; earlier ones to the same bytes before it."""
        several = [items for items in self.pending.values() if items]
        if not several:
            return
        items = rng.choice(several)
        chosen = items[rng.randrange(len(items))]
        for item in items[: items.index(chosen) + 1]:
            if item.high > chosen.low and item.low < chosen.high:
                self._show(item)
                items.remove(item)

    def _show(self, item: Pending) -> None:
        self.line.put(item.places, item.values, self.number)

    # -- own stores --------------------------------------------------------------------------------------------------

    def _overlapping(self, within: int, places: Words) -> list[Pending]:
        keys = list(self.pending) if within < 0 else [key for key in (within, -1) if key in self.pending]
        if not any(self.pending[key] for key in keys):
            return []
        low, high = int(places.min()), int(places.max()) + 8
        return [item for key in keys for item in self.pending[key] if item.high > low and item.low < high]

    def _show_own(self, within: int, places: Words) -> None:
        """Let the program's own stores to these places become visible, before it reads them by a strong operation."""
        for item in self._overlapping(within, places):
            self._show(item)
            for items in self.pending.values():
                if item in items:
                    items.remove(item)

    def _read_own(self, items: list[Pending], read: Callable[[], Words]) -> Words:
        """What `read` gives with these pending stores in place."""
        line, undo = self.line, []
        for item in items:
            nb = item.values.dtype.itemsize
            view, at = line.views[nb], item.places >> (nb.bit_length() - 1)
            parts = (item.places[:, None] + np.arange(nb)).reshape(-1)
            undo.append((view, at, view[at], parts, line.when[parts]))
            view[at] = item.values
            line.when[parts] = 0
        value = read()
        for view, at, before, parts, when in reversed(undo):
            view[at] = before
            line.when[parts] = when
        return value

    def _polls(self, places: Words, site: Site) -> None:
        self.polled = int(places[0]), site
        if self.changes != self.line.changes:
            self.changes, self.vain = self.line.changes, 0
            self.touched.clear()
        new = set(places.tolist()) - self.touched
        self.touched |= new
        self.vain = 0 if new else self.vain + 1

    # -- faults ------------------------------------------------------------------------------------------------------

    def _never(self, places: Words, site: Site) -> None:
        bad = places[self.line.when[places] < 0]
        name, first = self.line.element(int(bad.min()))
        last = self.line.element(int(bad.max()))[1]
        access = Access(*self.where, site, "load", name, first, last, self.line.sequence)
        said = f"{self._who()} loads {name} {list(first)}, which nobody wrote"
        raise SimulationFault(Fault("never written", said, (access,)))

    def _nearest(self, address: int) -> str:
        line = self.line
        if not len(line.bases):
            return f"address {address:#x}; the case names no memory"
        gaps = np.minimum(np.abs(line.bases - address), np.abs(line.ends - address))
        best = line.allocations[int(gaps.argmin())]
        if address >= best.base:
            return f"{address - best.base - best.nbytes + 1} bytes past the end of {best.label}"
        return f"{best.base - address} bytes before {best.label}"

    def _who(self) -> str:
        rank, launch, program = self.where
        return f"rank {rank}, {launch}, program {program}"

    def _fault(self, rule: str, said: str, what: str, site: Site, address: int) -> SimulationFault:
        access = Access(*self.where, site, what, "memory", (address,), (address,), self.line.sequence)
        return SimulationFault(Fault(rule, f"{self._who()}: {said}", (access,)))
