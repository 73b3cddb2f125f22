"""The engines of the grouped matmuls, and the choice between them.

    chunked   the vendor's matmul: torch's grouped_mm on a GPU, one matmul an expert on a CPU
    triton    the kernels of kernels/grouped_matmul.py and grouped_wgrad.py

Rows from offsets[E] on belong to no expert. No engine lets them show in what is defined: the same rows of an output
are left as they were allocated (grouped_mm and elementwise operations on a GPU, and 16-bit matmuls on a CPU, may store
something there), and the gradients of weights and biases leave them out.

On a GPU nothing here reads offsets on the host: a loop over experts would have to, and so there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtp.comm.device_view import runs_kernels

from .. import launch
from .. import matmul as dense
from ..engines import has_triton, interpreting
from ..matmul import is_16_bit, joined, matmul_add
from . import gate as gate_in_torch
from . import ragged
from .nodes import record_function

ENGINES = ("auto", "chunked", "triton")
ALIGNED = 8  # bf16 elements in the 16 bytes of which grouped_mm wants strides to be multiples


def choose(engine: str, x: Tensor) -> str:
    """ "chunked" or "triton", by device and dtype alone. Raises ValueError where the engine asked for cannot run."""
    if engine not in ENGINES:
        raise ValueError(f"engine is {engine!r}; it must be one of {', '.join(ENGINES)}")
    if engine == "auto":
        return "triton" if x.is_cuda and x.dtype in launch.DTYPES and runs_kernels(x.device) else "chunked"
    if engine == "triton":
        if not has_triton():
            raise ValueError("engine 'triton' needs the triton package; use 'chunked'")
        if x.dtype not in launch.DTYPES:
            raise ValueError(f"engine 'triton' takes fp32, fp16 and bf16, not {x.dtype}; use 'chunked'")
        if not x.is_cuda and not interpreting():
            raise ValueError(
                "engine 'triton' on CPU tensors runs in Triton's interpreter: set TRITON_INTERPRET=1 in the "
                "environment before Python starts, or use 'chunked'"
            )
    return engine


def matmul(
    engine: str, xs: Sequence[Tensor], weights: Sequence[Tensor], offsets: Tensor, bias: Tensor | None
) -> Tensor:
    """xs[j] [R, K], weights[j] [E, N, K], bias [E, N] -> [R, N]: sum_j xs[j] @ weights[j][e].T + bias[e]."""
    chosen = choose(engine, xs[0])
    with record_function(f"fusedtp.grouped_matmul.{chosen}"):
        if chosen == "triton":
            return launch.grouped.grouped_matmul(xs, weights, offsets, bias, precision=fp32_precision())
        if xs[0].is_cuda:
            return _vendor_matmul(xs, weights, offsets, bias)
        y = xs[0].new_empty(xs[0].shape[0], weights[0].shape[1])
        for e, rows in _experts(offsets):
            ragged.linear_into(y, rows, xs, [w[e] for w in weights], None if bias is None else bias[e])
        return y


def matmul_by_expert(
    xs: Sequence[Tensor], weights: Sequence[Tensor], offsets: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """`matmul` on a CPU, expert by expert: its first row and its y [R_e, N], which lasts until the next one is made."""
    each = list(_experts(offsets))
    windows = [ragged.window(rows, xs[0].shape[0], xs[0]) for _, rows in each]
    most = max((wide.stop - wide.start for wide in windows), default=0)
    buffer = xs[0].new_empty(most, weights[0].shape[1])
    for (e, rows), wide in zip(each, windows, strict=True):
        y = buffer[: wide.stop - wide.start]
        inputs, own = joined([x[wide] for x in xs], [w[e] for w in weights])
        dense.matmul_into(y, inputs, [w.t() for w in own])
        yield rows.start, y[rows.start - wide.start : rows.stop - wide.start]


def wgrad(engine: str, dys: Sequence[Tensor], x: Tensor, offsets: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """dys[i] [R, N_i], x [R, K] -> [E, N_i, K] of dtype: dys[i][rows of e].T @ x[rows of e], summed in fp32."""
    chosen = choose(engine, x)
    with record_function(f"fusedtp.grouped_wgrad.{chosen}"):
        if chosen == "triton":
            precision = fp32_precision()
            return [launch.grouped.grouped_wgrad(dy, x, offsets, dtype, precision=precision) for dy in dys]
        if x.is_cuda:
            return [_vendor_wgrad(dy, x, offsets).to(dtype) for dy in dys]
        dws = [x.new_empty(offsets.shape[0] - 1, dy.shape[1], x.shape[1], dtype=dtype) for dy in dys]
        padded, *each = (ragged.Padded(t, offsets.tolist()) for t in (x, *dys))
        for e, rows in _experts(offsets, empty=True):
            if dtype == x.dtype and rows.stop > rows.start:
                right = dense.to_fp32(padded[rows])  # read by all while a core's cache holds it
                for dw, dy in zip(dws, each, strict=True):
                    dense.matmul_into(dw[e], [dy[rows].t()], [right])
            else:
                for dw, plain in zip(dws, dys, strict=True):
                    matmul_add(dw[e].zero_(), plain[rows].t(), x[rows])
        return dws


def bias_grad(engine: str, dy: Tensor, offsets: Tensor) -> Tensor:
    """dy [R, N] -> [E, N]: the sum of each expert's rows, in fp32, rounded once."""
    chosen = choose(engine, dy)
    with record_function(f"fusedtp.grouped_bias_grad.{chosen}"):
        if chosen == "triton":  # in full precision: no factor is rounded
            ones = dy.new_ones(1, 1).expand(dy.shape[0], 1)
            return launch.grouped.grouped_wgrad(dy, ones, offsets, dy.dtype)[:, :, 0].contiguous()
        if dy.is_cuda:
            return _vendor_wgrad(dy, dy.new_ones(dy.shape[0], ALIGNED), offsets)[:, :, 0].contiguous()
        db = dy.new_zeros(offsets.shape[0] - 1, dy.shape[1])
        for e, rows in _experts(offsets):
            db[e] = dy[rows].sum(0, dtype=torch.float32 if is_16_bit(dy.dtype) else dy.dtype)
        return db


