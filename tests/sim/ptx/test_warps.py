"""Lanes of a warp together: shuffles, votes, matrix fragments and products, against PTX ISA 8.8's definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusedtp.sim.ptx.tensor_core import PENDING
from tests.sim.ptx.running import run_text

AT = "mad.wide.u32 %rd8, %r0, 4, %rd{}; "
WORDS = torch.arange(64, dtype=torch.int32) * 7 + 1


@pytest.mark.parametrize(
    "kind, by, clamp", [("bfly", 5, 31), ("up", 3, 0), ("down", 3, 31), ("idx", 9, 31), ("down", 2, 0x1807)]
)
def test_shuffle(kind: str, by: int, clamp: int) -> None:
    """9.7.9.6: the value of lane j of the segment, or the own value and a false predicate."""
    out, valid = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    body = (
        AT.format(0)
        + f"""ld.global.b32 %r1, [%rd8];
        shfl.sync.{kind}.b32 %r2|%p1, %r1, {by}, {clamp}, -1; selp.b32 %r3, 1, 0, %p1;
        {AT.format(1)} st.global.b32 [%rd8], %r2; {AT.format(2)} st.global.b32 [%rd8], %r3;"""
    )
    run_text(body, WORDS, out, valid, threads=64)
    segment, limit = clamp >> 8 & 31, clamp & 31
    for n in range(64):
        lane = n % 32
        least, most = lane & segment, (lane & segment) | (limit & ~segment)
        j = {"bfly": lane ^ by, "up": lane - by, "down": lane + by, "idx": least | (by & ~segment)}[kind]
        inside = j >= most if kind == "up" else j <= most
        assert valid[n] == inside and out[n] == WORDS[n - lane + j if inside else n], n


def test_votes_and_reductions() -> None:
    """9.7.13: over the participating lanes."""
    out = torch.zeros(6, 64, dtype=torch.int32)
    stores = "".join(f"st.global.b32 [%rd8+{256 * n}], %r{10 + n}; " for n in range(6))
    body = f"""and.b32 %r1, %r0, 3; setp.eq.b32 %p1, %r1, 0;
        vote.sync.ballot.b32 %r10, %p1, -1;
        vote.sync.any.pred %p2, %p1, -1; selp.b32 %r11, 1, 0, %p2;
        vote.sync.all.pred %p2, %p1, -1; selp.b32 %r12, 1, 0, %p2;
        redux.sync.add.s32 %r13, %r0, -1; redux.sync.max.s32 %r14, %r0, -1;
        elect.sync %r2|%p3, -1; selp.b32 %r15, 1, 0, %p3;
        {AT.format(0)} {stores}"""
    run_text(body, out, threads=64)
    assert set(out[0].tolist()) == {0x11111111} and set(out[1].tolist()) == {1} and set(out[2].tolist()) == {0}
    for warp in range(2):
        lanes = range(32 * warp, 32 * warp + 32)
        own = slice(32 * warp, 32 * warp + 32)
        assert set(out[3, own].tolist()) == {sum(lanes)} and set(out[4, own].tolist()) == {max(lanes)}
        assert out[5, own].tolist() == [1] + [0] * 31


def test_a_sum_of_a_warp_is_cut_to_32_bits() -> None:
    """9.7.13.11."""
    out = torch.zeros(32, dtype=torch.int32)
    body = f"add.s32 %r1, %r0, 0x40000000; redux.sync.add.s32 %r2, %r1, -1; {AT.format(0)} st.global.b32 [%rd8], %r2;"
    run_text(body, out)
    assert set(out.tolist()) == {sum(range(32))}  # and 2**35


@pytest.mark.parametrize("half", [False, True])
def test_match(half: bool) -> None:
    """9.7.13.10: of participating lanes (all or the even ones), those with the same value; or all of them, or none."""
    out = torch.zeros(4, 64, dtype=torch.int32)
    stores = "".join(f"st.global.b32 [%rd8+{256 * n}], %r{10 + n}; " for n in range(4))
    leaves = f"and.b32 %r1, %r0, {int(half)}; setp.ne.b32 %p1, %r1, 0; @%p1 ret;"
    body = f"""{leaves} shr.u32 %r2, %r0, 2; and.b32 %r2, %r2, 3; shr.u32 %r3, %r0, 5; mov.b64 %rd2, 1;
        match.any.sync.b32 %r10, %r2, -1; match.all.sync.b32 %r11|%p2, %r3, -1; selp.b32 %r12, 1, 0, %p2;
        match.all.sync.b32 %r13, %r2, -1;
        {AT.format(0)} {stores}"""
    run_text(body, out, threads=64)
    everyone = range(0, 32, 1 + half)
    for n in range(0, 64, 1 + half):
        alike = sum(1 << lane for lane in everyone if lane // 4 % 4 == n // 4 % 4)
        assert out[0, n].item() & 0xFFFFFFFF == alike
        assert out[1, n].item() & 0xFFFFFFFF == sum(1 << lane for lane in everyone) and out[2, n] == 1
        assert out[3, n] == 0


def fragments_of_a(e: int) -> list[list[tuple[int, int]]]:
    """9.7.14.5: row and first column of each register of A, by lane; a register holds e elements."""
    return [[(lane // 4 + 8 * (r % 2), 4 * e * (r // 2) + lane % 4 * e) for lane in range(32)] for r in range(4)]


def packed(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.uint8).numpy().view(np.uint32)


@pytest.mark.parametrize(
    "kind, dtype, e",
    [
        ("bf16", torch.bfloat16, 2),
        ("f16", torch.float16, 2),
        ("tf32", torch.float32, 1),
        ("e4m3", torch.float8_e4m3fn, 4),
        ("s8", torch.int8, 4),
        ("u8", torch.uint8, 4),
    ],
)
def test_mma(kind: str, dtype: torch.dtype, e: int) -> None:
    """D [16, 8] = A [16, 8e] B [8e, 8] + C, by two warps, from fragments laid out here by the ISA's figures."""
    torch.manual_seed(0)
    k = 8 * e
    to, number, low, high = "f32", torch.float32, -3, 4
    if not dtype.is_floating_point:
        to, number, (low, high) = "s32", torch.int32, (-128, 128) if kind == "s8" else (0, 256)
    a, b = (torch.randint(low, high, shape).to(number) for shape in ((2, 16, k), (2, k, 8)))
    c = torch.randint(-3, 4, (2, 16, 8)).to(number)
    words = np.zeros((10, 64), np.uint32)
    for warp in range(2):
        rows, columns = a[warp].to(dtype), b[warp].t().contiguous().to(dtype)
        for r, places in enumerate(fragments_of_a(e)):
            for lane, (row, first) in enumerate(places):
                words[r, 32 * warp + lane] = packed(rows[row, first : first + e])[0]
        for lane in range(32):
            g, t = lane // 4, lane % 4
            for r in range(2):
                words[4 + r, 32 * warp + lane] = packed(columns[g, 4 * e * r + t * e :][:e])[0]
            for r in range(4):
                words[6 + r, 32 * warp + lane] = packed(c[warp, g + 8 * (r // 2), 2 * t + r % 2].view(1))[0]
    given, out = torch.from_numpy(words.view(np.int32)), torch.zeros(4, 64, dtype=torch.int32)
    loads = "".join(f"ld.global.b32 %r{10 + n}, [%rd8+{256 * n}]; " for n in range(10))
    stores = "".join(f"st.global.b32 [%rd8+{256 * n}], %r{30 + n}; " for n in range(4))
    body = f"""{AT.format(0)} {loads}
        mma.sync.aligned.m16n8k{k}.row.col.{to}.{kind}.{kind}.{to} {{%r30, %r31, %r32, %r33}},
            {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%r16, %r17, %r18, %r19}};
        {AT.format(1)} {stores}"""
    run_text(body, given, out, threads=64)
    want = a.to(dtype).to(number) @ b.to(dtype).to(number) + c
    got = out.view(number)
    for warp in range(2):
        for lane in range(32):
            for r in range(4):
                row, column = lane // 4 + 8 * (r // 2), 2 * (lane % 4) + r % 2
                assert got[r, 32 * warp + lane] == want[warp, row, column]


@pytest.mark.parametrize("k", [8, 16])
def test_mma_that_sums_in_fp16(k: int) -> None:
    """9.7.14.5.8: two sums per register; D = A B + C by one warp, A and B all ones, C numbered by its place."""
    c = torch.arange(128).view(16, 8).half()
    words = np.zeros((2, 32), np.uint32)
    for lane in range(32):
        for r in range(2):
            words[r, lane] = packed(c[lane // 4 + 8 * r, 2 * (lane % 4) :][:2])[0]
    given, out = torch.from_numpy(words.view(np.int32)), torch.zeros(2, 32, dtype=torch.int32)
    held = ", ".join(["%r1"] * (k // 4))
    body = f"""{AT.format(0)} mov.b32 %r1, 0x3C003C00; ld.global.b32 %r2, [%rd8]; ld.global.b32 %r3, [%rd8+128];
        mma.sync.aligned.m16n8k{k}.row.col.f16.f16.f16.f16 {{%r4, %r5}}, {{{held}}},
            {{{", ".join(["%r1"] * (k // 8))}}}, {{%r2, %r3}};
        {AT.format(1)} st.global.b32 [%rd8], %r4; st.global.b32 [%rd8+128], %r5;"""
    run_text(body, given, out)
    got = out.view(torch.float16).view(2, 32, 2)
    for lane in range(32):
        for r in range(2):
            want = c[lane // 4 + 8 * r, 2 * (lane % 4) :][:2] + k
            assert got[r, lane].tolist() == want.tolist()


def test_mma_of_doubles() -> None:
    """9.7.14.5.2: D [8, 8] = A [8, 4] B [4, 8] + C of fp64, with more bits than fp32 has."""
    torch.manual_seed(2)
    a, b, c = (torch.randint(-(1 << 25), 1 << 25, shape).double() for shape in ((8, 4), (4, 8), (8, 8)))
    given, out = torch.zeros(4, 32, dtype=torch.float64), torch.zeros(2, 32, dtype=torch.float64)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        given[:, lane] = torch.stack([a[g, t], b[t, g], c[g, 2 * t], c[g, 2 * t + 1]])
    loads = "".join(f"ld.global.b64 %rd{10 + n}, [%rd8+{256 * n}]; " for n in range(4))
    body = f"""mad.wide.u32 %rd8, %r0, 8, %rd0; mad.wide.u32 %rd9, %r0, 8, %rd1; {loads}
        mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {{%rd20, %rd21}}, {{%rd10}}, {{%rd11}}, {{%rd12, %rd13}};
        st.global.b64 [%rd9], %rd20; st.global.b64 [%rd9+256], %rd21;"""
    run_text(body, given, out)
    want = a @ b + c
    for lane in range(32):
        assert out[:, lane].tolist() == want[lane // 4, 2 * (lane % 4) :][:2].tolist()


@pytest.mark.parametrize("limited, want", [("", -(1 << 31)), (".satfinite", (1 << 31) - 1)])
def test_mma_of_integers_wraps_or_is_limited(limited: str, want: int) -> None:
    out = torch.zeros(32, dtype=torch.int32)
    body = f"""mov.b32 %r1, 0; mov.b32 %r2, 0x7fffffff; mov.b32 %r3, 1; and.b32 %r4, %r0, 3; setp.eq.b32 %p1, %r4, 0;
        selp.b32 %r5, 1, 0, %p1;
        mma.sync.aligned.m16n8k32.row.col{limited}.s32.s8.s8.s32 {{%r10, %r11, %r12, %r13}},
            {{%r5, %r1, %r1, %r1}}, {{%r5, %r1}}, {{%r2, %r2, %r2, %r2}};
        mad.wide.u32 %rd9, %r0, 4, %rd0; st.global.b32 [%rd9], %r10;"""
    run_text(body, out)
    assert set(out.tolist()) == {want}


def by_wgmma(kind: str, low: int, weak: bool, wait: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(D [4, 128] as threads hold it after `wait`, A B).

    D [64, 8] = A [64, 32] B [32, 8] twice, the second time added; operands K-major in units of 8 rows, 16 bytes.
    """
    torch.manual_seed(1)
    x, pad = (
        torch.randint(low, low + 256, (72, 32)),
        torch.zeros(256, dtype=torch.uint8),
    )  # A, then B by columns
    units = (x & 255).to(torch.uint8).view(9, 8, 2, 16).transpose(1, 2).flatten()  # a row of units is 256 bytes
    given, out = torch.cat([units, pad]).view(torch.int32), torch.zeros(4, 128, dtype=torch.int32)
    copies = "".join(f"ld.global.b32 %r1, [%rd8+{512 * n}]; st.shared.b32 [%r2+{512 * n}], %r1; " for n in range(5))
    stores = "".join(f"st.global.b32 [%rd9+{512 * n}], %r{10 + n}; " for n in range(4))
    strides = 128 >> 4 << 16 | 256 >> 4 << 32
    product = f"wgmma.mma_async.sync.aligned.m64n8k32.s32.{kind}.{kind} {{%r10, %r11, %r12, %r13}}, %rd2, %rd3,"
    body = f"""{AT.format(0).replace("%rd9", "%rd8")} {AT.format(1).replace("%rd8", "%rd9")}
        shl.b32 %r2, %r0, 2; {copies} fence.proxy.async; bar.sync 0;
        mov.b64 %rd2, {strides}; mov.b64 %rd3, {strides | 2048 >> 4}; mov.b32 %r3, 1; setp.eq.b32 %p1, %r3, 1;
        wgmma.fence.sync.aligned; {product} 0; {product} %p1;
        wgmma.commit_group.sync.aligned; {wait}
        {stores}
        wgmma.wait_group.sync.aligned 0;"""
    run_text(body, given, out, threads=128, shared=2560, weak=weak)
    return out, x[:64] @ x[64:].t()


@pytest.mark.parametrize("weak", [False, True])
@pytest.mark.parametrize("kind, low", [("s8", -128), ("u8", 0)])
def test_wgmma_of_integers(kind: str, low: int, weak: bool) -> None:
    out, product = by_wgmma(kind, low, weak, "wgmma.wait_group.sync.aligned 0;")
    want = 2 * product
    for thread in range(128):
        for r in range(4):
            row, column = thread // 32 * 16 + thread % 32 // 4 + 8 * (r // 2), 2 * (thread % 4) + r % 2
            assert out[r, thread] == want[row, column]


@pytest.mark.parametrize("wait", ["", "wgmma.wait_group.sync.aligned 1;"])
def test_the_sums_of_a_product_are_poison_until_its_wait(wait: str) -> None:
    """PTX ISA, wgmma.wait_group: reading the registers of D earlier is undefined behaviour."""
    out, _ = by_wgmma("s8", -128, True, wait)
    assert set(out.flatten().tolist()) == {int(PENDING)}


@pytest.mark.parametrize("transposed", ["", ".trans"])
def test_ldmatrix_and_stmatrix(transposed: str) -> None:
    """9.7.14.5.15: lane i gets elements 2i and 2i+1 of row i / 4; transposed, of column i / 4. stmatrix inverts it."""
    x = torch.randint(0, 1 << 15, (4, 8, 8), dtype=torch.int16)
    out, again = torch.zeros(4, 32, dtype=torch.int32), torch.zeros(32, 4, dtype=torch.int32)
    stores = "".join(f"st.global.b32 [%rd9+{128 * n}], %r{10 + n}; " for n in range(4))
    body = f"""mad.wide.u32 %rd8, %r0, 16, %rd0; shl.b32 %r1, %r0, 4;
        ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%rd8]; st.shared.v4.b32 [%r1], {{%r2, %r3, %r4, %r5}};
        bar.sync 0;
        ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r1];
        mad.wide.u32 %rd9, %r0, 4, %rd1; {stores}
        bar.sync 0;
        stmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 [%r1+512], {{%r10, %r11, %r12, %r13}};
        bar.sync 0;
        ld.shared.v4.b32 {{%r2, %r3, %r4, %r5}}, [%r1+512];
        mad.wide.u32 %rd8, %r0, 16, %rd2; st.global.v4.b32 [%rd8], {{%r2, %r3, %r4, %r5}};"""
    run_text(body, x, out, again, shared=1024)
    want = x.transpose(1, 2) if transposed else x
    assert torch.equal(out.view(torch.int16).view(4, 8, 8), want.contiguous())
    assert torch.equal(again.view(torch.int16).view(4, 8, 8), x)
