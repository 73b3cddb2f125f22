"""Runs one schedule of compiled kernels: the programs of all ranks, interleaved by a seed.

streams of a rank    run their work in order of issue. The programs of a launch start in ascending order, at most
                     `resident` of a rank at once; those of a cooperative launch start together. The next work starts
                     when all of them have ended
turns                before every instruction that may observe other programs, the strategy picks the next program
sleep                a program that polls in vain gets no turn until a word that it polls changes, or many other words
                     do; if all programs sleep, all of them poll for a while longer; then it is a deadlock
"""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy

import numpy as np

from ..case import Await, Copy, Launch, Run, Signal, Work, memory_map
from ..faults import Access, Fault, Moment, SimulationFault, Site, Wait
from ..strategies import Strategy
from .clocks import Clock, Slot, joined
from .launch import SCRATCH, Compiler
from .memory import UNSIGNED, Line, Window
from .program import Program

# Polls in vain before a program sleeps, and the same once all sleep: enough for this library's waits to read the clock
PATIENCE, LAST_PATIENCE = 3, 2000
LONG_PATIENCE = 300  # the same for one rank's programs in every fifth schedule: loops with a bound then run out
# This many changes of other words also wake a sleeper: it may do other work and only glance at a flag
RESTLESS = 256
MOST_TURNS = 500_000
HOST = Site("host", 0, "host", 0)


class Actor:
    """A program, or a copy, signal or wait of a stream."""

    def __init__(self, stream: Stream, slot: int, order: int, does: Program | HostWork, patience: int) -> None:
        self.stream, self.slot, self.order, self.does, self.window = stream, slot, order, does, does.window
        self.rank = stream.rank
        self.asleep_since = -1  # line.changes when it fell asleep
        self.patience = self.least = patience


class Stream:
    def __init__(self, rank: int, work: list[Work], first_slot: int) -> None:
        self.rank, self.work, self.first_slot = rank, deque(work), first_slot
        self.width = max(map(_programs, work))
        self.todo: deque[tuple[Work, int]] = deque()
        self.alive = 0
        self.slots: dict[int, Slot] = {}  # by number of the program; successive launches share them
        self.before: Clock | None = None  # what happens before the current work
        self.after: Clock | None = None  # what happens before the next work: also the work that has ended


def _programs(work: Work) -> int:
    return int(np.prod(work.shape)) if isinstance(work, Launch) else 1


