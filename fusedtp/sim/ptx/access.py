"""Opcodes by which lanes reach memory, each other and their program: loads, stores, atomics, fences, shuffles.

PTX ISA 8.8: 9.7.9 (ld, st, mov), 9.7.13 (barriers, fences, atom, red, vote, redux, elect), 9.7.9.6 (shfl).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .alu import TYPES, Emitter, handles, size_of, typed
from .clocks import ALIAS, ASYNC
from .numerics import halves
from .parse import Address, Imm, Instruction, Operand, Reg, Symbol

Array = np.ndarray[Any, Any]
ORDERS = {
    "acquire": "acquire",
    "release": "release",
    "acq_rel": "acq_rel",
    "relaxed": "relaxed",
    "volatile": "relaxed",
    "mmio": "relaxed",
}
SCOPES = {
    "cta": "cta",
    "cluster": "cta",
    "gpu": "gpu",
    "gl": "gpu",
    "sys": "sys",
}  # a cluster is one program here


def order_of(i: Instruction, default: str = "weak") -> str:
    """A volatile access is a relaxed one of system scope: PTX ISA 8.4.2."""
    return next((ORDERS[part] for part in i.parts if part in ORDERS), default)


def scope_of(i: Instruction, default: str = "gpu") -> str:
    if i.has("volatile", "mmio"):
        return "sys"
    return next((SCOPES[part] for part in i.parts if part in SCOPES), default)


def is_strong(i: Instruction) -> bool:
    """Whether it may see what another program does at this moment: before it, others get their turn."""
    if i.root in ("atom", "red"):
        return not is_shared(i)
    if i.root == "multimem":
        return i.has("red") or order_of(i) != "weak"
    if i.root in ("ld", "st"):
        return order_of(i) != "weak" and not is_shared(i) and not i.has("param")
    return i.op.startswith(("mbarrier.try_wait", "mbarrier.test_wait"))


def is_shared(i: Instruction) -> bool:
    return any(part.startswith("shared") for part in i.parts)


def counted(i: Instruction) -> int:
    return next((int(part[1:]) for part in i.parts if part in ("v2", "v4", "v8")), 1)


@handles("ld", "ldu")
def _load(e: Emitter, i: Instruction) -> list[str] | None:
    t, (d, at, *_) = typed(i), i.args
    targets, nb = e.items(d), size_of(t)
    if i.has("const"):
        return None
    if i.has("param"):
        assert isinstance(at, Address)
        if isinstance(at.base, Reg):  # one of several parameters, chosen as the kernel runs
            chosen = f"S.chosen_parameter({e.address(at, False)}, {e.mask}, np.{TYPES[t][1].__name__})"
            return e.put(d, t, chosen) if len(targets) == 1 else None
        assert isinstance(at.base, Symbol)
        return [
            line
            for n, x in enumerate(targets)
            for line in e.put(x, t, f"S.parameter({at.base.name!r}, {at.offset + n * nb}, np.{TYPES[t][1].__name__})")
        ]
    if len(targets) != counted(i):
        raise i.unsupported("registers")
    if is_shared(i):
        read = f"S.load_shared({e.address(at, True)}, {nb}, {len(targets)}, {e.mask}, {e.const(i.site)})"
    elif i.has("local"):
        read = f"S.load_local({e.address(at, True)}, {nb}, {len(targets)}, {e.mask}, {e.const(i.site)})"
    else:
        order = order_of(i)
        how = f"{order!r}, {scope_of(i)!r}, {e.const(i.site)}"
        read = f"S.load({e.address(at, False)}, {nb}, {len(targets)}, {e.mask}, {how})"
    return [f"v = {read}", *(line for n, x in enumerate(targets) for line in into(e, x, t, f"v[:, {n}]"))]


def into(e: Emitter, x: Operand, t: str, value: str) -> list[str]:
    """What the lanes that took part got, as bits, into a register; extended by its sign for s types."""
    if not isinstance(x, Reg):
        return []
    signed = t[0] == "s"
    view = {16: "hz", 32: "us", 64: "UI"}[x.width][signed]
    value = f"{value}.view(np.int{8 * size_of(t)})" if signed else value
    masked = "..." if e.mask == "True" else e.mask
    return [f"{view}[{x.number}][{masked}] = {value}"]


@handles("st")
def _store(e: Emitter, i: Instruction) -> list[str] | None:
    t, (at, value, *_) = typed(i), i.args
    nb = size_of(t)
    if i.has("param"):
        return []  # an argument of a call
    if i.has("async"):
        return None
    words = ", ".join(e.read(x, f"b{8 * nb}") for x in e.items(value))
    if is_shared(i):
        return [f"S.store_shared({e.address(at, True)}, [{words}], {nb}, {e.mask}, {e.const(i.site)})"]
    if i.has("local"):
        return [f"S.store_local({e.address(at, True)}, [{words}], {nb}, {e.mask}, {e.const(i.site)})"]
    order = order_of(i)
    how = f"{order!r}, {scope_of(i)!r}, {e.const(i.site)}"
    return [f"S.store({e.address(at, False)}, [{words}], {nb}, {e.mask}, {how})"]


ATOMICS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")


@handles("atom", "red")
def _atomic(e: Emitter, i: Instruction) -> list[str] | None:
    t = typed(i)
    args = list(i.args)
    d = args.pop(0) if i.root == "atom" else Imm("_")
    at, *values = args
    operation = next((part for part in i.parts if part in ATOMICS), "")
    if not operation or i.has("b128", "async"):
        return None
    count, nb = counted(i), size_of(t)
    operands = [[e.read(x, t) for x in e.items(value)] for value in values[: 2 if operation == "cas" else 1]]
    lines, targets = [], e.items(d)
    for n in range(count):
        given = ", ".join(each[n] for each in operands)
        where = f"{e.address(at, False)} + {e.const(np.int64(n * nb))}" if n else e.address(at, False)
        if is_shared(i):
            call = f"S.atomic_shared({operation!r}, {t!r}, {where}, [{given}], {e.mask}, {e.const(i.site)})"
        else:
            reads = operation != "exch" or d not in e.unread
            how = f"{order_of(i, 'relaxed')!r}, {scope_of(i)!r}, {e.const(i.site)}, {i.root == 'atom'}, {reads}"
            call = f"S.atomic({operation!r}, {t!r}, {where}, [{given}], {e.mask}, {how})"
        lines.append(f"v = {call}")
        if isinstance(targets[min(n, len(targets) - 1)], Reg):
            lines += into(e, targets[n], f"b{8 * nb}", "v")
    return lines


def updated(operation: str, t: str, given: Sequence[Array]) -> tuple[Any, np.dtype[Any]]:
    """new(number, old) of an atomic, None where it leaves the word, and the type of it. PTX ISA 9.7.13.5."""
    dtype = np.dtype(TYPES[t][1])
    a = given[0]
    if t in ("bf16", "bf16x2", "f16x2"):
        return lambda n, old: halves(operation, t, False, False, old, a[n]), dtype
    if operation == "cas":
        swap = given[1]
        return lambda n, old: swap[n] if old == a[n] else None, dtype
    function = FUNCTIONS[operation]
    return lambda n, old: function(old, a[n]), dtype


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "exch": lambda old, a: a, "add": operator.add, "min": min, "max": max, "and": operator.and_, "or": operator.or_,
    "xor": operator.xor, "inc": lambda old, a: old - old if old >= a else old + type(old)(1),
    "dec": lambda old, a: a if old == 0 or old > a else old - type(old)(1),
}  # fmt: skip


@handles("fence", "membar")
def _fence(e: Emitter, i: Instruction) -> list[str] | None:
    """membar is fence.sc: PTX ISA 9.7.13.4. A proxy fence: of shared memory, of global memory, or of both."""
    if i.has("proxy"):
        if i.has("alias"):
            return [f"S.fence_proxy({e.mask}, {ALIAS})"]
        if i.has("tensormap::generic"):
            if i.has("acquire"):
                where = f"{e.address(i.args[0], False)}, {e.mask}, {scope_of(i)!r}, {e.const(i.site)}"
                return [f"S.acquire_map({where})"]
            return [f"S.fence({e.mask}, 'release', {scope_of(i)!r})"]
        if i.has("async::generic"):  # one way, of shared memory alone; to the async proxy it is the release
            return [f"S.fence_shared({e.mask})"] if i.has("release") else []
        if not i.has("async"):
            return []
        shared = [] if i.has("global") else [f"S.fence_shared({e.mask})"]
        return shared if is_shared(i) else [*shared, f"S.fence_proxy({e.mask}, {ASYNC})"]
    if i.has("mbarrier_init"):
        return []
    order = "sc" if i.root == "membar" or i.has("sc") else order_of(i, "acq_rel")
    return [f"S.fence({e.mask}, {order!r}, {scope_of(i)!r})"]


@handles("bar", "barrier")
def _warp(e: Emitter, i: Instruction) -> list[str] | None:
    """bar.warp.sync. Other barriers end a block, see program.py."""
    return [f"S.meet_warps({e.mask})"]


@handles("shfl")
def _shuffle(e: Emitter, i: Instruction) -> list[str] | None:
    d, a, b, c = i.args[:4]
    both = e.items(d)
    kind = next(part for part in i.parts if part in ("up", "down", "bfly", "idx"))
    lines = [f"v, t = S.shuffle({kind!r}, {e.read(a, 'b32')}, {e.read(b, 'u32')}, {e.read(c, 'u32')})"]
    return lines + [line for x, t, v in zip(both, ("b32", "pred"), "vt") for line in e.put(x, t, v)]


@handles("vote")
def _vote(e: Emitter, i: Instruction) -> list[str] | None:
    d, p = i.args[:2]
    kind = next(part for part in i.parts if part in ("ballot", "all", "any", "uni"))
    t = "b32" if kind == "ballot" else "pred"
    return e.put(d, t, f"S.vote({kind!r}, {e.read(p, 'pred')}, {e.mask})")


@handles("match")
def _match(e: Emitter, i: Instruction) -> list[str] | None:
    """Lanes of the warp that take part and hold the same; of `all`: whether all hold the same. PTX ISA 9.7.13.10."""
    both, t, kind = e.items(i.args[0]), typed(i), "all" if i.has("all") else "any"
    lines = [f"v, t = S.match({kind!r}, {e.read(i.args[1], t)}, {e.mask})"]
    return lines + [line for x, t, v in zip(both, ("b32", "pred"), "vt") for line in e.put(x, t, v)]


@handles("redux")
def _reduce(e: Emitter, i: Instruction) -> list[str] | None:
    t = typed(i)
    operation = next((part for part in i.parts if part in ("add", "min", "max", "and", "or", "xor")), "")
    if not operation or i.has("NaN", "abs"):
        return None
    return e.put(i.args[0], t, f"S.reduce({operation!r}, {e.read(i.args[1], t)}, {e.mask})")


@handles("elect")
def _elect(e: Emitter, i: Instruction) -> list[str] | None:
    """The lowest lane of the warp that takes part."""
    both = e.items(i.args[0])
    lines = [f"v, t = S.elect({e.mask})"]
    return lines + [line for x, t, v in zip(both, ("b32", "pred"), "vt") for line in e.put(x, t, v)]


@handles("activemask")
def _active(e: Emitter, i: Instruction) -> list[str] | None:
    return e.put(i.args[0], "b32", f"S.vote('ballot', np.bool_(True), {e.mask})")


@handles("nanosleep", "prefetch", "prefetchu", "discard", "applypriority", "pragma", "setmaxnreg", "griddepcontrol")
def _nothing(e: Emitter, i: Instruction) -> list[str] | None:
    """Changes no value. griddepcontrol: launches of a stream run one after another here."""
    return []


@handles("createpolicy")
def _policy(e: Emitter, i: Instruction) -> list[str] | None:
    return e.put(i.args[0], "b64", e.const(TYPES["b64"][1](0)))


@handles("trap")
def _trap(e: Emitter, i: Instruction) -> list[str] | None:
    return [f"S.trap({e.const(i.site)})"]


@handles("call")
def _call(e: Emitter, i: Instruction) -> list[str] | None:
    """Of __assertfail alone, which a device_assert that fails comes to: CUDA C++ Programming Guide, "Assertion"."""
    name = next((x.name for x in i.args if isinstance(x, Symbol)), "")
    if name != "__assertfail":
        raise i.unsupported(f"a call of {name}; replace= gives a device function another body")
    return [f"S.trap({e.const(i.site)}, {'device_assert: ' + (i.note or 'false')!r})"]
