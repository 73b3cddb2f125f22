"""What numpy has no single function for: PTX's integer fields, shifts, narrow floats and roundings, on arrays.

PTX ISA 8.8: 9.7.1.12 (popc), 9.7.1.14 (brev), 9.7.1.16-17 (bfe, bfi), 9.7.8 (shifts), 9.7.9.7 (prmt),
9.7.9.22 (cvt), 5.2.3 (alternate floating-point formats).
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


# -- integers ----------------------------------------------------------------------------------------------------------


def mul_hi(a: Array, b: Array) -> Array:
    """The upper half of a product, exact for up to 64 bits."""
    dtype = np.result_type(a, b)
    bits = 8 * dtype.itemsize
    if bits < 64:
        wide = np.int64 if dtype.kind == "i" else np.uint64
        return ((np.asarray(a).astype(wide) * np.asarray(b).astype(wide)) >> wide(bits)).astype(dtype)
    exact = np.asarray(a).astype(object) * np.asarray(b).astype(object)
    high = np.array([(int(x) >> 64) & ((1 << 64) - 1) for x in np.atleast_1d(exact)], np.uint64)
    return high.view(dtype)


def div_towards_zero(a: Array, b: Array) -> Array:
    """Quotient without its fraction; by zero, where PTX leaves it open, all bits are set."""
    a, b = np.broadcast_arrays(a, b)
    if a.itemsize == 4 and b.all():  # a quotient of 32 bits is exact in fp64, but for its fraction
        return (a / b).astype(np.int64).astype(a.dtype)
    if a.dtype.kind == "u":
        safe = np.where(b == 0, 1, b).astype(a.dtype)
        return np.where(b == 0, ~a.dtype.type(0), a // safe)
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    rest = np.fmod(a, safe)
    return np.where(b == 0, a.dtype.type(-1), (a - rest) // safe).astype(a.dtype)


def rem_towards_zero(a: Array, b: Array) -> Array:
    """Remainder with the sign of a; by zero: a."""
    a, b = np.broadcast_arrays(a, b)
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    return np.where(b == 0, a, np.fmod(a, safe)).astype(a.dtype)


def shift(left: bool, a: Array, by: Array) -> Array:
    a = np.asarray(a)
    bits = 8 * a.itemsize
    kept = np.minimum(by, bits - 1).astype(a.dtype)
    moved = a << kept if left else a >> kept
    if a.dtype.kind == "i" and not left:
        return moved
    return np.where(np.asarray(by) < bits, moved, 0).astype(a.dtype)


def funnel(left: bool, wrap: bool, low: Array, high: Array, by: Array) -> Array:
    """shf: 32 bits of [high, low], shifted."""
    n = (np.asarray(by) & 31) if wrap else np.minimum(by, 32)
    both = (np.asarray(high).astype(np.uint64) << np.uint64(32)) | np.asarray(low).astype(np.uint64)
    n = np.asarray(n).astype(np.uint64)
    return (((both << n) >> np.uint64(32)) if left else (both >> n)).astype(np.uint32)


def bit_field(a: Array, position: Array, length: Array) -> Array:
    """bfe: bits past the end of the word, or of the field, repeat its sign; that of an unsigned field is 0."""
    a = np.asarray(a)
    bits, unsigned = 8 * a.itemsize, np.dtype(f"u{a.itemsize}")
    position, length = (
        np.asarray(position).astype(np.int64) & 0xFF,
        np.asarray(length).astype(np.int64) & 0xFF,
    )
    word = a.view(unsigned)
    held = np.clip(np.minimum(length, bits - position), 0, bits)
    ones = shift(True, unsigned.type(1), held) - unsigned.type(1)
    made = shift(False, word, position) & ones
    if a.dtype.kind == "i":
        top = np.minimum(position + length - 1, bits - 1).clip(0).astype(unsigned)
        negative = (length > 0) & ((word >> top & unsigned.type(1)) != 0)
        made = np.where(negative, made | ~ones, made)
    return made.astype(unsigned).view(a.dtype)


def insert_field(a: Array, b: Array, position: Array, length: Array) -> Array:
    """bfi: b with `length` low bits of a at `position`."""
    b = np.asarray(b)
    position, length = np.asarray(position) & 0xFF, np.asarray(length) & 0xFF
    ones = shift(True, b.dtype.type(1), length.astype(np.uint32)) - b.dtype.type(1)
    mask = shift(True, ones, position.astype(np.uint32))
    return (b & ~mask) | (shift(True, np.asarray(a), position.astype(np.uint32)) & mask)


def permute(a: Array, b: Array, selector: Array) -> Array:
    """prmt: four of eight bytes; with bit 3 of its selector set, a byte's sign."""
    a, b, selector = np.broadcast_arrays(a, b, selector)
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    out = np.zeros(a.shape, np.uint32)
    for n in range(4):
        pick = (selector >> np.uint32(4 * n)) & np.uint32(15)
        byte = ((both >> ((pick & np.uint32(7)) * np.uint32(8)).astype(np.uint64)) & np.uint64(0xFF)).astype(np.uint32)
        byte = np.where(pick & np.uint32(8), np.where(byte & np.uint32(0x80), 0xFF, 0), byte).astype(np.uint32)
        out |= byte << np.uint32(8 * n)
    return out


