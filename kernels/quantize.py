"""Quantize a matrix to fp8 with power-of-two scales. The kernels are bitwise equal to `quantize`, `values_of` and
`largest_of` of fusedtp/ops/fp8.py and to `pack` and `unpack` of fusedtp/ops/moe/fp8.py; one kernel for each.

A row's scale needs the whole row: it is read once if a program can hold it, else twice. Rows sent to experts have a
scale for each block of columns, which a program can hold.
"""

import triton
import triton.language as tl

from .tiles import INTERPRETED, cdiv, inline, narrow, widen

INFINITY = tl.constexpr(float("inf"))


@inline
def load_tile(x, rows, stride_m, row_mask, cols, stride_k, K):
    """x[rows, cols] in fp32, zero outside."""
    at = x + rows.to(tl.int64)[:, None] * stride_m + cols.to(tl.int64)[None, :] * stride_k
    mask = row_mask[:, None] & (cols < K)[None, :]
    return widen(tl.load(at, mask=mask, other=0.0)).to(tl.float32)


@inline
def finite_magnitude(x):
    """|x|, or 0 where x is NaN or infinite."""
    magnitude = tl.abs(x)
    return tl.where(magnitude < INFINITY, magnitude, 0.0)


@inline
def scale_exponent(largest, TOP: tl.constexpr):
    """Exponent of the smallest scale (a power of two) with largest / scale <= 0.875 * 2**TOP; >= -126; for 0, -TOP."""
    bits = largest.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 126 - TOP  # largest = mantissa * 2**(this + TOP), mantissa in [0.5, 1)
    exponent += ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.where(bits == 0, -TOP, tl.maximum(exponent, -126))


@inline
def power_of_two(exponent):
    """2**exponent in fp32, for an exponent in [-126, 127]."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@inline
def to_fp8(x, kind: tl.constexpr):
    """Round fp32 to e4m3 or e5m2, to nearest, ties to even. Finite values beyond the largest fp8 become the largest. An
    infinity stays one, or becomes NaN in e4m3. NaN stays NaN.
    """
    LARGEST: tl.constexpr = 448.0 if kind == tl.float8e4nv else 57344.0
    inside = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
    if INTERPRETED:
        bits = fp8_bits(inside, kind)
    else:
        bits = inside.to(kind).to(tl.uint8, bitcast=True)
    sign = ((x.to(tl.uint32, bitcast=True) >> 24) & 0x80).to(tl.uint8)
    beyond = (sign | (0x7F if kind == tl.float8e4nv else 0x7C)).to(tl.uint8)
    return tl.where(tl.abs(x) == INFINITY, beyond, bits).to(kind, bitcast=True)


@inline
def fp8_bits(x, kind: tl.constexpr):
    """The fp8 bits of fp32 values within the format's range, or of NaN. The interpreter's own cast gets these wrong.

    Where fp8 is normal, its last bit is a bit of the fp32 mantissa. Below, adding AWAY makes it the last bit of the
    fp32 sum.
    """
    CUT: tl.constexpr = 20 if kind == tl.float8e4nv else 21  # mantissa bits that fp8 lacks compared with fp32
    BIAS: tl.constexpr = 120 if kind == tl.float8e4nv else 112  # difference of the exponent biases
    LEAST: tl.constexpr = 2.0**-6 if kind == tl.float8e4nv else 2.0**-14  # smallest normal number
    AWAY: tl.constexpr = 2.0**14 if kind == tl.float8e4nv else 2.0**7  # its ulp in fp32 is fp8's smallest subnormal
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.uint32, bitcast=True)
    normal = ((bits + (1 << (CUT - 1)) - 1 + ((bits >> CUT) & 1)) >> CUT) - (BIAS << (23 - CUT))
    away = (magnitude + AWAY).to(tl.uint32, bitcast=True) & 0x7FFFFF
    small = tl.where(magnitude < LEAST, away, normal)
    small = tl.where(x != x, 0x7F, small)
    return (small | ((x.to(tl.uint32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def quantize_kernel(
    x,  # [M, K], any strides
    stride_xm,
    stride_xk,
    given,  # one fp32, a power of two, or None
    values,  # fp8, rows contiguous
    stride_v,
    scales,  # fp32, COPIES of each row's scale; None if a scale is given
    stride_s,
    M,
    K,
    FILLED,  # columns of `values`: those after K are zero
    TOP: tl.constexpr,  # the largest fp8 is 0.875 * 2**TOP
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,  # BLOCK covers FILLED
    COPIES: tl.constexpr,
):
    """values = fp8(x / scale). The scale is the given one, or one per row that brings its largest magnitude to at most
    the largest fp8. A program takes ROWS rows.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < M
    cols = tl.arange(0, BLOCK)
    tile = tl.full((ROWS, BLOCK), 0.0, tl.float32)
    if WHOLE:
        tile = load_tile(x, rows, stride_xm, row_mask, cols, stride_xk, K)
    if given is None:
        largest = tile
        if WHOLE:
            largest = finite_magnitude(tile)
        else:
            for k in range(0, K, BLOCK):
                part = load_tile(x, rows, stride_xm, row_mask, k + cols, stride_xk, K)
                largest = tl.maximum(largest, finite_magnitude(part))
        exponent = scale_exponent(tl.max(largest, axis=1), TOP)
        copies = tl.arange(0, COPIES)
        at = scales + rows.to(tl.int64)[:, None] * stride_s + copies[None, :]
        scale = tl.broadcast_to(power_of_two(exponent)[:, None], (ROWS, COPIES))
        tl.store(at, scale, mask=tl.broadcast_to(row_mask[:, None], (ROWS, COPIES)))
        times = power_of_two(-exponent)[:, None]
    else:
        one = tl.load(given)
        times = tl.div_rn(tl.full((ROWS, 1), 1.0, tl.float32), tl.full((ROWS, 1), 0.0, tl.float32) + one)  # exact
    store = values + rows.to(tl.int64)[:, None] * stride_v
    if WHOLE:
        mask = row_mask[:, None] & (cols < FILLED)[None, :]
        tl.store(store + cols[None, :], to_fp8(tile * times, values.dtype.element_ty), mask=mask)
    else:
        for k in range(0, FILLED, BLOCK):
            part = load_tile(x, rows, stride_xm, row_mask, k + cols, stride_xk, K)
            mask = row_mask[:, None] & (k + cols < FILLED)[None, :]
            tl.store(store + (k + cols)[None, :], to_fp8(part * times, values.dtype.element_ty), mask=mask)


