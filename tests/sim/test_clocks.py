"""Vector clocks and shadow memory against the definition: a race is a conflicting pair that no chain of edges orders.

The oracle builds the happens-before graph of a whole history and looks for paths. The detector must find the first
racing access of every history, and nothing before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.sim.clocks import ATOMIC, PLAIN, Clocks, Events, Order, Shadow

SLOTS, WORDS = 4, 3
RANK_OF = (0, 0, 1, 2)  # slots 0 and 1 are two programs of one rank


@dataclass(frozen=True)
class Op:
    """kind: load, store, atomic_load, atomic_store, rmw."""

    slot: int
    word: int
    kind: str
    sem: str
    scope: str

    @property
    def atomic(self) -> bool:
        return self.kind not in ("load", "store")

    @property
    def reads(self) -> bool:
        return self.kind in ("load", "atomic_load", "rmw")

    @property
    def writes(self) -> bool:
        return self.kind in ("store", "atomic_store", "rmw")

    @property
    def order(self) -> Order:
        return Order(self.sem, self.scope)


ops = st.builds(
    Op,
    st.integers(0, SLOTS - 1),
    st.integers(0, WORDS - 1),
    st.sampled_from(["load", "store", "atomic_load", "atomic_store", "rmw", "rmw"]),
    st.sampled_from(["relaxed", "acquire", "release", "acq_rel"]),
    st.sampled_from(["sys", "sys", "gpu", "cta"]),
)


def include_one_another(a: Op, b: Op) -> bool:
    """PTX: morally strong operations' scopes include each other's program."""
    if a.slot == b.slot:
        return True
    if "cta" in (a.scope, b.scope):
        return False
    return RANK_OF[a.slot] == RANK_OF[b.slot] or a.scope == b.scope == "sys"


def edges(history: list[Op]) -> list[tuple[int, int]]:
    """Program order, and from each release to the acquires that read it or what read-modify-writes made of it."""
    found = []
    last_of: dict[int, int] = {}
    for i, op in enumerate(history):
        if op.slot in last_of:
            found.append((last_of[op.slot], i))
        last_of[op.slot] = i
        if not (op.atomic and op.reads and op.order.acquires):
            continue
        for j in range(i - 1, -1, -1):  # back through what wrote the value that is read
            before = history[j]
            if before.word != op.word or not before.writes:
                continue
            if not before.atomic:
                break
            if before.order.releases and include_one_another(before, op):
                found.append((j, i))
            if before.kind != "rmw":
                break
    return found


def first_race(history: list[Op]) -> int | None:
    n = len(history)
    reach = np.eye(n, dtype=bool)
    for j, i in sorted(edges(history), key=lambda edge: edge[1]):
        reach[:, i] |= reach[:, j]
    for i, b in enumerate(history):
        for j, a in enumerate(history[:i]):
            conflict = a.word == b.word and (a.writes or b.writes)
            if conflict and not (a.atomic and b.atomic and include_one_another(a, b)) and not reach[j, i]:
                return i
    return None


def detected(history: list[Op]) -> int | None:
    clocks, events, shadow = Clocks(SLOTS), Events(), Shadow(4 * WORDS, SLOTS)
    for i, op in enumerate(history):
        rank, atomic = RANK_OF[op.slot], ATOMIC[op.scope] if op.atomic else PLAIN
        places = 4 * op.word + np.arange(4)
        if op.atomic and op.reads:
            clocks.acquire(op.slot, rank, 4 * op.word, op.order)
        if shadow.conflict(clocks, events, op.slot, rank, atomic, places, op.writes):
            return i
        event = events.add(op.slot, clocks.now(op.slot), atomic, rank, op)
        shadow.note(op.slot, event, atomic, places, op.writes)
        if op.atomic and op.writes:
            clocks.publish(op.slot, rank, 4 * op.word, op.order, op.kind == "rmw")
        elif op.writes:
            clocks.forget(4 * op.word, 4 * op.word + 4)
    return None


@settings(max_examples=1000)
@given(st.lists(ops, max_size=14))
def test_the_first_race_of_a_history_is_found_exactly(history):
    assert detected(history) == first_race(history)


message = [Op(0, 0, "store", "", ""), Op(0, 1, "rmw", "release", "sys"), Op(3, 1, "rmw", "acquire", "sys")]


def test_a_message_orders_and_each_weakening_does_not():
    read = Op(3, 0, "load", "", "")
    assert detected([*message, read]) is None
    for i in (1, 2):
        for weaker in ({"sem": "relaxed"}, {"scope": "gpu"}):
            history = [*message, read]
            history[i] = Op(**{**history[i].__dict__, **weaker})
            assert detected(history) is not None, (i, weaker)