def popc(a: Array) -> Array:
    a = np.asarray(a)
    each = [(a >> a.dtype.type(n)) & a.dtype.type(1) for n in range(8 * a.itemsize)]
    return np.sum(each, axis=0).astype(np.uint32)


def clz(a: Array) -> Array:
    a = np.asarray(a)
    bits, rest = np.full(a.shape, 8 * a.itemsize, np.uint32), a.copy()
    while rest.any():
        bits = bits - (rest != 0)
        rest = rest >> a.dtype.type(1)
    return bits.astype(np.uint32)


def brev(a: Array) -> Array:
    a = np.asarray(a)
    out = np.zeros_like(a)
    for n in range(8 * a.itemsize):
        out |= ((a >> a.dtype.type(n)) & a.dtype.type(1)) << a.dtype.type(8 * a.itemsize - 1 - n)
    return out


def saturate(a: Array, dtype: Any) -> Array:
    limits = np.iinfo(dtype)
    wide = np.asarray(a).astype(object) if np.asarray(a).dtype == np.uint64 else np.asarray(a).astype(np.int64)
    return np.clip(wide, limits.min, limits.max).astype(dtype)


# -- floats ------------------------------------------------------------------------------------------------------------


def from_bf16(bits: Array) -> Array:
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def limited(x: Array) -> Array:
    """.sat of a float: from 0 to 1, NaN and -0 become 0."""
    return np.fmin(np.fmax(x, 0), 1) + 0


def xorsign(operation: str, a: Array, b: Array) -> Array:
    """min or max of the sizes, with the product's sign: PTX ISA 9.7.3.11, .xorsign.abs."""
    function = np.fmin if operation == "min" else np.fmax
    return np.copysign(function(np.abs(a), np.abs(b)), np.where(np.signbit(a) ^ np.signbit(b), -1, 1).astype(a.dtype))


def exact_fma(a: Array, b: Array, c: Array) -> Array:
    """fma of fp64, rounded once."""
    a, b, c = np.broadcast_arrays(a, b, c)
    made = a * b + c
    for n in np.flatnonzero(np.isfinite(made) & (a * b != 0)).tolist():
        found = Fraction(float(a[n])) * Fraction(float(b[n])) + Fraction(float(c[n]))
        made[n] = float(found) if found else made[n]
    return made


def directed(
    rounding: str, operation: str, a: Array, b: Array, *c: Array, dtype: type[np.floating[Any]] = np.float32
) -> Array:
    """A sum, a product or both of fp32, rounded once: rz towards zero, rm down, rp up. dtype: of the result.

    The product is exact in fp64, and what a sum in fp64 loses is known (Knuth, The Art of Computer Programming, 4.2.2).
    """
    x, y, *z = (np.asarray(v, np.float64) for v in (a, b, *c))
    y = -y if operation == "sub" else y
    left, right = (x, y) if operation in ("add", "sub") else (x * y, z[0] if z else np.float64(-0.0))
    made = left + right
    part = made - left
    lost = (left - (made - part)) + (right - part)
    near = made.astype(dtype)
    over = near - made
    above, below = (over > 0) | ((over == 0) & (lost < 0)), (over < 0) | ((over == 0) & (lost > 0))
    falls = made > 0 if rounding == "rz" else np.full(made.shape, rounding == "rm")
    near = np.where(above & falls, np.nextafter(near, dtype(-np.inf)), near)
    near = np.where(below & ~falls, np.nextafter(near, dtype(np.inf)), near)
    cancels = (made == 0) & (operation != "mul") & (np.signbit(left) != np.signbit(right))
    return np.where(cancels & (rounding == "rm"), dtype(-0.0), near)


