"""PTX operations that numpy lacks, on arrays: integer fields, shifts, narrow floats and rounding modes.

PTX ISA 8.8: 9.7.1.12 (popc), 9.7.1.14 (brev), 9.7.1.16-17 (bfe, bfi), 9.7.8 (shifts), 9.7.9.7 (prmt),
9.7.9.22 (cvt), 5.2.3 (alternate floating-point formats).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]


# -- integers ----------------------------------------------------------------------------------------------------------


def mul_hi(a: Array, b: Array) -> Array:
    """The upper half of a product, exact for up to 64 bits."""
    dtype = np.result_type(a, b)
    wide = np.dtype(object if dtype.itemsize == 8 else f"{dtype.kind}8")
    return np.asarray(np.multiply(a, b, dtype=wide) >> np.array(8 * dtype.itemsize, wide)).astype(dtype)


def div_towards_zero(a: Array, b: Array) -> Array:
    """Quotient, truncated. Division by zero, which PTX leaves unspecified, sets all bits."""
    a, b = np.broadcast_arrays(a, b)
    if a.itemsize == 4 and b.all():  # fp64 holds the integer part of a 32-bit quotient exactly
        return (a / b).astype(np.int64).astype(a.dtype)
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    whole = a - np.fmod(a, safe) if a.dtype.kind == "i" else a
    return np.where(b == 0, ~a.dtype.type(0), whole // safe)


def rem_towards_zero(a: Array, b: Array) -> Array:
    """Remainder with the sign of a; by zero: a."""
    return a - div_towards_zero(a, b) * b


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
    n = (by & 31 if wrap else np.minimum(by, 32)).astype(np.uint64)
    both = (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)
    return (((both << n) >> np.uint64(32)) if left else (both >> n)).astype(np.uint32)


def bit_field(a: Array, position: Array, length: Array) -> Array:
    """bfe: bits past the end of the word or the field repeat its sign, which is 0 for unsigned types."""
    wide = a.astype(np.int64 if a.dtype.kind == "i" else np.uint64)
    above = 64 - np.minimum(length & 0xFF, 64)
    return shift(False, shift(True, shift(False, wide, position & 0xFF), above), above).astype(a.dtype)


def insert_field(a: Array, b: Array, position: Array, length: Array) -> Array:
    """bfi: b with `length` low bits of a at `position`."""
    position, length = position & 0xFF, length & 0xFF
    ones = shift(True, b.dtype.type(1), length) - b.dtype.type(1)
    mask = shift(True, ones, position)
    return (b & ~mask) | (shift(True, a, position) & mask)


def permute(a: Array, b: Array, selector: Array) -> Array:
    """prmt: selects four of eight bytes; if bit 3 of a selector is set, it replicates the byte's sign."""
    a, b, selector = np.broadcast_arrays(a, b, selector)
    given = np.stack([a, b], -1).view(np.uint8)  # lowest byte first
    pick = (selector[..., None] >> np.arange(0, 16, 4).astype(np.uint32)) & np.uint32(15)
    picked = np.take_along_axis(given, pick & np.uint32(7), -1)
    return np.where(pick & np.uint32(8), (picked >> np.uint8(7)) * np.uint8(0xFF), picked).view(np.uint32)[..., 0]


def _bits(a: Array) -> Array:
    """Each bit [..., bits], lowest first."""
    return np.unpackbits(np.asarray(a)[..., None].view(np.uint8), axis=-1, bitorder="little")


def popc(a: Array) -> Array:
    return _bits(a).sum(-1, dtype=np.uint32)


def clz(a: Array) -> Array:
    highest_first = _bits(a)[..., ::-1]
    return np.where(highest_first.any(-1), highest_first.argmax(-1), highest_first.shape[-1])


def brev(a: Array) -> Array:
    return np.packbits(_bits(a)[..., ::-1], axis=-1, bitorder="little").view(a.dtype)[..., 0]


