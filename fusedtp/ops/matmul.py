"""Local matmuls and sums, shared by all engines.

Note [16-bit matmuls on CPU]
On a CPU without 16-bit instructions (for oneDNN: x86 below AVX-512), torch 2.13 multiplies 16-bit matrices with a plain
loop: 1 to 24 GF/s on a core that does 92 in fp32, slowest if an operand is transposed. Widening costs about one percent
of the matmul, so there operands are widened, a block of rows at a time, multiplied in fp32, and the result is rounded
once. It is never less accurate than the loop, which also accumulates in fp32.

Note [Steps of K on CPU]
On a CPU with AMX, oneDNN (as in torch 2.13) multiplies 16-bit numbers in steps along K, each even and at most 32. If
some steps are not full, it may read past the end of a row of the left operand and multiply those values by zero, which
gives NaN if they are NaN or infinite. Seen for every odd K and, beyond 32, for every K that is not divided into
ceil(K / 32) equal even steps; never if the left operand is transposed, because it is copied first. So rows are copied
to a buffer that has zeros after each row, up to a multiple of 32. On a Xeon, [2048, 1360] by [1360, 4096] takes 10.1 ms
without this copy, 10.5 with it, and 76 in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

_STEP = 32  # of K
_ROWS = 512  # approximate number of rows widened at a time
_BLOCK_BYTES = 1 << 18  # of fp32 sums in progress, so that they stay in a core's cache


def is_16_bit(dtype: torch.dtype) -> bool:
    return dtype is torch.bfloat16 or dtype is torch.float16


@cache
def _is_native(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies this 16-bit type fast."""
    ops = torch.ops.mkldnn
    return bool(ops._is_mkldnn_bf16_supported() if dtype == torch.bfloat16 else ops._is_mkldnn_fp16_supported())


def widens(x: Tensor) -> bool:
    """Whether matmuls of x run in fp32."""
    return is_16_bit(x.dtype) and x.device.type == "cpu" and not _is_native(x.dtype)


def to_fp32(x: Tensor) -> Tensor:
    """x in fp32 if matmuls of it run in fp32: converts an operand of several matmuls only once."""
    return x.float() if widens(x) else x


def _with_zeros_behind(x: Tensor) -> Tensor:
    """A left operand [M, K], or a copy with zeros after each row; see Note [Steps of K on CPU]."""
    depth = x.shape[1]
    missing = -depth % _STEP
    if not missing or x.stride(1) > 1 or x.device.type != "cpu" or not is_16_bit(x.dtype):
        return x
    return pad(x, (0, missing))[:, :depth]


