"""Simulated time: programs on SMs, transfers in shared capacities, flags that wake who waits for them.

program    runs until it meets others: an atomic, a volatile load, a store after products, its end. What it did
           until then is one segment: latencies of loads that nothing hid, plus max(products / rate of an SM,
           bytes / bandwidth of an SM), or longer if what it loads arrives later
store      leaves at once and holds its part of memory and links; a release waits until all stores of the
           program have landed, and its flag is seen a link's latency later
wait       a program that reads what it read before sleeps until one of those words changes
SM         one program at a time; programs of a rank start in the order of their launches and of their numbers
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from greenlet import GreenletExit, getcurrent, greenlet

from ..case import Await, Copy, Launch, Run, Signal
from ..clocks import Order
from ..faults import Access, Fault, SimulationFault, Wait
from .account import Account
from .actor import Actor, Gpu, Stream
from .language import Language
from .loops import Loop
from .node import Node
from .source import HOST, Program
from .timeline import COMPUTE, MEMORY, SEND, WAIT, Segment, Timeline
from .traffic import Traffic
from .words import Words

SAME_READS = 2  # times round all words that a program polls before it counts as waiting
VAIN_ROUNDS = 3
STILL = SimpleNamespace(monotonic_ns=lambda: 0, sleep=lambda seconds: None)  # no wait gives up here


class Engine:
    """One run on one node. `exact` executes every iteration of every loop, see Note [Skipped iterations]."""

    def __init__(self, run: Run, node: Node, *, exact: bool = False) -> None:
        self.node, self.exact = node, exact
        self.now = 0.0
        self.segments: list[Segment] = []
        self.switches = 0
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._number = self._vain = 0
        self._gpus = [Gpu(self, node) for _ in run.work]
        self.traffic = Traffic(node, self._gpus)
        self._streams = [
            Stream(rank, name, [w for w in work if w.stream == name])
            for rank, work in enumerate(run.work)
            for name in dict.fromkeys(w.stream for w in work)
        ]
        self._words = Words(run)
        self._live: dict[Actor, None] = {}
        self._sleepers: dict[int, list[Actor]] = {}
        self._language = Language(self)
        self._source = Program(self._language, lambda *bounds: Loop(self.account, *bounds), STILL)
        self._arguments: dict[int, dict[str, Any]] = {}
        self._me: Actor

    # -- time and turns --------------------------------------------------------------------------------------------

    def at(self, time: float, action: Callable[[], object]) -> None:
        self._number += 1
        heapq.heappush(self._queue, (time, self._number, action))

    def run(self) -> Timeline:
        """All work to its end. Raises SimulationFault for a deadlock and for an access outside of all memory."""
        end = 0.0
        try:
            for stream in self._streams:
                self._next(stream)
            while self._queue or self._once_more():
                time, _, action = heapq.heappop(self._queue)
                self.now = max(self.now, time)
                action()
                end = self.now if self._live else end
            if self._live or any(g.waiting for g in self._gpus):
                raise SimulationFault(self._deadlock())
        finally:
            for actor in self._live:
                if actor.greenlet:
                    actor.greenlet.throw(GreenletExit)
        total = max((s.end for s in self.segments), default=end)
        flops, memory = tuple(g.flops for g in self._gpus), tuple(g.memory.moved for g in self._gpus)
        return Timeline(total, tuple(self.segments), dict(self.traffic.sent), flops, memory, self.switches)

    def _next(self, stream: Stream) -> None:
        """Start the stream's next work, if there is any."""
        if not stream.work:
            return
        work = stream.work.popleft()
        if isinstance(work, Launch):
            stream.alive = int(np.prod(work.shape))
            self.at(self.now + self.node.launch_latency, lambda: self._launch(stream, work))
            return
        stream.alive = 1
        actor = Actor(stream, type(work).__name__.lower(), 0, -1, stream.last)
        actor.greenlet = greenlet(lambda: self._host(work))
        self._live[actor] = None
        delay = self.node.copy_latency if isinstance(work, Copy) else 0.0
        self.at(self.now + delay, lambda: self._go(actor))

    def _launch(self, stream: Stream, work: Launch) -> None:
        gpu = self._gpus[stream.rank]
        gpu.waiting.extend((stream, work, program, stream.last) for program in range(stream.alive))
        gpu.place(self._start)

    def _start(self, sm: int, stream: Stream, work: Launch, program: int, cause: int) -> None:
        actor = Actor(stream, work.name, program, sm, cause)
        actor.account = Account(self.exact, self._flush)
        actor.grid = work.shape
        rest, z = divmod(program, work.shape[2])
        actor.index = (*divmod(rest, work.shape[1]), z)
        if id(work) not in self._arguments:
            self._arguments[id(work)] = {k: self._language.argument(v) for k, v in work.args.items()}
        function, arguments = self._source.function(work.kernel), self._arguments[id(work)]

        def body() -> None:
            function(**arguments)
            self._land()

        actor.greenlet = greenlet(body)
        self._live[actor] = None
        self.at(self.now, lambda: self._go(actor))

    def _go(self, actor: Actor) -> None:
        self._me = actor
        self.switches += 1
        actor.greenlet.switch()
        if not actor.greenlet.dead:
            return
        del self._live[actor]
        gpu, stream = self._gpus[actor.rank], actor.stream
        if actor.sm >= 0:
            gpu.release(actor.sm, actor.last)
            gpu.place(self._start)
        stream.alive -= 1
        if not stream.alive:
            stream.last = actor.last
            self._next(stream)

    def _block(self) -> None:
        parent = getcurrent().parent
        assert parent is not None
        parent.switch()

    def _delay(self, seconds: float) -> None:
        if seconds > 0:
            me = self._me
            self.at(self.now + seconds, lambda: self._go(me))
            self._block()

    def _later(self, seconds: float, action: Callable[[], object]) -> None:
        self.at(self.now + seconds, action)

    def _arrived(self, actor: Actor) -> None:
        actor.pending -= 1
        if not actor.pending:
            self._go(actor)

    def _landed(self, actor: Actor) -> None:
        actor.flying -= 1
        if not actor.flying and actor.landing:
            self._go(actor)

    def _segment(self, what: str, begin: float, cause: int) -> None:
        """The running actor's latest stretch, up to now."""
        me = self._me
        if self.now > begin:
            self.segments.append(
                Segment(me.rank, me.name, me.program, me.sm, what, begin, self.now, cause, me.site)
            )
            me.last = len(self.segments) - 1

    # -- what a program did ----------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """End the running program's segment: it takes its time, and its stores leave."""
        me = self._me
        entries = me.account.take()
        if not entries:
            return
        me.progressed(self.now)
        self._vain = 0
        cost = self.traffic.cost(me.rank, entries)
        begin, me.pending = self.now, 1
        arrived = lambda: self._arrived(me)  # noqa: E731
        self.at(self.now + cost.alone, arrived)
        for share, nbytes in self.traffic.loads(me.rank, cost):
            me.pending += 1
            share.add(nbytes, cost.alone, arrived)
        for share, nbytes, latency in self.traffic.stores(me.rank, cost):
            me.flying += 1
            landed = partial(self._landed, me)
            share.add(nbytes, cost.alone, partial(self._later, latency, landed))
        self._block()
        me.away = cost.away(me.rank)
        self._segment(COMPUTE if cost.products else SEND if me.away else MEMORY, begin, me.last)

    def _land(self) -> None:
        """Wait until all stores of the running program have landed."""
        self._flush()
        me = self._me
        if me.flying:
            begin, me.landing = self.now, True
            self._block()
            me.landing = False
            self._segment(SEND if me.away else MEMORY, begin, me.last)

    # -- language.Runtime ------------------------------------------------------------------------------------------

    @property
    def account(self) -> Account:
        return self._me.account

    @property
    def program(self) -> tuple[int, int, int]:
        return self._me.index

    @property
    def grid(self) -> tuple[int, int, int]:
        return self._me.grid

    def owner(self, what: str, first: int, last: int) -> int:
        """The rank whose memory holds these bytes. Raises SimulationFault where there is none."""
        found = self._words.find(first, last)
        if found is not None:
            return found.rank
        me = self._me
        at = (first,)
        access = Access(
            me.rank, me.name, me.program, self._source.site(), what, "memory", at, at, self.switches
        )
        raise SimulationFault(Fault("out of bounds", self._words.nearest(first), (access,)))

    def read(self, addresses: Sequence[int], dtype: np.dtype) -> list[int]:
        return self._words.read(addresses, dtype)

    def write(self, addresses: Sequence[int], dtype: np.dtype, values: Sequence[int]) -> None:
        self._words.write(addresses, dtype, values)
        for address in addresses:
            self._wake(address, self._me.last)

    def poll(self, address: int, dtype: np.dtype) -> int:
        """A volatile load."""
        return self.atomic("load", address, dtype, lambda old: old, Order("relaxed", "sys"), False)

    def atomic(
        self, name: str, address: int, dtype: np.dtype, change: Callable[[int], int], order: Order, posted: bool
    ) -> int:  # fmt: skip
        """The word as it was. `posted`: nobody wants to know, so the program goes on at once."""
        me = self._me
        if order.releases:
            self._land()
        self._flush()
        me.account.met += 1
        remote = self.owner(f"atomic_{name}", address, address + dtype.itemsize) != me.rank
        latency = self.node.link_latency if remote else self.node.memory_latency
        if posted:
            cause = me.last
            me.progressed(self.now)
            self.at(self.now + latency, lambda: self._apply(address, dtype, change, cause))
            return 0
        self._delay(latency)
        old, changed = self._apply(address, dtype, change, me.last)
        if remote:
            self._delay(latency)
        if changed:
            me.progressed(self.now)
        elif self._again(me, address, old):
            self._sleep(me, [*me.polled])
            old, _ = self._apply(address, dtype, change, me.last)
        return old

    def _apply(
        self, address: int, dtype: np.dtype, change: Callable[[int], int], cause: int
    ) -> tuple[int, bool]:
        old = self._words.read([address], dtype)[0]
        self._words.write([address], dtype, [change(old)])
        changed = self._words.read([address], dtype)[0] != old
        if changed:
            self._vain = 0
            self._wake(address, cause)
        return old, changed

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _again(self, me: Actor, address: int, value: int) -> bool:
        """Whether a program that reads the same again and again waits."""
        me.address = address
        if me.polled.get(address) == value:
            me.repeats += 1
        else:
            if not me.polled or address in me.polled:
                me.since = self.now
            me.polled[address], me.repeats = value, 0
        return me.repeats > SAME_READS * len(me.polled)

    def _sleep(self, me: Actor, addresses: Sequence[int]) -> None:
        me.asleep, me.site = True, self._source.site()
        for address in addresses:
            self._sleepers.setdefault(address, []).append(me)
        self._block()
        self._segment(WAIT, me.since, me.woken_by if me.woken_by >= 0 else me.last)
        me.site = None
        me.progressed(self.now)
        self._delay(self.node.memory_latency)

    def _wake(self, address: int, cause: int) -> None:
        for actor in self._sleepers.pop(address, ()):
            self._rouse(actor, cause)

    def _rouse(self, actor: Actor, cause: int) -> None:
        if actor.asleep:
            actor.asleep, actor.woken_by = False, cause
            for others in self._sleepers.values():
                if actor in others:
                    others.remove(actor)
            self.at(self.now, lambda: self._go(actor))

    def _once_more(self) -> bool:
        """Nothing will happen. Some rounds more, in case a program reads a word often without waiting for it."""
        self._vain += 1
        sleeping = [actor for actor in self._live if actor.asleep]
        if self._vain <= VAIN_ROUNDS:
            for actor in sleeping:
                self._rouse(actor, -1)
        return bool(self._queue)

    def _deadlock(self) -> Fault:
        waits = []
        for actor in self._live:
            if actor.asleep:
                name, index = self._words.name(actor.address)
                seen = str(actor.polled.get(actor.address, "?"))
                where = actor.site or HOST
                waits.append(Wait(actor.rank, actor.name, actor.program, where, name, index, seen))
        queued = sum(len(g.waiting) for g in self._gpus)
        message = f"{len(waits)} programs wait and no other can run" + (
            f"; {queued} not started yet" if queued else ""
        )
        return Fault("deadlock", message, waits=tuple(waits))

    # -- the host's work -------------------------------------------------------------------------------------------

    def _tensor(self, tensor: torch.Tensor) -> int:
        nbytes = tensor.numel() * tensor.element_size()
        return self.owner("copy", tensor.data_ptr(), tensor.data_ptr() + nbytes)

    def _host(self, work: Copy | Signal | Await | Launch) -> None:
        if isinstance(work, Copy):
            self._copy(work)
        elif isinstance(work, Signal):
            latency = self.node.link_latency if self._tensor(work.flag) != self._me.rank else 0.0
            cause = self._me.last

            def signal(flag: torch.Tensor = work.flag, value: int = work.value) -> None:
                flag.fill_(value)
                self._wake(flag.data_ptr(), cause)

            self.at(self.now + latency, signal)
        elif isinstance(work, Await):
            bits = 8 * work.flag.element_size()
            half = 1 << (bits - 1)
            while (int(work.flag) - work.value + half) % (1 << bits) < half:
                me = self._me
                me.since, me.address, me.polled = self.now, work.flag.data_ptr(), {}
                me.polled[me.address] = int(work.flag)
                self._sleep(me, [me.address])

    def _copy(self, work: Copy) -> None:
        me = self._me
        source, to = self._tensor(work.src), self._tensor(work.dst)
        total = work.src.numel() * work.src.element_size()
        each = -(-total // work.pieces)
        for first in range(0, total, max(each, 1)):
            nbytes = min(each, total - first)
            begin, me.pending = self.now, 0
            for share in self.traffic.copy(me.rank, source, to, nbytes):
                me.pending += 1
                share.add(nbytes, nbytes / self.node.copy_bandwidth, lambda: self._arrived(me))
            self._block()
            self._segment(SEND if source != to else MEMORY, begin, me.last)
        if not work.src.dtype.is_floating_point and work.src.dtype.itemsize >= 4:
            work.dst.copy_(work.src)
