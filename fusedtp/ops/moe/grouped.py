"""y[i] = rows[i] @ weights[e].T, e the expert of row i: matmuls of ragged groups, on one device.

    rows     [R, K]     expert-major: the rows of expert e are offsets[e] .. offsets[e + 1]
    offsets  [E + 1]    int32, on the device of rows: offsets[0] is 0, offsets[E] at most R
    weights  [E, N, K]  rows, weights and bias have the same dtype and any strides
    return   [R, N]

Rows from offsets[E] on belong to no expert: they are the unused end of a bounded buffer. Their values, even NaN, are
never used; the same rows of the result and of the gradient of `rows` are undefined, and weight gradients do not include
them. The producer of `rows` must ignore those rows of the gradient too; a sum over all rows would not.

    engine    chunked   the vendor's matmul: torch's grouped_mm on a GPU, one matmul per expert on a CPU
              triton    the kernels of kernels/grouped_matmul.py and grouped_wgrad.py

dgrad    drows = grouped_matmul(dy, weights.mT)
wgrad    dweights[e] = dy[rows of e].T @ rows[rows of e]
saved    rows and weights; for a gated matmul also both products

If a weight has a `main_grad`, its gradient is added there in fp32, see Note [main_grad] in ../main_grad.py; grouped_mm
(`chunked` on a GPU) rounds it first. Offsets on a CPU are checked. The host never reads offsets on a GPU, because it
would have to wait for the GPU: there is no loop over experts, and kernels clamp offsets to [0, R].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from fusedtp.comm.device_view import runs_kernels
from fusedtp.comm.launching import Launch

from .. import cpu
from .. import matmul as dense
from ..engines import has_triton, interpreting
from ..launch.config import ALL_REGISTERS, Config, Machine, machine_of
from ..launch.operands import (
    describable,
    described,
    even_columns,
    fits,
    group_tiles,
    grouped_descriptors,
    local_config,
)
from ..launch.pointwise import ELEMENTS
from ..launch.run import DTYPES, check_tensors, of_one_layout
from ..main_grad import MainGrad, accumulate_grad, main_grads_of, wgrad_dtype
from ..matmul import is_16_bit, joined, matmul_add
from ..operation import LocalOperation, as_autocast, needs_grad, wanted
from ..pointwise import ACTIVATIONS

ENGINES = ("auto", "chunked", "triton")
ALIGNED = 8  # grouped_mm requires strides to be multiples of 16 bytes: this many bf16 elements
LARGE_TILE = 128  # rows; if experts have fewer, tiles are that short


def grouped_matmul(
    rows: Tensor, weights: Tensor, offsets: Tensor, *, bias: Tensor | None = None, engine: str = "auto"
) -> Tensor:
    """y[i] = rows[i] @ weights[e].T + bias[e], e the expert of row i.

        rows     [R, K]     fp32, fp16, bf16, and on CPU fp64
        weights  [E, N, K]
        offsets  [E + 1]    int32
        bias     [E, N]     or None
        engine   "auto", "triton", or "chunked": torch's grouped_mm on a GPU, one matmul per expert on a CPU
        return   [R, N]     summed in fp32 (fp64), rounded once; undefined from row offsets[E] on

    Raises ValueError for shapes, dtypes, devices or an engine that do not fit; on CPU also for invalid offsets.
    Source: Gale et al. 2022, "MegaBlocks", section 4.
    """
    (main_grad,) = main_grads_of([weights])
    rows, weights, bias = as_autocast(rows.device.type, rows, weights, bias)
    check_grouped(rows, offsets, weights=weights)
    if bias is not None and bias.shape != weights.shape[:2]:
        raise ValueError(f"got a bias {tuple(bias.shape)} for weights {tuple(weights.shape)}, wanted [E, N]")
    _check_alike(rows, bias=bias)
    if needs_grad(rows, weights, bias):
        y: Tensor = _Grouped.apply(engine, main_grad, rows, weights, bias, offsets)
    else:
        y = matmul_op([rows], [weights], offsets, bias, engine)
    return y


class _Grouped(Function):
    @staticmethod
    def forward(
        ctx: Any,
        engine: str,
        main_grad: MainGrad | None,
        rows: Tensor,
        weights: Tensor,
        bias: Tensor | None,
        offsets: Tensor,
    ) -> Tensor:
        _, _, need_rows, need_weights, _, _ = ctx.needs_input_grad
        ctx.save_for_backward(rows if need_weights else None, weights if need_rows else None, offsets)
        ctx.engine, ctx.main_grad = engine, main_grad
        y: Tensor = matmul_op([rows], [weights], offsets, bias, engine)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _, _, need_rows, need_weights, need_bias, _ = wanted(ctx)
        rows, weights, offsets = ctx.saved_tensors
        drows = matmul_op([dy], [weights.mT], offsets, None, ctx.engine) if need_rows else None
        [dw] = wgrads(ctx.engine, [dy], rows, offsets, [ctx.main_grad]) if need_weights else [None]
        db = bias_grad_op(dy, offsets, ctx.engine) if need_bias else None
        return None, None, drows, dw, db, None


def grouped_gated(
    rows: Tensor, gate: Tensor, up: Tensor, offsets: Tensor, *, act: str = "silu", engine: str = "auto"
) -> Tensor:
    """y[i] = act(rows[i] @ gate[e].T) * (rows[i] @ up[e].T), e the expert of row i: the first half of a gated MLP.

        rows     [R, K]     fp32, fp16, bf16, and on CPU fp64
        gate, up [E, N, K]  two tensors, or the halves of one
        offsets  [E + 1]    int32
        act      "silu" (SwiGLU), "gelu" or "gelu_pytorch_tanh" (GeGLU), as transformers calls them
        engine   as in grouped_matmul
        return   [R, N]     undefined from row offsets[E] on

    `triton` combines both products before rounding; `chunked` rounds them first. If a gradient is needed, both are
    kept, [R, N] each.
    dgrad  drows = dg @ gate[e] + du @ up[e], summed in fp32, with dg and du the gradients of the two products
    wgrad  dgate[e] = dg[rows of e].T @ rows[rows of e], dup likewise; zeros for an expert without rows

    Raises ValueError as grouped_matmul does. Source: Shazeer 2020, "GLU variants".
    """
    if act not in ACTIVATIONS:
        raise ValueError(f"act is {act!r}; it must be one of {', '.join(ACTIVATIONS)}")
    main_grads = main_grads_of([gate, up])
    rows, gate, up = as_autocast(rows.device.type, rows, gate, up)
    check_grouped(rows, offsets, gate=gate, up=up)
    if needs_grad(rows, gate, up):
        y: Tensor = _Gated.apply(engine, act, main_grads, rows, gate, up, offsets)
    else:
        [y] = gated_op(rows, gate, up, offsets, act, engine, False)
    return y


class _Gated(Function):
    @staticmethod
    def forward(
        ctx: Any,
        engine: str,
        act: str,
        main_grads: Sequence[MainGrad | None],
        rows: Tensor,
        gate: Tensor,
        up: Tensor,
        offsets: Tensor,
    ) -> Tensor:
        need_rows, *need_weights = ctx.needs_input_grad[3:6]
        y, g, u = gated_op(rows, gate, up, offsets, act, engine, True)
        weights = (gate, up) if need_rows else (None, None)
        ctx.save_for_backward(rows if any(need_weights) else None, *weights, offsets, g, u)
        ctx.engine, ctx.act, ctx.main_grads, ctx.kept = engine, act, main_grads, None
        out: Tensor = y
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        need_rows, *need_weights = wanted(ctx)[3:6]
        rows, gate, up, offsets, *products = ctx.saved_tensors
        drows, dws = None, [None, None]
        follows = need_rows and rows is not None and not any(need_weights)
        dys = gated_grads(ctx, ctx.engine, dy, products, offsets, follows)
        if need_rows:
            drows = matmul_op(dys, [gate.mT, up.mT], offsets, None, ctx.engine)
        if any(need_weights):
            dws = wgrads(ctx.engine, dys, rows, offsets, ctx.main_grads, need_weights)
        return None, None, None, drows, *dws, None


# -- shared by the backward passes of these layers and of the layers that communicate ----------------------------------


def gated_grads(
    ctx: Any, engine: str, dy: Tensor, products: Sequence[Tensor], offsets: Tensor, weight_pass_follows: bool
) -> list[Tensor]:
    """[dy], or for a gated matmul the gradients of its two products; a split backward computes these only once."""
    if not products:
        return [dy]
    made = take_kept(ctx, dy)
    if made is None:
        made = gated_backward_op(dy, *products, offsets, ctx.act, engine)
    if weight_pass_follows:
        ctx.kept = dy, dy._version, made
    return list(made)


def take_kept(ctx: Any, dy: Tensor) -> Any:
    """Take what a split backward's input pass kept for the weight pass; None if it was kept for another dy."""
    if ctx.kept is None:
        return None
    (of, version, made), ctx.kept = ctx.kept, None
    return made if of is dy and version == dy._version else None