def saturate(a: Array, dtype: Any) -> Array:
    own, limits = np.iinfo(a.dtype), np.iinfo(dtype)
    return np.clip(a, max(own.min, limits.min), min(own.max, limits.max)).astype(dtype)


# -- floats ------------------------------------------------------------------------------------------------------------


def from_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def limited(x: Array) -> Array:
    """.sat of a float: clamped to [0, 1]; NaN and -0 become 0."""
    return np.fmin(np.fmax(x, 0), 1) + 0


def xorsign(function: np.ufunc, a: Array, b: Array) -> Array:
    """min or max of the magnitudes, with the sign of the product: PTX ISA 9.7.3.11, .xorsign.abs."""
    return np.copysign(function(np.abs(a), np.abs(b)), np.where(np.signbit(a) ^ np.signbit(b), -1, 1).astype(a.dtype))


def exact_fma(a: Array, b: Array, c: Array) -> Array:
    """fma of fp64, rounded once."""
    a, b, c = np.broadcast_arrays(a, b, c)
    made = a * b + c
    for n in np.flatnonzero(np.isfinite(made) & (a * b != 0)).tolist():
        found = Fraction(float(a[n])) * Fraction(float(b[n])) + Fraction(float(c[n]))
        made[n] = float(found) if found else made[n]
    return made


def directed(rounding: str, operation: str, a: Array, b: Array, *c: Array, dtype: Any = np.float32) -> Array:
    """An fp32 sum, product or fma, rounded once: rz towards zero, rm down, rp up. dtype: of the result.

    The product is exact in fp64; so is the computed error of the sum (Knuth, The Art of Computer Programming, 4.2.2).
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


# over all lanes, a warp or all ranks
REDUCTIONS: dict[str, np.ufunc] = {
    "add": np.add, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


def to_odd(x: Array) -> Array:
    """fp64 to fp32, rounded to odd: rounding the result again gives the same as rounding once."""
    near = x.astype(np.float32)
    cut = np.where(np.abs(near.astype(np.float64)) > np.abs(x), np.nextafter(near, np.float32(0)), near)
    return (cut.view(np.uint32) | (cut.astype(np.float64) != x)).view(np.float32)


def to_bf16(x: Array, cut: bool = False) -> Array:
    """Bits of the nearest bf16, ties to even; NaN becomes 0x7FFF. cut: round towards zero."""
    x = np.asarray(x)
    exact = x.dtype.kind == "f" and x.itemsize <= 4
    x = x.astype(np.float32) if exact else to_odd(x.astype(np.float64))
    bits = np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)
    if not cut:
        bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.where(np.isnan(x), np.uint32(0x7FFF), bits >> np.uint32(16)).astype(np.uint16)


def to_tf32(x: Array, rounding: str) -> Array:
    """Bits of an fp32 with ten mantissa bits. rna: to nearest, ties away from zero; rn: ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(13)) & np.uint32(1)
    added: Any = {"rz": np.uint32(0), "rn": odd + np.uint32(0xFFF)}.get(rounding, np.uint32(0x1000))
    return np.where(np.isfinite(x), (bits + added) & np.uint32(0xFFFFE000), bits).astype(np.uint32)


FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def from_fp8(bits: Array, kind: str) -> Array:
    """e4m3 or e5m2 to fp32. e4m3 has no infinity, and one NaN of each sign."""
    return torch.from_numpy(np.ascontiguousarray(bits)).view(FP8[kind]).float().numpy()


def to_fp8(x: Array, kind: str) -> Array:
    """Bits of the nearest fp8, ties to even, clamped to the largest finite number (satfinite); NaN becomes 0x7F."""
    most = torch.finfo(FP8[kind]).max
    finite = torch.from_numpy(np.ascontiguousarray(x)).clamp(-most, most)
    return np.where(np.isnan(x), 0x7F, finite.to(FP8[kind]).view(torch.uint8).numpy()).astype(np.uint8)


