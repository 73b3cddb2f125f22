"""The memory operations of running programs: each is checked, done and made known; see interpreter.Handler.

A program gives up its turn before every atomic and volatile load, and with `fine` before any access. In weak-memory
mode a plain store is done later, see stores.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .clocks import ATOMIC, Order
from .detector import Detector
from .memory import Map
from .recorder import Recorder
from .spinning import Spinning
from .stores import Stores
from .streams import Turn


class Operations:
    """What the interpreter hands over instead of doing it."""

    def __init__(
        self, memory: Map, turn: Turn, detector: Detector, spinning: Spinning, recorder: Recorder,
        stores: Stores | None, fine: bool,
    ) -> None:  # fmt: skip
        self._memory, self._turn, self._detector, self._spinning = memory, turn, detector, spinning
        self._recorder, self._stores, self._fine = recorder, stores, fine

    def load(
        self, addresses: np.ndarray, mask: np.ndarray, itemsize: int, volatile: bool, do: Callable
    ) -> Any:
        if volatile or self._fine:
            self._turn.give_up()
        places = self._places("load", addresses, mask, itemsize)
        if places is None:
            return do()
        me = self._turn.me
        if self._stores:
            self._stores.own(me.slot, places, itemsize)
        self._detector.access("load", places, itemsize, self._recorder.site(), writes=False)
        self._recorder.note("load", "load", me, places)
        result = do()
        self._spinning.read(places, result.data, poll=volatile)
        return result

    def store(self, addresses: np.ndarray, value: np.ndarray, mask: np.ndarray, do: Callable) -> None:
        if self._fine:
            self._turn.give_up()
        places, itemsize = self._places("store", addresses, mask, value.itemsize), value.itemsize
        if places is None:
            return
        me = self._turn.me
        self._detector.access("store", places, itemsize, self._recorder.site(), writes=True)
        self._detector.clocks.forget(int(places.min()), int(places.max()) + 1)
        self._spinning.wrote()
        self._recorder.note("store", "store", me, places)

        def land() -> None:
            do()
            self._spinning.changed(places, itemsize)

        if self._stores is None:
            land()
        else:
            owner = self._memory.at(int(places[0])).rank
            self._stores.add(me.slot, places, itemsize, owner, land)

    def atomic(
        self, name: str, addresses: np.ndarray, mask: np.ndarray, itemsize: int, order: Order, do: Callable,
        peek: Callable,
    ) -> Any:  # fmt: skip
        self._turn.give_up()
        what = f"{name} ({order.sem}, {order.scope})"
        places = self._places(what, addresses, mask, itemsize)
        if places is None:
            return do()
        me = self._turn.me
        if self._stores:
            self._stores.own(me.slot, places, itemsize)
            if order.releases and order.scope != "cta":
                self._stores.release(me.slot, None if order.scope == "sys" else me.rank)
        result = do()
        before: Any = None if result is None else result.data[mask]  # a store returns nothing
        after = before if name == "atomic_load" else peek()[mask]
        writes = _wrote(name, before, after)
        self._order(name, places, itemsize, order, what, writes)
        if self._recorder.keep:
            shown = f"writes {after.ravel()[0]}" if writes else f"reads {before.ravel()[0]}"
            self._recorder.note("atomic", f"{what} {shown}", me, places)
        if writes:
            self._spinning.wrote()
            self._spinning.changed(places, itemsize)
        else:
            self._spinning.read(places, before, poll=True)
        return result

    def _order(
        self, name: str, places: np.ndarray, itemsize: int, order: Order, what: str, writes: bool
    ) -> None:
        """The edges that an atomic takes and gives, and its check between the two."""
        me, clocks = self._turn.me, self._detector.clocks
        if name != "atomic_store":
            for place in places.tolist():
                clocks.acquire(me.slot, me.rank, place, order)
        site = self._recorder.site()
        self._detector.access(what, places, itemsize, site, writes=writes, atomic=ATOMIC[order.scope])
        if writes:
            for place in places.tolist():
                clocks.publish(me.slot, me.rank, place, order, rmw=name != "atomic_store")

    def barrier(self) -> None:
        """A program is one thread here; barriers are the business of the ordering lint."""

    def _places(self, what: str, addresses: np.ndarray, mask: np.ndarray, itemsize: int) -> np.ndarray | None:
        """The first byte of each element in use; None if there is none."""
        flat = addresses.ravel() if mask.all() else np.broadcast_to(addresses, mask.shape)[mask]
        if flat.size == 0:
            return None
        places, wrong = self._memory.locate(flat.astype(np.int64), itemsize)
        if wrong is not None:
            raise self._detector.out_of_bounds(what, int(flat[wrong]), self._recorder.site())
        return places


def _wrote(name: str, before: Any, after: Any) -> bool:
    """A store and an exchange write always. Any other atomic that changed nothing is a read: a CAS that failed, + 0."""
    if name in ("atomic_store", "atomic_xchg"):
        return True
    return name != "atomic_load" and bool((after != before).any())