def gated(
    engine: str, x: Tensor, gate: Tensor, up: Tensor, offsets: Tensor, act: str, keep: bool
) -> list[Tensor]:
    """x [R, K], gate and up [E, N, K] -> act(g) * u with g = x @ gate[e].T, u = x @ up[e].T; g and u too if `keep`."""
    chosen = choose(engine, x)
    with record_function(f"fusedtp.grouped_gated.{chosen}"):
        if chosen == "triton":
            y, g, u = launch.grouped.grouped_gated(
                x, gate, up, offsets, act, keep, precision=fp32_precision()
            )
            return [y] if g is None or u is None else [y, g, u]
        if x.is_cuda:
            g, u = (_vendor_matmul([x], [w], offsets, None) for w in (gate, up))
            y = gate_in_torch.forward(g, u, act)
            return [y, g, u] if keep else [y]
        outs = [x.new_empty(x.shape[0], gate.shape[1]) for _ in range(3 if keep else 1)]
        for e, rows in _experts(offsets):
            here, there, products = rows, x, outs[1:]
            if not keep:  # products of this expert alone
                wide = ragged.window(rows, x.shape[0], x)
                here, there = slice(rows.start - wide.start, rows.stop - wide.start), x[wide]
                products = [x.new_empty(there.shape[0], gate.shape[1]) for _ in range(2)]
            g = ragged.linear_into(products[0], here, [there], [gate[e]])
            u = ragged.linear_into(products[1], here, [there], [up[e]])
            gate_in_torch.forward(g, u, act, outs[0][rows])
        return outs


