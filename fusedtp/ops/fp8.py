"""fp8 operands: values with fp32 scales, quantization, packed rows, and their product on one device.

    e4m3   float8_e4m3fn: 3 bits of mantissa, up to 448. Activations and weights
    e5m2   float8_e5m2: 2 bits, up to 57344, with infinities. Output gradients, which have a wider range

There is one scale per row, [M, 1], or one element for a whole tensor; an operand stands for value * scale.

Note [Scales that are powers of two]
`quantize` takes the smallest power of two that brings the largest magnitude M of a row (or tensor) to at most the
largest fp8. Division and multiplication by it are exact. So

    - an element x is off by at most u |x|, u = 2**-4 in e4m3 and 2**-3 in e5m2: half a unit of its last bit. The error
      is larger only where fp8 is subnormal: at most 2**-17 M in e4m3 and 2**-31 M in e5m2. (The scale is less than
      M / 224, and half a subnormal unit is 2**-10 of it; in e5m2 less than M / 28672, and half a unit is 2**-17)
    - apart from subnormals, the result for an element does not depend on the others of its row: if each rank has a part
      of a row, quantizing by parts gives almost the same as quantizing the whole row
    - value * scale is exact in bf16 and fp32, so operands can be multiplied in these as well as in fp8

A NaN element becomes NaN; so does an infinity in e4m3, which has none. Neither affects the scale of the row.

Note [Packed rows]
fp8 rows travel between ranks followed by their scales, as one row of bytes, aligned for 16-byte copies:

    | K values | up to 15 bytes, zero | scale, 4 times |        uint8 [T, 16 ceil(K / 16) + 16]

That is half the bytes of bf16 plus 16. A tensor scale travels the same way, repeated in each row. Nothing else is
exchanged, and ranks may have different scales.

Sources: Micikevicius et al. 2022, "FP8 formats for deep learning"; DeepSeek-V3 (2024), section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedtp.comm import Communicator, Place
from fusedtp.comm.streams import is_capturing

from . import engines, launch, pointwise
from .launch.plain import multiplies, scaled_matmul
from .launch.quantize import LARGEST, SCALE_BYTES, SCALES
from .matmul import matmul_as
from .operation import LocalOperation, Shared, Spec, needs_grad
from .rows import Rows

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = (E4M3, E5M2)
RESULTS = (torch.bfloat16, torch.float16, torch.float32)


# -- values and scales -----------------------------------------------------------------------------------------------


def power_of_two_scales(largest: Tensor, kind: torch.dtype) -> Tensor:
    """The smallest powers of two, but at least 2**-126, that bring these magnitudes to at most the largest fp8."""
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2**exponent, mantissa in [0.5, 1) or 0
    exponent = exponent - torch.where(mantissa <= 0.875, LARGEST[kind], LARGEST[kind] - 1)
    return torch.ldexp(torch.ones_like(largest), exponent.clamp(min=-126))


def quantize(x: Tensor, kind: torch.dtype = E4M3, *, by_row: bool = True) -> tuple[Tensor, Tensor]:
    """x [M, K] as fp8, and its scales: fp32 [M, 1], or [1, 1] for the tensor. Note [Scales that are powers of two].

    kind   float8_e4m3fn or float8_e5m2
    """
    if kind not in FORMATS or x.dim() != 2:
        raise ValueError(f"got x {tuple(x.shape)} and kind {kind}: wanted [M, K] and one of {FORMATS}")
    if by_row and _by_kernel(x):
        k = x.shape[1]
        return _parts(launch.quantize.packed_rows(x, kind, row_bytes(k) - SCALE_BYTES), k, kind)
    x = x.contiguous()
    scale = power_of_two_scales(largest_of(x, by_row), kind)
    return values_of(x, scale, kind), scale


def largest_of(x: Tensor, by_row: bool) -> Tensor:
    """The largest finite magnitude of each row of x [M, K], fp32 [M, 1], or of all, [1, 1]; 0 if there is none."""
    if not by_row and _by_kernel(x):
        return launch.quantize.largest(x)
    wide = x.float()
    magnitudes = torch.where(wide.isfinite(), wide.abs(), 0.0)
    shape = (x.shape[0], 1) if by_row else (1, 1)
    if x.numel() == 0:
        return wide.new_zeros(shape)
    return magnitudes.amax(1, keepdim=True) if by_row else magnitudes.amax().view(shape)


def values_of(x: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    """x / scale as fp8; scale is a power of two. Values beyond the largest fp8 saturate, NaN stays NaN."""
    if scale.numel() == 1 and _by_kernel(x):
        return launch.quantize.values(x, scale, kind)
    wide = x.contiguous().float() / scale
    if kind == E4M3:  # some conversions saturate
        wide = torch.where(wide.isinf(), torch.nan, wide)
    largest = torch.finfo(kind).max
    return torch.where(wide.isfinite(), wide.clamp(-largest, largest), wide).to(kind)


def _by_kernel(x: Tensor) -> bool:
    """Whether kernels/quantize.py quantizes it: on devices that multiply fp8, in eager mode."""
    return pointwise.serves(x) and multiplied_in_fp8(x.device)


def dequantize(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """value * scale in bf16 or fp32; exact if scale is a power of two."""
    return (values.float() * scale).to(dtype)


# -- packed rows -----------------------------------------------------------------------------------------------------


def row_bytes(k: int) -> int:
    """Bytes of a packed row of k values."""
    return -(-k // 16) * 16 + SCALE_BYTES


def pack(values: Tensor, scale: Tensor) -> Tensor:
    """fp8 [T, K] and its scale, per row or for all -> uint8 [T, row_bytes(K)]. Note [Packed rows]."""
    assert scale.dtype == torch.float32, scale.dtype
    rows, k = values.shape
    if _lie_packed(values, scale):
        return values.view(torch.uint8).as_strided((rows, row_bytes(k)), (row_bytes(k), 1))
    of_rows = scale.reshape(-1, 1).expand(rows, 1).repeat(1, SCALES).view(torch.uint8)
    filling = values.new_zeros(rows, -k % 16, dtype=torch.uint8)
    return torch.cat([values.view(torch.uint8), filling, of_rows], 1)


def _lie_packed(values: Tensor, scale: Tensor) -> bool:
    """Whether these are views of one packed matrix, as the kernel returns them."""
    if torch.compiler.is_compiling():
        return False
    width = row_bytes(values.shape[1])
    return (
        values.untyped_storage().data_ptr() == scale.untyped_storage().data_ptr()
        and values.stride() == (width, 1)
        and scale.stride(0) * 4 == width
        and scale.storage_offset() * 4 == values.storage_offset() + width - SCALE_BYTES
        and scale.shape == (values.shape[0], 1)
    )


def unpack(rows: Tensor, k: int, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """The output of `pack` -> (values [T, K], scale [T, 1]), as views."""
    return _parts(rows, k, kind)


def _parts(packed: Tensor, k: int, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    return packed.view(kind)[:, :k], packed[:, -SCALE_BYTES:].view(torch.float32)[:, :1]


# -- products on one device ------------------------------------------------------------------------------------------


def multiplied_in_fp8(device: torch.device) -> bool:
    """Whether our kernel multiplies fp8 on this device. Elsewhere values are widened, which is exact."""
    return device.type == "cuda" and engines.has_triton() and multiplies(E4M3, device)


def operand(w: Tensor) -> Tensor:
    """Prepare an fp8 operand of several products: widen it once if `product` would do so each time."""
    if multiplied_in_fp8(w.device):
        return w
    return w.to(torch.bfloat16 if w.is_cuda else torch.float32)


def _product(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x_scale * w_scale * (x [M, K] @ w [N, K].T) + bias in fp32, rounded once to dtype. w may be an `operand`."""
    if w.dtype in FORMATS and multiplied_in_fp8(x.device):
        x, w = columns_together(x), columns_together(w)
        if bias is None and _vendor_takes(x, x_scale, w, w_scale, dtype):
            return vendors_product(x, x_scale, w, w_scale, dtype)
        return scaled_matmul(x, w, x_scale, w_scale, bias, dtype)
    wide = torch.bfloat16 if x.is_cuda else torch.float32  # both hold any fp8
    sums = matmul_as(x.to(wide), w.to(wide).t(), torch.float32)
    sums = sums.mul_(x_scale.reshape(-1, 1)).mul_(w_scale.reshape(1, -1))
    return (sums if bias is None else sums.add_(bias)).to(dtype)