@triton.jit
def largest_kernel(
    x,  # [M, K], any strides
    stride_xm,
    stride_xk,
    parts,  # fp32, one per program
    M,
    K,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """parts = the largest finite magnitude of each program's rows, 0 if there is none."""
    cols = tl.arange(0, BLOCK)
    largest = tl.full((ROWS, BLOCK), 0.0, tl.float32)
    for first in range(tl.program_id(0) * ROWS, M, tl.num_programs(0) * ROWS):
        rows = first + tl.arange(0, ROWS)
        for k in range(0, K, BLOCK):
            part = load_tile(x, rows, stride_xm, rows < M, k + cols, stride_xk, K)
            largest = tl.maximum(largest, finite_magnitude(part))
    tl.store(parts + tl.program_id(0), tl.max(tl.max(largest, axis=1), axis=0))


@triton.jit
def pack_kernel(
    x,  # [T, K], any strides
    stride_xm,
    stride_xk,
    values,  # e4m3 of packed rows
    scales,  # fp32 of packed rows, starting after the values of the first row
    row_bytes,
    T,
    K,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,  # columns of a block
    TOP: tl.constexpr,
):
    """Pack the rows of x, with one scale per block. A program takes BLOCKS blocks of ROWS rows."""
    COLUMNS: tl.constexpr = BLOCKS * WIDTH
    parts = cdiv(K, COLUMNS)
    rows = tl.program_id(0) // parts * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)
    row_mask = rows < T
    tile = tl.reshape(load_tile(x, rows, stride_xm, row_mask, cols, stride_xk, K), (ROWS, BLOCKS, WIDTH))
    exponent = scale_exponent(tl.max(finite_magnitude(tile), axis=2), TOP)
    block = tl.program_id(0) % parts * BLOCKS + tl.arange(0, BLOCKS)
    at = rows.to(tl.int64)[:, None] * (row_bytes // 4) + block[None, :]
    tl.store(scales + at, power_of_two(exponent), mask=row_mask[:, None] & (block * WIDTH < K)[None, :])
    tile = tl.reshape(tile * power_of_two(-exponent)[:, :, None], (ROWS, COLUMNS))
    at = rows.to(tl.int64)[:, None] * row_bytes + cols[None, :]
    tl.store(values + at, to_fp8(tile, values.dtype.element_ty), mask=row_mask[:, None] & (cols < K)[None, :])


@triton.jit
def unpack_kernel(
    values,  # e4m3 of packed rows, and their scales, as in pack_kernel
    scales,
    row_bytes,
    y,  # contiguous [T, K]
    T,
    K,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """y = value * scale, rounded once."""
    COLUMNS: tl.constexpr = BLOCKS * WIDTH
    parts = cdiv(K, COLUMNS)
    rows = tl.program_id(0) // parts * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < T)[:, None] & (cols < K)[None, :]
    tile = widen(tl.load(values + rows.to(tl.int64)[:, None] * row_bytes + cols[None, :], mask=mask, other=0.0))
    block = tl.program_id(0) % parts * BLOCKS + tl.arange(0, BLOCKS)
    at = rows.to(tl.int64)[:, None] * (row_bytes // 4) + block[None, :]
    of_blocks = (rows < T)[:, None] & (block * WIDTH < K)[None, :]
    scale = tl.load(scales + at, mask=of_blocks, other=0.0)
    tile = tl.reshape(tile.to(tl.float32), (ROWS, BLOCKS, WIDTH)) * scale[:, :, None]
    at = rows.to(tl.int64)[:, None] * K + cols[None, :]
    tl.store(y + at, narrow(tl.reshape(tile, (ROWS, COLUMNS)), y.dtype.element_ty), mask=mask)
