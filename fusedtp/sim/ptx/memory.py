"""Global memory as the programs see it: named tensors at their real addresses, and the values that a read may return.

While a schedule runs, all tensors lie one after another on a line of bytes. An address is mapped to its place on the
line through the tensor that holds it, so no access leaves its tensor. `land` copies the line back into the tensors.

The model is the PTX memory model (ISA 8.8, section 8). "Late effects" in docs/checking-kernels.md lists what it covers.
A weak access without a race can return only the newest value. A strong read returns, by the seed, any write of its word
that is not older than the newest write that happened before it or was read before (8.10.6, 8.10.7).

Note [Heartbeats]. The values that a program polls tell whether it waits or works. It works if it stores, or if it sees
news: a word that it has not read before, or a word of its last few polls that others have changed since. Two events
count neither way: a change by an atomic of its own, and a change of a word that it reads rarely, such as a clock. A
waiting program may read the time once in a thousand polls.

Every memory access of a program goes through `Window`, with threads, order and scope.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ..faults import Access, Fault, Moment, SimulationFault, Site, place_of
from ..memory import LINE, Allocation, Map
from .cause import NO_BARRIER, cause
from .clocks import ALIAS, ASYNC, GENERIC, READONLY, Carried, Clock, Known, Rows, Slot, Source, Space, carry
from .shadow import Accessor, Conflict, Event, Operation, Shadow, Word, Write, program_name

ATOMIC_BYTES = 8  # read by hardware at once. NCCL's LL protocol relies on it; PTX guarantees it only for a scalar
STALE = 0.4  # probability that a strong read draws among all writes that it may return
UNIT = 8  # granularity of polls in bytes: a change of one byte is a change for programs that poll any of them
LATEST = 8  # polls: a change of a word that one of them read is news
MOST_MOMENTS = 200_000  # a trace keeps only this many, the last ones
WIDEST = 32  # bytes of the widest access
SCOPE = READONLY + 1
LACKS = {  # what is missing between two accesses: any order, or only the fence of a proxy
    GENERIC: "are not ordered",
    ASYNC: "are ordered, but no proxy fence makes the first visible to an asynchronous copy",
    ALIAS: "are ordered, but use a multicast and a plain address with no fence.proxy.alias in between",
    READONLY: "are ordered, but ld.global.nc reads the value from when its kernel began",
    SCOPE: "are not ordered, and their scopes do not reach each other",
}
Words = np.ndarray[Any, Any]
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def rows_of_words(memory: Words) -> dict[tuple[int, int], Words]:
    """(bytes per word, words per row) -> the same memory viewed as rows; one row is the access of one thread."""
    return {
        (nb, count): memory.view(dtype).reshape(-1, count)
        for nb, dtype in UNSIGNED.items()
        for count in (1, 2, 4, 8)
        if nb * count <= WIDEST
    }


class Line:
    """The bytes of all tensors, their last accesses, and the history of the words that strong operations use.

    weak    whether strong reads may return old values
    trace   whether to record the actions of every program, for reports and timelines
    waived  names of findings to ignore, with the number of times each occurred
    by_tma  whether some program copies by TMA
    """

    def __init__(
        self, tensors: Map, rng: random.Random, weak: bool, trace: bool, waived: dict[str, int] | None, by_tma: bool
    ) -> None:
        self.waived = {} if waived is None else waived
        self.rng, self.weak, self.allocations, self.multicasts = rng, weak, tensors.allocations, tensors.multicasts
        self.nearest, self.borders = tensors.nearest, np.array(tensors.borders, np.int64)
        self.starts, size = list[int](), 0
        for each in self.allocations:
            size = -(-size // LINE) * LINE + each.base % LINE
            self.starts.append(size)
            size += each.nbytes
        self.bytes = np.zeros((size // WIDEST + 2) * WIDEST, np.uint8)
        self.views = rows_of_words(self.bytes)
        for theirs, own in self._bytes_of_tensors():
            own[:] = theirs
        self.shadows = [Shadow(at, each.nbytes, each.poisoned) for at, each in zip(self.starts, self.allocations)]
        self.bases = np.array([each.base for each in self.allocations], np.int64)
        self.first_bytes = [each.base for each in self.allocations]
        self.ends = np.array([each.end for each in self.allocations], np.int64)
        self.shifts = np.array(self.starts, np.int64) - self.bases
        self.space = Space(1 + (ALIAS if self.multicasts else ASYNC if by_tma else GENERIC))
        self.words: dict[int, Word] = {}  # by place
        self.events = [Event((-1, "", 0), Site("", 0, "", 0), "", False)]  # 0 means no event
        self.sequence = 0  # of strong writes
        self.changes = 0  # writes that changed a value
        # by unit of UNIT bytes: number of the last such write to a word of the unit, and the windows that wait for one
        self.changed: dict[int, int] = {}
        self.sleepers: dict[int, dict[Window, None]] = {}
        self.trace: deque[Moment] | None = deque(maxlen=MOST_MOMENTS) if trace else None

    def land(self) -> None:
        """Copy the line back into the tensors. No program waits for a change any more."""
        self.sleepers.clear()
        for theirs, own in self._bytes_of_tensors():
            theirs[:] = own

    def _bytes_of_tensors(self) -> Iterator[tuple[Words, Words]]:
        """The bytes of each tensor, in its storage and on the line."""
        for each, start in zip(self.allocations, self.starts, strict=True):
            storage = each.tensor.untyped_storage()
            first, size = each.base - storage.data_ptr(), (each.nbytes,)
            theirs = torch.empty(0, dtype=torch.uint8).set_(storage, first, size, (1,))
            yield theirs.numpy(), self.bytes[start : start + each.nbytes]

    def locate(self, addresses: Words, nbytes: int) -> tuple[Words, int]:
        """int64 addresses -> places, and the index of their allocation; -1 if they lie in several.

        Raises IndexError(lane of an address outside all tensors) or ValueError(lane of one not a multiple of nbytes).
        """
        index = bisect_right(self.first_bytes, int(addresses[0])) - 1
        if index >= 0:
            first, size = self.first_bytes[index], self.allocations[index].nbytes - nbytes
            within = addresses - first
            bits = int(np.bitwise_or.reduce(within))  # at least as large as any of them; negative if one is
            inside = 0 <= bits <= size or (bits >= 0 and int(np.maximum.reduce(within)) <= size)
            if inside and not (bits | first) & (nbytes - 1):
                return within + self.starts[index], index
        uneven = addresses & (nbytes - 1)
        if uneven.any():
            raise ValueError(int(np.argmax(uneven != 0)))
        each = self.bases.searchsorted(addresses, "right") - 1
        wrong = (each < 0) | (addresses + nbytes > self.ends[each])
        if len(self.borders):
            wrong |= np.isin(addresses, self.borders) & np.isin(addresses - nbytes, addresses)
        if wrong.any():
            raise IndexError(int(np.argmax(wrong)))
        return addresses + self.shifts[each], -1

    def _holder(self, place: int) -> tuple[Allocation, int]:
        """The allocation that holds a place, and the byte offset in it."""
        at = int(np.searchsorted(np.array(self.starts), place, "right")) - 1
        return self.allocations[at], place - self.starts[at]

    def element(self, place: int) -> tuple[str, tuple[int, ...]]:
        """Name of the tensor and index of the element that holds a place."""
        allocation, byte = self._holder(place)
        return allocation.label, allocation.index_of(byte)

    def elements(self, places: Words) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """The tensor's name, and the indices of the first and last element at these places."""
        return (*self.element(int(places.min())), self.element(int(places.max()))[1])

    def access(self, event: Event, places: Words, number: int = 0) -> Access:
        """number: of the event; 0 for a current access, which gets the next number."""
        return Access(*event.where, event.site, event.what, *self.elements(places), number or len(self.events))

    def value(self, place: int) -> Any:
        """The element that holds a place, in the dtype of its tensor."""
        allocation, byte = self._holder(place)
        size = allocation.tensor.element_size()
        first = place - byte % size
        return torch.from_numpy(self.bytes[first : first + size].copy()).view(allocation.tensor.dtype).item()

    def put(self, places: Words, values: Words) -> None:
        """Write rows of words, values [n, count], at [n] places."""
        nb, count = values.dtype.itemsize, values.shape[1]
        rows, at = self.views[nb, count], places >> ((nb * count).bit_length() - 1)
        self.changes += int((rows[at] != values).any())
        rows[at] = values

    def set(self, place: int, nb: int, value: Any) -> None:
        """Write one word and wake the windows that wait for it."""
        row = self.views[nb, 1][place // nb]
        if row[0] != value:
            self.changes += 1
            row[0] = value
            self.changed[place // UNIT] = self.changes
            for window in self.sleepers.pop(place // UNIT, ()):
                window.woken = True

    def newest(self, places: Words, nb: int, count: int = 1) -> Words:
        """The newest values: [n, count] words of nb bytes at [n] places."""
        return self.views[nb, count][places >> ((nb * count).bit_length() - 1)]

    def event(self, event: Event) -> int:
        self.events.append(event)
        return len(self.events) - 1

    def note(self, event: Event, number: int, places: Words, kind: str, reads: Any = None, writes: Any = None) -> None:
        """Record a moment, if tracing. places: all in one tensor; reads, writes: words at the first place."""
        if self.trace is None:
            return
        words = {"reads": reads, "writes": writes}
        said = [f" {does} {self.shown(int(places[0]), word)}" for does, word in words.items() if word is not None]
        what = event.what + ",".join(said)
        self.trace.append(Moment(number, *event.where, what, event.site, 0.0, 0.0, kind, *self.elements(places)))

    def shown(self, place: int, word: Any) -> str:
        """A word, shown in the dtype of the tensor at this place."""
        tensor, raw = self._holder(place)[0].tensor, np.asarray(word)
        if raw.dtype.itemsize != tensor.element_size():
            return str(raw)
        return str(torch.from_numpy(raw.reshape(1).view(np.uint8).copy()).view(tensor.dtype).item())

    # -- words -------------------------------------------------------------------------------------------------------

    def word(self, place: int, nb: int) -> Word:
        """The word of a strong operation. It replaces the words that overlap it and takes their newest values."""
        found = self.words.get(place)
        if found is not None and found.nb == nb:
            return found
        word = Word(place, nb, self.space.take(1), self.newest(np.array([place]), nb)[0, 0])
        for other in self.overlapping(place, nb):
            last = other.writes[-1]
            word.operations.update(other.operations)
            word.users |= other.users
            carry(word.writes[0].carried, last.carried)
            word.writes[0] = word.writes[0]._replace(number=last.number)
            del self.words[other.place]
        self.words[place] = word
        return word

    def last_writer(self, place: int) -> str:
        """Describes the last strong write of a word; "" if there was none."""
        number = self._last_strong(self.words.get(place))
        return f"last written by {program_name(self.events[number].where)}" if number else ""

    def last_write(self, address: int) -> tuple[Access, ...]:
        """The access that wrote this byte last, if any."""
        try:
            places, within = self.locate(np.array([address]), 1)
        except IndexError:
            return ()
        place, shadow = int(places[0]), self.shadows[within]
        words = self.overlapping(place, 1)  # a weak write deletes them
        number = self._last_strong(words[0]) if words else 0
        number = number or int(shadow.write_events[(place >> shadow.shift) - shadow.begin])
        return (self.access(self.events[number], places),) if number else ()

    def _last_strong(self, word: Word | None) -> int:
        """Event number of the last strong write; 0 if there is none."""
        return max((o.event for (_, writes), o in word.operations.items() if writes), default=0) if word else 0

    def overlapping(self, place: int, nbytes: int) -> list[Word]:
        found = [self.words[at] for at in range(place - 7, place + nbytes) if at in self.words]
        return [word for word in found if word.place + word.nb > place]


class Window:
    """One program's view of the line.

    number   unique number of the program
    where    (rank, launch, program), for reports
    start    clock of what happened before the program
    words    names of its weak reads and writes in reports
    """

    def __init__(
        self, line: Line, number: int, where: tuple[int, str, int], slot: Slot, start: Clock | None = None,
        words: tuple[str, str] = ("load", "store"),
    ) -> None:  # fmt: skip
        self.line, self.where, self.words = line, where, words
        self.known = Known(line.space, slot, Source(where[0], number, "cta"), start)
        self.begun = 0  # line.sequence when its last strong access began
        self.by_warp = False  # whether its warps run one at a time
        self.seen: dict[int, int] = {}  # polled unit -> the last change that the program saw
        self.touched: set[int] = set()  # units polled since the last news or store
        self.counted: set[int] = set()  # those that its own atomics changed
        self.polls, self.last = 0, dict[int, int]()  # unit -> number of its last poll
        self.period = 0  # polls between the last two of the same unit: one round of the program's loop
        self.vain = 0  # polls in a row that touched only known units
        self.watched: set[int] = set()  # units that wake it
        self.woken = False
        self.polled: tuple[int, Site] | None = None  # place and line of its last poll

    # -- accesses ----------------------------------------------------------------------------------------------------

    def places(self, addresses: Words, nbytes: int, what: str, site: Site) -> tuple[Words, int]:
        """The places of addresses. Raises SimulationFault for one outside all tensors, or misaligned."""
        try:
            return self.line.locate(addresses, nbytes)
        except ValueError as error:
            wrong = int(addresses[error.args[0]])
            try:
                at = self.line.element(int(self.line.locate(np.array([wrong]), 1)[0][0]))
            except IndexError:
                at = "memory", (wrong,)
            said = f"{what} of {nbytes} bytes at {place_of(*at, at[1])}, whose address is not a multiple of {nbytes}"
            raise self.fault("misaligned", said, what, site, *at) from None
        except IndexError as error:
            wrong = int(addresses[error.args[0]])
            said = f"{what} of {nbytes} bytes, {self.line.nearest(wrong)}"
            raise self.fault("out of bounds", said, what, site, "memory", (wrong,)) from None

    def replicas(self, addresses: Words, nbytes: int, what: str, site: Site) -> list[Words]:
        """Each rank's addresses behind multicast addresses. Raises SimulationFault for an address that is not one."""
        multicasts = self.line.multicasts
        within = addresses[:, None] - np.array([first for first, _, _ in multicasts], np.int64)
        inside = (within >= 0) & (within + nbytes <= np.array([size for _, size, _ in multicasts]))
        if not inside.any(1).all():
            wrong = int(addresses[np.argmin(inside.any(1))])
            said = f"{what} of {nbytes} bytes at {wrong:#x}, outside of all multicast addresses"
            raise self.fault("out of bounds", said, what, site, "memory", (wrong,))
        which = inside.argmax(1)
        at = within[np.arange(len(which)), which]
        return [np.array(bases)[which] + at for bases in zip(*(bases for _, _, bases in multicasts))]

    def load(
        self, addresses: Words, nb: int, count: int, threads: Words, order: str, scope: str, site: Site,
        issued: Rows | None = None, proxy: int = GENERIC, engine: bool = False,
    ) -> Words:  # fmt: skip
        """[n] addresses -> [n, count] words of nb bytes. order: "weak", "nc" (ld.global.nc), "relaxed" or "acquire".

        issued   for an asynchronous copy: the clocks of its threads when they issued it
        engine   attribute the copy to the program's copy engine, not to these threads
        """
        places, within = self.places(addresses, nb * count, "load", site)
        who = Accessor(self.known, issued or self.known.now(), threads, READONLY if order == "nc" else proxy, engine)
        if order in ("weak", "nc"):
            self._weak(who, places, within, nb * count, Event(self.where, site, self.words[0], False))
            return self.line.newest(places, nb, count)
        self._polls(places, nb * count, site)
        event = Event(self.where, site, f"load ({order}, {scope})", False)
        number = self._beside_weak(who, places, within, nb * count, event)
        values = np.empty((len(places), count), UNSIGNED[nb])
        together = len(threads) > 1 and (places == places[0]).all() and self.known.same(threads)
        for lanes in [slice(None)] if together else [slice(n, n + 1) for n in range(len(threads))]:
            own, first = threads[lanes], int(places[lanes.start or 0])
            words = [self._used(at, nb, own, scope, event, number) for at in range(first, first + nb * count, nb)]
            per = max(ATOMIC_BYTES // nb, 1)
            for n in range(0, count, per):
                values[lanes, n : n + per] = self._read(words[n : n + per], own, order, scope)
        self.line.note(event, number, places[:1], "atomic", reads=values[0, 0])
        return values

    def store(
        self, addresses: Words, values: Words, threads: Words, order: str, scope: str, site: Site,
        issued: Rows | None = None, proxy: int = GENERIC,
    ) -> None:  # fmt: skip
        """Store values [n, count] at [n] addresses."""
        nb, count = values.dtype.itemsize, values.shape[1]
        places, within = self.places(addresses, nb * count, "store", site)
        who = Accessor(self.known, issued or self.known.now(), threads, proxy)
        self.vain = 0  # a program that stores works: Note [Heartbeats]
        self.touched.clear()
        self.counted.clear()
        if order == "weak":
            event = Event(self.where, site, self.words[1], True)
            self._weak(who, places, within, nb * count, event, values)
            self.line.put(places, values)
            if len(places) > 1 and (self.line.newest(places, nb, count) != values).any():
                access = self.line.access(event, places[~self._alike(places, values)])
                where = f"{access.tensor} {list(access.first)}"
                said = f"{program_name(self.where)}: two threads of one store write different values to {where}"
                self._end(Fault("write-write race", said, (access, access)))
            return
        event = Event(self.where, site, f"store ({order}, {scope})", True)
        number = self._beside_weak(who, places, within, nb * count, event, reads=False)
        for lane, (first, thread) in enumerate(zip(places.tolist(), threads.tolist(), strict=True)):
            carried = self.known.released(thread, order, scope)
            for at, value in zip(range(first, first + nb * count, nb), values[lane], strict=True):
                word = self._used(at, nb, threads[lane : lane + 1], scope, event, number)
                self._write(word, thread, order, dict(carried), value)
        self.line.note(event, number, places[:1], "atomic", writes=values[0, 0])

    def atomic(
        self, addresses: Words, threads: Words, new: Callable[[int, Any], Any], dtype: np.dtype[Any], order: str,
        scope: str, site: Site, what: str = "atomic", returns: bool = True, proxy: int = GENERIC, reads: bool = True,
        issued: Rows | None = None,
    ) -> Words:  # fmt: skip
        """Each thread in turn replaces the old value by new(lane, old), unless that is None. Returns the old values.

        returns   the instruction returns the old value, so it may acquire; reads: the old value matters
        issued    for an asynchronous reduction: the clocks of its thread when it was issued
        """
        nb = dtype.itemsize
        places, within = self.places(addresses, nb, what, site)
        if issued is None:
            self._polls(places, nb, site)
        event = Event(self.where, site, f"{what} ({order}, {scope})", True)
        who = Accessor(self.known, issued or self.known.now(), threads, proxy)
        number = self._beside_weak(who, places, within, nb, event, reads)
        old = np.empty(len(places), dtype)
        for lane, (place, thread) in enumerate(zip(places.tolist(), threads.tolist(), strict=True)):
            own = threads[lane : lane + 1]
            word = self._used(place, nb, own, scope, event, number, issued)
            before = word.writes[-1]
            old[lane] = now = np.array(before.value).view(dtype)[()]
            made = new(lane, now)
            if returns:
                self._acquire(word, own, order, scope, before)
            if made is None:
                self.known.observe(own, word.coordinate, before.number)
                continue
            carried = {} if issued is not None else self.known.released(thread, order, scope)
            self._write(word, thread, order, carried, np.array(made, dtype).view(UNSIGNED[nb])[()], before)
        first, now = old.view(UNSIGNED[nb])[0], self.line.newest(places[:1], nb)[0, 0]
        self.line.note(event, number, places[:1], "atomic", first, now if now != first else None)
        return old

    def _weak(
        self, who: Accessor, places: Words, within: int, width: int, event: Event, values: Words | None = None
    ) -> None:
        """Check a weak access against all earlier accesses, and record it. values: those of a store."""
        number = self.line.event(event)
        for shadow, part, chosen in self._by_tensor(who, places, within):
            own = places[chosen]
            cells = shadow.cells(own, width)
            excused = partial(self._loaded, shadow, event) if self.by_warp else None
            if values is not None:
                excused = partial(self._alike, own, values[chosen])
            for found in shadow.conflicts(part, cells, event.writes, excused):
                self._race(shadow, found, event)
            strong = shadow.strong[cells]
            if np.count_nonzero(strong):
                near = strong.reshape(len(own), -1).any(1)
                self._beside_strong(part._replace(threads=part.threads[near]), own[near], width, event)
            if not event.writes and shadow.poisoned:
                self._never(shadow, cells, event)
            shadow.note(part, cells, event.writes, number)
            self.line.note(event, number, own, event.what.partition(" ")[0])

    def _by_tensor(self, who: Accessor, places: Words, within: int) -> Iterator[tuple[Shadow, Accessor, Any]]:
        """The shadow of each tensor accessed, the accessor with its threads, and the indices of the places in it."""
        if within >= 0:
            yield self.line.shadows[within], who, ...
            return
        each = np.array(self.line.starts).searchsorted(places, "right") - 1
        for n in dict.fromkeys(each.tolist()):
            chosen = np.flatnonzero(each == n)
            yield self.line.shadows[n], who._replace(threads=who.threads[chosen]), chosen

    def _alike(self, places: Words, values: Words, cells: Words | None = None) -> Words:
        """Whether memory already holds each row of words: [n], or [n, 1] if cells are [n, k]."""
        there = self.line.newest(places, values.dtype.itemsize, values.shape[1])
        return (there == values).all(1, keepdims=cells is not None and cells.ndim == 2)

    def _loaded(self, shadow: Shadow, event: Event, cells: Words) -> Any:
        """Cells whose last read by this program came from the same source line as this load."""
        if self.known.first not in shadow.reads:
            return False
        numbers, events = shadow.reads[self.known.first][1][cells], self.line.events
        of_line = [n for n in np.unique(numbers).tolist() if events[n][:2] == event[:2]]  # where and site
        return np.isin(numbers, of_line)

    def _beside_strong(self, who: Accessor, places: Words, width: int, event: Event) -> None:
        """Check a weak access against the strong operations on the same words. A write deletes the words."""
        for place, thread in zip(places.tolist(), who.threads.tolist(), strict=True):
            for word in self.line.overlapping(place, width):
                for found in word.conflicts(who.known, who.rows, thread, None, place, width, event.writes):
                    self._unordered(np.array([word.place]), found.event, event)
                if event.writes:
                    del self.line.words[word.place]

    def _beside_weak(
        self, who: Accessor, places: Words, within: int, width: int, event: Event, reads: bool = True
    ) -> int:
        """Check a strong access against weak ones. Returns its event number. reads: it uses the old value."""
        self.begun = self.line.sequence
        for shadow, part, chosen in self._by_tensor(who, places, within):
            cells = shadow.cells(places[chosen], width)
            shadow.strong[cells] = True
            for found in shadow.conflicts(part, cells, event.writes):
                self._race(shadow, found, event)
            if shadow.poisoned and reads:
                self._never(shadow, cells, event)
            if event.writes:
                shadow.unwritten[cells] = False
        return self.line.event(event)

    # -- strong accesses ---------------------------------------------------------------------------------------------

    def _used(
        self, place: int, nb: int, threads: Words, scope: str, event: Event, number: int, issued: Rows | None = None
    ) -> Word:
        """The word of a strong access, checked against other strong accesses. All `threads` have the same clock."""
        word, source, now = self.line.word(place, nb), self.known.scoped[scope], issued or self.known.now()
        for found in word.conflicts(self.known, now, int(threads[0]), source, place, nb, event.writes):
            lacks = GENERIC if found.source.reaches(source) else SCOPE
            self._unordered(np.array([word.place]), found.event, event, lacks)
        operation = Operation(self.known.slot.tick, source, place, nb, number)
        word.users.add(operation[1:4])
        for own in threads.tolist():
            word.operations[self.known.first + own, event.writes] = operation
        return word

    def _read(self, words: list[Word], threads: Words, order: str, scope: str) -> list[Any]:
        """Values of words that are read at once, all as of one past moment that the threads may still observe."""
        line, thread, values = self.line, int(threads[0]), []
        moment = line.sequence
        if line.weak and line.rng.random() < STALE:
            known = self.known.now()
            least = max(word.at(known.newest(thread, word.coordinate)).number for word in words)
            moments = {w.number for word in words for w in word.writes if w.number >= least}
            moment = line.rng.choice(sorted(moments))
        for word in words:
            write = word.at(moment)
            if write is not word.writes[-1]:
                self.vain, self.seen[word.place // UNIT] = 0, -1  # the next poll may see more
            self.known.observe(threads, word.coordinate, write.number)
            self._acquire(word, threads, order, scope, write)
            values.append(write.value)
        return values

    def _acquire(self, word: Word, threads: Words, order: str, scope: str, write: Write) -> None:
        """Pass the clocks of a write to acquiring threads; else keep them for a later fence or acquire of the word."""
        acquires, first = order in ("acquire", "acq_rel"), []  # threads that have not read the word before
        for thread in threads.tolist():
            pending = self.known.pending.setdefault(thread, {})
            before = pending.get(word.place)
            if write.carried:
                carry(pending.setdefault(word.place, {}), write.carried)
            if before is None:
                first.append(thread)
            elif acquires:
                self.known.acquire([thread], before, scope)
        if first and acquires:
            self.known.acquire(first, write.carried, scope)

    def _write(
        self, word: Word, thread: int, order: str, carried: Carried, value: Any, read: Write | None = None
    ) -> None:
        """Append the newest write of a word. read: the write that an atomic read; its clocks are carried on."""
        line, by = self.line, self.known.first + thread
        if order in ("release", "acq_rel"):
            word.released[by] = dict(carried)
        elif by in word.released:
            carry(carried, word.released[by])
        if read is not None:
            carry(carried, read.carried)
        line.sequence += 1
        before = word.writes[max(len(word.writes) - 2, 0)]
        if before.number > self.begun and before.value == value == word.writes[-1].value:
            word.writes.pop()  # equal values stored by one instruction: keep only the first and the last
        word.writes.append(Write(line.sequence, value, carried))
        unit, changes = word.place // UNIT, line.changes
        last = line.changed.get(unit, 0)
        line.set(word.place, word.nb, value)
        if read is not None and line.changes != changes:  # Note [Heartbeats]
            self.counted.add(unit)
            self.vain = max(self.vain - 1, 0)
            if self.seen.get(unit) == last:  # otherwise others have changed it too
                self.seen[unit] = line.changes
        self.known.observe(np.array([thread]), word.coordinate, line.sequence)

    # -- polls -------------------------------------------------------------------------------------------------------

    def _polls(self, places: Words, nbytes: int, site: Site) -> None:
        self.polled = int(places[0]), site
        units = {at // UNIT for first in places.tolist() for at in range(first, first + nbytes, UNIT)}
        now = {unit: self.line.changed.get(unit, 0) for unit in units}
        changed = [unit for unit, change in now.items() if self.seen.get(unit, change) != change]
        ago = {unit: self.polls - self.last.get(unit, self.polls) for unit in units}
        if any(ago[unit] < LATEST for unit in changed):
            self.touched.clear()
        if not units <= self.touched:
            self.vain = 0
        elif not changed:
            self.vain += 1
        self.polls, self.period = self.polls + 1, 1 + max(ago.values())
        self.last |= dict.fromkeys(units, self.polls)
        self.seen |= now
        self.touched |= units

    @property
    def waits(self) -> int:
        """The number of polls in vain, if they cover a whole round of the program's loop; else 0."""
        return self.vain if self.vain >= self.period else 0

    def sleep(self) -> None:
        """Sleep until a word of the polling loop changes. One may already have changed since its last poll."""
        self.watched = {unit for unit, number in self.last.items() if number > self.polls - self.vain} - self.counted
        self.woken = any(self.line.changed.get(unit, 0) != self.seen[unit] for unit in self.watched)
        for unit in self.watched:
            self.line.sleepers.setdefault(unit, {})[self] = None

    def wake(self) -> None:
        for unit in self.watched:
            waiting = self.line.sleepers.get(unit, {})
            waiting.pop(self, None)
            if not waiting:
                self.line.sleepers.pop(unit, None)
        self.watched, self.vain = set(), 0

    # -- faults ------------------------------------------------------------------------------------------------------

    def _never(self, shadow: Shadow, cells: Words, event: Event) -> None:
        fresh = shadow.unwritten[cells]
        if fresh.any():
            access = self.line.access(event, shadow.places(cells[fresh]))
            said = f"{program_name(self.where)} loads {access.tensor} {list(access.first)}, which was never written"
            self._end(Fault("never written", said, (access,)))

    def _end(self, fault: Fault, why: Callable[[], str] = str) -> None:
        """Raises SimulationFault unless the fault is waived; then the access is carried out and the run continues."""
        if fault.name not in self.line.waived:
            raise SimulationFault(replace(fault, cause=why()))
        self.line.waived[fault.name] += 1

    def _race(self, shadow: Shadow, found: Conflict, event: Event) -> None:
        words, events = self.line.words.values(), self.line.events
        why = partial(cause, words, events, self.known, found.event, found.by, found.tick, event)
        self._unordered(shadow.places(found.cells), found.event, event, found.proxy, str if found.proxy else why)

    def _unordered(
        self, places: Words, earlier: int, event: Event, lacks: int = GENERIC, why: Callable[[], str] = str
    ) -> None:
        """Report a race: ends the run unless it is waived. lacks: a key of LACKS."""
        before = self.line.events[earlier]
        a, b = self.line.access(before, places, earlier), self.line.access(event, places)
        rule = "write-write race" if before.writes and event.writes else "read-write race"
        said = f"rank {a.rank}'s {a.what} and rank {b.rank}'s {b.what} of {a.tensor} {LACKS[lacks]}"
        self._end(Fault("scope" if lacks == SCOPE else rule, said, (a, b)), why)

    def race_in(self, memory: str, earlier: int, place: int, now: Event) -> None:
        """Report a race between threads or copies of this program, in its own memory. earlier: an event number."""
        before, numbers = self.line.events[earlier], (earlier, len(self.line.events))
        a, b = (Access(*e.where, e.site, e.what, memory, (place,), (place,), n) for e, n in zip((before, now), numbers))
        both = before.writes and now.writes
        rule, why = "write-write race" if both else "read-write race", "both are in flight" if both else NO_BARRIER
        said = f"{program_name(self.where)}: its {a.what} and its {b.what} of {memory} are not ordered"
        self._end(Fault(rule, said, (a, b)), lambda: why)

    def fault(
        self, rule: str, said: str, what: str, site: Site, tensor: str = "", at: tuple[int, ...] = (), cause: str = ""
    ) -> SimulationFault:
        """A fault of this program's access. tensor, at: the memory accessed, and the element."""
        access = Access(*self.where, site, what, tensor, at, at, len(self.line.events))
        return SimulationFault(Fault(rule, f"{program_name(self.where)}: {said}", (access,), cause=cause))
