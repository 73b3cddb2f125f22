"""Opcodes for memory and for communication between lanes: loads, stores, atomics, fences, barriers, shuffles.

PTX ISA 8.8: 9.7.9 (ld, st, mov), 9.7.13 (barriers, fences, atom, red, vote, redux, elect), 9.7.9.6 (shfl).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .alu import BY_WIDTH, HALVES, SIGNED, TYPES, Emitter, dtype_of, handles, size_of, typed
from .clocks import ALIAS, ASYNC
from .numerics import REDUCTIONS, halves
from .parse import Address, Instruction, Operand, Reg, Symbol, Vector

Array = np.ndarray[Any, Any]
SHARED, LOCALLY, CONSTANT = "shared memory", "local memory", "constant memory"
ORDERS = {
    "acquire": "acquire", "release": "release", "acq_rel": "acq_rel", "relaxed": "relaxed",
    "volatile": "relaxed", "mmio": "relaxed",
}  # fmt: skip
SCOPES = {"cta": "cta", "cluster": "cta", "gpu": "gpu", "gl": "gpu", "sys": "sys", "volatile": "sys", "mmio": "sys"}


def order_of(i: Instruction, default: str = "weak") -> str:
    """The order of an access. volatile is relaxed at system scope: PTX ISA 8.4.2."""
    return ORDERS.get(i.among(ORDERS), default)


def scope_of(i: Instruction, default: str = "gpu") -> str:
    """The scope of an access. A cluster is one program here."""
    return SCOPES.get(i.among(SCOPES), default)


def is_strong(i: Instruction) -> bool:
    """Whether the instruction may observe another program; other programs may run before it."""
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
    return int(i.among(("v2", "v4", "v8"), "v1")[1:])


def _call(e: Emitter, i: Instruction, access: str, at: Operand, what: str) -> str:
    """A load or store of the memory that the opcode names: shared, local or any other."""
    memory = SHARED if is_shared(i) else LOCALLY if i.has("local") else ""
    how = f"{('nc' if i.has('nc') else order_of(i))!r}, {scope_of(i)!r}, {e.const(i.site)}"
    return f"S.{access}({memory!r}, {e.address(at)}, {what}, {e.mask}, {how})"


@handles("ld", "ldu")
def _load(e: Emitter, i: Instruction) -> list[str] | None:
    t, (d, at, *_) = typed(i), i.args
    targets, nb = e.items(d), size_of(t)
    if i.has("const"):
        return None
    if i.has("param"):
        assert isinstance(at, Address)
        if isinstance(at.base, Reg):  # one of several parameters, chosen at run time
            chosen = f"S.chosen_parameter({e.address(at)}, {e.mask}, {dtype_of(t)})"
            return e.put(d, t, chosen) if len(targets) == 1 else None
        assert isinstance(at.base, Symbol)
        values = [f"S.parameter({at.base.name!r}, {at.offset + n * nb}, {dtype_of(t)})" for n in range(len(targets))]
        return [line for x, value in zip(targets, values) for line in e.put(x, t, value)]
    if len(targets) != counted(i):
        raise i.unsupported("registers")
    read = _call(e, i, "load", at, f"{nb}, {len(targets)}")
    return [f"v = {read}", *(line for n, x in enumerate(targets) for line in into(e, x, t, f"v[:, {n}]"))]


def into(e: Emitter, x: Operand, t: str, value: str) -> list[str]:
    """Writes the bits that active lanes received to a register; sign-extended for s types."""
    if x == Symbol("_"):
        return []
    assert isinstance(x, Reg)
    if t[0] == "s":
        value = f"{value}.view({dtype_of(t)})"
    view = (SIGNED if t[0] == "s" else BY_WIDTH)[x.width]
    return [f"{view}[{x.number}][{'...' if e.mask == 'True' else e.mask}] = {value}"]


@handles("st")
def _store(e: Emitter, i: Instruction) -> list[str] | None:
    if i.has("param"):
        return []  # an argument of a call
    if i.has("async"):
        return None
    t, (at, value, *_) = typed(i), i.args
    nb = size_of(t)
    return [_call(e, i, "store", at, f"[{e.reads(e.items(value), f'b{8 * nb}')}], {nb}")]


ATOMICS = (*REDUCTIONS, "exch", "cas", "inc", "dec")


@handles("atom", "red")
def _atomic(e: Emitter, i: Instruction) -> list[str] | None:
    t, operation = typed(i), i.among(ATOMICS)
    d, at, *values = i.args if i.root == "atom" else (Symbol("_"), *i.args)
    if not operation or i.has("b128", "async"):
        return None
    assert isinstance(at, Address)
    nb, count = size_of(t), counted(i)
    operands = [[e.read(x, t) for x in e.items(value)] for value in values[: 2 if operation == "cas" else 1]]
    lines = []
    for n, x in enumerate(e.items(d) if isinstance(d, Vector) else (d,) * count):
        where = e.address(at._replace(offset=at.offset + n * nb))
        what = f"{operation!r}, {t!r}, {where}, [{', '.join(each[n] for each in operands)}], {e.mask}"
        if is_shared(i):
            call = f"S.atomic_shared({what}, {e.const(i.site)})"
        else:
            how = f"{order_of(i, 'relaxed')!r}, {scope_of(i)!r}, {e.const(i.site)}"
            reads = operation != "exch" or d not in e.unread
            call = f"S.atomic({what}, {how}, {i.root == 'atom'}, {reads})"
        lines += [f"v = {call}", *into(e, x, f"b{8 * nb}", "v")]
    return lines


def updated(operation: str, t: str, given: Sequence[Array]) -> tuple[Any, np.dtype[Any]]:
    """The function new(lane, old) of an atomic, which returns None for no write, and its dtype. PTX ISA 9.7.13.5."""
    dtype, (a, *swap) = np.dtype(TYPES[t][1]), given
    if t in HALVES or t == "f16":
        return lambda n, old: halves(operation, t, False, False, old, a[n]), dtype
    if operation == "cas":
        return lambda n, old: swap[0][n] if old == a[n] else None, dtype
    return lambda n, old: FUNCTIONS[operation](old, a[n]), dtype


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "inc": lambda old, a: old - old if old >= a else old + type(old)(1),
    "dec": lambda old, a: a if old == 0 or old > a else old - type(old)(1),
    **REDUCTIONS, "exch": lambda old, a: a,
}  # fmt: skip


@handles("fence", "membar")
def _fence(e: Emitter, i: Instruction) -> list[str] | None:
    """membar is fence.sc: PTX ISA 9.7.13.4. A proxy fence applies to shared memory, global memory, or both."""
    if i.has("proxy"):
        if i.has("alias"):
            return [f"S.fence_proxy({e.mask}, {ALIAS})"]
        if i.has("tensormap::generic"):
            if i.has("acquire"):
                return [f"S.acquire_map({e.address(i.args[0])}, {e.mask}, {scope_of(i)!r}, {e.const(i.site)})"]
            return [f"S.fence({e.mask}, 'release', {scope_of(i)!r})"]
        if i.has("async::generic"):  # one way, shared memory only; the release makes writes visible to the async proxy
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
    """bar.warp.sync. All other barriers end a block, see program.py."""
    return [f"S.meet_warps({e.mask})"]


def _and_whether(e: Emitter, d: Operand, call: str) -> list[str]:
    """Writes a value and a predicate to d, which may be d|p."""
    lines = [line for x, t, v in zip(e.items(d), ("b32", "pred"), "vt") for line in e.put(x, t, v)]
    return [f"v, t = {call}", *lines]


@handles("shfl", "vote", "match", "redux", "elect", "activemask")
def _of_warp(e: Emitter, i: Instruction) -> list[str] | None:
    """Communication between active lanes of a warp. elect: the lowest lane; match: the lanes with an equal value."""
    r, (d, *given), kind = i.root, i.args, i.among(KINDS.get(i.root, ()))
    if r in KINDS and not kind:
        return None
    if r == "shfl":
        return _and_whether(e, d, f"S.shuffle({kind!r}, {e.read(given[0], 'b32')}, {e.reads(given[1:3], 'u32')})")
    if r == "match":
        return _and_whether(e, d, f"S.match({kind!r}, {e.read(given[0], typed(i))}, {e.mask})")
    if r == "elect":
        return _and_whether(e, d, f"S.elect({e.mask})")
    if r == "redux":
        call = f"S.reduce({kind!r}, {e.read(given[0], typed(i))}, {e.mask})"
        return None if i.has("NaN", "abs") else e.put(d, typed(i), call)
    predicate = "np.bool_(True)" if r == "activemask" else e.read(given[0], "pred")
    kind = kind or "ballot"
    return e.put(d, "b32" if kind == "ballot" else "pred", f"S.vote({kind!r}, {predicate}, {e.mask})")


KINDS: dict[str, Iterable[str]] = {
    "shfl": ("up", "down", "bfly", "idx"), "vote": ("ballot", "all", "any", "uni"), "match": ("all", "any"),
    "redux": REDUCTIONS,
}  # fmt: skip


@handles(
    "nanosleep", "prefetch", "prefetchu", "discard", "applypriority", "createpolicy", "setmaxnreg", "griddepcontrol"
)
def _nothing(e: Emitter, i: Instruction) -> list[str] | None:
    """No effect here: accesses ignore cache policies, and launches of a stream run one after another."""
    return []


@handles("trap")
def _trap(e: Emitter, i: Instruction) -> list[str] | None:
    return [f"S.trap({e.const(i.site)})"]


@handles("call")
def _assert(e: Emitter, i: Instruction) -> list[str] | None:
    """Supports only __assertfail, the call of a failed device_assert: CUDA C++ Programming Guide, "Assertion"."""
    name = next((x.name for x in i.args if isinstance(x, Symbol)), "")
    if name != "__assertfail":
        raise i.unsupported(f"a call of {name}; pass replace= to give a device function another body")
    return [f"S.trap({e.const(i.site)}, {'device_assert: ' + (i.note or 'false')!r})"]
