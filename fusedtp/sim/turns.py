"""An exchange's slots in turn: dispatches and combines one after another, of which a fast rank may be a call ahead.

What a slot holds changes from call to call: own tokens, which peers read, or rows that peers push, of many ranks, of
one, of none; ranks without tokens and experts without rows. Every rank must still hear of every other in every call,
see Note [Two rotating buffers] in kernels/signals.py.
"""

from __future__ import annotations

from .call import Call
from .case import Case
from .cases import fused_case


def turns(world_size: int) -> list[Call]:
    """Six calls: another rank has no tokens each time; all go to the first rank's experts, the last one's, nobody's."""
    w = world_size
    sizes = [tuple(0 if r == i % w else 3 + (r + i) % 3 for r in range(w)) for i in range(1, 6)]
    return [
        Call("moe_dispatch", sizes[0], k=5, chunk=2, routing="first"),
        Call("moe_combine", sizes[1], (7,), chunk=2, routing="none"),
        Call("moe_combine", sizes[2], (5,), chunk=2),
        Call("moe_dispatch", sizes[3], k=3, chunk=2, routing="last"),
        Call("moe_dispatch", sizes[4], k=7, chunk=2),
        Call("moe_combine", (1,) * w, (5,), chunk=2, routing="first"),
    ]


def turns_case(world_size: int) -> Case:
    """Those calls on one workspace."""
    return fused_case("moe_turns", turns(world_size), seed=11)
