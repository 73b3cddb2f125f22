"""One schedule of one run: programs as greenlets, their memory operations checked as they happen.

    streams of a rank    work in order of issue; the programs of a launch start in ascending order, at most `resident`
                         of a rank alive at once; the next work starts when all of them have ended
    turns                before every atomic and volatile load, and with `fine` before any access, the strategy chooses
                         who goes on
    sleep                who waits in vain gets no turn until what it waits for has changed

    machine (who runs) -> operations, host (what they do) -> spinning (who waits) -> detector (what is wrong) -> clocks

Nothing here knows what a kernel means. Clocks (clocks.py) say what is ordered, the map (memory.py) what exists.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from greenlet import GreenletExit, greenlet

from .case import Launch, Run, Work, memory_map
from .detector import Detector
from .faults import Moment, SimulationFault
from .host import Host
from .interpreter import Builder, arguments, call, interpreted
from .operations import Operations
from .recorder import Recorder
from .spinning import Spinning, deadlock
from .stores import Stores
from .strategies import Strategy
from .streams import Actor, Stream, Turn, num_programs, streams_of

FROZEN = SimpleNamespace(monotonic_ns=lambda: 0, sleep=lambda seconds: None)  # no wait times out here


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
        self._rng = random.Random(seed)
        world_size = len(run.work)
        self._strategy = strategy(self._rng, world_size)
        self._memory, self._streams, self._turn = memory_map(run), streams_of(run), Turn()
        num_slots = sum(stream.width for stream in self._streams)
        self._detector = Detector(self._memory, num_slots, self._turn, detect)
        self._recorder = Recorder(self._memory, self._turn, trace)
        self._spinning = Spinning(self._turn, self._recorder)
        self._stores = Stores(self._rng) if weak else None
        parts = (self._memory, self._turn, self._detector, self._spinning, self._recorder, self._stores)
        self._operations, self._host = Operations(*parts, fine), Host(*parts)
        self._builder = Builder()
        self._resident = resident
        self._limit = [self._drawn_limit() for _ in range(world_size)]
        self._live: list[Actor] = []
        self._started = 0
        self._arguments: dict[int, dict[str, Any]] = {}
        self.switches = 0

    @property
    def moments(self) -> tuple[Moment, ...]:
        """What happened so far, where `trace` was asked for."""
        return self._recorder.moments

    def run(self) -> int:
        launches = [w for s in self._streams for w in s.work if isinstance(w, Launch)]
        kernels = {id(w.kernel): w.kernel for w in launches}.values()
        with ExitStack() as stack:
            for holder in _clock_holders(kernels):
                stack.enter_context(patch.object(holder, "time", FROZEN))
            functions = [interpreted(kernel) for kernel in kernels]
            stack.enter_context(self._builder.intercepted(self._operations, functions))
            stack.callback(self._end_all)
            self._loop()
        self.land()
        return self.switches

    def land(self) -> None:
        """All stores that are on their way arrive."""
        if self._stores:
            self._stores.release_all()

    def _loop(self) -> None:
        while True:
            self._start()
            runnable = [actor for actor in self._live if not actor.asleep]
            if runnable:
                self._go_on(self._chosen(runnable))
            elif not self._live and not any(s.todo or s.work for s in self._streams):
                return
            elif not self._spinning.once_more(self._live):
                queued = self._not_started()
                raise SimulationFault(deadlock(self._live, self._memory, self._detector, queued))

    def _chosen(self, runnable: list[Actor]) -> Actor:
        last = self._turn.actor
        chosen = runnable[0] if len(runnable) == 1 else runnable[self._strategy.pick(runnable, last)]
        self.switches += chosen is not last
        return chosen

    def _go_on(self, actor: Actor) -> None:
        """Until it gives up its turn or ends."""
        self._turn.actor = actor
        self._builder.stand_at(actor.program, actor.grid)
        actor.greenlet.switch()
        self._turn.step += 1
        if self._stores:
            self._stores.drift()
        if actor.greenlet.dead:
            self._ended(actor)

    # -- beginning and end of work -----------------------------------------------------------------------------------

    def _start(self) -> None:
        """Begin all that streams and residency allow."""
        for stream in self._streams:
            while True:
                if not stream.todo:
                    if stream.alive or not stream.work:
                        break
                    self._next_work(stream)
                work, program = stream.todo[0]
                if isinstance(work, Launch) and self._resident_on(stream.rank) >= self._limit[stream.rank]:
                    break
                stream.todo.popleft()
                self._begin(stream, work, program)

    def _resident_on(self, rank: int) -> int:
        return sum(actor.rank == rank and actor.resident for actor in self._live)

    def _drawn_limit(self) -> int:
        if self._resident == "varying":
            return self._rng.randint(1, 4)
        return self._resident if isinstance(self._resident, int) else 1 << 30

    def _next_work(self, stream: Stream) -> None:
        """All that the stream did has happened for what it does next; programs of one launch order nothing."""
        work = stream.work.popleft()
        stream.todo.extend((work, program) for program in range(num_programs(work)))
        stream.clock = stream.ended
        if self._stores:
            for slot in stream.slots:
                self._stores.release(slot)

    def _begin(self, stream: Stream, work: Work, program: int) -> None:
        slot = stream.first_slot + program
        name = work.name if isinstance(work, Launch) else type(work).__name__.lower()
        actor = Actor(stream, program, slot, self._started, name)
        self._started += 1
        if stream.clock is not None:
            self._detector.clocks.join(slot, stream.clock)
        if isinstance(work, Launch):
            actor.grid = work.shape
            function, args = interpreted(work.kernel), self._arguments_of(work)
            actor.greenlet = greenlet(lambda: call(function, args))
        else:
            actor.greenlet, actor.resident = greenlet(lambda: self._host.do(work)), False
        stream.alive += 1
        self._live.append(actor)
        self._recorder.note("start", "starts", actor)

    def _arguments_of(self, launch: Launch) -> dict[str, Any]:
        """The same for all programs of a launch."""
        if id(launch) not in self._arguments:
            self._arguments[id(launch)] = arguments(launch.kernel, launch.args)
        return self._arguments[id(launch)]

    def _ended(self, actor: Actor) -> None:
        self._live.remove(actor)
        stream = actor.stream
        stream.alive -= 1
        clock = self._detector.clocks.copy(actor.slot)
        stream.ended = clock if stream.ended is None else np.maximum(stream.ended, clock)
        if self._resident == "varying":
            self._limit[actor.rank] = self._drawn_limit()
        self._recorder.note("end", "ends", actor)

    def _end_all(self) -> None:
        for actor in self._live:
            if actor.greenlet and not actor.greenlet.dead:
                actor.greenlet.throw(GreenletExit)

    def _not_started(self) -> list[str]:
        return [
            f"{len(s.todo)} programs of rank {s.rank}"
            + (f" (at most {self._limit[s.rank]} resident)" if self._resident else "")
            for s in self._streams
            if s.todo
        ]


def _clock_holders(kernels: Iterable[Any]) -> list[ModuleType]:
    """Modules that a kernel calls into and that look at a clock."""
    found: dict[int, ModuleType] = {}
    for kernel in kernels:
        for value in list(kernel.fn.__globals__.values()):
            clock = getattr(value, "time", None) if isinstance(value, ModuleType) else None
            if isinstance(clock, ModuleType) and clock.__name__ == "time":
                found[id(value)] = value
    return list(found.values())