# nan: one of the two is a NaN; num: none is. The others do not hold with a NaN: PTX ISA 9.7.7.1.
COMPARISONS: dict[str, Any] = dict(
    eq=np.equal, lt=np.less, le=np.less_equal, gt=np.greater, ge=np.greater_equal,
    ne=lambda x, y: (x < y) | (x > y), num=lambda x, y: (x == x) & (y == y), nan=lambda x, y: (x != x) | (y != y),
)  # fmt: skip


def compared(kind: str, a: Array, b: Array) -> Array:
    """Of two pairs of fp16: 1.0 in each half where the comparison holds, else 0."""
    both = zip(split("f16x2", a), split("f16x2", b), strict=True)
    return join("f16x2", [COMPARISONS[kind](x, y).astype(np.float32) for x, y in both])


def to_odd(x: Array) -> Array:
    """fp64 as fp32 whose last bit is set where it is inexact: what is rounded again then is as if rounded once."""
    near = x.astype(np.float32)
    cut = np.where(np.abs(near.astype(np.float64)) > np.abs(x), np.nextafter(near, np.float32(0)), near)
    return (cut.view(np.uint32) | (cut.astype(np.float64) != x)).view(np.float32)


def to_bf16(x: Array, cut: bool = False) -> Array:
    """Bits of the nearest, ties to even; NaN becomes 0x7FFF. cut: towards zero."""
    x = np.asarray(x)
    exact = x.dtype.kind == "f" and x.itemsize <= 4
    x = x.astype(np.float32) if exact else to_odd(x.astype(np.float64))
    bits = np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)
    if not cut:
        bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.where(np.isnan(x), np.uint32(0x7FFF), bits >> np.uint32(16)).astype(np.uint16)