_ASKED: dict[tuple[Any, ...], bool] = {}  # kind of operands -> whether the vendor's product is right for them


def _vendor_takes(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch._scaled_mm multiplies these: on an H100 it is 1.3 to 1.5 times as fast as our kernel (docs/fp8.md).

    It was not measured on other GPUs. The operands it supports depend on its version and on the vendor's library, so it
    is tried once for each kind of operands; not during graph capture, which cannot wait for the result.
    """
    by_row, shape = w_scale.numel() > 1, (*x.shape, w.shape[0])
    if (
        torch.version.hip is not None
        or torch.cuda.get_device_capability(x.device) != (9, 0)
        or by_row != (x_scale.numel() > 1)
        or 0 in shape
        or any(side % 16 for side in shape[1:])
    ):
        return False
    key = x.device, x.dtype, w.dtype, by_row, dtype
    if key not in _ASKED:
        if is_capturing():
            return False
        _ASKED[key] = vendor_is_right(*key)
    return _ASKED[key]


def vendors_product(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """_product with the vendor's library. Row scales of both operands, [M, 1] and [N, 1], or one element each."""
    if w_scale.numel() > 1:
        scales = x_scale.contiguous(), w_scale.contiguous().t()
    else:
        scales = x_scale.reshape(()), w_scale.reshape(())
    y: Tensor = torch._scaled_mm(x, w.t(), *scales, out_dtype=dtype)
    return y


def vendor_is_right(
    device: torch.device, x_kind: torch.dtype, w_kind: torch.dtype, by_row: bool, dtype: torch.dtype
) -> bool:
    """Whether vendors_product is exact for a small product of integers with padded rows."""
    m, n, k = 48, 32, 64
    x, w = ((torch.arange(rows * 80, device=device) * 7 % 5 - 2.0).view(rows, 80) for rows in (m, n))
    scales = [(2.0 ** (torch.arange(rows if by_row else 1, device=device) % 3)).view(-1, 1) for rows in (m, n)]
    want = (x[:, :k].double() * scales[0]) @ (w[:, :k].double() * scales[1]).t()
    try:
        got = vendors_product(x.to(x_kind)[:, :k], scales[0], w.to(w_kind)[:, :k], scales[1], dtype)
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    return torch.equal(got, want.to(dtype))


product = LocalOperation(
    "scaled_product",
    "Tensor x, Tensor x_scale, Tensor weight, Tensor w_scale, Tensor? bias, ScalarType dtype",
    "Tensor",
    fake=lambda x, x_scale, weight, w_scale, bias, dtype: x.new_empty(x.shape[0], weight.shape[0], dtype=dtype),
    function=_product,
)


# -- shared by the fp8 operations ------------------------------------------------------------------------------------


def choose(name: str, comm: Communicator, spec: Spec, rows: Rows, shared: Shared | None = None) -> engines.Choice:
    """Choose the engine as for bf16, by the defaults; `triton` only if the device multiplies fp8.

    Raises ValueError if the requested engine cannot run.
    """
    if spec.engine == "auto":
        engines.check_alike(comm, engines.KERNELS, engines.FP8)
    choice = engines.choose(comm, spec.engine, rows, torch.bfloat16)
    if choice.engine == "triton" and not multiplies(E4M3, comm.device):
        if spec.engine != "auto":
            raise ValueError(f"engine {spec.engine!r}: {comm.device} does not multiply fp8; use 'collective'")
        return engines.Choice("collective", f"{comm.device} does not multiply fp8")
    return choice


def check(
    at: Place,
    x: Tensor,
    x_scale: Tensor,
    weights: Sequence[Tensor],
    w_scales: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    dtype: torch.dtype,
) -> None:
    """Raises ValueError, naming this rank, for fp8 operands that do not fit. x [..., K]; scales: per row, or one."""
    here = f"rank {at.rank}:"
    if dtype not in RESULTS:
        raise ValueError(f"{here} dtype of the result is {dtype}; it must be one of {RESULTS}")
    if needs_grad(x, x_scale, *weights, *w_scales, *biases):
        raise ValueError(
            f"{here} an operand requires a gradient, but this operation has no backward; use fusedtp.nn.FP8Linear"
        )
    _check_operand(here, "x", x, x_scale, x.shape[:-1].numel())
    for w, scale, bias in zip(weights, w_scales, biases, strict=True):
        _check_operand(here, "the weight", w, scale, w.shape[0] if w.dim() else 0)
        if w.dtype != weights[0].dtype:
            raise ValueError(f"{here} the weights are {weights[0].dtype} and {w.dtype}; they must have one dtype")
        if w.dim() != 2 or x.dim() < 2 or w.shape[1] != x.shape[-1]:
            raise ValueError(
                f"{here} x has shape {tuple(x.shape)}, the weight {tuple(w.shape)}; wanted [..., K] and [N, K]"
            )
        if bias is not None and (tuple(bias.shape) != (w.shape[0],) or bias.dtype != dtype):
            raise ValueError(f"{here} the bias is {tuple(bias.shape)} {bias.dtype}; wanted [{w.shape[0]}] of {dtype}")
        for other in (x_scale, w, scale, bias):
            if other is not None and other.device != x.device:
                raise ValueError(f"{here} x is on {x.device}, another operand on {other.device}")
    if x.device.type != at.device_type:
        raise ValueError(f"{here} x is on {x.device}, the group {at.name!r} works on {at.device_type}")


def _check_operand(here: str, what: str, values: Tensor, scale: Tensor, rows: int) -> None:
    if values.dtype not in FORMATS:
        raise ValueError(f"{here} {what} is {values.dtype}; it must be one of {FORMATS}")
    if scale.dtype != torch.float32 or scale.numel() not in (1, rows):
        raise ValueError(
            f"{here} the scale of {what} is {tuple(scale.shape)} {scale.dtype}; wanted one element or "
            f"[{rows}, 1] of float32"
        )


def columns_together(x: Tensor) -> Tensor:
    """x [M, K] with contiguous rows, as fp8 tensor cores require of both operands, that begin at multiples of 16 bytes,
    as TMA and vector loads require. Copied if necessary.
    """
    if x.numel() == 0 or (x.stride(1) == 1 and x.stride(0) % 16 == x.data_ptr() % 16 == 0):
        return x
    rows, k = x.shape
    together = x.new_empty(rows, -(-k // 16) * 16)[:, :k]
    return together.copy_(x)


def of_check(x: Tensor, weights: Sequence[Tensor], dtype: torch.dtype | None) -> tuple[Any, ...]:
    """For the checks' launches: the operands they draw -> (x, its scale, weights, their scales, dtype of results).

    Small integers are quantized exactly, with scales that differ between operands. If the operands are fp8 already, as
    in the lint, only their layouts matter.
    """
    if x.dtype in FORMATS:
        scales = [t.new_ones(t.shape[0], 1, dtype=torch.float32) for t in (x, *weights)]
        return x, scales[0], list(weights), scales[1:], dtype or torch.bfloat16
    made = [quantize(x, E5M2), *map(quantize, weights)]  # as for a gradient: both formats occur
    made = [((v.float() / 2**i).to(v.dtype), s * 2**i) for i, (v, s) in enumerate(made)]
    return (*made[0], [w for w, _ in made[1:]], [s for _, s in made[1:]], dtype or x.dtype)
