"""Scalar opcodes: translates one PTX instruction into one numpy statement over all lanes of a program.

`Emitter` turns a block of instructions into the body of a Python function of the lanes `S`: one version for all lanes,
one for those of a mask `m`. Registers are rows of arrays, with one view per type:

    32 bits   u uint32, s int32, f float32        16 bits   h uint16, z int16, g float16
    64 bits   U uint64, I int64, F float64        p predicates

PTX ISA 8.8, section 9.7: 9.7.1 integers, 9.7.3 floats, 9.7.6 comparison and selection, 9.7.8 logic and shifts,
9.7.9 moves and conversions. Approximate functions (ex2, rcp, div.full, ...) are rounded exactly. fma of fp32 is done in
fp64, so it rounds twice in one of 2**29 cases. Denormals are never flushed. Directed rounding is supported for sums and
products of fp32, and for conversions that are exact in fp64; other uses are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from .parse import LOCAL, Address, Imm, Instruction, Operand, Reg, Special, Symbol, UnsupportedPtx, Vector

TYPES: dict[str, tuple[str, Any]] = {
    "b16": ("h", np.uint16), "u16": ("h", np.uint16), "s16": ("z", np.int16), "f16": ("g", np.float16),
    "bf16": ("h", np.uint16), "b32": ("u", np.uint32), "u32": ("u", np.uint32), "s32": ("s", np.int32),
    "f32": ("f", np.float32), "bf16x2": ("u", np.uint32), "f16x2": ("u", np.uint32), "b64": ("U", np.uint64),
    "u64": ("U", np.uint64), "s64": ("I", np.int64), "f64": ("F", np.float64), "pred": ("p", np.bool_),
    "b8": ("", np.uint8), "u8": ("", np.uint8), "s8": ("", np.int8),
    "s16x2": ("u", np.uint32), "u16x2": ("u", np.uint32),
}  # fmt: skip
VIEWS = {view: np.dtype(dtype) for view, dtype in TYPES.values() if view}
BY_WIDTH = {16: "h", 32: "u", 64: "U", 1: "p"}
SIGNED = {16: "z", 32: "s", 64: "I"}
COMPARED = dict(
    eq="equal", ne="not_equal", lt="less", le="less_equal", gt="greater", ge="greater_equal",
    lo="less", ls="less_equal", hi="greater", hs="greater_equal",
)  # fmt: skip

READ_BY_ASSERT = ("assertMessage_", "assertFile_", "assertFunc_")  # only by __assertfail, see parse
FLOATS = ("f16", "bf16", "f32", "f64")
HALVES = ("bf16", "bf16x2", "f16x2")  # types without a numpy dtype
DIRECTED = ("rz", "rm", "rp")  # rounding modes that numpy lacks
TO_NEAREST = ("div", "rcp", "sqrt", "rsqrt")

Handler = Callable[["Emitter", Instruction], "list[str] | None"]
HANDLERS: dict[str, Handler] = {}


def handles(*roots: str) -> Callable[[Handler], Handler]:
    """Registers a translator of opcodes with these roots; it returns lines of Python, or None if unsupported."""

    def enter(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(roots, handler))
        return handler

    return enter


def size_of(type_name: str) -> int:
    """Bytes of a type."""
    return int(np.dtype(TYPES[type_name][1]).itemsize)


def dtype_of(type_name: str) -> str:
    """The numpy name of a type, for a line of Python."""
    return f"np.{TYPES[type_name][1].__name__}"


def typed(i: Instruction) -> str:
    """The last modifier that names a type."""
    for part in reversed(i.parts):
        if part in TYPES:
            return part
    raise i.unsupported("no known type")


class Emitter:
    """Translates one kernel's instructions.

    every     for all lanes; otherwise for those of the mask `m`
    unread    registers that are never read
    """

    def __init__(self, every: bool, unread: frozenset[Operand] = frozenset()) -> None:
        self.constants: list[Any] = []
        self.unread = unread
        self.lanes = self.mask = "True" if every else "m"  # `mask`: of the current instruction

    def const(self, value: Any) -> str:
        """A constant of the generated code. Numbers become 0-d arrays: numpy scalars are several times slower."""
        self.constants.append(np.asarray(value) if isinstance(value, np.generic) else value)
        return f"K[{len(self.constants) - 1}]"

    def literal(self, value: int, t: str) -> str:
        return self.const(TYPES[t][1](value))

    def guarded(self, i: Instruction) -> list[str]:
        """Lines of Python for an instruction and its guard. Raises UnsupportedPtx."""
        if i.guard is None:
            return self.one(i)
        self.mask = "k"
        body = self.one(i)
        self.mask = self.lanes
        taken = f"{'~' if i.negated else ''}p[{i.guard.number}]{'' if self.lanes == 'True' else ' & m'}"
        return [f"k = {taken}", "if np.count_nonzero(k):", *(f"    {line}" for line in body or ["pass"])]

    def one(self, i: Instruction) -> list[str]:
        handler = HANDLERS.get(i.root)
        if handler is None or (i.root in TO_NEAREST and i.has(*DIRECTED)):
            raise i.unsupported()
        try:
            lines = handler(self, i)
        except UnsupportedPtx:
            raise
        except (AttributeError, KeyError, IndexError, ValueError, TypeError, AssertionError) as error:
            raise i.unsupported(f"{type(error).__name__}: {error}") from None
        if lines is None:
            raise i.unsupported()
        return lines

    # -- operands ----------------------------------------------------------------------------------------------------

    def read(self, x: Operand, t: str) -> str:
        """An operand as type t. A wider register gives its low part, as for ld, st and cvt."""
        view, dtype = TYPES[t]
        if isinstance(x, Reg):
            width = 1 if t == "pred" else 8 * size_of(t)
            if x.width == width:
                return f"{view}[{x.number}]"
            if x.width > width:
                low = f"{BY_WIDTH[x.width]}[{x.number}].astype(np.uint{width})"
                return low if np.dtype(dtype).kind == "u" else f"{low}.view({dtype_of(t)})"
            raise ValueError(f"{x.name} as {t}")
        if isinstance(x, Imm):
            return self.const(number(x.text, t))
        if isinstance(x, Special):
            parameter = f"S.parameter({'%' + x.name!r}, 0, np.uint32)"
            return parameter if x.name.startswith("envreg") else f"S.special({x.name!r})"
        if isinstance(x, Symbol) and (x.name == "global_smem" or x.name.startswith(READ_BY_ASSERT)):
            return self.literal(0, t)
        if isinstance(x, Symbol) and "_param_" in x.name:
            return f"{dtype_of(t)}(S.parameter_address({x.name!r}))"
        raise ValueError(f"operand {x}")

    def reads(self, given: Iterable[Operand], t: str) -> str:
        """Operands as arguments of a function."""
        return ", ".join(self.read(x, t) for x in given)

    def target(self, x: Operand, t: str) -> str:
        """A destination register of type t."""
        if not isinstance(x, Reg) or x.width != (1 if t == "pred" else 8 * size_of(t)):
            raise ValueError(f"{x} written as {t}")
        return f"{TYPES[t][0]}[{x.number}]"

    def put(self, x: Operand, t: str, value: str) -> list[str]:
        """Assign to a register. A register wider than t is extended, with the sign for s types, as for ld and cvt."""
        if x == Symbol("_"):
            return []
        if isinstance(x, Reg) and t != "pred" and x.width > 8 * size_of(t):
            target = f"{(SIGNED if t[0] == 's' else BY_WIDTH)[x.width]}[{x.number}]"
        else:
            target = self.target(x, t)
        if self.mask == "True":
            return [f"{target}[...] = {value}"]
        return [f"np.copyto({target}, {value}, where={self.mask}, casting='unsafe')"]

    def call(self, function: str, x: Operand, t: str, *given: str) -> list[str]:
        """Write the result of a numpy function to a register."""
        masked = "" if self.mask == "True" else f", where={self.mask}"
        return [f"np.{function}({', '.join(given)}, out={self.target(x, t)}{masked})"]

    def address(self, x: Operand) -> str:
        """The address of every lane, int64."""
        assert isinstance(x, Address)
        base = x.base
        if isinstance(base, Imm) or base == Symbol("global_smem"):
            return f"np.full(S.count, {x.offset + (int(base.text, 0) if isinstance(base, Imm) else 0)}, np.int64)"
        if isinstance(base, Symbol):
            raise ValueError(f"operand {base}")
        wide = isinstance(base, Reg) and base.width == 64
        at = self.read(base, "s64") if wide else f"{self.read(base, 'u32')}.astype(np.int64)"
        return f"{at} + {self.const(np.int64(x.offset))}" if x.offset else at

    @staticmethod
    def items(x: Operand) -> tuple[Operand, ...]:
        return x.items if isinstance(x, Vector) else (x,)


def number(text: str, t: str) -> Any:
    """A literal as a numpy scalar of a type. PTX ISA 4.5."""
    dtype = np.dtype(TYPES[t][1])
    if found := re.fullmatch(r"0[fFdD]([0-9a-fA-F]{8}|[0-9a-fA-F]{16})", text):
        bits = np.array(int(found[1], 16), f"u{len(found[1]) // 2}")
        return (bits.view(f"f{bits.itemsize}") if dtype.kind == "f" else bits).astype(dtype)[()]
    if dtype.kind == "b":
        return np.bool_(int(text, 0))
    if dtype.kind == "f" and not text.lower().startswith("0x"):
        return dtype.type(float(text))
    return np.array(int(text.rstrip("U"), 0) % (1 << 8 * dtype.itemsize), f"u{dtype.itemsize}").view(dtype)[()]


# -- arithmetic: 9.7.1, 9.7.3 ------------------------------------------------------------------------------------------


@handles("add", "sub", "mul", "min", "max", "and", "or", "xor", "mad", "fma", "div", "rem")
def _arithmetic(e: Emitter, i: Instruction) -> list[str] | None:
    r, t, (d, *given) = i.root, typed(i), i.args
    if i.has("cc"):
        return _carried(e, i)
    if i.has(*DIRECTED):
        return _directed(e, i)
    floats = t in FLOATS or t in HALVES
    if len(given) != (3 if r in ("mad", "fma") else 2) or (r in OF_INTEGERS if floats else r == "fma"):
        return None
    if (i.has("sat") and (r, t) != ("fma", "f32")) or (i.has("xorsign") and t in HALVES):
        return None
    if r != "div" and (t in HALVES or (r, t) == ("fma", "f16")):
        return e.put(d, t, f"halves({r!r}, {t!r}, {i.has('relu')}, {i.has('NaN')}, {e.reads(given, t)})")
    if t.endswith("16x2"):
        assert r in ("add", "min", "max") and not i.has("relu")
        return e.put(d, t, f"of_pairs({r!r}, {t!r}, {e.reads(given, t)})")
    if i.has("wide"):
        product = " * ".join(_widened(e, x, t) for x in given[:2])
        return e.put(d, WIDE[t], " + ".join([product, *(e.read(x, WIDE[t]) for x in given[2:])]))
    if t[0] == "s" and r in ("add", "sub", "mul", "mad") and not i.has("hi"):
        t = "u" + t[1:]  # the same bits, and no overflow
    x, y, *z = (e.read(each, t) for each in given)
    if i.has("hi"):
        return e.put(d, t, " + ".join([f"mul_hi({x}, {y})", *z]))
    function = f"f{r}" if t[0] == "f" and not i.has("NaN") else f"{r}imum"
    if i.has("abs", "xorsign"):
        return e.put(d, t, f"xorsign(np.{function}, {x}, {y})") if i.has("xorsign") else None
    if r in ("min", "max"):
        made = e.call(function, d, t, x, y)
        return made + (e.call("maximum", d, t, e.target(d, t), e.literal(0, t)) if i.has("relu") else [])
    if r == "fma" and t == "f32":
        value = f"np.multiply({x}, {y}, dtype=np.float64) + {z[0]}"
        return e.put(d, t, f"limited({value})" if i.has("sat") else value)
    if r == "fma":
        return e.put(d, t, f"exact_fma({x}, {y}, {z[0]})")
    if r == "mad":
        return e.put(d, t, f"{x} * {y} + {z[0]}")
    if r in ("div", "rem") and not floats:
        return e.put(d, t, f"{r}_towards_zero({x}, {y})")
    return e.call(BINARY[r], d, t, x, y)


OF_INTEGERS = ("mad", "rem", "and", "or", "xor")
BINARY = {
    "add": "add", "sub": "subtract", "mul": "multiply", "div": "divide",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
}  # fmt: skip
WIDE = {"s32": "s64", "u32": "u64", "s16": "s32", "u16": "u32"}


def _widened(e: Emitter, x: Operand, t: str) -> str:
    """An operand of type t, widened to twice the bits."""
    if isinstance(x, Imm):
        return e.const(TYPES[WIDE[t]][1](number(x.text, t)))
    return f"{e.read(x, t)}.astype({dtype_of(WIDE[t])})"


@handles("addc", "madc")
def _carried(e: Emitter, i: Instruction) -> list[str] | None:
    """32-bit sums with carry: `cc` writes the carry, `addc` and `madc` add it. PTX ISA 9.7.2."""
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


def _directed(e: Emitter, i: Instruction) -> list[str] | None:
    """fp32 sums and products rounded towards zero or an infinity."""
    if typed(i) != "f32" or i.root not in ("add", "sub", "mul", "fma") or i.has("sat"):
        return None
    return e.put(i.args[0], "f32", f"directed({i.among(DIRECTED)!r}, {i.root!r}, {e.reads(i.args[1:], 'f32')})")


UNARY = dict(
    neg="negative", abs="absolute", sqrt="sqrt", ex2="exp2", lg2="log2", sin="sin", cos="cos", tanh="tanh",
)  # fmt: skip


@handles("not", "rsqrt", "rcp", *UNARY)
def _unary(e: Emitter, i: Instruction) -> list[str] | None:
    r, t, (d, a) = i.root, typed(i), i.args
    x = e.read(a, t)
    if r == "not":
        return e.call("logical_not" if t == "pred" else "invert", d, t, x)
    if t in HALVES:
        if r in ("ex2", "tanh"):
            return e.put(d, t, f"halves({r!r}, {t!r}, False, False, {x})")
        sign = TYPES[t][1](0x8000 if t == "bf16" else 0x80008000)
        how = dict(neg=f"^ {e.const(sign)}", abs=f"& {e.const(~sign)}").get(r)
        return e.put(d, t, f"{x} {how}") if how else None
    if r == "rcp":
        return e.call("divide", d, t, e.literal(1, t), x)
    if r == "rsqrt":
        return e.put(d, t, f"(1 / np.sqrt({x}.astype(np.float64))).astype({dtype_of(t)})")
    return e.call(UNARY[r], d, t, x)


# opcode -> formula, type of the result, types of the operands; t: the type in the opcode
FORMULAS = {
    "copysign": ("np.copysign({1}, {0})", "t", "t t"),
    "popc": ("popc({})", "b32", "t"),
    "clz": ("clz({})", "b32", "t"),
    "brev": ("brev({})", "t", "t"),
    "bfe": ("bit_field({}, {}, {})", "t", "t u32 u32"),
    "bfi": ("insert_field({}, {}, {}, {})", "t", "t t u32 u32"),
    "prmt": ("permute({}, {}, {})", "b32", "u32 u32 u32"),
    "selp": ("np.where({2}, {0}, {1})", "t", "t t pred"),
}


@handles(*FORMULAS)
def _formula(e: Emitter, i: Instruction) -> list[str] | None:
    if i.root == "prmt" and i.op != "prmt.b32":
        return None
    t, (d, *given) = typed(i), i.args
    formula, to, types = FORMULAS[i.root]
    operands = [e.read(x, t if each == "t" else each) for x, each in zip(given, types.split(), strict=True)]
    return e.put(d, t if to == "t" else to, formula.format(*operands))


# -- logic and shifts: 9.7.8 -------------------------------------------------------------------------------------------


@handles("shl", "shr")
def _shift(e: Emitter, i: Instruction) -> list[str] | None:
    """Shifts by at least the width give 0, or the sign."""
    t, (d, a, b) = typed(i), i.args
    bits, left = 8 * size_of(t), i.root == "shl"
    if not isinstance(b, Imm):
        return e.put(d, t, f"shift({left}, {e.read(a, t)}, {e.read(b, 'u32')})")
    by = int(b.text, 0)
    if by >= bits and (left or t[0] != "s"):
        return e.put(d, t, e.literal(0, t))
    return e.call("left_shift" if left else "right_shift", d, t, e.read(a, t), e.literal(min(by, bits - 1), t))


@handles("shf")
def _funnel(e: Emitter, i: Instruction) -> list[str] | None:
    d, *given = i.args
    return e.put(d, "b32", f"funnel({i.has('l')}, {i.has('wrap')}, {e.reads(given, 'u32')})")


@handles("lop3")
def _lookup(e: Emitter, i: Instruction) -> list[str] | None:
    d, a, b, c, table = i.args
    assert isinstance(table, Imm)
    x, y, z = (e.read(each, "b32") for each in (a, b, c))
    bits = int(table.text, 0)
    upper, lower = (half.format(y=y, z=z) for half in (LOGIC[bits >> 4], LOGIC[bits & 15]))
    if upper == lower:
        return e.put(d, "b32", upper)
    parts = [f"({x} & ({upper}))" if bits >> 4 else "", f"(~{x} & ({lower}))" if bits & 15 else ""]
    return e.put(d, "b32", " | ".join(filter(None, parts)))


# functions of y and z by their truth table: bit 2 y + z. PTX ISA 9.7.8.6
LOGIC = (
    "{y} & 0", "~({y} | {z})", "~{y} & {z}", "~{y}", "{y} & ~{z}", "~{z}", "{y} ^ {z}", "~({y} & {z})",
    "{y} & {z}", "~({y} ^ {z})", "{z}", "~{y} | {z}", "{y}", "{y} | ~{z}", "{y} | {z}", "{y} | ~{y}",
)  # fmt: skip


# -- comparison and selection: 9.7.6 -----------------------------------------------------------------------------------


@handles("setp")
def _compare(e: Emitter, i: Instruction) -> list[str] | None:
    t, (d, a, b, *third) = typed(i), i.args
    assert not t.endswith("x2"), "two comparisons"
    x, y = (f"from_bf16({e.read(v, t)})" if t == "bf16" else e.read(v, t) for v in (a, b))
    kind, targets = i.parts[1], e.items(d)
    if kind in COMPARED and not third and len(targets) == 1 and not (kind == "ne" and t in FLOATS):
        return e.call(COMPARED[kind], d, "pred", x, y)
    values = ["t", "~t"]
    if third:
        sign = {"and": "&", "or": "|", "xor": "^"}[i.parts[2]]
        values = [f"({value}) {sign} {e.read(third[0], 'pred')}" for value in values]
    lines = [line for target, value in zip(targets, values) for line in e.put(target, "pred", value)]
    return [f"t = {_test(kind, x, y, t in FLOATS)}", *lines]


def _test(kind: str, x: str, y: str, floats: bool) -> str:
    """Only comparisons that end in u, and nan, hold if x or y is NaN. PTX ISA 9.7.6, comparisons."""
    unordered = f"np.isnan({x}) | np.isnan({y})"
    if kind in ("num", "nan"):
        return unordered if kind == "nan" else f"~({unordered})"
    test = f"np.{COMPARED[kind.removesuffix('u')]}({x}, {y})"
    if kind == "ne" and floats:
        return f"{test} & ~({unordered})"
    return f"{test} | {unordered}" if kind.endswith("u") else test


@handles("set")
def _set(e: Emitter, i: Instruction) -> list[str] | None:
    """Supports only f16x2: 1.0 where the comparison holds. PTX ISA 9.7.7.1."""
    if i.parts[2:] != ("f16x2", "f16x2"):
        return None
    d, a, b = i.args
    both = ", ".join(f"split('f16x2', {e.read(x, 'f16x2')})" for x in (a, b))
    holds = f"[({_test(i.parts[1], 'x', 'y', True)}).astype(np.float32) for x, y in zip({both})]"
    return e.put(d, "f16x2", f"join('f16x2', {holds})")


# -- moves and conversions: 9.7.9 --------------------------------------------------------------------------------------


@handles("mov")
def _move(e: Emitter, i: Instruction) -> list[str] | None:
    t, (d, a) = typed(i), i.args
    if isinstance(a, Vector) or isinstance(d, Vector):
        parts, shift = (a.items, "<<") if isinstance(a, Vector) else (e.items(d), ">>")
        bits = 8 * size_of(t) // len(parts)
        if bits == 8:
            return None
        shifts = [f" {shift} {e.literal(bits * n, t)}" if n else "" for n in range(len(parts))]
        if isinstance(a, Vector):  # packed
            words = [f"({e.read(x, f'b{bits}')}.astype({dtype_of(t)}){by})" for x, by in zip(parts, shifts)]
            return e.put(d, t, " | ".join(words))
        source = e.read(a, t)  # the assignment drops the upper bits
        return [line for x, by in zip(parts, shifts) for line in e.put(x, f"b{bits}", source + by)]
    return e.put(d, t, e.read(a, t))


@handles("cvta")
def _address(e: Emitter, i: Instruction) -> list[str] | None:
    """Generic addresses are global addresses, or in the local window; shared memory has no generic addresses here."""
    d, a = i.args
    if i.has("shared") or not i.has("u64"):
        return None
    window = f" {'-' if i.has('to') else '+'} {e.const(np.uint64(LOCAL))}" if i.has("local") else ""
    return e.put(d, "u64", e.read(a, "u64") + window)


PAIRS = {"bf16x2": "b32", "f16x2": "b32", "e4m3x2": "b16", "e5m2x2": "b16"}  # register type of each
ROUNDED = ("rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi")


@handles("cvt")
def _convert(e: Emitter, i: Instruction) -> list[str] | None:
    types = [part for part in i.parts if part in TYPES or part in PAIRS or part == "tf32"]
    if len(types) != 2:
        return None
    (to, of), (d, *given) = types, i.args
    rounding, saturated = i.among(ROUNDED), i.has("sat")
    if to in PAIRS or of in PAIRS:
        if (rounding != "rn" and (rounding, to, of) != ("rz", "f16x2", "f32")) or (i.has("satfinite") and "f16" in to):
            return None
        source = e.reads(given, PAIRS.get(of, of))
        return e.put(d, PAIRS[to], f"pairs({to!r}, {of!r}, {i.has('relu')}, {source}, cut={rounding == 'rz'})")
    if i.has("relu", "satfinite"):
        return None
    if to == "tf32":
        return e.put(d, "b32", f"to_tf32({e.read(given[0], 'f32')}, {rounding!r})")
    source, dtype = e.read(given[0], of), dtype_of(to)
    if of == "bf16":
        source = f"from_bf16({source})"
    if to == "bf16":
        return e.put(d, "b16", f"to_bf16({source}, cut={rounding == 'rz'})") if rounding in ("rz", "rn", "") else None
    if to in FLOATS and rounding in DIRECTED:
        in_fp64 = of in FLOATS or size_of(of) <= 4  # exactly
        if to == "f64" or saturated or not in_fp64:
            return None
        return e.put(d, to, f"directed({rounding!r}, 'mul', {source}, np.float64(1), dtype={dtype})")
    if to in FLOATS:
        if of in FLOATS and rounding[-1:] == "i":
            source = f"np.{dict(rni='rint', rzi='trunc', rmi='floor', rpi='ceil')[rounding]}({source})"
        return e.put(d, to, f"limited({source}.astype({dtype}))" if saturated else f"{source}.astype({dtype})")
    if of in FLOATS:
        return e.put(d, to, f"to_integer({source}, {dtype}, {rounding!r})")
    return e.put(d, to, f"saturate({source}, {dtype})" if saturated else f"{source}.astype({dtype})")
