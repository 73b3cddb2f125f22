"""Launchers of the kernels that quantize a matrix to fp8. Any strides; sizes may be zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedtp.comm.launching import Launch

from .config import Config, Machine, machine_of, power_of_two

LARGEST = {torch.float8_e4m3fn: 9, torch.float8_e5m2: 16}  # the largest value is 0.875 * 2**this
SCALE_BYTES = 16  # at the end of a packed row, one scale repeated: as in kernels/all_gather_matmul.py
SCALES = SCALE_BYTES // 4
HELD = 8192  # longest row that one program holds, in elements
ELEMENTS = 4096  # per program, for several rows or a part of a longer row
SQUARE = 64  # side of a tile if the rows of x are not contiguous
BLOCK = 128  # columns per scale, for rows sent to experts
PARTS = (4, 8)  # rows and blocks per program, for rows sent to experts
PROGRAMS = 4  # per SM that search for the largest magnitude


def packed_rows(x: Tensor, kind: torch.dtype, filled: int) -> Tensor:
    """x [M, K] -> uint8 [M, filled + 16]: each row in fp8, zeros from K on, and the row's scale, SCALES times."""
    packed = x.new_empty(x.shape[0], filled + SCALE_BYTES, dtype=torch.uint8)
    plan_quantize(x, None, packed.view(kind)[:, :filled], packed[:, filled:].view(torch.float32)).start(x.device)
    return packed


def values(x: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    """x [M, K] / scale -> fp8 [M, K]. scale: one element, fp32, a power of two."""
    made = x.new_empty(x.shape, dtype=kind)
    plan_quantize(x, scale, made, None).start(x.device)
    return made


def plan_quantize(x: Tensor, given: Tensor | None, made: Tensor, scales: Tensor | None) -> Launch:
    """The launch that fills `made` and, if no scale is given, `scales` [M, SCALES], not yet run."""
    from fusedtp.kernels.quantize import quantize_kernel

    m, filled = made.shape
    rows, block, warps = _tile(x, filled)
    args = dict(
        x=x,
        stride_xm=x.stride(0),
        stride_xk=x.stride(1),
        given=given,
        values=made,
        stride_v=made.stride(0),
        scales=scales,
        stride_s=0 if scales is None else scales.stride(0),
        M=m,
        K=x.shape[1],
        FILLED=filled,
        TOP=LARGEST[made.dtype],
        ROWS=rows,
        BLOCK=block,
        WHOLE=block >= filled,
        COPIES=SCALES,
    )
    return _launch(quantize_kernel, -(-m // rows), args, warps)


def packed_blocks(x: Tensor) -> Tensor:
    """x [T, K], K a multiple of 4 -> uint8 [T, K + 4 ceil(K / BLOCK)]: each row in e4m3, then its blocks' scales."""
    k = x.shape[1]
    packed = x.new_empty(x.shape[0], k + 4 * -(-k // BLOCK), dtype=torch.uint8)
    plan_pack(x, packed).start(x.device)
    return packed


def plan_pack(x: Tensor, packed: Tensor) -> Launch:
    """The launch that fills `packed`, not yet run."""
    from fusedtp.kernels.quantize import pack_kernel

    args = dict(x=x, stride_xm=x.stride(0), stride_xk=x.stride(1), **_of_packed(packed, x.shape[1]))
    return _launch(pack_kernel, _parts(*x.shape), args | dict(TOP=LARGEST[torch.float8_e4m3fn]), 4)


def unpacked_blocks(packed: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """The contiguous output of `packed_blocks` -> [T, k]."""
    launch, y = plan_unpack(packed, k, dtype)
    launch.start(packed.device)
    return y


def plan_unpack(packed: Tensor, k: int, dtype: torch.dtype) -> tuple[Launch, Tensor]:
    """The launch, not yet run, and its output."""
    from fusedtp.kernels.quantize import unpack_kernel

    y = packed.new_empty(packed.shape[0], k, dtype=dtype)
    args = dict(y=y, **_of_packed(packed, k))
    return _launch(unpack_kernel, _parts(*y.shape), args, 4), y


def _of_packed(packed: Tensor, k: int) -> dict[str, Any]:
    rows, blocks = PARTS
    values, scales = packed.view(torch.float8_e4m3fn), packed[:, k:].view(torch.float32)
    sizes = dict(row_bytes=packed.stride(0), T=packed.shape[0], K=k)
    return dict(values=values, scales=scales, **sizes, ROWS=rows, BLOCKS=blocks, WIDTH=BLOCK)


def _parts(rows: int, k: int) -> int:
    height, blocks = PARTS
    return -(-rows // height) * -(-k // (blocks * BLOCK))


def largest(x: Tensor) -> Tensor:
    """The largest finite magnitude of x [M, K], fp32 [1, 1]; 0 if there is none."""
    launch, parts = plan_largest(x, machine_of(x.device))
    launch.start(x.device)
    return parts.amax().view(1, 1)


def plan_largest(x: Tensor, machine: Machine) -> tuple[Launch, Tensor]:
    """The launch, not yet run, and the result of each of its programs."""
    from fusedtp.kernels.quantize import largest_kernel

    m, k = x.shape
    rows, block, warps = _tile(x, min(k, ELEMENTS))
    programs = max(1, min(PROGRAMS * machine.programs, -(-m // rows)))
    parts = x.new_empty(programs, dtype=torch.float32)
    args = dict(x=x, stride_xm=x.stride(0), stride_xk=x.stride(1), parts=parts, M=m, K=k, ROWS=rows, BLOCK=block)
    return _launch(largest_kernel, programs, args, warps), parts


def _tile(x: Tensor, columns: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program's tile."""
    if x.stride(1) != 1 and x.shape[1] > 1:
        return SQUARE, SQUARE, 4
    block = power_of_two(max(16, columns))
    if block > HELD:
        block = ELEMENTS
    rows = max(1, ELEMENTS // block)
    return rows, block, max(4, min(16, rows * block // 1024))


def _launch(kernel: Any, programs: int, args: dict[str, Any], warps: int) -> Launch:
    return Launch(kernel, programs, args, Config(0, 0, 0, num_warps=warps))
