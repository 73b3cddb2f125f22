"""Tiles and rows: helpers that all kernels share and that do not involve other ranks.

Note [bf16 under the interpreter]: the interpreter keeps bf16 as raw 16-bit integers. Copies are correct, but sums and
products are not, and a cast from fp32 truncates. So bf16 is widened before arithmetic and rounded by hand.
fp8 is raw bits there too, and 3.6 converts NaN to a number, so it is decoded by hand.

Note [Device functions under the interpreter]: it patches the whole language again for each call of a jit function,
which takes about a millisecond, but runs a plain function directly. So kernels are `triton.jit`, and the functions they
call are `inline`: jit when compiled, plain when interpreted. Such a function must not rely on a plain assignment to
turn a number into a tensor. `tl.cdiv` and `tl.zeros` are jit functions of Triton's own: `cdiv` and `tl.full` are not.
"""

from collections.abc import Callable

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


def inline(function: Callable) -> Callable:
    """Decorate a device function that kernels call; see Note [Device functions under the interpreter]."""
    return function if INTERPRETED.value else triton.jit(function)


@inline
def decoded(n):
    """Decode an integer that was passed as 2n + 3, see Note [Odd integers] in signals.py."""
    return (n - 3) // 2


@inline
def widen(x):
    """A tile ready for arithmetic: x itself, or fp32 where the interpreter holds bf16 or fp8 as bits."""
    if INTERPRETED:
        if x.dtype == tl.bfloat16:
            return x.to(tl.float32)
        if x.dtype == tl.float8e4nv:
            return decode_e4m3(x.to(tl.uint8, bitcast=True))
        if x.dtype == tl.float8e5:
            return decode_e5m2(x.to(tl.uint8, bitcast=True))
    return x


@inline
def decode_e4m3(bits):
    """Decode e4m3: its bits, shifted into place, are an fp32 that is 2**120 too small. 0x7F is NaN, of either sign."""
    bits = bits.to(tl.uint32)
    small = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), small * 2.0**120)


@inline
def decode_e5m2(bits):
    """Decode fp8 e5m2, which is the upper half of an fp16, to fp32."""
    return (bits.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@inline
def narrow(x, dtype: tl.constexpr):
    """Round fp32 to `dtype`, to nearest, ties to even. NaN is kept apart: rounding its bits could make it a number."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet_nan = (bits >> 16) | 0x40
        bits = tl.where(x != x, quiet_nan, rounded)
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@inline
def to_int64(x):
    """An int64 scalar, whether `x` is a runtime value or was specialised to a constant."""
    return tl.full((), 0, tl.int64) + x


@inline
def shard(sizes, rank, WORLD: tl.constexpr):
    """(rows of `rank`, rows of all ranks before it), int32; for `sizes` see Note [Odd integers] in signals.py."""
    size = tl.full((), 0, tl.int32)
    offset = tl.full((), 0, tl.int32)
    for q in tl.static_range(WORLD):
        n = decoded(sizes[q])
        size += tl.where(rank == q, n, 0)
        offset += tl.where(rank > q, n, 0)
    return size, offset


@inline
def global_rows(local, size, offset, total, batch):
    """Row of the full tensor for each local row of a rank: its rows are [batch, size] of [batch, total]."""
    if batch == 1:
        rows = offset + local
    else:
        rows = (local // size) * total + offset + local % size
    return rows.to(tl.int64)


@inline
def tile_rows(local, size, offset, total, batch, limit):
    """As global_rows, but rows past the end of the shard become row 0 (they are masked anyway)."""
    return global_rows(tl.where(local < limit, local, 0), size, offset, total, batch)


@inline
def cdiv(a, b):
    """a / b rounded up."""
    return (a + b - 1) // b


@inline
def grouped(tile, num_rows, num_cols, GROUP: tl.constexpr):
    """(row, col) of a tile. GROUP rows of tiles are walked column by column, so that their operands stay in cache."""
    width = GROUP * num_cols
    first = tile // width * GROUP
    height = tl.minimum(num_rows - first, GROUP)
    inside = tile % width
    return first + inside % height, inside // height


@inline
def halves(x):
    """The left and right halves of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@inline
def dealt(start, count, stride):
    """How many of `count` items go to a program that takes every `stride`-th one from `start` on.

    Items of several lists are dealt in turn. For each item that it takes, the program adds `stride` to `start`. At the
    end of a list it subtracts `count`, which gives its start in the next list.

    Not range(start, count, stride): if a loop over lists carries a value that only bounds an inner loop, Triton 3.6
    treats it as dead (its pass remove-layout-conversions) and deals each list from the first program on. On an H100 a
    grouped matmul of DeepSeek-V3's experts took six times as long.
    """
    return (tl.maximum(count - start, 0) + stride - 1) // stride


@inline
def copy_rows(src, src_rows, src_stride, src_stride_k, dst, dst_rows, dst_stride, row_mask, K, BLOCK_K: tl.constexpr):
    """Copy whole rows, K elements each, as bits; `dst` rows are contiguous."""
    cols = tl.arange(0, BLOCK_K)
    for k in range(0, K, BLOCK_K):
        mask = row_mask[:, None] & (k + cols < K)[None, :]
        at = (k + cols)[None, :].to(tl.int64)
        value = tl.load(src + src_rows[:, None] * src_stride + at * src_stride_k, mask=mask)
        tl.store(dst + dst_rows[:, None] * dst_stride + at, value, mask=mask)


@inline
def copy_rows_ahead(
    src, src_rows, src_stride, src_stride_k, dst, dst_rows, dst_stride, row_mask, K, BLOCK_K: tl.constexpr
):
    """copy_rows, but each block is stored while the next one loads: twice the bytes in flight, twice the registers."""
    src += src_rows[:, None] * src_stride
    dst += dst_rows[:, None] * dst_stride
    cols = tl.arange(0, BLOCK_K)[None, :]
    at = cols
    value = tl.load(src + at.to(tl.int64) * src_stride_k, mask=row_mask[:, None] & (at < K))
    for k in range(BLOCK_K, K, BLOCK_K):
        ahead = k + cols
        following = tl.load(src + ahead.to(tl.int64) * src_stride_k, mask=row_mask[:, None] & (ahead < K))
        tl.store(dst + at, value, mask=row_mask[:, None] & (at < K))
        at, value = ahead, following
    tl.store(dst + at, value, mask=row_mask[:, None] & (at < K))