def to_tf32(x: Array, rounding: str) -> Array:
    """Bits of an fp32 with ten bits of mantissa: rna to the nearest, ties away from zero; rn ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(13)) & np.uint32(1)
    added: Any = {"rz": np.uint32(0), "rn": odd + np.uint32(0xFFF)}.get(rounding, np.uint32(0x1000))
    kept = (bits + added) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), kept, bits).astype(np.uint32)


EIGHT = {"e4m3x2": (4, 3, 7, 448.0), "e5m2x2": (5, 2, 15, 57344.0)}  # exponent, mantissa, bias, largest


def from_fp8(bits: Array, kind: str) -> Array:
    """fp32 of e4m3 or e5m2. e4m3 has no infinity, and one NaN of each sign."""
    e_bits, m_bits, bias, _ = EIGHT[kind]
    bits = np.asarray(bits).astype(np.int32)
    exponent, mantissa = (bits >> m_bits) & ((1 << e_bits) - 1), bits & ((1 << m_bits) - 1)
    normal = np.ldexp(1 + mantissa / (1 << m_bits), exponent - bias)
    value = np.where(exponent == 0, np.ldexp(mantissa / (1 << m_bits), 1 - bias), normal)
    if kind == "e4m3x2":
        value = np.where((bits & 0x7F) == 0x7F, np.nan, value)
    else:
        top = exponent == (1 << e_bits) - 1
        value = np.where(top, np.where(mantissa == 0, np.inf, np.nan), value)
    return np.where(bits & 0x80, -value, value).astype(np.float32)


def to_fp8(x: Array, kind: str) -> Array:
    """Bits of the nearest, ties to even, limited to the largest finite number (satfinite); NaN becomes 0x7F."""
    _, m_bits, bias, largest = EIGHT[kind]
    x = np.asarray(x, np.float64)
    size = np.minimum(np.abs(x), largest)
    _, exponent = np.frexp(np.where(np.isfinite(size), size, 1.0))
    exponent = np.maximum(exponent - 1, 1 - bias)
    step = np.ldexp(1.0, exponent - m_bits)
    rounded = np.minimum(np.round(size / step) * step, largest)
    fraction, top = np.frexp(np.where(rounded == 0, 1.0, rounded))
    subnormal = rounded < np.ldexp(1.0, 1 - bias)
    bits = np.where(
        subnormal,
        rounded / np.ldexp(1.0, 1 - bias - m_bits),
        ((top - 1 + bias) << m_bits) + (2 * fraction - 1) * (1 << m_bits),
    )
    bits = np.where(np.isnan(x), 0x7F, np.nan_to_num(bits)).astype(np.uint16)
    return (bits | np.where(np.signbit(x) & ~np.isnan(x), 0x80, 0)).astype(np.uint16)


def split(kind: str, x: Array) -> list[Array]:
    """fp32 of the values in a packed operand, lowest first."""
    if kind in EIGHT:
        return [from_fp8(np.asarray(x) >> np.uint16(8 * n) & np.uint16(0xFF), kind) for n in range(2)]
    if kind == "bf16":
        return [from_bf16(x)]
    if kind == "f16":
        return [np.asarray(x).astype(np.float32)]
    parts = [(np.asarray(x) >> np.uint32(16 * n)).astype(np.uint16) for n in range(2)]
    return [from_bf16(p) if kind == "bf16x2" else p.view(np.float16).astype(np.float32) for p in parts]


def join(kind: str, values: list[Array]) -> Array:
    """The opposite, rounded."""
    if kind in EIGHT:
        low, high = (to_fp8(v, kind) for v in values)
        return low | (high << np.uint16(8))
    if kind == "bf16":
        return to_bf16(values[0])
    if kind == "f16":
        return values[0].astype(np.float16)
    narrow = to_bf16 if kind == "bf16x2" else lambda v: np.asarray(v).astype(np.float16).view(np.uint16)
    low, high = (narrow(v).astype(np.uint32) for v in values)
    return low | (high << np.uint32(16))


def pairs(to: str, of: str, relu: bool, *given: Array, cut: bool = False) -> Array:
    """cvt to or from two packed values. Of two operands the first is the upper value. cut: towards zero, of fp16."""
    values = [np.asarray(x, np.float32) for x in reversed(given)] if of == "f32" else split(of, given[0])
    if cut:
        near = [v.astype(np.float16) for v in values]
        values = [np.where(abs(n) > abs(v), np.nextafter(n, np.float16(0)), n) for n, v in zip(near, values)]
    if relu:
        values = [np.where(np.isnan(v), v, np.maximum(v, 0)) for v in values]
    return join(to, values)


def halves(operation: str, kind: str, relu: bool, propagates: bool, *given: Array) -> Array:
    """Arithmetic of 16-bit floats, single or packed."""
    function: Any = {
        "add": np.add, "sub": np.subtract, "mul": np.multiply,
        "min": np.minimum if propagates else np.fmin, "max": np.maximum if propagates else np.fmax,
        "fma": lambda a, b, c: a * b + c, "ex2": np.exp2, "tanh": np.tanh,
    }[operation]  # fmt: skip
    wide = [[v.astype(np.float64) for v in split(kind, x)] for x in given]
    values = [function(*parts) for parts in zip(*wide, strict=True)]
    if relu:
        values = [np.maximum(v, 0) for v in values]
    return join(kind, values)


def to_integer(x: Array, dtype: Any, rounding: str) -> Array:
    """Rounded and limited to the type's range; NaN gives 0."""
    x = np.asarray(x, np.float64)
    rounded = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[rounding](x)
    limits = np.iinfo(dtype)
    inside = np.clip(np.nan_to_num(rounded, nan=0.0, posinf=2.0**70, neginf=-(2.0**70)), -(2.0**63), 2.0**63)
    low, high = inside <= limits.min, inside >= float(limits.max)
    kept = np.where(low | high, 0, inside)
    wide = kept.astype(np.int64 if np.dtype(dtype).kind == "i" else np.uint64)
    return np.where(low, limits.min, np.where(high, limits.max, wide)).astype(dtype)
