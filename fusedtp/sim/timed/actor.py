"""The actors of a timed run: programs, the host's copies and signals; and the streams and GPUs they belong to."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence

from greenlet import greenlet

from ..case import Launch, Work
from ..faults import Site
from .account import Account
from .node import Node
from .share import Events, Share


class Stream:
    """The work of a rank's stream, in order of issue."""

    def __init__(self, rank: int, name: str, work: Sequence[Work]) -> None:
        self.rank, self.name, self.work = rank, name, deque(work)
        self.alive = 0
        self.last = -1  # index of the segment that ended last


class Actor:
    """A program of a launch, or the copy, signal or wait of a stream (its sm is -1)."""

    def __init__(self, stream: Stream, name: str, program: int, sm: int, cause: int) -> None:
        self.stream, self.rank, self.name, self.program, self.sm = stream, stream.rank, name, program, sm
        self.account = Account()
        self.index, self.grid = (program, 0, 0), (1, 1, 1)
        self.greenlet: greenlet
        self.last = cause  # index of its last segment, or of the one that let it start
        self.pending = 0  # transfers that it waits for
        self.flying = 0  # parts of its stores that have not landed
        self.ahead = 0  # bytes prefetched and not loaded yet
        self.coming = 0  # prefetches in flight
        self.awaited = 0  # those that it waits for
        self.landing = False  # it waits for its stores
        self.away = False  # the last segment moved bytes over a link
        self.polled: dict[int, int] = {}  # by address, the last value seen since it did other work
        self.repeats = 0
        self.since = 0.0  # time of its last new value
        self.asleep = False
        self.woken_by = -1
        self.site: Site | None = None
        self.address = 0

    def progressed(self, now: float) -> None:
        self.polled.clear()
        self.repeats, self.since = 0, now


class Gpu:
    """A rank's GPU: SMs, a cache, and the resources that its programs share.

    Note [Cache]: programs walk their operands at the same pace. So if a load starts together with an earlier load of
    the same addresses, all of it hits the cache. A later load also hits if no more bytes than the size of the cache
    have gone through memory since then.
    """

    def __init__(self, events: Events, node: Node) -> None:
        self.free = list(range(node.sms))
        self.waiting: deque[tuple[Stream, Launch, int, int]] = deque()  # programs, and the segment that let each start
        self.memory = Share(events, node.memory_bandwidth)
        self.egress, self.ingress = Share(events, node.link_bandwidth), Share(events, node.link_bandwidth)
        self.engines = Share(events, node.copy_bandwidth * node.copy_engines)
        self.flops = 0
        self._cached: dict[tuple[int, int], float] = {}  # bytes gone through memory at the last load
        self._capacity = node.l2_bytes

    def missed(self, key: tuple[int, int], nbytes: int) -> int:
        """Bytes of a load that miss the cache: all or none, see Note [Cache]."""
        gone = self.memory.gone()
        before = self._cached.get(key)
        self._cached[key] = gone
        return nbytes if before is None or gone - before > self._capacity else 0

    def place(self, start: Callable[[int, Stream, Launch, int, int], None]) -> None:
        """Place waiting programs on free SMs, the lowest SM first."""
        while self.free and self.waiting:
            start(heapq.heappop(self.free), *self.waiting.popleft())

    def release(self, sm: int, cause: int) -> None:
        """Free an SM; `cause` is the segment that lets the next waiting program start."""
        heapq.heappush(self.free, sm)
        if self.waiting:
            stream, launch, program, _ = self.waiting[0]
            self.waiting[0] = (stream, launch, program, cause)