def wgrads(
    engine: str,
    dys: Sequence[Tensor],
    rows: Tensor,
    offsets: Tensor,
    main_grads: Sequence[MainGrad | None],
    needs: Sequence[bool] = (True, True),
) -> list[Any]:
    """dw_i [E, N_i, K], or None if it is not needed or was added to a main_grad.

    With main_grads they are computed one at a time, so that only one is in memory.
    """
    if all(needs) and all(main_grad is None for main_grad in main_grads):
        return list(wgrad_op(dys, rows, offsets, engine, rows.dtype))
    out: list[Any] = []
    for dy, main_grad, need in zip(dys, main_grads, needs, strict=False):
        if not need:
            out.append(None)
            continue
        [dw] = wgrad_op([dy], rows, offsets, engine, wgrad_dtype(rows, [main_grad]))
        out.append(accumulate_grad(dw, main_grad, rows.dtype))
    return out


# -- argument checks ---------------------------------------------------------------------------------------------------


def check_grouped(rows: Tensor, offsets: Tensor, **weights: Tensor) -> None:
    """Raises ValueError for shapes, dtypes or devices that do not fit."""
    for name, w in weights.items():
        if rows.dim() != 2 or w.dim() != 3 or w.shape[2] != rows.shape[1]:
            raise ValueError(f"got rows {tuple(rows.shape)} and {name} {tuple(w.shape)}, wanted [R, K] and [E, N, K]")
        if offsets.dtype != torch.int32 or offsets.shape != (w.shape[0] + 1,) or not w.shape[0]:
            raise ValueError(
                f"got offsets {tuple(offsets.shape)} of {offsets.dtype} for {name} {tuple(w.shape)}, wanted [E + 1] of "
                "int32 and at least one expert"
            )
    (first, one), *others = weights.items()
    for name, w in others:
        if w.shape != one.shape:
            raise ValueError(f"got {first} {tuple(one.shape)} and {name} {tuple(w.shape)}: they must match")
    if not rows.dtype.is_floating_point:
        raise ValueError(f"rows are {rows.dtype}; the operations take floating-point tensors")
    if offsets.device != rows.device:
        raise ValueError(f"rows are on {rows.device}, offsets on {offsets.device}")
    _check_alike(rows, **weights)