def _blocks(rows: int) -> Iterator[slice]:
    """rows in equal parts of about _ROWS: a short remainder would need a separate matmul."""
    each = -(-rows // max(1, round(rows / _ROWS)))
    for begin in range(0, rows, max(1, each)):
        yield slice(begin, min(begin + each, rows))


def matmul_into(out: Tensor, xs: Sequence[Tensor], ys: Sequence[Tensor], bias: Tensor | None = None) -> None:
    """out [M, N] = sum_j xs[j] [M, K_j] @ ys[j] [K_j, N] + bias, in place. `ys` may be widened already."""
    if not widens(xs[0]):
        if bias is None:
            torch.mm(_with_zeros_behind(xs[0]), ys[0], out=out)
        else:
            torch.addmm(bias, _with_zeros_behind(xs[0]), ys[0], out=out)
        for x, y in zip(xs[1:], ys[1:], strict=True):
            out.addmm_(_with_zeros_behind(x), y)
        return
    ys = [y.float() for y in ys]
    for block in _blocks(out.shape[0]):
        total = torch.mm(xs[0][block].float(), ys[0])
        for x, y in zip(xs[1:], ys[1:], strict=True):
            total.addmm_(x[block].float(), y)
        if bias is not None:
            total.add_(bias)
        out[block] = total


def matmul(x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K], y [K, N] -> a new [M, N], rounded once."""
    if not widens(x):
        x = _with_zeros_behind(x)
        return torch.mm(x, y) if bias is None else torch.addmm(bias, x, y)
    out = x.new_empty(x.shape[0], y.shape[1])
    matmul_into(out, [x], [y], bias)
    return out


def matmul_as(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """x [M, K], y [K, N] -> a new [M, N] in `dtype`; an fp32 result of 16-bit operands is never rounded to 16 bits."""
    if dtype == x.dtype:
        return matmul(x, y)
    assert dtype == torch.float32 and is_16_bit(x.dtype), (x.dtype, dtype)
    if x.is_cuda and torch.version.hip is None:
        return torch.mm(x, y, out_dtype=dtype)
    y = y.float()
    out = torch.empty(x.shape[0], y.shape[1], dtype=dtype, device=x.device)
    for block in _blocks(x.shape[0]):
        torch.mm(x[block].float(), y, out=out[block])
    return out


def matmul_add(total: Tensor, x: Tensor, y: Tensor) -> None:
    """total [M, N] += x [M, K] @ y [K, N]; the product of 16-bit operands is added to an fp32 total unrounded.

    Nothing is copied on a GPU; on a CPU see the notes above.
    """
    if total.dtype == x.dtype:
        if widens(x):
            total.copy_(total.float().addmm_(x.float(), y.float()))
        else:
            total.addmm_(_with_zeros_behind(x), y)
        return
    assert total.dtype == torch.float32 and is_16_bit(x.dtype), (x.dtype, total.dtype)
    if x.is_cuda and torch.version.hip is None:
        torch.addmm(total, x, y, out_dtype=total.dtype, out=total)
        return
    y = y.float()
    for block in _blocks(total.shape[0]):
        total[block].addmm_(x[block].float(), y)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K], weight [N, K] -> a new [M, N]."""
    return matmul(x, weight.t(), bias)


def linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """out [M, N] = x [M, K] @ weight [N, K].T + bias, written in place."""
    matmul_into(out, [x], [weight.t()], bias)


def joined(xs: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Operands of sum_j xs[j] @ weights[j].T, arranged so that the sum is rounded only once.

    Native 16-bit operands are concatenated along K; others accumulate in place, without copies.
    """
    if len(xs) > 1 and is_16_bit(xs[0].dtype) and not widens(xs[0]):
        return [torch.cat(list(xs), 1)], [side_by_side(weights)]
    return list(xs), list(weights)


def side_by_side(weights: Sequence[Tensor]) -> Tensor:
    """[N, K_j] -> [N, sum of K_j] in the same layout: whole rows are copied even if they are transposed."""
    if all(w.stride(0) == 1 for w in weights):
        return torch.cat([w.t() for w in weights], 0).t()
    return torch.cat(list(weights), 1)


def sum_linear_into(out: Tensor, xs: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """out [M, N] = sum_j xs[j] [M, K_j] @ weights[j] [N, K_j].T, written in place."""
    matmul_into(out, xs, [w.t() for w in weights])


def sum_in_rank_order(parts: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
    """[M, N] partials of all ranks -> a new [M, N]: fp32 (fp64) sums in the given order, rounded once."""
    first = parts[0]
    out = torch.empty(first.shape, dtype=first.dtype, device=first.device)
    if len(parts) == 2 and (bias is None or not is_16_bit(first.dtype)):
        torch.add(parts[0], parts[1], out=out)  # 16-bit: one addition, in fp32, rounded once
        return out if bias is None else out.add_(bias)
    if not is_16_bit(first.dtype):
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)
        return out if bias is None else out.add_(bias)
    rows = first.shape[0]
    if not first.is_cuda:  # a GPU prefers few large kernels
        rows = _BLOCK_BYTES // (4 * max(1, first.shape[1]))
    for begin in range(0, first.shape[0], max(1, rows)):
        block = slice(begin, begin + max(1, rows))
        total = parts[0][block].float()
        for part in parts[1:]:
            total.add_(part[block])
        if bias is not None:
            total.add_(bias)
        out[block] = total
    return out
