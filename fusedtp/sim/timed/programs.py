"""The effects of programs on time and memory: implements language.Runtime.

segment   the work of a program until it synchronizes (an atomic, a volatile load, a store after matmuls, its end).
          It takes the latencies of loads that are not hidden, plus max(FLOPs / rate of an SM, bytes / bandwidth of
          an SM), or longer if its loads arrive later
prefetch  starts at once; the program's next loads that miss the cache get as many bytes from it, or wait for them
store     starts at once and uses its share of memory and links. A release waits until all stores of the program have
          landed; its flag becomes visible one link latency later
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..case import Launch
from ..faults import Access, Fault, SimulationFault, UnsupportedKernel
from .account import Account
from .actor import Actor
from .language import Language
from .loops import Loop
from .node import Node
from .source import Program
from .timeline import COMPUTE, MEMORY, SEND
from .traffic import Traffic
from .turns import Turns
from .waits import Waits
from .words import Words

STILL = SimpleNamespace(monotonic_ns=lambda: 0, sleep=lambda seconds: None)  # waits never time out here


class Programs:
    """`exact` executes every iteration of every loop, see Note [Skipped iterations]."""

    def __init__(self, turns: Turns, words: Words, traffic: Traffic, node: Node, exact: bool) -> None:
        self._turns, self._words, self._traffic, self._node, self._exact = turns, words, traffic, node, exact
        self._language = Language(self)
        self._source = Program(self._language, lambda *bounds: Loop(self.account, *bounds), STILL)
        self._arguments: dict[int, dict[str, Any]] = {}
        self.waits = Waits(turns, words, self._source.site, node.memory_latency)

    def start(self, actor: Actor, work: Launch) -> None:
        """Start the actor as a program of this launch on its SM."""
        actor.account = Account(self._exact, self._flush)
        actor.grid = work.shape
        rest, z = divmod(actor.program, work.shape[2])
        actor.index = (*divmod(rest, work.shape[1]), z)
        if id(work) not in self._arguments:
            self._arguments[id(work)] = {k: self._language.argument(v) for k, v in work.args.items()}
        function, arguments = self._source.function(work.kernel), self._arguments[id(work)]

        def body() -> None:
            try:
                function(**arguments)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
                why = str(error) if isinstance(error, UnsupportedKernel) else f"{type(error).__name__}: {error}"
                said = f"{work.name} cannot be timed: {why}, at {self._source.raised_at(error)}"
                raise UnsupportedKernel(said) from error
            self._land()

        self._turns.begin(actor, body)

    # -- what a program did ----------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """End the running program's segment: let its time pass and start its stores."""
        me, turns = self._turns.me, self._turns
        entries = me.account.take()
        if not entries:
            return
        me.progressed(turns.now)
        self.waits.progress()
        cost = self._traffic.cost(me.rank, entries)
        begin, me.pending = turns.now, 1
        arrived = partial(self._arrived, me)
        turns.later(cost.alone, arrived)
        found = min(me.ahead, cost.missed)
        if found:
            cost.missed, me.ahead = cost.missed - found, me.ahead - found
            me.pending, me.awaited = me.pending + me.coming, me.coming
        for share, nbytes in self._traffic.loads(me.rank, cost):
            me.pending += 1
            share.add(nbytes, cost.alone, arrived)
        for share, nbytes, latency in self._traffic.stores(me.rank, cost):
            me.flying += 1
            landed = partial(self._landed, me)
            share.add(nbytes, cost.alone, partial(turns.later, latency, landed))
        if cost.prefetched:
            me.ahead, me.coming = me.ahead + cost.prefetched, me.coming + 1
            share, nbytes, alone = self._traffic.prefetch(me.rank, cost)
            share.add(nbytes, alone, partial(self._came, me))
        turns.block()
        me.away = cost.away(me.rank)
        turns.segment(COMPUTE if cost.products else SEND if me.away else MEMORY, begin, me.last)

    def _arrived(self, actor: Actor) -> None:
        actor.pending -= 1
        if not actor.pending:
            self._turns.go(actor)

    def _came(self, actor: Actor) -> None:
        """A prefetch has arrived."""
        actor.coming -= 1
        if actor.awaited:
            actor.awaited -= 1
            self._arrived(actor)

    def _landed(self, actor: Actor) -> None:
        actor.flying -= 1
        if not actor.flying and actor.landing:
            self._turns.go(actor)

    def _land(self) -> None:
        """Wait until all stores of the running program have landed."""
        self._flush()
        me = self._turns.me
        if me.flying:
            begin, me.landing = self._turns.now, True
            self._turns.block()
            me.landing = False
            self._turns.segment(SEND if me.away else MEMORY, begin, me.last)

    # -- language.Runtime ------------------------------------------------------------------------------------------

    @property
    def account(self) -> Account:
        return self._turns.me.account

    @property
    def program(self) -> tuple[int, int, int]:
        return self._turns.me.index

    @property
    def grid(self) -> tuple[int, int, int]:
        return self._turns.me.grid

    def owner(self, what: str, first: int, last: int) -> int:
        """The rank whose memory holds these bytes. Raises SimulationFault if there is none."""
        found = self._words.find(first, last)
        if found is not None:
            return found.rank
        outside = first if self._words.find(first, first + 1) is None else last - 1
        me, at = self._turns.me, (outside,)
        where = self._source.site()
        access = Access(
            me.rank, me.name, me.program, where, what, "memory", at, at, self._turns.switches
        )  # fmt: skip
        raise SimulationFault(Fault("out of bounds", self._words.nearest(outside), (access,)))

    def read(self, addresses: Sequence[int], dtype: np.dtype) -> list[int]:
        return self._words.read(addresses, dtype)

    def write(self, addresses: Sequence[int], dtype: np.dtype, values: Sequence[int]) -> None:
        self._words.write(addresses, dtype, values)
        for address in addresses:
            self.waits.wake(address, self._turns.me.last)

    def poll(self, address: int, dtype: np.dtype) -> int:
        """A volatile load."""
        return self.atomic("load", [address], dtype, [lambda old: old], False, False)[0]

    def atomic(
        self, name: str, addresses: Sequence[int], dtype: np.dtype, changes: Sequence[Callable[[int], int]],
        releases: bool, posted: bool,
    ) -> list[int]:  # fmt: skip
        """Returns the old values. `posted`: the result is unused, so the program continues at once."""
        me, turns, size = self._turns.me, self._turns, dtype.itemsize
        if releases:
            self._land()
        self._flush()
        me.account.met += 1
        remote = any(self.owner(f"atomic_{name}", at, at + size) != me.rank for at in addresses)
        latency = self._node.link_latency if remote else self._node.memory_latency
        if posted:
            cause = me.last
            me.progressed(turns.now)
            turns.later(latency, lambda: self._apply(addresses, dtype, changes, cause))
            return [0] * len(addresses)
        turns.delay(latency)
        old, changed = self._apply(addresses, dtype, changes, me.last)
        if remote:
            turns.delay(latency)
        if changed:
            me.progressed(turns.now)
        elif self.waits.again(me, addresses, old):
            self.waits.sleep(me, [*me.polled])
            old, _ = self._apply(addresses, dtype, changes, me.last)
        return old

    def _apply(
        self, addresses: Sequence[int], dtype: np.dtype, changes: Sequence[Callable[[int], int]], cause: int
    ) -> tuple[list[int], bool]:
        """(the old values, whether any changed)."""
        before, moved = [], False
        for address, change in zip(addresses, changes, strict=True):
            old = self._words.read([address], dtype)[0]
            self._words.write([address], dtype, [change(old)])
            before.append(old)
            if self._words.read([address], dtype)[0] != old:
                moved = True
                self.waits.progress()
                self.waits.wake(address, cause)
        return before, moved