def _check_alike(rows: Tensor, **others: Tensor | None) -> None:
    for name, t in others.items():
        if t is not None and (t.dtype != rows.dtype or t.device != rows.device):
            raise ValueError(f"rows are {rows.dtype} on {rows.device}, {name} {t.dtype} on {t.device}")


def _check_offsets(offsets: Tensor, rows: int) -> None:
    """Raises ValueError naming the invalid offset. Does not read offsets on a GPU."""
    if offsets.device.type != "cpu":
        return
    before, values = 0, offsets.tolist()
    if values[0] != 0:
        raise ValueError(f"offsets[0] is {values[0]}; it must be 0")
    for e, value in enumerate(values):
        if value < before:
            raise ValueError(f"offsets[{e}] is {value}, less than offsets[{e - 1}], {before}")
        before = value
    if before > rows:
        raise ValueError(f"offsets[{len(values) - 1}] is {before}, but there are only {rows} rows")


def choose(engine: str, x: Tensor) -> str:
    """ "chunked" or "triton", by device and dtype only. Raises ValueError if the requested engine cannot run."""
    if engine not in ENGINES:
        raise ValueError(f"engine is {engine!r}; it must be one of {', '.join(ENGINES)}")
    if engine == "auto":
        return "triton" if x.is_cuda and x.dtype in DTYPES and runs_kernels(x.device) else "chunked"
    if engine == "triton":
        if not has_triton():
            raise ValueError("engine 'triton' needs the triton package; use 'chunked'")
        if x.dtype not in DTYPES:
            raise ValueError(f"engine 'triton' takes fp32, fp16 and bf16, not {x.dtype}; use 'chunked'")
        if not x.is_cuda and not interpreting():
            raise ValueError(
                "engine 'triton' on CPU tensors runs in Triton's interpreter: set TRITON_INTERPRET=1 in the "
                "environment before Python starts, or use 'chunked'"
            )
    return engine


