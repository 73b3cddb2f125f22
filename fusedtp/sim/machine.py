"""One schedule of one run: programs as greenlets, their memory operations checked as they happen.

    streams of a rank    work in order of issue; the programs of a launch start in ascending order, at most `resident`
                         of a rank alive at once; the next work starts when all of them have ended
    switch               before every atomic and volatile load, and with `fine` before any access
    spin                 a program that repeats reads which return what they returned before is put to sleep until
                         one of those words changes; if nobody is left awake, that is a deadlock

Nothing here knows what a kernel means. Clocks (clocks.py) say what is ordered, the map (memory.py) what exists.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from greenlet import GreenletExit, getcurrent, greenlet

from .case import Copy, Launch, Run, Signal, Work
from .clocks import ATOMIC, PLAIN, Clocks, Events, Order, Shadow
from .faults import Access, Fault, Moment, SimulationFault, Site, Wait
from .interpreter import Builder, arguments, call, interpreted, site
from .memory import Map
from .stores import Stores
from .strategies import Strategy

MAX_TRACE = 200_000
SAME_READS = 3  # times round a loop of reads that return the same before a program counts as waiting
VAIN_ROUNDS = 8
HOST_SITE = Site("host", 0, "host", 0)
FROZEN = SimpleNamespace(monotonic_ns=lambda: 0, sleep=lambda seconds: None)  # no wait times out here


class Info(NamedTuple):
    """What a report needs of an event."""

    actor: Actor
    what: str
    site: Site
    step: int
    wrote: bool


@dataclass
class Poll:
    """A word that a program reads again and again."""

    site: Site
    value: bytes
    shown: str
    times: int = 1


class Actor:
    """A program of a launch, or a copy or signal of a stream."""

    def __init__(self, stream: Stream, program: int, slot: int, order: int, name: str) -> None:
        self.stream, self.program, self.slot, self.order, self.name = stream, program, slot, order, name
        self.rank = stream.rank
        self.greenlet: greenlet
        self.grid = (1, 1, 1)
        self.seen: set[tuple[Any, ...]] = set()  # reads since it last did something
        self.polled: dict[int, Poll] = {}  # the atomics and volatile loads among them, by place
        self.repeats = 0
        self.asleep = False


class Stream:
    """A stream of a rank: work in order."""

    def __init__(self, rank: int, name: str, work: Sequence[Work]) -> None:
        self.rank, self.name, self.work = rank, name, deque(work)
        self.todo: deque[tuple[Work, int]] = deque()  # programs of the current work that have not started
        self.alive = 0
        self.first_slot = 0
        self.clock: np.ndarray | None = None  # what its current work has seen of the work before
        self.ended: np.ndarray | None = None  # what all programs that ended had seen

    @property
    def width(self) -> int:
        return max((_programs(each) for each in self.work), default=1)


def _programs(work: Work) -> int:
    return int(np.prod(work.shape)) if isinstance(work, Launch) else 1


class Machine:
    """Runs one schedule; `run` returns the number of switches or raises SimulationFault.

    resident   programs of a rank alive at once; None: all; "varying": changes during the run
    weak       plain stores reach others late (stores.py)
    detect     check for races; without it only results, deadlocks and bounds are checked
    """

    def __init__(
        self,
        run: Run,
        strategy: Callable[[random.Random, int], Strategy],
        *,
        seed: int = 0,
        resident: int | str | None = None,
        weak: bool = False,
        fine: bool = False,
        detect: bool = True,
        trace: bool = False,
    ) -> None:
        if resident is not None and resident != "varying" and (not isinstance(resident, int) or resident < 1):
            raise ValueError(f"resident is {resident!r}; it must be None, 'varying' or at least 1")
        self.rng = random.Random(seed)
        self.world_size = len(run.work)
        self.strategy = strategy(self.rng, self.world_size)
        self.resident, self.fine, self.detect = resident, fine, detect
        self.memory = Map()
        for memory in run.memory:
            if len(memory.tensors) != self.world_size:
                raise ValueError(
                    f"memory {memory.name!r} has {len(memory.tensors)} tensors, the world {self.world_size} ranks"
                )
            for rank, tensor in enumerate(memory.tensors):
                self.memory.add(memory.name, rank, tensor, memory.poisoned)
        self.streams = [
            Stream(rank, name, [each for each in work if each.stream == name])
            for rank, work in enumerate(run.work)
            for name in dict.fromkeys(each.stream for each in work)
        ]
        slots = 0
        for stream in self.streams:
            stream.first_slot = slots
            slots += stream.width
            for work in stream.work:
                self._register(stream.rank, work)
        self.memory.freeze()
        self.clocks, self.events = Clocks(slots), Events()
        self.shadow = Shadow(self.memory.size, slots)
        for a in self.memory.allocations:
            if a.poisoned:
                self.shadow.unwritten[a.place : a.place + a.nbytes] = True
        self.stores = Stores(self.rng) if weak else None
        self.live: list[Actor] = []
        self.sleepers: dict[int, set[Actor]] = {}
        self.vain_rounds = 0
        self.started = self.switches = self.step = 0
        self.limit = [self._limit() for _ in range(self.world_size)]
        self.trace: deque[Moment] | None = deque(maxlen=MAX_TRACE) if trace else None  # the last ones count
        self._known: dict[CodeType, bool] = {}
        self.actor: Actor | None = None
        self._builder = Builder()
        self._arguments: dict[int, dict[str, Any]] = {}

    def _register(self, rank: int, work: Work) -> None:
        if isinstance(work, Launch):
            for name, value in work.args.items():
                self.memory.add_arguments(name, rank, value)
        elif isinstance(work, Copy):
            self.memory.add("copied to", rank, work.dst)
            self.memory.add("copied from", rank, work.src)
        else:
            self.memory.add("flag", rank, work.flag)

    def _limit(self) -> int:
        if self.resident == "varying":
            return self.rng.randint(1, 4)
        return self.resident if isinstance(self.resident, int) else 1 << 30

    # -- scheduling ------------------------------------------------------------------------------------------------

    def run(self) -> int:
        launches = [w for s in self.streams for w in s.work if isinstance(w, Launch)]
        kernels = {id(w.kernel): w.kernel for w in launches}.values()
        with ExitStack() as stack:
            for holder in _clock_holders(kernels):
                stack.enter_context(patch.object(holder, "time", FROZEN))
            functions = [interpreted(kernel) for kernel in kernels]
            stack.enter_context(self._builder.intercepted(self, functions))
            stack.callback(self._end_all)
            self._loop()
        if self.stores:
            self.stores.release_all()
        return self.switches

    def _loop(self) -> None:
        current: Actor | None = None
        while True:
            self._start()
            runnable = [actor for actor in self.live if not actor.asleep]
            if not runnable:
                if not self.live and not any(s.todo or s.work for s in self.streams):
                    return
                if self._once_more():
                    continue
                raise SimulationFault(self._deadlock())
            chosen = runnable[0] if len(runnable) == 1 else runnable[self.strategy.pick(runnable, current)]
            if chosen is not current:
                self.switches += 1
                current = chosen
            self.actor = chosen
            self._builder.stand_at(chosen.program, chosen.grid)
            chosen.greenlet.switch()
            self.step += 1
            if self.stores:
                self.stores.drift()
            if chosen.greenlet.dead:
                self._ended(chosen)

    def _start(self) -> None:
        for stream in self.streams:
            while True:
                if not stream.todo:
                    if stream.alive or not stream.work:
                        break
                    work = stream.work.popleft()
                    self._next_work(stream)
                    stream.todo.extend((work, program) for program in range(_programs(work)))
                work, program = stream.todo[0]
                alive = sum(a.rank == stream.rank for a in self.live) if isinstance(work, Launch) else 0
                if alive >= self.limit[stream.rank]:
                    break
                stream.todo.popleft()
                self._begin(stream, work, program)

    def _next_work(self, stream: Stream) -> None:
        """All that the stream did has happened for what it does next; programs of one launch order nothing."""
        stream.clock = stream.ended
        if self.stores:
            for slot in range(stream.first_slot, stream.first_slot + self._width(stream)):
                self.stores.release(slot)

    def _begin(self, stream: Stream, work: Work, program: int) -> None:
        slot = stream.first_slot + program
        name = work.name if isinstance(work, Launch) else type(work).__name__.lower()
        actor = Actor(stream, program, slot, self.started, name)
        self.started += 1
        if stream.clock is not None:
            self.clocks.join(slot, stream.clock)
        if isinstance(work, Launch):
            actor.grid = work.shape
            function = interpreted(work.kernel)
            key = id(work)
            if key not in self._arguments:
                self._arguments[key] = arguments(work.kernel, work.args)
            args = self._arguments[key]
            actor.greenlet = greenlet(lambda: call(function, args))
        else:
            actor.greenlet = greenlet(lambda: self._host(work))
        stream.alive += 1
        self.live.append(actor)
        self._note("start", "starts", actor)

    def _width(self, stream: Stream) -> int:
        later = [s.first_slot for s in self.streams if s.first_slot > stream.first_slot]
        return min(later, default=len(self.clocks.seen)) - stream.first_slot

    def _ended(self, actor: Actor) -> None:
        self.live.remove(actor)
        stream = actor.stream
        stream.alive -= 1
        clock = self.clocks.copy(actor.slot)
        stream.ended = clock if stream.ended is None else np.maximum(stream.ended, clock)
        if self.resident == "varying":
            self.limit[actor.rank] = self._limit()
        self._note("end", "ends", actor)

    def _end_all(self) -> None:
        for actor in self.live:
            if actor.greenlet and not actor.greenlet.dead:
                actor.greenlet.throw(GreenletExit)

    def _switch(self) -> None:
        parent = getcurrent().parent
        assert parent is not None
        parent.switch()

    # -- memory operations: interpreter.Handler --------------------------------------------------------------------

    def load(
        self, addresses: np.ndarray, mask: np.ndarray, itemsize: int, volatile: bool, do: Callable
    ) -> Any:
        if volatile or self.fine:
            self._switch()
        places = self._places("load", addresses, mask, itemsize)
        if places is None:
            return do()
        if self.stores:
            self.stores.own(self._me.slot, int(places.min()), int(places.max()) + itemsize)
        self._access("load", places, itemsize, writes=False)
        self._note("load", "load", self._me, places)
        result = do()
        self._read(places, result.data, "volatile" if volatile else "")
        return result

    def store(self, addresses: np.ndarray, value: np.ndarray, mask: np.ndarray, do: Callable) -> Any:
        if self.fine:
            self._switch()
        places = self._places("store", addresses, mask, value.itemsize)
        if places is None:
            return None
        self._access("store", places, value.itemsize, writes=True)
        self.clocks.forget(int(places.min()), int(places.max()) + 1)
        self._did_something()
        me = self._me
        self._note("store", "store", me, places)
        if self.stores is None:
            do()
            self._wake(places, value.itemsize)
            return None
        owner = self.memory.at(int(places[0])).rank

        def land() -> None:
            do()
            self._wake(places, value.itemsize)

        self.stores.add(me.slot, places, value.itemsize, owner, land)
        return None

    def atomic(
        self, name: str, addresses: np.ndarray, mask: np.ndarray, itemsize: int, order: Order, do: Callable,
        peek: Callable,
    ) -> Any:  # fmt: skip
        self._switch()
        what = f"{name} ({order.sem}, {order.scope})"
        places = self._places(what, addresses, mask, itemsize)
        if places is None:
            return do()
        me = self._me
        if self.stores:
            self.stores.own(me.slot, int(places.min()), int(places.max()) + itemsize)
            if order.releases and order.scope != "cta":
                self.stores.release(me.slot, None if order.scope == "sys" else me.rank)
        result = do()
        after = peek()
        rmw = name not in ("atomic_load", "atomic_store")
        changed = (
            name == "atomic_load" or bool((after[mask] != result.data[mask]).any())
            if result is not None
            else True
        )
        writes = name in ("atomic_xchg", "atomic_store") or (name != "atomic_load" and changed)
        if name != "atomic_store":
            for place in places.tolist():
                self.clocks.acquire(me.slot, me.rank, place, order)
        self._access(what, places, itemsize, writes=writes, atomic=ATOMIC[order.scope])
        if writes:
            for place in places.tolist():
                self.clocks.publish(me.slot, me.rank, place, order, rmw)
        if self.trace is not None:
            shown = "writes " + _first(after[mask]) if writes else "reads " + _first(result.data[mask])
            self._note("atomic", f"{what} {shown}", me, places)
        if writes:
            self._did_something()
            self._wake(places, itemsize)
        else:
            self._read(places, result.data[mask], what)
        return result

    def barrier(self) -> None:
        """A program is one thread here; barriers are the business of the ordering lint."""

    @property
    def _me(self) -> Actor:
        assert self.actor is not None
        return self.actor

    def _site(self) -> Site:
        return site(self._known)

    def _places(self, what: str, addresses: np.ndarray, mask: np.ndarray, itemsize: int) -> np.ndarray | None:
        """The first byte of each element in use; None if there is none."""
        flat = addresses.ravel() if mask.all() else np.broadcast_to(addresses, mask.shape)[mask]
        if flat.size == 0:
            return None
        places, wrong = self.memory.locate(flat.astype(np.int64), itemsize)
        if wrong is None:
            return places
        address = int(flat[wrong])
        me = self._me
        access = Access(
            me.rank, me.name, me.program, self._site(), what, "memory", (address,), (address,), self.step
        )
        raise SimulationFault(Fault("out of bounds", self.memory.nearest(address), (access,)))

    def _access(
        self, what: str, places: np.ndarray, itemsize: int, *, writes: bool, atomic: int = PLAIN
    ) -> None:
        """Check one access against all earlier ones and note it."""
        if not self.detect:
            return
        me = self._me
        covered = (places[:, None] + np.arange(itemsize)).ravel() if itemsize > 1 else places
        info = Info(me, what, self._site(), self.step, writes)
        found = self.shadow.conflict(self.clocks, self.events, me.slot, me.rank, atomic, covered, writes)
        if found is not None:
            raise SimulationFault(self._race(found, info, covered))
        if not writes:
            fresh = self.shadow.unwritten[covered]
            if fresh.any():
                at = covered[np.flatnonzero(fresh)]
                access = self._describe(info, at)
                raise SimulationFault(
                    Fault("never written", f"nobody has written what {access.what} reads", (access,))
                )
        event = self.events.add(me.slot, self.clocks.now(me.slot), atomic, me.rank, info)
        self.shadow.note(me.slot, event, atomic, covered, writes)

    # -- spinning --------------------------------------------------------------------------------------------------

    def _did_something(self) -> None:
        me = self._me
        me.seen.clear()
        me.polled.clear()
        me.repeats = 0
        self.vain_rounds = 0

    def _read(self, places: np.ndarray, value: np.ndarray, what: str) -> None:
        """A read that changed nothing. Reading the same again and again is waiting."""
        me = self._me
        first = int(places[0])
        if not what:
            key: tuple[Any, ...] = (first, len(places))
        else:  # an atomic or volatile
            where = self._site()
            key = (where.line, where.kernel_line, first, value.tobytes())
            poll = me.polled.get(first)
            if poll is None or poll.value != value.tobytes():
                me.polled[first] = Poll(where, value.tobytes(), str(value.ravel()[0]) if value.size else "?")
            else:
                poll.times += 1
        if key not in me.seen:
            me.seen.add(key)
            me.repeats = 0
        elif what:
            me.repeats += 1
            if me.repeats > SAME_READS * len(me.polled):
                self._sleep()

    def _sleep(self) -> None:
        me = self._me
        me.asleep = True
        for place, poll in me.polled.items():
            self.sleepers.setdefault(place, set()).add(me)
            self._note("wait", f"waits, sees {poll.shown}", me, np.array([place]), poll.site)
        self._switch()

    def _wake(self, places: np.ndarray, itemsize: int) -> None:
        if not self.sleepers:
            return
        low, high = int(places.min()), int(places.max()) + itemsize
        for place in [p for p in self.sleepers if low <= p < high]:
            for actor in self.sleepers.pop(place):
                self._rouse(actor)

    def _rouse(self, actor: Actor) -> None:
        actor.asleep = False
        self._note("wake", "wakes", actor)
        actor.seen.clear()
        actor.repeats = 0
        for waiting in self.sleepers.values():
            waiting.discard(actor)

    def _once_more(self) -> bool:
        """Everyone sleeps. Some rounds more, in case a program reads the same word often without waiting for it."""
        self.vain_rounds += 1
        if self.vain_rounds > VAIN_ROUNDS:
            return False
        for actor in self.live:
            self._rouse(actor)
        return bool(self.live)

    # -- work of the host ------------------------------------------------------------------------------------------

    def _host(self, work: Work) -> None:
        assert not isinstance(work, Launch)
        if isinstance(work, Copy):
            src, dst = work.src.view(-1), work.dst.view(-1)
            size = -(-max(src.numel(), 1) // work.pieces)
            for part, to in zip(src.split(size), dst.split(size), strict=True):
                self._switch()
                self._host_access("copy reads", part, writes=False)
                self._host_access("copy writes", to, writes=True)
                self._note("copy", "copy", self._me, self._host_places(to), HOST_SITE)
                to.copy_(part)
            return
        flag = work.flag
        order = Order("release" if isinstance(work, Signal) else "acquire", "sys")
        places = np.array([self._place_of(flag)])
        while True:
            self._switch()
            me = self._me
            writes = isinstance(work, Signal)
            name = f"{'signal' if writes else 'wait'} (host)"
            if not writes:
                self.clocks.acquire(me.slot, me.rank, int(places[0]), order)
            self._access(name, places, flag.element_size(), writes=writes, atomic=ATOMIC["sys"])
            if writes:
                self.clocks.publish(me.slot, me.rank, int(places[0]), order, False)
            if isinstance(work, Signal):
                if self.stores:
                    self.stores.release(me.slot)
                flag.fill_(work.value)
                self._note("atomic", f"{name} writes {work.value}", me, places, HOST_SITE)
                self._wake(places, flag.element_size())
                return
            bits = 8 * flag.element_size()
            behind = (int(flag) - work.value + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))
            if behind >= 0:
                self._note("atomic", f"{name} reads {int(flag)}", me, places, HOST_SITE)
                return
            me.polled[int(places[0])] = Poll(HOST_SITE, b"", str(int(flag)))
            self._sleep()

    def _place_of(self, tensor: Any) -> int:
        return int(self.memory.locate(np.array([tensor.data_ptr()]), tensor.element_size())[0][0])

    def _host_access(self, what: str, tensor: Any, *, writes: bool) -> None:
        if tensor.numel():
            self._access(what, self._host_places(tensor), tensor.element_size(), writes=writes)

    def _host_places(self, tensor: Any) -> np.ndarray:
        return self._place_of(tensor) + np.arange(tensor.numel()) * tensor.element_size()

    # -- reports ---------------------------------------------------------------------------------------------------

    def _note(
        self, kind: str, what: str, actor: Actor, places: np.ndarray | None = None, where: Site | None = None
    ) -> None:
        if self.trace is None:
            return
        moment = Moment(self.step, actor.rank, actor.name, actor.program, what, where, kind=kind)
        if places is not None and len(places):
            low, high = int(places.min()), int(places.max())
            a = self.memory.at(low)
            moment = moment._replace(
                site=where or self._site(),
                tensor=f"{a.name} of rank {a.rank}",
                first=a.index_of(low),
                last=a.index_of(min(high, a.place + a.nbytes - 1)),
            )
        self.trace.append(moment)

    def _describe(self, info: Info, places: np.ndarray, value: bool = True) -> Access:
        low, high = int(places.min()), int(places.max())
        a = self.memory.at(low)
        first, last = a.index_of(low), a.index_of(min(high, a.place + a.nbytes - 1))
        seen = ""
        if value and a.tensor.dim() and a.tensor.is_contiguous():
            seen = str(a.tensor.view(-1)[(low - a.place) // a.tensor.element_size()].item())
        actor = info.actor
        return Access(
            actor.rank, actor.name, actor.program, info.site, info.what, f"{a.name} of rank {a.rank} ",
            first, last, info.step, seen,
        )  # fmt: skip

    def _race(self, found: tuple[str, int, int], now: Info, covered: np.ndarray) -> Fault:
        rule, event, index = found
        before = self.events.info[event]
        assert isinstance(before, Info)  # what was there before the run races with nothing
        last = self.shadow.written if before.wrote else self.shadow.read[before.actor.slot]
        same = covered[last[covered] == event]
        same = same if len(same) else covered[index : index + 1]  # an atomic
        first, second = self._describe(before, same, False), self._describe(now, same)
        a, b = first, second
        message = (
            f"rank {a.rank}'s {a.what} and rank {b.rank}'s {b.what} of {a.tensor.strip()} are not ordered"
        )
        return Fault(rule, message, (first, second))

    def _deadlock(self) -> Fault:
        waits = []
        for actor in self.live:
            if not actor.polled:
                continue
            place, poll = max(actor.polled.items(), key=lambda item: item[1].times)
            a = self.memory.at(place)
            event = self.events.info[self.shadow.last_write(place)]
            by = event.actor if isinstance(event, Info) else None
            writer = f"last written by rank {by.rank}, {by.name}, program {by.program}" if by else ""
            tensor = f"{a.name} of rank {a.rank} "
            index = a.index_of(place)
            waits.append(
                Wait(actor.rank, actor.name, actor.program, poll.site, tensor, index, poll.shown, writer)
            )
        queued = [
            f"{len(s.todo)} programs of rank {s.rank}"
            + (f" (at most {self.limit[s.rank]} resident)" if self.resident else "")
            for s in self.streams
            if s.todo
        ]
        message = f"{len(waits)} programs wait and no other can run"
        if queued:
            message += "; not started yet: " + ", ".join(queued)
        return Fault("deadlock", message, waits=tuple(waits))


def _first(values: np.ndarray) -> str:
    return str(values.ravel()[0])


def _clock_holders(kernels: Any) -> list[ModuleType]:
    """Modules that a kernel calls into and that look at a clock."""
    found: dict[int, ModuleType] = {}
    for kernel in kernels:
        scope = kernel.fn.__globals__
        for value in list(scope.values()):
            clock = getattr(value, "time", None) if isinstance(value, ModuleType) else None
            if isinstance(clock, ModuleType) and clock.__name__ == "time":
                found[id(value)] = value
    return list(found.values())
