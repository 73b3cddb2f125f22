"""What a stream does beside launches: copies by a copy engine, flags that it writes and awaits."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from .case import Await, Copy, Signal
from .clocks import ATOMIC, Order
from .detector import Detector
from .faults import Site
from .memory import Map
from .recorder import Recorder
from .spinning import Spinning
from .stores import Stores
from .streams import Turn

SITE = Site("host", 0, "host", 0)


class Host:
    """Does the work of a stream that is no launch."""

    def __init__(
        self, memory: Map, turn: Turn, detector: Detector, spinning: Spinning, recorder: Recorder, stores: Stores | None
    ) -> None:  # fmt: skip
        self._memory, self._turn, self._detector, self._spinning = memory, turn, detector, spinning
        self._recorder, self._stores = recorder, stores

    def do(self, work: Copy | Signal | Await) -> None:
        if isinstance(work, Copy):
            self._copy(work)
        elif isinstance(work, Signal):
            self._signal(work)
        else:
            self._await(work)

    def _copy(self, work: Copy) -> None:
        src, dst = work.src.view(-1), work.dst.view(-1)
        size = -(-max(src.numel(), 1) // work.pieces)
        for part, to in zip(src.split(size), dst.split(size), strict=True):
            self._turn.give_up()
            if not part.numel():
                continue
            here, there, itemsize = self._places(part), self._places(to), to.element_size()
            self._detector.access("copy reads", here, itemsize, SITE, writes=False)
            self._detector.access("copy writes", there, itemsize, SITE, writes=True)
            self._recorder.note("copy", "copy", self._turn.me, there, SITE)
            to.copy_(part)

    def _signal(self, work: Signal) -> None:
        self._turn.give_up()
        me, places, itemsize = self._turn.me, self._places(work.flag), work.flag.element_size()
        self._detector.access("signal (host)", places, itemsize, SITE, writes=True, atomic=ATOMIC["sys"])
        self._detector.clocks.publish(me.slot, me.rank, int(places[0]), Order("release", "sys"), rmw=False)
        if self._stores:
            self._stores.release(me.slot)
        work.flag.fill_(work.value)
        self._recorder.note("atomic", f"signal (host) writes {work.value}", me, places, SITE)
        self._spinning.changed(places, itemsize)

    def _await(self, work: Await) -> None:
        me, places, itemsize = self._turn.me, self._places(work.flag), work.flag.element_size()
        while True:
            self._turn.give_up()
            self._detector.clocks.acquire(me.slot, me.rank, int(places[0]), Order("acquire", "sys"))
            self._detector.access("wait (host)", places, itemsize, SITE, writes=False, atomic=ATOMIC["sys"])
            seen = int(work.flag)
            if work.over(seen):
                self._recorder.note("atomic", f"wait (host) reads {seen}", me, places, SITE)
                return
            self._spinning.wait(int(places[0]), SITE, str(seen))

    def _places(self, tensor: Tensor) -> np.ndarray:
        address, itemsize = np.array([tensor.data_ptr()]), tensor.element_size()
        return self._memory.locate(address, itemsize)[0] + np.arange(tensor.numel()) * itemsize