# -- engines -----------------------------------------------------------------------------------------------------------


def matmul_engine(
    engine: str, xs: Sequence[Tensor], weights: Sequence[Tensor], offsets: Tensor, bias: Tensor | None
) -> Tensor:
    """xs[j] [R, K], weights[j] [E, N, K], bias [E, N] -> [R, N]: sum_j xs[j] @ weights[j][e].T + bias[e]."""
    if choose(engine, xs[0]) == "triton":
        check_tensors(xs[0], [*xs[1:], *weights, bias])
        machine = machine_of(xs[0].device)
        launch, y = plan_matmul(xs, weights, offsets, bias, None, fp32_precision(), machine)
        launch.start(y.device)
        return y
    if xs[0].is_cuda:
        return _vendor_matmul(xs, weights, offsets, bias)
    y = xs[0].new_empty(xs[0].shape[0], weights[0].shape[1])
    for e, rows in _experts(offsets):
        cpu.linear_into(y, rows, xs, [w[e] for w in weights], None if bias is None else bias[e])
    return y


def matmul_by_expert(xs: Sequence[Tensor], weights: Sequence[Tensor], offsets: Tensor) -> Iterator[tuple[int, Tensor]]:
    """`matmul_engine` on a CPU, expert by expert: yields (first row, y [R_e, N]); y is valid until the next one."""
    each = list(_experts(offsets))
    windows = [cpu.window(rows, xs[0].shape[0], xs[0]) for _, rows in each]
    most = max((wide.stop - wide.start for wide in windows), default=0)
    buffer = xs[0].new_empty(most, weights[0].shape[1])
    for (e, rows), wide in zip(each, windows, strict=True):
        y = buffer[: wide.stop - wide.start]
        inputs, own = joined([x[wide] for x in xs], [w[e] for w in weights])
        dense.matmul_into(y, inputs, [w.t() for w in own])
        yield rows.start, y[rows.start - wide.start : rows.stop - wide.start]


