"""The fp8 suite: a layer's matmul, and quantization, on one device.

    op=linear     y = x @ w.T, with x [T, K] and w [N, K] of one rank of `--tp`. "fp8" is our kernel on fp8 operands (on
                  a CPU, they are widened); "quantized here" first quantizes both, then multiplies as a layer does: a
                  forward of fusedtp.nn.FP8Linear
    op=quantize   x [T, K] -> fp8 with a scale per row; counts x read once and fp8 written once. "torch" is the formula,
                  which runs on a CPU and where Triton does not compile

Operands are exactly representable in fp8, so that all ways compute the same product. An fp8 sum may lose 17 / 2**13 of
the magnitude of its terms in addition, see tests/gpu/test_fp8.py. On a GPU, the roof of an fp8 matmul is twice that of
16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fusedtp.ops import fp8, launch

from .. import errors, rivals
from ..cases import Case, named
from ..options import Plan
from ..rank import Rank
from ..rivals import matmul as vendor
from ..rows import Row
from ..ways import Ways
from .local import matmul_cases

SUITE = "fp8"
DTYPES = ("bfloat16", "float32")  # supported by FP8Linear
LOST = 17 * 2.0**-13
Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # x, w; x in fp8, its scale, w in fp8, its scale


def cases(plan: Plan, tp: int) -> list[Case]:
    """The layers of the matmul suite, and a quantization of each width that is gathered or multiplied."""
    found = []
    for case in matmul_cases(plan, tp):
        if case.dtype in DTYPES:
            found.append(replace(case, operation="linear", names=(("op", "linear"), *case.names)))
            names = named(op="quantize", T=case.tokens, K=case.k)
            found.append(replace(case, operation="quantize", n=0, names=names))
    return list(dict.fromkeys(found))


def made(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(x rounded to fp8 in its own dtype, the fp8 values, their scales); contiguous, as torch's matmul requires."""
    values, scale = fp8.quantize(x)
    return fp8.dequantize(values, scale, x.dtype), values.contiguous(), scale.contiguous()


@torch.no_grad()
def measure(rank: Rank, case: Case) -> list[Row]:
    """Result rows of one case."""
    linear, on_cpu = case.operation == "linear", rank.device.type == "cpu"

    def operands(seed: int) -> Operands:
        n = case.n or 16
        x, x8, x_scale = made(rank.randn(case.tokens, case.k, dtype=case.dtype, seed=2 * seed))
        w = rank.randn(n, case.k, dtype=case.dtype, seed=2 * seed + 1, scale=case.k**-0.5)
        w, w8, w_scale = made(w)
        return x, w, x8, x_scale, w8, w_scale

    ways, sets = Ways(rank, SUITE, case), rank.copies(operands)
    if linear:
        ways.add(rivals.vendor_name(rank.device), lambda x, w, *_: vendor(x, w))
        ways.add("torch._scaled_mm", None if on_cpu else torchs, "left out on a CPU")
        ways.add("fusedtp fp8", lambda x, w, *given: (product if on_cpu else kernel)(x, *given))
        ways.add("fusedtp fp8, quantized here", lambda x, w, *_: product(x, *fp8.quantize(x), *fp8.quantize(w)))
    else:
        ways.add("torch", lambda x, *_: by_formula(x))
        ways.add("torch.compile", *rivals.compiled(fp8.quantize, rank.device, rank.plan.compile))
        if "torch.compile" in ways.functions:
            compiled: Callable[..., Any] = ways.functions["torch.compile"]
            ways.add("torch.compile", lambda x, *_: compiled(x))
        ways.add("fusedtp", None if on_cpu else lambda x, *_: fp8.quantize(x), "on a CPU it is the formula")
    ways.prepare(sets)
    found = {name: {"error": error(case, function(*sets[0]), sets[0])} for name, function in ways.functions.items()}
    if linear:
        return ways.rows(found, flops=case.flops, roof=rank.roofs[case.dtype] * (1 if on_cpu else 2))
    moved = case.tokens * (case.k * case.itemsize + fp8.row_bytes(case.k))
    return ways.rows(found, moved_bytes=float(moved), roof=rank.roofs["copy"])


def product(x: Tensor, x8: Tensor, x_scale: Tensor, w8: Tensor, w_scale: Tensor) -> Tensor:
    """The fp8 matmul that a layer uses, rounded to x's dtype."""
    return fp8.product(x8, x_scale, w8, w_scale, None, x.dtype)


def kernel(x: Tensor, x8: Tensor, x_scale: Tensor, w8: Tensor, w_scale: Tensor) -> Tensor:
    """The same with our kernel."""
    return launch.scaled_matmul(x8, w8, x_scale, w_scale, None, x.dtype)


def torchs(x: Tensor, w: Tensor, x8: Tensor, x_scale: Tensor, w8: Tensor, w_scale: Tensor) -> Tensor:
    """The vendor's fp8 matmul, with scales of rows."""
    return fp8.vendors_product(x8, x_scale, w8, w_scale, x.dtype)


def by_formula(x: Tensor) -> tuple[Tensor, Tensor]:
    with patch.object(fp8, "_by_kernel", lambda x: False):
        return fp8.quantize(x)


def error(case: Case, got: Any, operands: Operands) -> errors.Error:
    """The error at sampled rows. Quantizing numbers that are representable in fp8 must be exact."""
    x, w = operands[:2]
    if case.operation == "quantize":
        values, scale = got
        off = float((fp8.dequantize(values, scale, x.dtype) - x).abs().max()) if x.numel() else 0.0
        return errors.Error(off, 0.0 if off == 0 else float("inf"))
    rows = errors.sampled(case.tokens).to(x.device)
    want = errors.product(x, w, rows)
    u, v = errors.unit(x.dtype), errors.unit(torch.float32)
    allowed = u * want.y.abs() + ((case.k + 3) * v + LOST) * want.terms
    off = (got[rows].double() - want.y).abs()
    return errors.Error(float(off.max()), float((off / allowed.clamp(min=1e-300)).max()))