class HostWork:
    """A copy, a signal or a wait; a copy runs piece by piece. copied: bytes."""

    def __init__(self, work: Copy | Signal | Await, window: Window) -> None:
        self.work, self.window, self.site, self.ended, self.copied = work, window, HOST, False, 0

    def turn(self) -> None:
        """cuStreamWriteValue releases if it fences, and cuStreamWaitValue acquires, both at system scope."""
        work, window, thread = self.work, self.window, np.zeros(1, np.int64)
        if isinstance(work, Copy):
            count, size = work.src.numel(), work.src.element_size()
            end, nb = min(self.copied + -(-count // work.pieces) * size, count * size), min(size, 8)
            if end > self.copied:
                at = np.arange(self.copied, end, nb)
                threads = np.zeros(len(at), np.int64)
                moved = window.load(work.src.data_ptr() + at, nb, 1, threads, "weak", "", HOST)
                window.store(work.dst.data_ptr() + at, moved, threads, "weak", "", HOST)
            self.copied, self.ended = end, end == count * size
            return
        nb, flag = work.flag.element_size(), np.array([work.flag.data_ptr()])
        if isinstance(work, Signal):
            value = np.array([[work.value]], f"i{nb}").view(UNSIGNED[nb])
            window.store(flag, value, thread, "release" if work.fence else "relaxed", "sys", HOST)
            self.ended = True
        else:
            self.ended = work.over(int(window.load(flag, nb, 1, thread, "acquire", "sys", HOST)[0, 0]))


@contextmanager
def uncollected() -> Iterator[None]:
    """Disables the garbage collector: it walks all objects of torch and Triton, and a schedule makes few cycles."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Machine:
    """Runs one schedule; `run` raises SimulationFault.

    compiler    compiles the kernels of the launches
    resident, weak, fine    see explore.Schedule; trace, waived: see Line
    """

    def __init__(
        self, run: Run, strategy: Callable[[random.Random, int], Strategy], compiler: Compiler, *, seed: int = 0,
        resident: int | str | None = None, weak: bool = True, fine: bool = False, trace: bool = False,
        waived: dict[str, int] | None = None,
    ) -> None:  # fmt: skip
        self.rng = random.Random(seed)
        given = [[copy(each) for each in work] for work in run.work]  # a launch listed twice is two launches
        launches = [(rank, each) for rank, work in enumerate(given) for each in work if isinstance(each, Launch)]
        self.compiled = {id(each): compiler.compiled(each) for _, each in launches}
        held = []
        for rank, each in launches:
            memory = self.compiled[id(each)][1].pop(SCRATCH, None)
            held += [] if memory is None else [(f"scratch of {each.name}", rank, memory)]
        by_tma = any(kernel.by_tma for kernel, _ in self.compiled.values())
        self.line = Line(memory_map(run, held), self.rng, weak, trace, waived, by_tma)
        self.strategy = strategy(self.rng, len(run.work))
        self.resident, self.lockstep = resident, not fine
        self.patient = seed // 5 % len(run.work) if seed % 5 == 3 else -1  # the rank with LONG_PATIENCE
        self.limits = [self._drawn_limit() for _ in run.work]
        self.streams: list[Stream] = []
        slots = 0
        for rank, work in enumerate(given):
            for name in dict.fromkeys(each.stream for each in work):
                self.streams.append(Stream(rank, [each for each in work if each.stream == name], slots))
                slots += self.streams[-1].width
        self.live: list[Actor] = []
        self.last: Actor | None = None
        self.started = self.switches = 0

    def run(self) -> int:
        """Returns the number of switches."""
        with np.errstate(all="ignore"), uncollected():
            for _ in range(MOST_TURNS):
                self._start()
                if not self.live:
                    break
                awake = [actor for actor in self.live if self._awake(actor)]
                if awake:
                    self._go_on(awake)
                elif not self._roused():
                    raise SimulationFault(self._deadlock())
            else:
                assert self.last is not None
                site = self.last.does.site
                access = Access(*self.last.window.where, site, "loops", "", (), (), len(self.line.events))
                said = f"no progress at {site} after {MOST_TURNS} turns"
                raise SimulationFault(Fault("no progress", said, (access,)))
        self.line.land()
        return self.switches

    # -- turns -------------------------------------------------------------------------------------------------------

    def _awake(self, actor: Actor) -> bool:
        """Whether the actor gets turns. Wakes a sleeper that has a reason to wake."""
        if actor.asleep_since >= 0:
            changes = self.line.changes - actor.asleep_since
            if actor.window.woken or changes >= (RESTLESS if actor.window.watched else 1):
                self._wake(actor, actor.least)
        return actor.asleep_since < 0

    def _wake(self, actor: Actor, patience: int) -> None:
        actor.asleep_since, actor.patience = -1, patience
        actor.window.wake()
        self._note("wake", actor)

    def _go_on(self, awake: list[Actor]) -> None:
        chosen = awake[0] if len(awake) == 1 else awake[self.strategy.pick(awake, self.last)]
        self.switches += chosen is not self.last
        self.last = chosen
        chosen.does.turn()
        if chosen.does.ended:
            self._ended(chosen)
        elif chosen.window.waits >= chosen.patience:
            chosen.asleep_since = self.line.changes
            chosen.window.sleep()
            self._note("wait", chosen)

    def _roused(self) -> bool:
        """All sleep, but one may be polling between steps of other work: let all poll again, longer each time."""
        if all(actor.patience == LAST_PATIENCE for actor in self.live):
            return False
        for actor in self.live:
            self._wake(actor, min(8 * actor.patience, LAST_PATIENCE))
        return True

    def _note(self, kind: str, actor: Actor) -> None:
        """Trace an event of a whole program; for a wait, with the word that it polls."""
        if self.line.trace is None:
            return
        moment = Moment(len(self.line.events), *actor.window.where, f"{kind}s", kind=kind)
        if kind == "wait" and actor.window.polled is not None:
            place, site = actor.window.polled
            name, index = self.line.element(place)
            said = f"waits, sees {self.line.value(place)}"
            moment = moment._replace(what=said, site=site, tensor=name, first=index, last=index)
        self.line.trace.append(moment)

    # -- beginning and end of work -----------------------------------------------------------------------------------

    def _start(self) -> None:
        for stream in self.streams:
            while stream.todo or (stream.work and not stream.alive):
                if not stream.todo:
                    stream.before, work = stream.after, stream.work.popleft()
                    stream.todo.extend((work, number) for number in range(_programs(work)))
                    continue
                work, number = stream.todo[0]
                alive = sum(actor.rank == stream.rank and isinstance(actor.does, Program) for actor in self.live)
                full = alive >= self.limits[stream.rank]
                if full and isinstance(work, Launch) and not work.options.get("launch_cooperative_grid"):
                    break
                stream.todo.popleft()
                self._begin(stream, work, number)

    def _drawn_limit(self) -> int:
        if self.resident == "varying":
            return self.rng.randint(1, 4)
        return self.resident if isinstance(self.resident, int) else 1 << 30

    def _begin(self, stream: Stream, work: Work, number: int) -> None:
        does: Program | HostWork
        if isinstance(work, Launch):
            kernel, parameters = self.compiled[id(work)]
            window = self._window(stream, work.name, number, kernel.listing.threads)
            z, y, x = map(int, np.unravel_index(number, work.shape[::-1]))
            does = Program(kernel, window, (x, y, z), work.shape, parameters, lockstep=self.lockstep)
        else:
            name, words = type(work).__name__.lower(), ("copy reads", "copy writes")
            does = HostWork(work, self._window(stream, name, 0, 1, words))
        for actor in self.live:
            actor.patience = actor.least  # a waiting program soon sleeps again, so that the new one gets its turn
        patience = LONG_PATIENCE if stream.rank == self.patient else PATIENCE
        self.live.append(Actor(stream, stream.first_slot + number, self.started, does, patience))
        self._note("start", self.live[-1])
        self.started += 1
        stream.alive += 1

    def _window(self, stream: Stream, name: str, number: int, threads: int, *words: tuple[str, str]) -> Window:
        """The window reuses the slot of the previous program with this number on the stream if the threads match."""
        slot = stream.slots.get(number)
        if slot is None or slot.threads != threads:
            slot = stream.slots[number] = Slot(self.line.space.take(threads + 1), threads)
        return Window(self.line, self.started, (stream.rank, name, number), slot, stream.before, *words)

    def _ended(self, actor: Actor) -> None:
        self.live.remove(actor)
        self._note("end", actor)
        stream, clock = actor.stream, actor.window.known.end()
        stream.alive -= 1
        stream.after = clock if stream.after is None else joined(stream.after, clock)
        if self.resident == "varying":
            self.limits[actor.rank] = self._drawn_limit()

    # -- faults ------------------------------------------------------------------------------------------------------

    def _deadlock(self) -> Fault:
        waits = []
        for actor in self.live:
            where, polled = actor.window.where, actor.window.polled
            if polled is None:
                waits.append(Wait(*where, actor.does.site, "an mbarrier", (0,), "no change"))
            else:
                place, site = polled
                seen, writer = str(self.line.value(place)), self.line.last_writer(place)
                waits.append(Wait(*where, site, *self.line.element(place), seen, writer))
        queued = []
        for stream in filter(lambda stream: stream.todo, self.streams):
            most = f" (at most {self.limits[stream.rank]} resident)" if self.resident else ""
            queued.append(f"{len(stream.todo)} programs of rank {stream.rank}{most}")
        more = f"; not started yet: {', '.join(queued)}" if queued else ""
        return Fault("deadlock", f"{len(waits)} programs wait and nothing can wake them{more}", waits=tuple(waits))
