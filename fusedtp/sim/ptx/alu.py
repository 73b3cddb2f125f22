"""Scalar opcodes: one PTX instruction to one numpy statement over all lanes of a program.

`Emitter` turns a block of instructions into the body of a Python function of the lanes `S`, once for all lanes and once
for those of a mask `m`. Registers are rows of arrays, seen through one view a type:

    32 bits   u uint32, s int32, f float32        16 bits   h uint16, z int16, g float16
    64 bits   U uint64, I int64, F float64        p predicates

PTX ISA 8.8, section 9.7: 9.7.1 integers, 9.7.3 floats, 9.7.6 comparison and selection, 9.7.8 logic and shifts,
9.7.9 moves and conversions. Approximate functions (ex2, rcp, div.full, ...) are the exactly rounded ones; fma of fp32
rounds twice where the product and sum in fp64 do (once in 2**29 cases); denormals are never flushed. Directed
roundings are those of sums and products of fp32, and of conversions that fp64 holds; others are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .numerics import COMPARISONS
from .parse import LOCAL, Address, Imm, Instruction, Operand, Reg, Special, Symbol, Vector

TYPES: dict[str, tuple[str, Any]] = {
    "b16": ("h", np.uint16), "u16": ("h", np.uint16), "s16": ("z", np.int16), "f16": ("g", np.float16),
    "bf16": ("h", np.uint16), "b32": ("u", np.uint32), "u32": ("u", np.uint32), "s32": ("s", np.int32),
    "f32": ("f", np.float32), "bf16x2": ("u", np.uint32), "f16x2": ("u", np.uint32), "b64": ("U", np.uint64),
    "u64": ("U", np.uint64), "s64": ("I", np.int64), "f64": ("F", np.float64), "pred": ("p", np.bool_),
    "b8": ("", np.uint8), "u8": ("", np.uint8), "s8": ("", np.int8),
}  # fmt: skip
VIEWS = {view: np.dtype(dtype) for view, dtype in TYPES.values() if view}
BY_WIDTH = {16: "h", 32: "u", 64: "U", 1: "p"}
SIGNED = {16: "z", 32: "s", 64: "I"}
COMPARED = dict(
    eq="equal", ne="not_equal", lt="less", le="less_equal", gt="greater", ge="greater_equal",
    lo="less", ls="less_equal", hi="greater", hs="greater_equal",
)  # fmt: skip

DIRECTED = ("rz", "rm", "rp")  # roundings that numpy has not
TO_NEAREST = ("div", "rcp", "sqrt", "rsqrt")

Handler = Callable[["Emitter", Instruction], "list[str] | None"]
HANDLERS: dict[str, Handler] = {}


def handles(*roots: str) -> Callable[[Handler], Handler]:
    """The decorated function translates opcodes that begin so: to lines of Python, or None for one unknown to it."""

    def enter(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(roots, handler))
        return handler

    return enter


def size_of(type_name: str) -> int:
    """Bytes of a type."""
    return int(np.dtype(TYPES[type_name][1]).itemsize)


def typed(i: Instruction) -> str:
    """The last modifier that names a type."""
    for part in reversed(i.parts):
        if part in TYPES:
            return part
    raise i.unsupported("no type that it knows")


class Emitter:
    """Translates one kernel's instructions.

    every     for all lanes, else for those of the mask `m`
    unread    registers that nothing reads
    """

    def __init__(self, every: bool, unread: frozenset[Operand] = frozenset()) -> None:
        self.constants: list[Any] = []
        self.unread = unread
        self.lanes = self.mask = "True" if every else "m"  # `mask`: of the instruction

    def const(self, value: Any) -> str:
        """Numbers as arrays without an axis: numpy takes several times as long for its scalars."""
        self.constants.append(np.asarray(value) if isinstance(value, np.generic) else value)
        return f"K[{len(self.constants) - 1}]"

    def guarded(self, i: Instruction) -> list[str]:
        """Lines of Python. Raises UnsupportedPtx."""
        if i.guard is None:
            return self.one(i)
        self.mask = "k"
        body = self.one(i)
        self.mask = self.lanes
        taken = f"{'~' if i.negated else ''}p[{i.guard.number}]"
        return [
            f"k = {taken}" if self.lanes == "True" else f"k = {taken} & m",
            "if np.count_nonzero(k):",
            *(f"    {line}" for line in body),
        ]

    def one(self, i: Instruction) -> list[str]:
        handler = HANDLERS.get(i.root)
        if handler is None or (i.root in TO_NEAREST and i.has(*DIRECTED)):
            raise i.unsupported()
        try:
            lines = handler(self, i)
        except (KeyError, IndexError, ValueError, TypeError, AssertionError) as error:
            if type(error).__name__ == "UnsupportedPtx":
                raise
            raise i.unsupported(f"{type(error).__name__}: {error}") from None
        if lines is None:
            raise i.unsupported()
        return lines

    # -- operands ----------------------------------------------------------------------------------------------------

    def read(self, x: Operand, t: str) -> str:
        """An operand as type t. A wider register gives its low part, as ld, st and cvt want it."""
        view, dtype = TYPES[t]
        if isinstance(x, Reg):
            width = 1 if t == "pred" else 8 * size_of(t)
            if x.width == width:
                return f"{view}[{x.number}]"
            if x.width > width:
                low = f"{BY_WIDTH[x.width]}[{x.number}].astype(np.uint{width})"
                return low if np.dtype(dtype).kind == "u" else f"{low}.view(np.{np.dtype(dtype).name})"
            raise ValueError(f"{x.name} as {t}")
        if isinstance(x, Imm):
            return self.const(number(x.text, t))
        if isinstance(x, Special) and x.name.startswith("envreg"):
            return f"S.parameter({'%' + x.name!r}, 0, np.uint32)"
        if isinstance(x, Special):
            return f"S.special({x.name!r})"
        if isinstance(x, Symbol) and x.name == "global_smem":
            return self.const(dtype(0))
        if isinstance(x, Symbol) and x.name.startswith(("assertMessage_", "assertFile_", "assertFunc_")):
            return self.const(dtype(0))  # read by no one but __assertfail, see parse
        if isinstance(x, Symbol) and "_param_" in x.name:
            return f"np.{np.dtype(dtype).name}(S.parameter_address({x.name!r}))"
        raise ValueError(f"operand {x}")

    def target(self, x: Operand, t: str) -> str:
        """A register that is written as type t."""
        if not isinstance(x, Reg) or x.width != (1 if t == "pred" else 8 * size_of(t)):
            raise ValueError(f"{x} written as {t}")
        return f"{TYPES[t][0]}[{x.number}]"

    def put(self, x: Operand, t: str, value: str) -> list[str]:
        """Assign: a register that is wider than t is extended, by sign for s types, as ld and cvt do."""
        if isinstance(x, Special | Symbol) or (isinstance(x, Imm) and x.text == "_"):
            return []
        if isinstance(x, Reg) and t != "pred" and x.width > 8 * size_of(t):
            target = f"{(SIGNED if t[0] == 's' else BY_WIDTH)[x.width]}[{x.number}]"
        else:
            target = self.target(x, t)
        if self.mask == "True":
            return [f"{target}[...] = {value}"]
        return [f"np.copyto({target}, {value}, where={self.mask}, casting='unsafe')"]

    def call(self, function: str, x: Operand, t: str, *given: str) -> list[str]:
        """A numpy function into a register."""
        masked = "" if self.mask == "True" else f", where={self.mask}"
        return [f"np.{function}({', '.join(given)}, out={self.target(x, t)}{masked})"]

    def address(self, x: Operand, shared: bool) -> str:
        """int64 of every lane."""
        assert isinstance(x, Address)
        base = x.base
        if isinstance(base, Symbol | Imm):
            if isinstance(base, Symbol) and base.name != "global_smem":
                raise ValueError(f"operand {base}")
            return f"np.full(S.count, {x.offset + (int(base.text, 0) if isinstance(base, Imm) else 0)}, np.int64)"
        if isinstance(base, Reg) and base.width == 64:
            at = f"I[{base.number}]"
        else:
            at = f"{self.read(base, 'u32')}.astype(np.int64)"
        return f"{at} + {self.const(np.int64(x.offset))}" if x.offset else at

    @staticmethod
    def items(x: Operand) -> tuple[Operand, ...]:
        return x.items if isinstance(x, Vector) else (x,)


def number(text: str, t: str) -> Any:
    """A literal as a numpy scalar of a type. PTX ISA 4.5."""
    dtype = np.dtype(TYPES[t][1])
    if found := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
        single = np.array(int(found[1], 16), np.uint32)
        return single.view(np.float32)[()].astype(dtype) if dtype.kind == "f" else dtype.type(int(found[1], 16))
    if found := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", text):
        return np.array(int(found[1], 16), np.uint64).view(np.float64)[()].astype(dtype)
    if dtype.kind == "b":
        return np.bool_(text == "true" if text in ("true", "false") else int(text, 0))
    if dtype.kind == "f" and not text.lower().startswith("0x"):
        return dtype.type(float(text))
    bits = 8 * dtype.itemsize
    value = int(text.rstrip("U"), 0) & ((1 << bits) - 1)
    return np.array(value, f"u{bits // 8}").view(dtype)[()]


# -- arithmetic: 9.7.1, 9.7.3 ------------------------------------------------------------------------------------------


@handles("add", "sub", "mul", "min", "max", "and", "or", "xor")
def _binary(e: Emitter, i: Instruction) -> list[str] | None:
    r, t, (d, a, b) = i.root, typed(i), i.args[:3]
    if i.has("cc"):
        return _carried(e, i)
    if i.has(*DIRECTED):
        return _directed(e, i)
    if i.has("bf16", "bf16x2", "f16x2", "sat", "global") or (r in ("min", "max") and len(i.args) > 3):
        return _halves(e, i)
    if r == "mul" and i.has("wide"):
        return e.put(d, WIDE[t], f"{e.read(a, t)}.astype({WIDER[t]}) * {_const_or(e, b, t)}")
    if r == "mul" and i.has("hi"):
        return e.put(d, t, f"mul_hi({e.read(a, t)}, {e.read(b, t)})")
    if r in ("add", "sub", "mul") and t[0] == "s":
        t = "u" + t[1:]  # the same bits, and no overflow
    if i.has("abs", "xorsign"):
        return e.put(d, t, f"xorsign({r!r}, {e.read(a, t)}, {e.read(b, t)})") if i.has("xorsign") else None
    if r in ("min", "max"):
        relu = i.has("relu")
        name = r if t[0] != "f" or i.has("NaN") else "f" + r
        name = name if name.startswith("f") else name + "imum"
        made = e.call(name, d, t, e.read(a, t), e.read(b, t))
        return made + (e.call("maximum", d, t, e.target(d, t), e.const(TYPES[t][1](0))) if relu else [])
    name = dict(add="add", sub="subtract", mul="multiply").get(r) or f"bitwise_{r}"
    return e.call(name, d, t, e.read(a, t), e.read(b, t))


WIDE = {"s32": "s64", "u32": "u64", "s16": "s32", "u16": "u32"}
WIDER = {"s32": "np.int64", "u32": "np.uint64", "s16": "np.int32", "u16": "np.uint32"}


def _const_or(e: Emitter, x: Operand, t: str) -> str:
    """An operand of type t, widened."""
    if isinstance(x, Imm):
        return e.const(np.dtype(WIDER[t][3:]).type(number(x.text, t)))
    return f"{e.read(x, t)}.astype({WIDER[t]})"


@handles("addc", "madc")
def _carried(e: Emitter, i: Instruction) -> list[str] | None:
    """Sums of 32 bits with a carry, which `cc` writes and `addc` and `madc` add. PTX ISA 9.7.2."""
    t, (d, a, *rest) = typed(i), i.args
    if size_of(t) != 4 or not i.root.startswith(("add", "mad")) or (i.has("hi") and t[0] == "s"):
        return None
    first, *others = (f"{e.read(x, 'u32')}.astype(np.uint64)" for x in (a, *rest))
    if i.root.startswith("mad"):
        first = f"({first} * {others.pop(0)})"
        first = f"({first} >> np.uint64(32))" if i.has("hi") else f"({first} & np.uint64(0xFFFFFFFF))"
    carry = " + S.carry" if i.root.endswith("c") else ""
    lines = [f"v = {first} + {others[0]}{carry}", *e.put(d, "u32", "v.astype(np.uint32)")]
    return lines + ([f"np.copyto(S.carry, v >> np.uint64(32) != 0, where={e.mask})"] if i.has("cc") else [])


@handles("mad", "fma")
def _multiply_add(e: Emitter, i: Instruction) -> list[str] | None:
    t, (d, a, b, c) = typed(i), i.args
    if i.has("cc"):
        return _carried(e, i)
    if i.has(*DIRECTED):
        return _directed(e, i)
    if i.root == "fma":
        x, y, z = (e.read(each, t) for each in (a, b, c)) if t in ("f32", "f64") else ("", "", "")
        if t == "f32":
            made = f"np.multiply({x}, {y}, dtype=np.float64) + {z}"
            return e.put(d, t, f"limited({made})" if i.has("sat") else made)
        return e.put(d, t, f"exact_fma({x}, {y}, {z})") if t == "f64" else _halves(e, i)
    if i.has("wide"):
        wide = WIDE[t]
        return e.put(d, wide, f"{e.read(a, t)}.astype({WIDER[t]}) * {_const_or(e, b, t)} + {e.read(c, wide)}")
    if i.has("hi"):
        return e.put(d, t, f"mul_hi({e.read(a, t)}, {e.read(b, t)}) + {e.read(c, t)}")
    if t[0] == "f":
        return None
    t = "u" + t[1:]
    return e.put(d, t, f"{e.read(a, t)} * {e.read(b, t)} + {e.read(c, t)}")


def _directed(e: Emitter, i: Instruction) -> list[str] | None:
    """Sums and products of fp32, towards zero or an infinity."""
    if typed(i) != "f32" or i.root not in ("add", "sub", "mul", "fma") or i.has("sat"):
        return None
    rounding = next(part for part in i.parts if part in DIRECTED)
    given = ", ".join(e.read(x, "f32") for x in i.args[1:])
    return e.put(i.args[0], "f32", f"directed({rounding!r}, {i.root!r}, {given})")


def _halves(e: Emitter, i: Instruction) -> list[str] | None:
    """Arithmetic of bf16, bf16x2 and f16x2: in fp32, rounded once."""
    if i.root not in ("add", "sub", "mul", "min", "max", "fma") or i.has("cc", "sat"):
        return None
    t = next(part for part in reversed(i.parts) if part in ("bf16", "bf16x2", "f16x2", "f16"))
    given = ", ".join(e.read(x, t) for x in i.args[1:])
    relu = i.has("relu")
    return e.put(i.args[0], t, f"halves({i.root!r}, {t!r}, {relu}, {i.has('NaN')}, {given})")


@handles("neg", "abs", "not", "sqrt", "rsqrt", "rcp", "ex2", "lg2", "sin", "cos", "tanh", "popc", "clz", "brev")
def _unary(e: Emitter, i: Instruction) -> list[str] | None:
    r, t, (d, a) = i.root, typed(i), i.args
    if r in ("popc", "clz", "brev"):
        return e.put(d, "b32" if r != "brev" else t, f"{r}({e.read(a, t)})")
    if r == "not":
        return e.call("logical_not" if t == "pred" else "invert", d, t, e.read(a, t))
    if t in ("bf16", "bf16x2", "f16x2"):
        if r in ("ex2", "tanh"):
            return e.put(d, t, f"halves({r!r}, {t!r}, False, False, {e.read(a, t)})")
        if r not in ("neg", "abs"):
            return None
        sign = {"bf16": 0x8000, "bf16x2": 0x80008000, "f16x2": 0x80008000}[t]
        bits = TYPES[t][1](sign)
        how = f"^ {e.const(bits)}" if r == "neg" else f"& {e.const(~bits)}"
        return e.put(d, t, f"{e.read(a, t)} {how}")
    if r == "rcp":
        return e.call("divide", d, t, e.const(TYPES[t][1](1)), e.read(a, t))
    if r == "rsqrt":
        return e.put(d, t, f"(1 / np.sqrt({e.read(a, t)}.astype(np.float64))).astype(np.{np.dtype(TYPES[t][1])})")
    names = dict(neg="negative", abs="absolute", ex2="exp2", lg2="log2")
    return e.call(names.get(r, r), d, t, e.read(a, t))


@handles("div", "rem")
def _divide(e: Emitter, i: Instruction) -> list[str] | None:
    t, (d, a, b) = typed(i), i.args
    if t[0] == "f":
        return e.call("divide", d, t, e.read(a, t), e.read(b, t)) if i.root == "div" else None
    return e.put(d, t, f"{i.root}_towards_zero({e.read(a, t)}, {e.read(b, t)})")


@handles("copysign")
def _copysign(e: Emitter, i: Instruction) -> list[str] | None:
    t, (d, a, b) = typed(i), i.args
    return e.call("copysign", d, t, e.read(b, t), e.read(a, t))


# -- logic and shifts: 9.7.8 -------------------------------------------------------------------------------------------


@handles("shl", "shr")
def _shift(e: Emitter, i: Instruction) -> list[str] | None:
    """Shifts by the width or more give 0, or the sign."""
    t, (d, a, b) = typed(i), i.args
    bits, left = 8 * size_of(t), i.root == "shl"
    name = "left_shift" if left else "right_shift"
    if isinstance(b, Imm):
        by = min(int(b.text, 0), bits)
        if by < bits:
            return e.call(name, d, t, e.read(a, t), e.const(TYPES[t][1](by)))
        if left or t[0] != "s":
            return e.put(d, t, e.const(TYPES[t][1](0)))
        return e.call(name, d, t, e.read(a, t), e.const(TYPES[t][1](bits - 1)))
    return e.put(d, t, f"shift({left}, {e.read(a, t)}, {e.read(b, 'u32')})")


@handles("shf")
def _funnel(e: Emitter, i: Instruction) -> list[str] | None:
    d, a, b, c = i.args
    left, wrap = i.has("l"), i.has("wrap")
    return e.put(d, "b32", f"funnel({left}, {wrap}, *({', '.join(e.read(x, 'u32') for x in (a, b, c))}))")


@handles("bfe")
def _extract(e: Emitter, i: Instruction) -> list[str] | None:
    t, (d, a, b, c) = typed(i), i.args
    return e.put(d, t, f"bit_field({e.read(a, t)}, {e.read(b, 'u32')}, {e.read(c, 'u32')})")


@handles("bfi")
def _insert(e: Emitter, i: Instruction) -> list[str] | None:
    t, (d, a, b, c, n) = typed(i), i.args
    given = f"{e.read(a, t)}, {e.read(b, t)}, {e.read(c, 'u32')}, {e.read(n, 'u32')}"
    return e.put(d, t, f"insert_field({given})")


@handles("prmt")
def _permute(e: Emitter, i: Instruction) -> list[str] | None:
    if i.op != "prmt.b32":
        return None
    d, *given = i.args
    return e.put(d, "b32", f"permute({', '.join(e.read(x, 'u32') for x in given)})")


@handles("lop3")
def _lookup(e: Emitter, i: Instruction) -> list[str] | None:
    d, a, b, c, table = i.args
    assert isinstance(table, Imm)
    x, y, z = (e.read(each, "b32") for each in (a, b, c))
    bits = int(table.text, 0)
    upper, lower = (half.format(y=y, z=z) for half in (LOGIC[bits >> 4], LOGIC[bits & 15]))
    if upper == lower:
        return e.put(d, "b32", f"{upper} | {e.const(np.uint32(0))}")
    parts = [f"({x} & ({upper}))" if bits >> 4 else "", f"(~{x} & ({lower}))" if bits & 15 else ""]
    return e.put(d, "b32", " | ".join(filter(None, parts)))


# of y and z by the four bits of a table: bit 2 y + z. PTX ISA 9.7.8.6
LOGIC = (
    "{y} & 0", "~({y} | {z})", "~{y} & {z}", "~{y}", "{y} & ~{z}", "~{z}", "{y} ^ {z}", "~({y} & {z})",
    "{y} & {z}", "~({y} ^ {z})", "{z}", "~{y} | {z}", "{y}", "{y} | ~{z}", "{y} | {z}", "{y} | ~{y}",
)  # fmt: skip


# -- comparison and selection: 9.7.6 -----------------------------------------------------------------------------------


@handles("setp")
def _compare(e: Emitter, i: Instruction) -> list[str] | None:
    t = typed(i)
    d, a, b, *third = i.args
    x, y = e.read(a, t), e.read(b, t)
    if t == "bf16":
        x, y = f"from_bf16({x})", f"from_bf16({y})"
    kind = i.parts[1]
    both = e.items(d)
    plain = not third and len(both) == 1
    if kind in COMPARED and plain and not (kind == "ne" and t in FLOATS):
        return e.call(COMPARED[kind], d, "pred", x, y)
    floats = t[0] == "f" or t == "bf16"
    if kind in COMPARED:  # ordered: false with a NaN
        test = f"np.{COMPARED[kind]}({x}, {y})"
        test = f"({test} & ~np.isnan({x}) & ~np.isnan({y}))" if floats and kind == "ne" else test
    elif kind in ("num", "nan"):
        test = f"(np.isnan({x}) | np.isnan({y}))"
        test = f"~{test}" if kind == "num" else test
    elif kind[:-1] in COMPARED and kind[-1] == "u":
        test = f"(np.{COMPARED[kind[:-1]]}({x}, {y}) | np.isnan({x}) | np.isnan({y}))"
    else:
        return None
    lines = [f"t = {test}"]
    values = ["t", "~t"][: len(both)]
    if third:
        sign = {"and": "&", "or": "|", "xor": "^"}[i.parts[2]]
        values = [f"({value}) {sign} {e.read(third[0], 'pred')}" for value in values]
    return lines + [line for x_, value in zip(both, values) for line in e.put(x_, "pred", value)]


@handles("set")
def _set(e: Emitter, i: Instruction) -> list[str] | None:
    """Of two halves alone. PTX ISA 9.7.7.1."""
    if i.parts[2:] != ("f16x2", "f16x2") or i.parts[1] not in COMPARISONS:
        return None
    given = ", ".join(e.read(x, "f16x2") for x in i.args[1:])
    return e.put(i.args[0], "f16x2", f"compared({i.parts[1]!r}, {given})")


@handles("selp")
def _select(e: Emitter, i: Instruction) -> list[str] | None:
    t, (d, a, b, p) = typed(i), i.args
    return e.put(d, t, f"np.where({e.read(p, 'pred')}, {e.read(a, t)}, {e.read(b, t)})")


# -- moves and conversions: 9.7.9 --------------------------------------------------------------------------------------


@handles("mov")
def _move(e: Emitter, i: Instruction) -> list[str] | None:
    t, (d, a) = typed(i), i.args
    if isinstance(a, Vector):  # packed
        bits = 8 * size_of(t) // len(a.items)
        if bits == 8:
            return None
        wide = TYPES[t][1]
        parts = [f"{e.read(x, f'b{bits}')}.astype(np.{wide.__name__})" for x in a.items]
        shifts = [f" << {e.const(wide(bits * n))}" if n else "" for n in range(len(parts))]
        return e.put(d, t, " | ".join(f"({x}{by})" for x, by in zip(parts, shifts, strict=True)))
    if isinstance(d, Vector):  # unpacked
        bits = 8 * size_of(t) // len(d.items)
        if bits == 8:
            return None
        wide, source = TYPES[t][1], e.read(a, t)
        return [  # the upper bits are lost where it is put
            line
            for n, x in enumerate(d.items)
            if isinstance(x, Reg)
            for line in e.put(x, f"b{bits}", f"{source} >> {e.const(wide(bits * n))}" if n else source)
        ]
    if isinstance(a, Special):
        return e.put(d, t, f"np.asarray({e.read(a, t)}).astype(np.{np.dtype(TYPES[t][1]).name})")
    return e.put(d, t, e.read(a, t))


@handles("cvta")
def _address(e: Emitter, i: Instruction) -> list[str] | None:
    """Generic addresses are global ones here, or in the window of local memory; shared memory has none."""
    d, a = i.args
    if i.has("shared") or not i.has("u64"):
        return None
    window = f" {'-' if i.has('to') else '+'} {e.const(np.uint64(LOCAL))}" if i.has("local") else ""
    return e.put(d, "u64", e.read(a, "u64") + window)


FLOATS = ("f16", "bf16", "f32", "f64")
PAIRS = ("bf16x2", "f16x2", "e4m3x2", "e5m2x2")
ROUNDED = ("rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi")


@handles("cvt")
def _convert(e: Emitter, i: Instruction) -> list[str] | None:
    types = [part for part in i.parts if part in TYPES or part in PAIRS or part == "tf32"]
    if len(types) != 2:
        return None
    to, of = types
    d, *given = i.args
    rounding = next((part for part in i.parts if part in ROUNDED), "")
    saturated = i.has("sat", "satfinite")
    if to in PAIRS or of in PAIRS:
        if rounding != "rn" and (rounding, to, of) != ("rz", "f16x2", "f32"):
            return None
        register = {"e4m3x2": "b16", "e5m2x2": "b16"}
        source = ", ".join(e.read(x, register.get(of, "b32" if of in PAIRS else of)) for x in given)
        made = f"pairs({to!r}, {of!r}, {i.has('relu')}, {source}, cut={rounding == 'rz'})"
        return e.put(d, register.get(to, "b32"), made)
    if to == "tf32":
        return e.put(d, "b32", f"to_tf32({e.read(given[0], 'f32')}, {rounding!r})")
    source = e.read(given[0], of)
    if of == "bf16":
        source = f"from_bf16({source})"
    if i.has("relu"):
        return None
    if to == "bf16":
        how = {"rz": ", cut=True", "rn": "", "": ""}.get(rounding)
        return None if how is None else e.put(d, "b16", f"to_bf16({source}{how})")
    if to in FLOATS:
        if of in FLOATS and rounding[-1:] == "i":
            source = f"np.{dict(rni='rint', rzi='trunc', rmi='floor', rpi='ceil')[rounding]}({source})"
        if rounding in DIRECTED:
            in_fp64 = of in FLOATS or size_of(of) <= 4  # exactly
            if to == "f64" or saturated or not in_fp64:
                return None
            how = f"dtype=np.{np.dtype(TYPES[to][1]).name}"
            return e.put(d, to, f"directed({rounding!r}, 'mul', {source}, np.float64(1), {how})")
        made = f"np.asarray({source}).astype(np.{np.dtype(TYPES[to][1]).name})"
        return e.put(d, to, f"limited({made})" if saturated else made)
    if of in FLOATS:
        return e.put(d, to, f"to_integer({source}, np.{np.dtype(TYPES[to][1]).name}, {rounding!r})")
    kept = f"np.{np.dtype(TYPES[to][1]).name}"
    if saturated:
        return e.put(d, to, f"saturate({source}, {kept})")
    return e.put(d, to, f"{source}.astype({kept})")