def wgrad_engine(engine: str, dys: Sequence[Tensor], x: Tensor, offsets: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """dys[i] [R, N_i], x [R, K] -> [E, N_i, K] of dtype: dys[i][rows of e].T @ x[rows of e], summed in fp32."""
    if choose(engine, x) == "triton":
        return [_launch_wgrad(dy, x, offsets, dtype, fp32_precision()) for dy in dys]
    if x.is_cuda:
        return [_vendor_wgrad(dy, x, offsets).to(dtype) for dy in dys]
    dws = [x.new_empty(offsets.shape[0] - 1, dy.shape[1], x.shape[1], dtype=dtype) for dy in dys]
    padded, *each = (cpu.Padded(t, offsets.tolist()) for t in (x, *dys))
    for e, rows in _experts(offsets, empty=True):
        if dtype == x.dtype and rows.stop > rows.start:
            right = dense.to_fp32(padded[rows])  # all dys read it while it is in a core's cache
            for dw, dy in zip(dws, each, strict=True):
                dense.matmul_into(dw[e], [dy[rows].t()], [right])
        else:
            for dw, plain in zip(dws, dys, strict=True):
                matmul_add(dw[e].zero_(), plain[rows].t(), x[rows])
    return dws


def _launch_wgrad(dy: Tensor, x: Tensor, offsets: Tensor, dtype: torch.dtype, precision: str = "ieee") -> Tensor:
    check_tensors(x, [dy])
    launch, dw = plan_wgrad(dy, x, offsets, dtype, None, precision, machine_of(x.device))
    launch.start(x.device)
    return dw


def bias_grad_engine(engine: str, dy: Tensor, offsets: Tensor) -> Tensor:
    """dy [R, N] -> [E, N]: the sum of each expert's rows, in fp32, rounded once."""
    if choose(engine, dy) == "triton":  # "ieee": no factor is rounded to tf32
        ones = dy.new_ones(1, 1).expand(dy.shape[0], 1)
        return _launch_wgrad(dy, ones, offsets, dy.dtype)[:, :, 0].contiguous()
    if dy.is_cuda:
        return _vendor_wgrad(dy, dy.new_ones(dy.shape[0], ALIGNED), offsets)[:, :, 0].contiguous()
    db = dy.new_zeros(offsets.shape[0] - 1, dy.shape[1])
    for e, rows in _experts(offsets):
        db[e] = dy[rows].sum(0, dtype=torch.float32 if is_16_bit(dy.dtype) else dy.dtype)
    return db


def gated_engine(
    engine: str, x: Tensor, gate: Tensor, up: Tensor, offsets: Tensor, act: str, keep: bool
) -> list[Tensor]:
    """x [R, K], gate and up [E, N, K] -> act(g) * u with g = x @ gate[e].T, u = x @ up[e].T; g and u too if `keep`."""
    if choose(engine, x) == "triton":
        check_tensors(x, [gate, up])
        machine = machine_of(x.device)
        launch, outs = plan_gated(x, gate, up, offsets, act, keep, None, fp32_precision(), machine)
        launch.start(x.device)
        return [y for y in outs if y is not None]
    if x.is_cuda:
        g, u = (_vendor_matmul([x], [w], offsets, None) for w in (gate, up))
        y = cpu.gated(g, u, act)
        return [y, g, u] if keep else [y]
    made = [x.new_empty(x.shape[0], gate.shape[1]) for _ in range(3 if keep else 1)]
    for e, rows in _experts(offsets):
        here, there, products = rows, x, made[1:]
        if not keep:  # buffers for the products of this expert only
            wide = cpu.window(rows, x.shape[0], x)
            here, there = slice(rows.start - wide.start, rows.stop - wide.start), x[wide]
            products = [x.new_empty(there.shape[0], gate.shape[1]) for _ in range(2)]
        g = cpu.linear_into(products[0], here, [there], [gate[e]])
        u = cpu.linear_into(products[1], here, [there], [up[e]])
        cpu.gated(g, u, act, made[0][rows])
    return made


def gated_backward_engine(engine: str, dy: Tensor, g: Tensor, u: Tensor, offsets: Tensor, act: str) -> list[Tensor]:
    """dy, g, u [R, N] -> the gradients of g and u in act(g) * u."""
    if choose(engine, g) == "triton":
        dy = dy.contiguous()
        check_tensors(dy, [g, u])
        launch, grads = plan_gated_backward(dy, g, u, offsets, act, machine_of(dy.device))
        launch.start(dy.device)
        return [*grads]
    outs = [torch.empty_like(g), torch.empty_like(u)]
    rows = slice(0, g.shape[0] if g.is_cuda else int(offsets[-1]))
    cpu.gated_backward(dy[rows], g[rows], u[rows], act, *(out[rows] for out in outs))
    return outs


def _experts(offsets: Tensor, *, empty: bool = False) -> Iterator[tuple[int, slice]]:
    """(expert, its rows); without `empty` only experts that have rows. Offsets on CPU, where reading needs no wait."""
    assert not offsets.is_cuda
    for e, (begin, end) in enumerate(pairwise(offsets.tolist())):
        if end > begin or empty:
            yield e, slice(begin, end)


def fp32_precision() -> str:
    """Precision of fp32 operands, from torch's `allow_tf32`."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _matmul(
    xs: Sequence[Tensor], weights: Sequence[Tensor], offsets: Tensor, bias: Tensor | None, engine: str
) -> Tensor:
    _check_offsets(offsets, xs[0].shape[0])
    return matmul_engine(engine, xs, weights, offsets, bias)


def _gated(x: Tensor, gate: Tensor, up: Tensor, offsets: Tensor, act: str, engine: str, keep: bool) -> list[Tensor]:
    _check_offsets(offsets, x.shape[0])
    return gated_engine(engine, x, gate, up, offsets, act, keep)


matmul_op = LocalOperation(
    "grouped_matmul",
    "Tensor[] xs, Tensor[] weights, Tensor offsets, Tensor? bias, str engine",
    "Tensor",
    fake=lambda xs, weights, *_: xs[0].new_empty(xs[0].shape[0], weights[0].shape[1]),
    function=_matmul,
)

wgrad_op = LocalOperation(
    "grouped_wgrad",
    "Tensor[] dys, Tensor x, Tensor offsets, str engine, ScalarType dtype",
    "Tensor[]",
    fake=lambda dys, x, offsets, engine, dtype: [
        x.new_empty(offsets.shape[0] - 1, dy.shape[1], x.shape[1], dtype=dtype) for dy in dys
    ],
    function=lambda dys, x, offsets, engine, dtype: wgrad_engine(engine, dys, x, offsets, dtype),
)

bias_grad_op = LocalOperation(
    "grouped_bias_grad",
    "Tensor dy, Tensor offsets, str engine",
    "Tensor",
    fake=lambda dy, offsets, engine: dy.new_empty(offsets.shape[0] - 1, dy.shape[1]),
    function=lambda dy, offsets, engine: bias_grad_engine(engine, dy, offsets),
)

gated_op = LocalOperation(
    "grouped_gated",
    "Tensor x, Tensor gate, Tensor up, Tensor offsets, str act, str engine, bool keep",
    "Tensor[]",
    fake=lambda x, gate, up, offsets, act, engine, keep: [
        x.new_empty(x.shape[0], gate.shape[1]) for _ in range(3 if keep else 1)
    ],
    function=_gated,
)

gated_backward_op = LocalOperation(
    "grouped_gated_backward",
    "Tensor dy, Tensor g, Tensor u, Tensor offsets, str act, str engine",
    "Tensor[]",
    fake=lambda dy, g, u, *_: [torch.empty_like(g), torch.empty_like(u)],
    function=lambda dy, g, u, offsets, act, engine: gated_backward_engine(engine, dy, g, u, offsets, act),
)


# -- grouped_mm --------------------------------------------------------------------------------------------------------


def _vendor_matmul(xs: Sequence[Tensor], weights: Sequence[Tensor], offsets: Tensor, bias: Tensor | None) -> Tensor:
    """Rounds after each product and after adding the bias, which grouped_mm does not support."""
    r, (_, n, k) = xs[0].shape[0], weights[0].shape
    _check_vendor(xs[0], n, k)
    if 0 in (r, n, k):
        y = xs[0].new_zeros(r, n)
    else:
        y, *others = (
            F.grouped_mm(_whole_rows(x), _aligned(w).transpose(1, 2), offs=offsets[1:].contiguous())
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
    """In x's dtype: grouped_mm supports no other."""
    _check_vendor(x, dy.shape[1], x.shape[1])
    if 0 in (*dy.shape, x.shape[1]):
        return x.new_zeros(len(offsets) - 1, dy.shape[1], x.shape[1])
    dw = F.grouped_mm(_whole_rows(dy).t(), _whole_rows(x), offs=offsets[1:].contiguous())
    if not _writes_empty(dw.device):
        dw.masked_fill_((offsets[1:] == offsets[:-1])[:, None, None], 0)
    return dw


def _writes_empty(device: torch.device) -> bool:
    """Whether grouped_mm writes zeros for an expert without rows. Hopper's does; Blackwell's and AMD's have left that
    memory uninitialized (pytorch issue 172439, pull request 174314); others are unknown.
    """
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return hopper and torch.version.hip is None


def _check_vendor(x: Tensor, n: int, k: int) -> None:
    """Raises ValueError for operands that grouped_mm does not support."""
    if x.dtype != torch.bfloat16 or n % ALIGNED or k % ALIGNED:
        raise ValueError(
            f"engine 'chunked' on a GPU uses torch's grouped_mm, which takes bfloat16 and multiples of {ALIGNED} for N "
            f"and K, not {x.dtype} with N {n} and K {k}: use 'triton', or CPU tensors"
        )


def _aligned(x: Tensor) -> Tensor:
    """x with an address and strides that are multiples of 16 bytes, and one dimension contiguous."""
    inner = [s for s in x.stride()[-2:] if s != 1]
    outer = [*x.stride()[:-2], *inner]
    fits = len(inner) < 2 and all(s % ALIGNED == 0 and s > 0 for s in outer) and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _whole_rows(x: Tensor) -> Tensor:
    """x [R, K] aligned and with contiguous rows. With contiguous columns, grouped_mm supports only multiples of 8 rows
    per expert, and any other number is an unrecoverable device error.
    """
    return _aligned(x if x.stride(1) == 1 else x.contiguous())


# -- the launchers of the kernels --------------------------------------------------------------------------------------


def plan_matmul(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    offsets: Tensor,
    bias: Tensor | None,
    config: Config | None,
    precision: str,
    machine: Machine,
) -> tuple[Launch, Tensor]:
    """The launch of grouped_matmul, not yet run, and its output."""
    from fusedtp.kernels.grouped_matmul import grouped_matmul_kernel

    (r, k), (e, n, _) = xs[0].shape, weights[0].shape
    y = xs[0].new_empty(r, n)
    assert 1 <= len(xs) == len(weights) <= 2
    xs, weights = of_one_layout(xs), of_one_layout(weights)
    config = config or group_config(machine, xs[0].dtype, precision, r, e, n)
    config, taken = group_tiles(config, machine, xs, weights)
    args = _sizes(config, precision, offsets, e, r, n, k) | dict(
        strides=(*xs[0].stride(), *weights[0].stride()),
        bias=None if bias is None else bias.contiguous(),
        y=y,
        EVEN_K=k % config.block_k == 0,
        HALVES=config.halves,
        **taken,
    )
    (x, *x2), (w, *w2) = grouped_descriptors(config, args, xs, weights)
    args |= dict(x=x, w=w, x2=x2[0] if x2 else None, w2=w2[0] if w2 else None)
    return Launch(grouped_matmul_kernel, _programs(machine, config, r, e, n), args, config), y


def plan_gated(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    offsets: Tensor,
    act: str,
    keep: bool,
    config: Config | None,
    precision: str,
    machine: Machine,
) -> tuple[Launch, tuple[Tensor, Tensor | None, Tensor | None]]:
    """The launch of grouped_gated, not yet run, and its outputs."""
    from fusedtp.kernels.grouped_matmul import grouped_gated_kernel

    (r, k), (e, n, _) = x.shape, gate.shape
    gate, up = of_one_layout([gate, up])
    config = config or group_config(machine, x.dtype, precision, r, e, n, 2, keep)
    config, taken = group_tiles(config, machine, [x], [gate, up], transposed=False)
    y = x.new_empty(r, n)
    gate_out, up_out = (x.new_empty(r, n), x.new_empty(r, n)) if keep else (None, None)
    args = _sizes(config, precision, offsets, e, r, n, k) | dict(
        strides=(*x.stride(), *gate.stride()),
        TMA=taken["TMA"],
        X_TMA=taken["X_TMA"],
        y=y,
        gate_out=gate_out,
        up_out=up_out,
        EVEN_K=k % config.block_k == 0,
        ACT=act,
    )
    (x,), (gate, up) = grouped_descriptors(config, args, [x], [gate, up])
    args |= dict(x=x, gate=gate, up=up)
    launch = Launch(grouped_gated_kernel, _programs(machine, config, r, e, n), args, config)
    return launch, (y, gate_out, up_out)


def plan_wgrad(
    dy: Tensor,
    x: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
    config: Config | None,
    precision: str,
    machine: Machine,
) -> tuple[Launch, Tensor]:
    """The launch of grouped_wgrad, not yet run, and its output."""
    from fusedtp.kernels.grouped_wgrad import grouped_wgrad_kernel

    width, depth = dy.shape[1], x.shape[1]
    if machine.clock != "host":
        dy, x = even_columns(dy), even_columns(x)
    (r, n), k, e = dy.shape, x.shape[1], offsets.shape[0] - 1
    wide = dtype.itemsize > x.dtype.itemsize and machine.capability // 10 == 10
    config = config or group_config(machine, x.dtype, precision, e * n, e, k, keep=wide)
    dw = x.new_empty(e, n, k, dtype=dtype)
    config, by_tma = _stored_by_tma(config, x, dw, machine)
    args = _sizes(config, precision, offsets, e, r, n, k) | dict(dy=dy, x=x, dw=dw, DW_TMA=by_tma)
    if by_tma:
        args["dw"] = described(dw, [1, config.block_m, config.block_n >> config.halves])
    args["HALVES"] = config.halves
    args["stride_dm"], args["stride_dn"] = dy.stride()
    args["stride_xm"], args["stride_xk"] = x.stride()
    tiles = e * -(-n // config.block_m) * -(-k // config.block_n)
    return Launch(grouped_wgrad_kernel, min(machine.programs, tiles), args, config), dw[:, :width, :depth]


def _stored_by_tma(config: Config, x: Tensor, dw: Tensor, machine: Machine) -> tuple[Config, bool]:
    """Whether TMA stores dw [E, N, K], and the config with as many stages as then fit: at most one less."""
    if not config.tma or not describable(dw.flatten(0, 1)):
        return config, False
    for stages in (config.num_stages, config.num_stages - 1):
        fewer = replace(config, num_stages=stages)
        if fits(fewer, x, dw, machine):
            return fewer, True
    return config, False


def plan_gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, offsets: Tensor, act: str, machine: Machine
) -> tuple[Launch, tuple[Tensor, Tensor]]:
    """The launch of grouped_gated_backward, not yet run, and its outputs."""
    from fusedtp.kernels.grouped_wgrad import grouped_gated_backward_kernel

    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    args = dict(
        dy=dy, gate=gate, up=up, dgate=dgate, dup=dup, offsets=offsets.contiguous(), E=offsets.shape[0] - 1,
        R=dy.shape[0], N=dy.shape[1], BLOCK=ELEMENTS, ACT=act,
    )  # fmt: skip
    most = 8 * machine.programs  # they use few registers, so several are resident on an SM
    programs = min(most, -(-dy.numel() // ELEMENTS))
    return Launch(grouped_gated_backward_kernel, programs, args, Config(0, 0, 0)), (dgate, dup)


def group_config(
    machine: Machine,
    dtype: torch.dtype,
    precision: str,
    rows: int,
    groups: int,
    n: int,
    weights: int = 1,
    keep: bool = False,
) -> Config:
    """Tiles of `groups` matmuls with `rows` rows in total: those of a single matmul, but no taller than the average
    group, and without warp specialisation. keep: more is stored than one result in the operands' dtype.

    With two weights in tf32 on sm_80, block_k is halved: the lint shows that they would spill.
    """
    each = -(-rows // max(1, groups))
    tall = min(rows, each) if each < LARGE_TILE else rows
    config = local_config(machine, dtype, precision, tall, n, weights, keep)
    if config.specialized:
        config = replace(config, specialized=False, max_registers=ALL_REGISTERS)
    deep = weights > 1 and precision == "tf32" and 0 < machine.capability < 90
    return replace(config, block_k=config.block_k // 2) if deep else config


def _sizes(config: Config, precision: str, offsets: Tensor, e: int, r: int, n: int, k: int) -> dict[str, Any]:
    return dict(
        offsets=offsets.contiguous(), E=e, R=r, N=n, K=k, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, GROUP=config.group, PRECISION=precision,
    )  # fmt: skip


def _programs(machine: Machine, config: Config, r: int, e: int, n: int) -> int:
    """At most one program per possible tile: each expert with rows may add one row of tiles."""
    return min(machine.programs, (-(-r // config.block_m) + min(e, r)) * -(-n // config.block_n))
