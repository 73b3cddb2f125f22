"""Scalar opcodes against their definitions in the PTX ISA 8.8, written here in Python's own numbers.

Every lane of a program computes one case; inputs are edges of the type and random words.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from fusedtp.sim.ptx.parse import UnsupportedPtx
from tests.sim.ptx.running import edge_words, run_text

Definition = Callable[..., Any]


def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def single(bits: int) -> float:
    return float(struct.unpack("f", struct.pack("I", bits & 0xFFFFFFFF))[0])


def bits_of(x: float) -> int:
    return int(np.array(x, np.float32).view(np.uint32))


def towards_zero(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def field(a: int, position: int, length: int, is_signed: bool) -> int:
    """9.7.1.19: bits past the end repeat the sign, which is 0 for an unsigned field."""
    position, length = position & 0xFF, length & 0xFF
    sign = 0 if not is_signed or length == 0 else a >> min(position + length - 1, 31) & 1
    made = 0
    for n in range(32):
        bit = a >> (position + n) & 1 if n < length and position + n < 32 else sign
        made |= bit << n
    return made


def permuted(a: int, b: int, selector: int) -> int:
    both, made = (b << 32 | a).to_bytes(8, "little"), 0
    for n in range(4):
        pick = selector >> 4 * n & 15
        byte = both[pick & 7]
        made |= (0xFF * (byte >> 7) if pick & 8 else byte) << 8 * n
    return made


def halfwise(made: Callable[[int, int], int], a: int, b: int) -> int:
    """The lower and the upper 16 bits separately."""
    low, high = made(a & 0xFFFF, b & 0xFFFF), made(a >> 16, b >> 16)
    return (high & 0xFFFF) << 16 | low & 0xFFFF


def rounded(x: float, how: str) -> int:
    if math.isnan(x):
        return 0
    if math.isinf(x):
        return -(1 << 31) if x < 0 else (1 << 31) - 1
    whole = {"rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil, "rni": round}[how](x)
    return max(-(1 << 31), min((1 << 31) - 1, whole))


INTEGERS: list[tuple[str, Definition]] = [  # d, a, b, c: 32 bits, unsigned; the result is cut to 32 bits
    ("add.s32 d, a, b", lambda a, b, c: a + b),
    ("sub.s32 d, a, b", lambda a, b, c: a - b),
    ("mul.lo.s32 d, a, b", lambda a, b, c: a * b),
    ("mul.hi.s32 d, a, b", lambda a, b, c: signed(a) * signed(b) >> 32),
    ("mul.hi.u32 d, a, b", lambda a, b, c: a * b >> 32),
    ("mad.lo.s32 d, a, b, c", lambda a, b, c: a * b + c),
    ("div.s32 d, a, b", lambda a, b, c: towards_zero(signed(a), signed(b)) if b else None),
    ("div.u32 d, a, b", lambda a, b, c: a // b if b else None),
    (
        "rem.s32 d, a, b",
        lambda a, b, c: signed(a) - signed(b) * towards_zero(signed(a), signed(b)) if b else None,
    ),
    ("rem.u32 d, a, b", lambda a, b, c: a % b if b else None),
    ("min.s32 d, a, b", lambda a, b, c: min(signed(a), signed(b))),
    ("max.u32 d, a, b", lambda a, b, c: max(a, b)),
    ("max.relu.s32 d, a, b", lambda a, b, c: max(signed(a), signed(b), 0)),
    ("abs.s32 d, a", lambda a, b, c: abs(signed(a))),
    ("neg.s32 d, a", lambda a, b, c: -a),
    ("and.b32 d, a, b", lambda a, b, c: a & b),
    ("or.b32 d, a, 12", lambda a, b, c: a | 12),
    ("xor.b32 d, a, b", lambda a, b, c: a ^ b),
    ("not.b32 d, a", lambda a, b, c: ~a),
    ("shl.b32 d, a, b", lambda a, b, c: a << b if b < 32 else 0),
    ("shr.u32 d, a, b", lambda a, b, c: a >> b if b < 32 else 0),
    ("shr.s32 d, a, b", lambda a, b, c: signed(a) >> min(b, 31)),
    ("shr.s32 d, a, 40", lambda a, b, c: signed(a) >> 31),
    ("shf.l.wrap.b32 d, a, b, c", lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32),
    ("shf.r.clamp.b32 d, a, b, c", lambda a, b, c: (b << 32 | a) >> min(c, 32)),
    ("bfe.u32 d, a, b, c", lambda a, b, c: field(a, b, c, False)),
    ("bfe.s32 d, a, b, c", lambda a, b, c: field(a, b, c, True)),
    ("bfe.s32 d, a, 5, 3", lambda a, b, c: field(a, 5, 3, True)),
    ("bfi.b32 d, a, b, 4, 9", lambda a, b, c: b & ~(0x1FF << 4) | (a & 0x1FF) << 4),
    ("prmt.b32 d, a, b, c", permuted),
    ("lop3.b32 d, a, b, c, 0xca", lambda a, b, c: a & b | ~a & c),
    ("popc.b32 d, a", lambda a, b, c: bin(a).count("1")),
    ("clz.b32 d, a", lambda a, b, c: 32 - a.bit_length()),
    ("brev.b32 d, a", lambda a, b, c: int(f"{a:032b}"[::-1], 2)),
    ("selp.b32 d, a, b, p", lambda a, b, c: a if signed(c) < 0 else b),  # p: c < 0
    ("add.s16x2 d, a, b", lambda a, b, c: halfwise(lambda x, y: x + y, a, b)),
    ("add.u16x2 d, a, 0x30001", lambda a, b, c: halfwise(lambda x, y: x + y, a, 0x30001)),
    ("min.s16x2 d, a, b", lambda a, b, c: halfwise(lambda x, y: min(signed(x, 16), signed(y, 16)), a, b)),
    ("max.u16x2 d, a, b", lambda a, b, c: halfwise(max, a, b)),
    ("cvt.s32.s8 d, a", lambda a, b, c: signed(a, 8)),
    ("cvt.u32.u16 d, a", lambda a, b, c: a & 0xFFFF),
    ("cvt.sat.u8.s32 d, a", lambda a, b, c: max(0, min(255, signed(a)))),
    ("cvt.rn.f32.s32 d, a", lambda a, b, c: bits_of(np.float32(signed(a)))),
    ("cvt.rzi.s32.f32 d, a", lambda a, b, c: rounded(single(a), "rzi")),
    ("cvt.rni.s32.f32 d, a", lambda a, b, c: rounded(single(a), "rni")),
    ("cvt.rmi.s32.f32 d, a", lambda a, b, c: rounded(single(a), "rmi")),
    ("cvt.rpi.s32.f32 d, a", lambda a, b, c: rounded(single(a), "rpi")),
]


every_lane_or_half = pytest.mark.parametrize("half", [False, True], ids=["all lanes", "half of them"])


def past(half: bool, instruction: str) -> str:
    """The instruction; if `half`, odd lanes branch past it."""
    return f"""and.b32 %r9, %r0, {int(half)}; setp.ne.b32 %p7, %r9, 0; @%p7 bra $past;
        {instruction};
        $past:"""


@every_lane_or_half
@pytest.mark.parametrize(
    "text, definition", INTEGERS, ids=[text.split(" ")[0] + f"-{n}" for n, (text, _) in enumerate(INTEGERS)]
)
def test_integers(text: str, definition: Definition, half: bool) -> None:
    given = [edge_words(32, 128, n) for n in range(3)]
    x = torch.from_numpy(np.stack(given).view(np.int32).copy())
    out = torch.zeros(128, dtype=torch.int32)
    names = {} if "%" in text else dict(a="%r1", b="%r2", c="%r3", d="%r4", p="%p1")
    for name, register in names.items():
        op, _, args = text.partition(" ")
        words = [register if word == name else word for word in args.split(", ")]
        text = f"{op} {', '.join(words)}"
    body = f"""
        mad.wide.u32 %rd8, %r0, 4, %rd0;
        ld.global.b32 %r1, [%rd8]; ld.global.b32 %r2, [%rd8+512]; ld.global.b32 %r3, [%rd8+1024];
        setp.lt.s32 %p1, %r3, 0;
        mov.b32 %r4, 77; {past(half, text)} mad.wide.u32 %rd9, %r0, 4, %rd1;
        st.global.b32 [%rd9], %r4;"""
    run_text(body, x, out, threads=128)
    got = out.numpy().view(np.uint32).tolist()
    for lane, words in enumerate(zip(*(g.tolist() for g in given), strict=True)):
        want = 77 if half and lane % 2 else definition(*words)
        assert want is None or got[lane] == want & 0xFFFFFFFF, (
            text,
            [hex(w) for w in words],
            hex(got[lane]),
            want,
        )


CARRIED: list[tuple[str, Definition]] = [
    ("add.cc.u32 %r4, %r1, %r2; addc.u32 %r4, %r3, 0", lambda a, b, c: c + (a + b >> 32)),
    ("mad.lo.cc.u32 %r4, %r1, %r2, %r3; madc.hi.u32 %r4, %r1, %r2, 5",
     lambda a, b, c: 5 + (a * b >> 32) + ((a * b & 0xFFFFFFFF) + c >> 32)),
    ("mad.hi.cc.u32 %r4, %r1, %r2, %r3; addc.cc.s32 %r4, %r1, %r2; madc.lo.s32 %r4, %r1, %r2, %r3",
     lambda a, b, c: a * b + c + (a + b + ((a * b >> 32) + c >> 32) >> 32)),
]  # fmt: skip


@every_lane_or_half
@pytest.mark.parametrize("text, definition", CARRIED, ids=["add", "mad", "three"])
def test_carries(text: str, definition: Definition, half: bool) -> None:
    test_integers(text, definition, half)


def test_every_table_of_lop3() -> None:
    """9.7.8.6: bit 4 a + 2 b + c of the table, for each bit of the operands."""
    tables = range(256)
    lines = [f"lop3.b32 %r1, %r2, %r3, %r4, {t}; st.global.b32 [%rd0+{4 * t}], %r1;" for t in tables]
    out = torch.zeros(256, dtype=torch.int32)
    run_text(f"mov.b32 %r2, 0xf0; mov.b32 %r3, 0xcc; mov.b32 %r4, 0xaa; {' '.join(lines)}", out)
    assert (out & 0xFF).tolist() == list(tables)


WIDE: list[tuple[str, Definition]] = [
    ("mul.wide.s32 %rd4, %r1, %r2", lambda a, b, c: signed(a) * signed(b)),
    ("mul.wide.u32 %rd4, %r1, 12", lambda a, b, c: a * 12),
    ("mad.wide.s32 %rd4, %r1, %r2, %rd3", lambda a, b, c: signed(a) * signed(b) + c),
    ("cvt.s64.s32 %rd4, %r1", lambda a, b, c: signed(a)),
    ("cvt.u64.u32 %rd4, %r1", lambda a, b, c: a),
    ("add.s64 %rd4, %rd3, -3", lambda a, b, c: c - 3),
    ("mul.lo.s64 %rd4, %rd3, %rd3", lambda a, b, c: c * c),
    ("mul.hi.u64 %rd4, %rd3, %rd3", lambda a, b, c: c * c >> 64),
    ("shr.u64 %rd4, %rd3, 33", lambda a, b, c: c >> 33),
    ("mov.b64 %rd4, {%r1, %r2}", lambda a, b, c: b << 32 | a),
    ("add.u64 %rd4, %rd3, 0d3FF8000000000000", lambda a, b, c: c + 0x3FF8000000000000),  # bits, not 1.5
    ("mov.b64 {%r8, %r9}, %rd3; mov.b64 %rd4, {%r9, %r8}", lambda a, b, c: (c & 0xFFFFFFFF) << 32 | c >> 32),
]


@every_lane_or_half
@pytest.mark.parametrize(
    "text, definition", WIDE, ids=[text.split(" ")[0] + f"-{n}" for n, (text, _) in enumerate(WIDE)]
)
def test_wide_integers(text: str, definition: Definition, half: bool) -> None:
    a, b, c = edge_words(32, 64, 1), edge_words(32, 64, 2), edge_words(64, 64, 3)
    x = torch.from_numpy(np.concatenate([a, b]).view(np.int32).copy())
    y, out = torch.from_numpy(c.view(np.int64).copy()), torch.zeros(64, dtype=torch.int64)
    body = f"""
        mad.wide.u32 %rd8, %r0, 4, %rd0; ld.global.b32 %r1, [%rd8]; ld.global.b32 %r2, [%rd8+256];
        mad.wide.u32 %rd9, %r0, 8, %rd1; ld.global.b64 %rd3, [%rd9];
        mov.b64 %rd4, 77; {past(half, text)} mad.wide.u32 %rd9, %r0, 8, %rd2; st.global.b64 [%rd9], %rd4;"""
    run_text(body, x, y, out, threads=64)
    for lane, (p, q, r) in enumerate(zip(a.tolist(), b.tolist(), c.tolist(), strict=True)):
        want = 77 if half and lane % 2 else definition(p, q, r)
        assert out.numpy().view(np.uint64)[lane] == want & ((1 << 64) - 1), (
            text,
            hex(p),
            hex(q),
            hex(r),
        )


def half_pair(high: float, low: float, dtype: torch.dtype) -> int:
    words = torch.tensor([low, high], dtype=torch.float32).to(dtype).view(torch.int16).numpy().view(np.uint16)
    return int(words[1]) << 16 | int(words[0])


F32 = np.float32


def within_one(x: float) -> int:
    """.sat: PTX ISA 9.7.3, NaN results are flushed to +0."""
    return bits_of(F32(min(x, 1.0) if x > 0 else 0.0))


def by_size(choose: Any, a: float, b: float) -> int:
    """.xorsign.abs: PTX ISA 9.7.3.11. For a NaN and a number, the number."""
    sizes = [abs(x) for x in (a, b) if not math.isnan(x)] or [math.nan]
    return bits_of(F32(math.copysign(choose(sizes), math.copysign(1, a) * math.copysign(1, b))))


def cut_half(x: float) -> int:
    """Round to fp16 towards zero, in whole steps of its last bit."""
    if not math.isfinite(x):
        return int(np.float16(x).view(np.uint16))
    step = 2.0 ** max(math.frexp(x)[1] - 11, -24)
    size = min(math.floor(abs(x) / step) * step, 65504.0)
    return int(np.float16(math.copysign(size, x)).view(np.uint16))


def exact(operation: str, a: float, b: float, c: float) -> Fraction | float:
    """The exact sum, difference, product, or product and sum; a float if the result is not a number or is zero."""
    plain = {"add": a + b, "sub": a - b, "mul": a * b, "fma": a * b + c}[operation]
    if not all(map(math.isfinite, (a, b, c))):
        return plain
    x, y, z = map(Fraction, (a, b, c))
    return {"add": x + y, "sub": x - y, "mul": x * y, "fma": x * y + z}[operation] or plain


def towards(how: str, x: Fraction | float) -> int:
    """fp32 of a number: the neighbour towards zero (rz), below (rm) or above (rp)."""
    if isinstance(x, float):  # sums that cancel are -0 if rounded down
        return bits_of(F32(-0.0 if x == 0 and how == "rm" and math.copysign(1, x) > 0 else x))
    near = F32(float(x))
    while Fraction(float(near)) > x and (how == "rm" or (how == "rz" and x > 0)):
        near = np.nextafter(near, F32(-math.inf))
    while Fraction(float(near)) < x and (how == "rp" or (how == "rz" and x < 0)):
        near = np.nextafter(near, F32(math.inf))
    return bits_of(near)


def halves_where(holds: Callable[[float, float], bool], a: tuple[float, ...], b: tuple[float, ...]) -> int:
    """set: PTX ISA 9.7.7.1, 1.0 where the condition holds, in both halves."""
    low, high = (0x3C00 if holds(F32(np.float16(F32(x))), F32(np.float16(F32(y)))) else 0 for x, y in zip(a, b))
    return high << 16 | low


def half_of(function: Any, x: float) -> int:
    return int(np.float16(function(np.float64(np.float16(F32(x))))).view(np.uint16))


def set_of(comparison: str) -> str:
    """PTX of `set` on the pairs (b, a) and (c, a)."""
    pack = "cvt.rn.f16x2.f32 %r5, %r1, %r2; cvt.rn.f16x2.f32 %r6, %r1, %r3;"
    return f"{pack} set.{comparison}.f16x2.f16x2 %r4, %r5, %r6"


FLOATS: list[tuple[str, Definition]] = [  # a, b, c: fp32 -> bits; NaN of any kind equals NaN
    ("add.f32 %r4, %r1, %r2", lambda a, b, c: bits_of(F32(a) + F32(b))),
    ("sub.rn.f32 %r4, %r1, %r2", lambda a, b, c: bits_of(F32(a) - F32(b))),
    ("mul.f32 %r4, %r1, 0f3FC00000", lambda a, b, c: bits_of(F32(a) * F32(1.5))),
    ("fma.rn.f32 %r4, %r1, %r2, %r3", lambda a, b, c: bits_of(F32(a * b + c))),
    ("div.rn.f32 %r4, %r1, %r2", lambda a, b, c: bits_of(F32(a) / F32(b))),
    ("min.f32 %r4, %r1, %r2", lambda a, b, c: bits_of(np.fmin(F32(a), F32(b)))),
    ("max.NaN.f32 %r4, %r1, %r2", lambda a, b, c: bits_of(np.maximum(F32(a), F32(b)))),
    ("min.xorsign.abs.f32 %r4, %r1, %r2", lambda a, b, c: by_size(min, a, b)),
    ("max.xorsign.abs.f32 %r4, %r1, %r2", lambda a, b, c: by_size(max, a, b)),
    (
        "min.NaN.xorsign.abs.f32 %r4, %r1, %r2",
        lambda a, b, c: bits_of(math.nan) if math.isnan(a) or math.isnan(b) else by_size(min, a, b),
    ),
    ("fma.rn.sat.f32 %r4, %r1, %r2, %r3", lambda a, b, c: within_one(a * b + c)),
    ("cvt.sat.f32.f32 %r4, %r1", lambda a, b, c: within_one(a)),
    ("cvt.rz.f16x2.f32 %r4, %r1, %r2", lambda a, b, c: cut_half(a) << 16 | cut_half(b)),
    ("neg.f32 %r4, %r1", lambda a, b, c: bits_of(-F32(a))),
    ("abs.f32 %r4, %r1", lambda a, b, c: bits_of(abs(F32(a)))),
    ("rcp.approx.ftz.f32 %r4, %r1", lambda a, b, c: bits_of(F32(1) / F32(a))),
    ("ex2.approx.f32 %r4, %r1", lambda a, b, c: bits_of(np.exp2(F32(a)))),
    ("setp.ltu.f32 %p2, %r1, %r2; selp.b32 %r4, 1, 0, %p2", lambda a, b, c: int(not a >= b)),
    ("setp.ne.f32 %p2, %r1, %r2; selp.b32 %r4, 1, 0, %p2", lambda a, b, c: int(a < b or a > b)),
    (
        "setp.gt.and.f32 %p2|%p3, %r1, %r2, %p1; selp.b32 %r4, 1, 0, %p3",
        lambda a, b, c: int(not a > b and c < 0),
    ),
    ("cvt.rni.f32.f32 %r4, %r1", lambda a, b, c: bits_of(np.rint(F32(a)))),
    ("cvt.rzi.f32.f32 %r4, %r1", lambda a, b, c: bits_of(np.trunc(F32(a)))),
    ("cvt.rmi.f32.f32 %r4, %r1", lambda a, b, c: bits_of(np.floor(F32(a)))),
    ("cvt.rpi.f32.f32 %r4, %r1", lambda a, b, c: bits_of(np.ceil(F32(a)))),
    ("cvt.rn.bf16x2.f32 %r4, %r1, %r2", lambda a, b, c: half_pair(a, b, torch.bfloat16)),
    ("cvt.rn.f16x2.f32 %r4, %r1, %r2", lambda a, b, c: half_pair(a, b, torch.float16)),
    ("cvt.rn.f16.f32 %rs1, %r1; cvt.f32.f16 %r4, %rs1", lambda a, b, c: bits_of(F32(np.float16(F32(a))))),
    *(
        (
            f"cvt.{how}.f32.s32 %r4, %r1",
            lambda a, b, c, h=how: towards(h, Fraction(signed(bits_of(a)))),
        )
        for how in ("rz", "rm", "rp")
    ),
    ("cvt.rz.f16.f32 %rs1, %r1; mov.b32 %r4, {%rs1, %rs1}", lambda a, b, c: cut_half(a) * 0x10001),
    *(
        (
            f"{operation}.{how}.f32 %r4, {given}",
            lambda a, b, c, o=operation, h=how: towards(h, exact(o, a, b, c)),
        )
        for operation, given in (("add", "%r1, %r2"), ("sub", "%r1, %r2"), ("fma", "%r1, %r2, %r3"))
        for how in ("rz", "rm", "rp")
    ),
    *(
        (
            f"{operation}.{how}.f32 %r4, %r1, 0f1C800000",
            lambda a, b, c, o=operation, h=how: towards(h, exact(o, a, 2.0**-70, c)),
        )
        for operation in ("add", "sub")
        for how in ("rz", "rm", "rp")
    ),
    *(
        (f"sub.{how}.ftz.f32 %r4, %r1, %r1", lambda a, b, c, h=how: towards(h, exact("sub", a, a, c)))
        for how in ("rz", "rm")
    ),
    (
        "mul.rz.f32 %r4, %r1, %r2",
        lambda a, b, c: towards("rz", exact("mul", a, b, 0.0)) if a * b else bits_of(F32(a * b)),
    ),
    ("cvt.rz.bf16.f32 %rs1, %r1; cvt.f32.bf16 %r4, %rs1", lambda a, b, c: bits_of(F32(a)) & 0xFFFF0000),
    (
        set_of("nan"),
        lambda a, b, c: halves_where(lambda x, y: math.isnan(x) or math.isnan(y), (b, a), (c, a)),
    ),
    (
        set_of("num"),
        lambda a, b, c: halves_where(lambda x, y: not (math.isnan(x) or math.isnan(y)), (b, a), (c, a)),
    ),
    (set_of("lt"), lambda a, b, c: halves_where(lambda x, y: x < y, (b, a), (c, a))),
    (set_of("ne"), lambda a, b, c: halves_where(lambda x, y: x < y or x > y, (b, a), (c, a))),
    (
        "cvt.rna.tf32.f32 %r4, %r1",
        lambda a, b, c: (bits_of(a) + 0x1000) & 0xFFFFE000 if math.isfinite(a) else bits_of(a),
    ),
]


@pytest.mark.slow
@every_lane_or_half
@pytest.mark.parametrize(
    "text, definition", FLOATS, ids=[text.split(" ")[0] + f"-{n}" for n, (text, _) in enumerate(FLOATS)]
)
def test_floats(text: str, definition: Definition, half: bool) -> None:
    torch.manual_seed(3)
    x = torch.randn(3, 128) * 2.0 ** torch.randint(-3, 4, (3, 128))
    x[:, ::5] = torch.tensor([0.0, -0.0, 1.0, math.inf, -math.inf, math.nan]).repeat(13)[: 3 * 26].view(3, 26)
    out = torch.zeros(128, dtype=torch.int32)
    body = f"""
        mad.wide.u32 %rd8, %r0, 4, %rd0;
        ld.global.b32 %r1, [%rd8]; ld.global.b32 %r2, [%rd8+512]; ld.global.b32 %r3, [%rd8+1024];
        setp.lt.f32 %p1, %r3, 0f00000000;
        mov.b32 %r4, 77; {past(half, text)} mad.wide.u32 %rd9, %r0, 4, %rd1; st.global.b32 [%rd9], %r4;"""
    run_text(body, x, out, threads=128)
    got = out.numpy().view(np.uint32)
    packed = "x2" in text
    with np.errstate(all="ignore"):
        for lane in range(128):
            a, b, c = x[:, lane].tolist()
            want = 77 if half and lane % 2 else definition(a, b, c)
            if packed and (math.isnan(a) or math.isnan(b)):
                continue  # which NaN it is, bit by bit, differs from torch's
            same = math.isnan(single(int(got[lane]))) and math.isnan(single(want))
            assert same or int(got[lane]) == want, (text, a, b, c, hex(int(got[lane])), hex(want))


@pytest.mark.parametrize(
    "how, given, want", [("rn", 16842753, 16908288), ("rn", -16842752, -16777216), ("rz", 33554431, 33423360)]
)
def test_integers_become_bf16_in_one_rounding(how: str, given: int, want: int) -> None:
    """16842753 lies just above the middle of two bf16 numbers; rounding to fp32 first would lose that."""
    x, out = torch.tensor([given], dtype=torch.int32), torch.zeros(1)
    body = f"""ld.global.b32 %r1, [%rd0]; cvt.{how}.bf16.s32 %rs1, %r1; cvt.f32.bf16 %r2, %rs1;
        st.global.b32 [%rd1], %r2;"""
    run_text(body, x, out)
    assert out.item() == want


@pytest.mark.parametrize(
    "to, of, want",
    [("s32", "f32", 0), ("u64", "f32", 1 << 63), ("s64", "f16", -1 << 63), ("s32", "f64", -1 << 31), ("u16", "f16", 0)],
)
def test_nan_becomes_an_integer(to: str, of: str, want: int) -> None:
    """9.7.9.21: 0; the highest bit if the source is f64 or the integer has 64 bits."""
    d = {"16": "%rs2", "32": "%r2", "64": "%rd5"}
    x, out = torch.tensor([math.nan], dtype=getattr(torch, f"float{of[1:]}")), torch.zeros(1, dtype=torch.int64)
    source = {"16": "%rs1", "32": "%r1", "64": "%rd4"}[of[1:]]
    body = f"ld.global.b{of[1:]} {source}, [%rd0]; cvt.rzi.{to}.{of} {d[to[1:]]}, {source};"
    run_text(f"{body} st.global.b{to[1:]} [%rd1], {d[to[1:]]};", x, out)
    assert out.item() & ((1 << int(to[1:])) - 1) == want & ((1 << int(to[1:])) - 1)


@pytest.mark.parametrize("kind, dtype", [("e4m3x2", torch.float8_e4m3fn), ("e5m2x2", torch.float8_e5m2)])
def test_fp8_is_torchs(kind: str, dtype: torch.dtype) -> None:
    """All 256 words to fp16 and back; and fp32 to fp8, limited to the largest number (9.7.9.22, satfinite)."""
    words = torch.arange(256, dtype=torch.int16)
    pairs = (words | (words.flip(0) << 8)).to(torch.int16)
    out, back = torch.zeros(256, dtype=torch.int32), torch.zeros(256, dtype=torch.int16)
    body = f"""
        mad.wide.u32 %rd8, %r0, 2, %rd0; ld.global.b16 %rs1, [%rd8];
        cvt.rn.f16x2.{kind} %r1, %rs1;
        mad.wide.u32 %rd8, %r0, 4, %rd1; st.global.b32 [%rd8], %r1;
        cvt.rn.satfinite.{kind}.f16x2 %rs2, %r1;
        mad.wide.u32 %rd8, %r0, 2, %rd2; st.global.b16 [%rd8], %rs2;"""
    run_text(body, pairs, out, back, threads=256)
    exact = words.to(torch.uint8).view(dtype).float()
    halves = out.view(torch.float16).view(256, 2).float()
    torch.testing.assert_close(halves[:, 0], exact, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(halves[:, 1], exact.flip(0), rtol=0, atol=0, equal_nan=True)
    finite = exact.isfinite()
    assert torch.equal(back.view(torch.uint8).view(256, 2)[finite, 0], words.to(torch.uint8)[finite])
    x = torch.randn(256) * 2.0 ** torch.randint(-12, 9, (256,))
    narrow = torch.zeros(256, dtype=torch.int16)
    run_text(
        f"""mad.wide.u32 %rd8, %r0, 4, %rd0; ld.global.b32 %r1, [%rd8];
        cvt.rn.satfinite.{kind}.f32 %rs1, %r1, %r1;
        mad.wide.u32 %rd8, %r0, 2, %rd1; st.global.b16 [%rd8], %rs1;""",
        x, narrow, threads=256,
    )  # fmt: skip
    largest = torch.finfo(dtype).max
    assert torch.equal(
        narrow.view(torch.uint8).view(256, 2)[:, 1], x.clamp(-largest, largest).to(dtype).view(torch.uint8)
    )


def test_divergence_and_loops() -> None:
    """Every lane counts to its number; finished lanes wait for the others (9.7.12)."""
    out = torch.zeros(64, dtype=torch.int32)
    body = """
        mov.b32 %r1, 0; mov.b32 %r2, 0;
        $again:
        setp.ge.s32 %p1, %r1, %r0;
        @%p1 bra $out;
        add.s32 %r2, %r2, %r1; add.s32 %r1, %r1, 1;
        bra.uni $again;
        $out:
        { .reg .pred %p<2>; .reg .b32 odd; and.b32 odd, %r0, 1; setp.eq.b32 %p1, odd, 0; @!%p1 neg.s32 %r2, %r2; }
        mad.wide.u32 %rd8, %r0, 4, %rd0; st.global.b32 [%rd8], %r2;"""
    run_text(body, out, threads=64)
    assert out.tolist() == [n * (n - 1) // 2 * (-1 if n % 2 else 1) for n in range(64)]


def test_an_unknown_opcode_is_named_with_its_line() -> None:
    body = ".loc 1 42 3\n frobnicate.b32 %r1, %r0;"
    with pytest.raises(UnsupportedPtx, match=r"(?s)frobnicate\.b32.*kernel\.py:42"):
        run_text(body, torch.zeros(1))


@pytest.mark.parametrize(
    "text",
    [
        "mov.b32 %r300, 7",
        "mov.b32 %foo, 7",
        "ld.global.b32 %foo, [%rd0]",
        "min.xorsign.abs.bf16x2 %r1, %r2, %r3",
        "setp.lt.f16x2 %p1|%p2, %r1, %r2",
        "max.relu.s16x2 %r1, %r2, %r3",
        "cvt.rn.satfinite.f16.f32 %rs1, %r1",
        "cvt.rn.satfinite.f16x2.f32 %r1, %r2, %r3",
        "cvt.rna.relu.tf32.f32 %r1, %r2",
        "barrier.cluster.arrive",
        "barrier.cluster.wait",
        "cp.async.bulk.tensor.2d.tile::gather4.shared::cta.global.mbarrier [%r1], [%rd1, {%r2, %r2}], [%r3]",
    ],
)
def test_what_is_not_modelled_is_refused(text: str) -> None:
    """Undeclared registers, and forms with a different meaning."""
    with pytest.raises(UnsupportedPtx, match=text.split(" ")[0].split(".")[0]):
        run_text(text + ";", torch.zeros(1))


def test_an_instruction_behind_a_pragma_runs() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    run_text('.pragma "nounroll"; mov.b32 %r1, 7; st.global.b32 [%rd0], %r1;', out)
    assert out.item() == 7


def test_comments_of_both_kinds_are_passed_over() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    run_text("mov.b32 %r1, /* not // 9; */ 7; // nor 8\n st.global.b32 [%rd0], /**/ %r1; /* end */", out)
    assert out.item() == 7