def gated_backward(engine: str, dy: Tensor, g: Tensor, u: Tensor, offsets: Tensor, act: str) -> list[Tensor]:
    """dy, g, u [R, N] -> the gradients of g and u in act(g) * u."""
    chosen = choose(engine, g)
    with record_function(f"fusedtp.grouped_gated_backward.{chosen}"):
        if chosen == "triton":
            return [*launch.grouped.grouped_gated_backward(dy.contiguous(), g, u, offsets, act)]
        outs = [torch.empty_like(g), torch.empty_like(u)]
        rows = slice(0, g.shape[0] if g.is_cuda else int(offsets[-1]))
        gate_in_torch.backward(dy[rows], g[rows], u[rows], act, *(out[rows] for out in outs))
        return outs


def _experts(offsets: Tensor, *, empty: bool = False) -> Iterator[tuple[int, slice]]:
    """(expert, its rows), `empty` or only where there are any; of a CPU's offsets, which are read without waiting."""
    assert not offsets.is_cuda
    for e, (begin, end) in enumerate(pairwise(offsets.tolist())):
        if end > begin or empty:
            yield e, slice(begin, end)


def fp32_precision() -> str:
    """Of fp32 operands: what `allow_tf32` asks for."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


# -- grouped_mm ------------------------------------------------------------------------------------------------------


def _vendor_matmul(
    xs: Sequence[Tensor], weights: Sequence[Tensor], offsets: Tensor, bias: Tensor | None
) -> Tensor:
    """Rounds after each product and after the bias, which grouped_mm does not take."""
    r, (_, n, k) = xs[0].shape[0], weights[0].shape
    _check_vendor(xs[0], n, k)
    if 0 in (r, n, k):
        y = xs[0].new_zeros(r, n)
    else:
        y, *others = (
            F.grouped_mm(_aligned(x), _aligned(w).transpose(1, 2), offs=offsets[1:].contiguous())
            for x, w in zip(xs, weights, strict=True)
        )
        for other in others:
            y.add_(other)
    if bias is not None:
        row = torch.arange(r, dtype=offsets.dtype, device=y.device)
        expert = torch.searchsorted(offsets[1:], row, right=True).clamp_(max=len(bias) - 1)
        y.add_(bias[expert])
    return y


def _vendor_wgrad(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """In x's dtype: grouped_mm makes no other."""
    _check_vendor(x, dy.shape[1], x.shape[1])
    if 0 in (*dy.shape, x.shape[1]):
        return x.new_zeros(len(offsets) - 1, dy.shape[1], x.shape[1])
    dw = F.grouped_mm(_aligned(dy).t(), _aligned(x), offs=offsets[1:].contiguous())
    if not _writes_empty(dw.device):
        dw.masked_fill_((offsets[1:] == offsets[:-1])[:, None, None], 0)
    return dw


def _writes_empty(device: torch.device) -> bool:
    """Whether grouped_mm writes the zeros of an expert without rows. Hopper's does; Blackwell's and AMD's have left
    there what was in memory (pytorch issue 172439, pull request 174314), and of others nothing is known.
    """
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return hopper and torch.version.hip is None


def _check_vendor(x: Tensor, n: int, k: int) -> None:
    """Raises ValueError for what grouped_mm does not take."""
    if x.dtype != torch.bfloat16 or n % ALIGNED or k % ALIGNED:
        raise ValueError(
            f"engine 'chunked' on a GPU is torch's grouped_mm, which takes bfloat16 and N and K that are multiples of "
            f"{ALIGNED}, not {x.dtype} with N {n} and K {k}. A loop over experts would wait for the GPU to learn the "
            f"offsets: use 'triton', or tensors on the CPU"
        )


def _aligned(x: Tensor) -> Tensor:
    """x with an address and strides that are multiples of 16 bytes, and one dimension contiguous."""
    inner = [s for s in x.stride()[-2:] if s != 1]
    outer = [*x.stride()[:-2], *inner]
    fits = len(inner) < 2 and all(s % ALIGNED == 0 and s > 0 for s in outer) and x.data_ptr() % 16 == 0
    return x if fits else x.contiguous()
