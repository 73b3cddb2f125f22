"""multimem: one access to the memory of every rank at once, through a multicast address (NVLink SHARP).

PTX ISA 8.8, section 9.7.9.14. A multicast address, `Memory.multicast` of a case, refers to the same place in the memory
of every rank. Each instruction accesses every rank once, in an order that no kernel may rely on. With .acc::f32, sums
of 16-bit floats are computed in fp32 and rounded once; otherwise each addition is rounded. A real switch may round
differently, which tests with exactly representable sums do not show.

Another address of the same memory is another proxy (8.3). A weak write through one address and an access through the
other need a fence.proxy.alias between them, even in one thread. This is not checked for a write after a read, nor for
an access after a strong one.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np

from ..faults import Site
from .access import counted, into, order_of, scope_of, updated
from .alu import HALVES, TYPES, Emitter, handles, size_of, typed
from .clocks import ALIAS
from .numerics import REDUCTIONS, halves, join, split
from .parse import Instruction

Array = np.ndarray[Any, Any]
Lanes = Any  # program.Lanes


@handles("multimem")
def _multimem(e: Emitter, i: Instruction) -> list[str] | None:
    t, kind, operation, count = typed(i), i.parts[1], i.among(REDUCTIONS), counted(i)
    nb = size_of(t)
    if i.has("noftz") or kind not in ("ld_reduce", "st", "red") or nb < 2 or (kind != "st" and not operation):
        return None
    words, site = f"b{8 * nb}", e.const(i.site)
    how = f"{e.mask}, {order_of(i, 'relaxed' if kind == 'red' else 'weak')!r}, {scope_of(i, 'sys')!r}, {site}"
    if kind == "ld_reduce":
        d, at = i.args
        if len(e.items(d)) != count:
            raise i.unsupported("registers")
        what = f"{operation!r}, {t!r}, {i.has('acc::f32')}"
        lines = [f"v = load_reduced(S, {what}, {e.address(at)}, {count}, {how})"]
        return lines + [line for n, x in enumerate(e.items(d)) for line in into(e, x, words, f"v[:, {n}]")]
    at, value = i.args
    if kind == "st":
        return [f"store_everywhere(S, {e.address(at)}, [{e.reads(e.items(value), words)}], {nb}, {how})"]
    return [
        f"atomic_everywhere(S, {operation!r}, {t!r}, {e.address(at)} + {n * nb}, {e.read(x, t)}, {how})"
        for n, x in enumerate(e.items(value))
    ]


def load_reduced(
    lanes: Lanes, operation: str, t: str, wide: bool, at: Array, count: int, mask: Any, order: str, scope: str,
    site: Site,
) -> Array:  # fmt: skip
    """[n, count] words of the n active lanes."""
    nb, window, threads = size_of(t), lanes.window, lanes.part(lanes.ids, mask)
    places = window.replicas(lanes.part(at, mask), nb * count, "multimem.ld_reduce", site)
    first = lanes.program.salt % len(places)
    order_of_ranks = (*places[first:], *places[:first])
    words = [window.load(each, nb, count, threads, order, scope, site, proxy=ALIAS) for each in order_of_ranks]
    values = [each.view(TYPES[t][1]) for each in words]
    half = t == "f16" or t in HALVES
    if half and wide and operation == "add":
        parts = zip(*(split(t, each) for each in values), strict=True)
        made = join(t, [reduce(np.add, part) for part in parts])
    elif half:
        made = reduce(lambda a, b: halves(operation, t, False, False, a, b), values)
    else:
        made = reduce(REDUCTIONS[operation], values)
    return made.view(words[0].dtype)


def store_everywhere(
    lanes: Lanes, at: Array, values: list[Any], nb: int, mask: Any, order: str, scope: str, site: Site
) -> None:
    words, threads = lanes.words(values, nb, mask), lanes.part(lanes.ids, mask)
    for each in lanes.window.replicas(lanes.part(at, mask), nb * len(values), "multimem.st", site):
        lanes.window.store(each, words, threads, order, scope, site, proxy=ALIAS)


def atomic_everywhere(
    lanes: Lanes, operation: str, t: str, at: Array, value: Any, mask: Any, order: str, scope: str, site: Site
) -> None:
    new, dtype = updated(operation, t, [lanes.part(np.broadcast_to(value, (lanes.count,)), mask)])
    threads, what = lanes.part(lanes.ids, mask), f"multimem.red.{operation}"
    for each in lanes.window.replicas(lanes.part(at, mask), dtype.itemsize, what, site):
        lanes.window.atomic(each, threads, new, dtype, order, scope, site, what, False, ALIAS)
