"""Simulates a run in time: streams launch programs onto SMs, copy and signal, until all work is done.

program    see programs.py
wait       a program that keeps reading the same values sleeps until one of those words changes, see waits.py
SM         runs one program at a time; programs of a rank start in order of their launch, then of their number
copy       passes through a copy engine of its rank, both memories and the links between them, piece by piece
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..case import Await, Copy, Launch, Run, Signal
from ..faults import SimulationFault
from ..launching import plain
from .actor import Actor, Gpu, Stream
from .node import Node
from .programs import Programs
from .timeline import MEMORY, SEND, Timeline
from .traffic import Traffic
from .turns import Turns
from .words import Words


def is_decorated(kernel: Any) -> bool:
    """Whether autotune or heuristics choose some arguments of the kernel."""
    return hasattr(kernel, "configs") or hasattr(kernel, "values")


class Engine:
    """One run on one node. `exact` executes every iteration of every loop, see Note [Skipped iterations].

    An autotuned kernel runs with its first config, or with the one that its launch names.
    """

    def __init__(self, run: Run, node: Node, *, exact: bool = False) -> None:
        launches = [work for of_rank in run.work for work in of_rank if isinstance(work, Launch)]
        if any(callable(launch.grid) or is_decorated(launch.kernel) for launch in launches):
            run = plain(run)
        self._node = node
        self._turns = Turns(self._ended)
        self._gpus = [Gpu(self._turns, node) for _ in run.work]
        self._traffic = Traffic(node, self._gpus)
        self._streams = [
            Stream(rank, name, [w for w in work if w.stream == name])
            for rank, work in enumerate(run.work)
            for name in dict.fromkeys(w.stream for w in work)
        ]
        self._programs = Programs(self._turns, Words(run), self._traffic, node, exact)
        self._waits = self._programs.waits

    def run(self) -> Timeline:
        """Run all work to its end. Raises SimulationFault for a deadlock or an access outside all memory."""
        turns, end = self._turns, 0.0
        try:
            for stream in self._streams:
                self._next(stream)
            while turns.pending or self._waits.once_more():
                turns.advance()
                end = turns.now if turns.live else end
            queued = sum(len(g.waiting) for g in self._gpus)
            if turns.live or queued:
                raise SimulationFault(self._waits.deadlock(queued))
        finally:
            turns.stop()
        total = max((s.end for s in turns.segments), default=end)
        flops, memory = tuple(g.flops for g in self._gpus), tuple(g.memory.moved for g in self._gpus)
        return Timeline(total, tuple(turns.segments), dict(self._traffic.sent), flops, memory, turns.switches)

    def _next(self, stream: Stream) -> None:
        """Start the stream's next work, if there is any."""
        if not stream.work:
            return
        work = stream.work.popleft()
        if isinstance(work, Launch):
            stream.alive = int(np.prod(work.shape))
            self._turns.later(self._node.launch_latency, lambda: self._launch(stream, work))
            return
        stream.alive = 1
        actor = Actor(stream, type(work).__name__.lower(), 0, -1, stream.last)
        delay = self._node.copy_latency if isinstance(work, Copy) else 0.0
        self._turns.begin(actor, lambda: self._host(work), delay)

    def _launch(self, stream: Stream, work: Launch) -> None:
        gpu = self._gpus[stream.rank]
        gpu.waiting.extend((stream, work, program, stream.last) for program in range(stream.alive))
        gpu.place(self._start)

    def _start(self, sm: int, stream: Stream, work: Launch, program: int, cause: int) -> None:
        self._programs.start(Actor(stream, work.name, program, sm, cause), work)

    def _ended(self, actor: Actor) -> None:
        gpu, stream = self._gpus[actor.rank], actor.stream
        if actor.sm >= 0:
            gpu.release(actor.sm, actor.last)
            gpu.place(self._start)
        stream.alive -= 1
        if not stream.alive:
            stream.last = actor.last
            self._next(stream)

    # -- the host's work -------------------------------------------------------------------------------------------

    def _owner(self, tensor: torch.Tensor) -> int:
        nbytes = tensor.numel() * tensor.element_size()
        return self._programs.owner("copy", tensor.data_ptr(), tensor.data_ptr() + nbytes)

    def _host(self, work: Copy | Signal | Await) -> None:
        if isinstance(work, Copy):
            self._copy(work)
        elif isinstance(work, Signal):
            self._signal(work)
        else:
            self._await(work)

    def _copy(self, work: Copy) -> None:
        me, turns = self._turns.me, self._turns
        source, to = self._owner(work.src), self._owner(work.dst)
        total = work.src.numel() * work.src.element_size()
        each = -(-total // work.pieces)

        def arrived() -> None:
            me.pending -= 1
            if not me.pending:
                turns.go(me)

        for first in range(0, total, max(each, 1)):
            nbytes = min(each, total - first)
            begin, me.pending = turns.now, 0
            for share in self._traffic.copy(me.rank, source, to, nbytes):
                me.pending += 1
                share.add(nbytes, nbytes / self._node.copy_bandwidth, arrived)
            turns.block()
            turns.segment(SEND if source != to else MEMORY, begin, me.last)
        if not work.src.dtype.is_floating_point and work.src.dtype.itemsize >= 4:
            work.dst.copy_(work.src)

    def _signal(self, work: Signal) -> None:
        latency = self._node.link_latency if self._owner(work.flag) != self._turns.me.rank else 0.0
        cause = self._turns.me.last

        def seen() -> None:
            work.flag.fill_(work.value)
            self._waits.wake(work.flag.data_ptr(), cause)

        self._turns.later(latency, seen)

    def _await(self, work: Await) -> None:
        me = self._turns.me
        while not work.over(int(work.flag)):
            me.since, me.address, me.polled = self._turns.now, work.flag.data_ptr(), {}
            me.polled[me.address] = int(work.flag)
            self._waits.sleep(me, [me.address])
