"""The packed format in which rows travel to their experts.

"fp8"   float8_e4m3fn with one fp32 scale for every 128 columns of a row, in one row of bytes:

        | K values | scale of columns 0 .. 127 | scale of 128 .. 255 | ... |     uint8 [T, K + 4 ceil(K / 128)]

A scale is the smallest power of two that brings its block's largest magnitude to at most 448, so values that fp8 can
hold are exact. For a block with largest magnitude M > 0: 2**p * 448 >= M > 2**p * 224, p at least -126, and

    an element x    is off by at most 2**-4 |x|, half a unit of 3 mantissa bits, where |x| >= 2**p * 2**-6
                    and by at most 2**p * 2**-10 <= 2**-17 M below that, where fp8 is subnormal
    so every one    is off by at most 2**-4 M, for M from 2**-117 on

An element that is inf or NaN becomes NaN; it does not affect the scale of its block.

Source: DeepSeek-V3 (2024), section 3.3.2, tiles of 1 x 128, and section 3.3.3, fp8 rows to the experts with scales that
are powers of two. The experts' outputs travel unpacked, and here all gradients do too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtp.comm.signature import COMM_DTYPES
from fusedtp.ops import launch
from fusedtp.ops.fp8 import multiplied_in_fp8, power_of_two_scales
from fusedtp.ops.launch.quantize import BLOCK

LARGEST = 448.0  # = 0.875 * 2**9
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def fault(comm_dtype: str, dtype: torch.dtype) -> str | None:
    """An error message if rows of this dtype cannot travel in this format."""
    if comm_dtype not in COMM_DTYPES:
        return f"comm_dtype is {comm_dtype!r}; it must be one of {', '.join(map(repr, COMM_DTYPES))}"
    if comm_dtype and dtype not in DTYPES:
        return f"comm_dtype={comm_dtype!r} supports {', '.join(map(str, DTYPES))}, not {dtype}"
    return None


def row_bytes(k: int) -> int:
    """Bytes of a packed row of k columns."""
    return k + 4 * -(-k // BLOCK)


def _by_kernel(x: Tensor) -> bool:
    """Whether kernels/quantize.py is used: on GPUs with fp8. It requires a multiple of 4 columns."""
    return x.numel() > 0 and multiplied_in_fp8(x.device)


def pack(x: Tensor) -> Tensor:
    """x [T, K] -> uint8 [T, K + 4 ceil(K / 128)]."""
    if _by_kernel(x) and x.shape[1] % 4 == 0:
        return launch.quantize.packed_blocks(x)
    (tokens, k), count = x.shape, -(-x.shape[1] // BLOCK)
    blocks = F.pad(x.float(), (0, count * BLOCK - k)).view(tokens, count, BLOCK)
    finite = blocks.isfinite()
    largest = torch.where(finite, blocks.abs(), 0.0).amax(2) if count else x.new_empty(tokens, 0).float()
    scales = power_of_two_scales(largest, torch.float8_e4m3fn)
    values = torch.where(finite, blocks / scales[:, :, None], torch.nan)  # some conversions saturate
    bits = values.view(tokens, count * BLOCK)[:, :k].to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat([bits, scales.view(torch.uint8)], 1)


def unpack(rows: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """The output of `pack` for rows [R, k] -> [R, k] in `dtype`."""
    if _by_kernel(rows) and k % 4 == 0 and rows.is_contiguous() and rows.data_ptr() % 4 == 0:
        return launch.quantize.unpacked_blocks(rows, k, dtype)
    count, r = -(-k // BLOCK), rows.shape[0]
    values = rows[:, :k].contiguous().view(torch.float8_e4m3fn).float()
    aligned = rows[:, k:].clone(memory_format=torch.contiguous_format).view(-1)
    scales = aligned.view(torch.float32).view(r, count, 1)
    blocks = F.pad(values, (0, count * BLOCK - k)).view(r, count, BLOCK) * scales
    return blocks.view(r, count * BLOCK)[:, :k].to(dtype, copy=True)