# element type -> dtype of its word, and the function that decodes words to fp32 (or int32)
ELEMENTS: dict[str, tuple[Any, Callable[[Array], Array]]] = {
    "tf32": (np.uint32, lambda words: (words & np.uint32(0xFFFFE000)).view(np.float32)),
    "bf16": (np.uint16, from_bf16),
    "f16": (np.uint16, lambda words: words.view(np.float16).astype(np.float32)),
    "e4m3": (np.uint8, lambda words: from_fp8(words, "e4m3")),
    "e5m2": (np.uint8, lambda words: from_fp8(words, "e5m2")),
    "s8": (np.uint8, lambda words: words.view(np.int8).astype(np.int32)),
    "u8": (np.uint8, lambda words: words.astype(np.int32)),
}


def elements(words: Array, kind: str) -> Array:
    """Words [...] -> the elements in them [..., e], lowest first."""
    word, decoded = ELEMENTS[kind]
    return decoded(np.ascontiguousarray(words).view(word).reshape(*words.shape, -1))


def split(kind: str, x: Array) -> list[Array]:
    """Decodes the one or two values of an operand to fp32, lowest first."""
    word, decoded = ELEMENTS[kind.removesuffix("x2")]
    words, count = np.ascontiguousarray(x).view(word), 2 if kind.endswith("x2") else 1
    return [decoded(words[..., n::count]).reshape(x.shape) for n in range(count)]


def join(kind: str, values: list[Array]) -> Array:
    """The inverse of `split`, with rounding."""
    if kind in ("f16", "bf16"):
        return values[0].astype(np.float16) if kind == "f16" else to_bf16(values[0])
    narrow: Any = {"bf16x2": to_bf16, "f16x2": lambda v: v.astype(np.float16).view(np.uint16)}
    low, high = (narrow[kind](v) if kind in narrow else to_fp8(v, kind.removesuffix("x2")) for v in values)
    wide: Any = np.uint32 if low.itemsize == 2 else np.uint16
    return low.astype(wide) | (high.astype(wide) << wide(8 * low.itemsize))


def pairs(to: str, of: str, relu: bool, *given: Array, cut: bool = False) -> Array:
    """cvt to or from two packed values. The first of two operands is the upper value. cut: fp16 rounds towards zero."""
    values = [np.asarray(x, np.float32) for x in reversed(given)] if of == "f32" else split(of, given[0])
    if cut:
        near = [v.astype(np.float16) for v in values]
        values = [np.where(abs(n) > abs(v), np.nextafter(n, np.float16(0)), n) for n, v in zip(near, values)]
    if relu:
        values = [np.maximum(v, 0) for v in values]  # keeps NaN
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


def of_pairs(operation: str, kind: str, a: Array, b: Array) -> Array:
    """add, min or max of the two integers in each word."""
    a, b = (np.ascontiguousarray(x).view(np.int16 if kind[0] == "s" else np.uint16) for x in np.broadcast_arrays(a, b))
    return {"add": np.add, "min": np.minimum, "max": np.maximum}[operation](a, b).view(np.uint32)


def to_integer(x: Array, dtype: Any, rounding: str) -> Array:
    """Rounds and clamps to the range of the type. NaN gives 0, or if either type has 64 bits, 1 << 63: 9.7.9.21."""
    limits, wide = np.iinfo(dtype), 8 in (x.dtype.itemsize, np.dtype(dtype).itemsize)
    nothing = np.uint64(wide << limits.bits - 1).astype(dtype)
    rounded = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[rounding](np.asarray(x, np.float64))
    low, high = rounded <= limits.min, rounded >= float(limits.max)
    inside = np.where(low | high | np.isnan(x), 0, rounded).astype(dtype)
    return np.where(np.isnan(x), nothing, np.where(low, limits.min, np.where(high, limits.max, inside)).astype(dtype))
