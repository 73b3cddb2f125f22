"""The public operations: shapes checked here, then autograd.py (eager) or the custom op (compiled).

`group` is a ProcessGroup, a 1-D DeviceMesh, a VirtualGroup or a group's name. `sizes` is every rank's row count, the
same list on all ranks; without it a gather takes equal rows and a scatter splits as torch.chunk does. `dim=1` takes
[B, S_r, K] for [T_r, K] and [B, S, N] for [T, N]. `layer` is the kind of layer that the call and its backward are
counted for.

On CPU a rank that raises for its own arguments makes its peers raise PeerFailed, naming it, and the group stays
usable. On a GPU they wait for it until the group's timeout.

A weight with an attribute `main_grad` (fp32, its shape) gets its gradient added there, unrounded, and None in `.grad`:
see Note [main_grad] in main_grad.py. Under torch.compile such a weight raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtp.comm import Group, Place, communicator, place

from . import autograd, gradients
from . import library as _library  # registers the custom ops
from .gradients import Where
from .main_grad import main_grads_of
from .rows import Rows, rows_of_full, rows_of_shard

assert _library


def all_gather_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    group: Group,
    *,
    biases: Sequence[Tensor | None] | None = None,
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    engine: str = "auto",
    keep_gathered: bool = False,
    layer: str = "",
) -> tuple[Tensor, ...]:
    """Column-parallel linear layers on token shards, one gather for all of them.

        x        [T_r, K]    this rank's rows
        weights  [N_i, K]    this rank's rows of each full weight
        biases   [N_i]       or None, one entry a weight
        return   [T, N_i]    one a weight

    forward  y_i = all_gather(x) @ w_i.T + b_i
    dgrad    dx = matmul_reduce_scatter(dy_i, w_i.T)
    wgrad    dw_i = all_gather_wgrad(x, dy_i), or local on a gathered x that `keep_gathered` saves instead of the shard

    Raises ValueError for shapes or dtypes that do not fit, SignatureMismatch naming the rank that differs.
    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4.2.2.
    """
    at = place(group)
    with in_step(at):
        weights = list(weights)
        biases = [None] * len(weights) if biases is None else list(biases)
        if not weights or len(biases) != len(weights):
            raise ValueError(
                f"{len(weights)} weights, {len(biases)} biases; give at least one weight, a bias or None each"
            )
        rows = rows_of_shard(x, at, sizes, dim)
        sinks = main_grads_of(weights)
        x, weights = _autocast(at.device_type, x), [_autocast(at.device_type, w) for w in weights]
        biases = [None if b is None else _autocast(at.device_type, b) for b in biases]
        for w, b in zip(weights, biases, strict=True):
            _check_operands(at, x, w, b)
        flat = x.flatten(0, -2)
        where, needs_grad = _where(at, rows, engine, layer), _mask(x, *weights, *biases)
        if torch.compiler.is_compiling() or not needs_grad:
            keep = keep_gathered and needs_grad != 0
            outs = autograd.forward_columns(where, flat, weights, biases, needs_grad, keep)
            ys = outs[: len(weights)]
        else:
            ys = autograd.column_linear(where, flat, weights, biases, needs_grad, sinks, keep_gathered)
        return tuple(_unflatten(y, rows.batch, rows.length, dim) for y in ys)


def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    group: Group,
    *,
    bias: Tensor | None = None,
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    engine: str = "auto",
    layer: str = "",
) -> Tensor:
    """A row-parallel linear layer whose output is sharded by tokens.

        x       [T, K]    all rows, this rank's columns (K may differ between ranks)
        weight  [N, K]    this rank's columns of the full weight
        bias    [N]       the full bias; added once, not W times. Its gradient is this rank's rows' part
        return  [T_r, N]  summed over ranks, in rank order, rounded once

    forward  y = reduce_scatter(x @ w.T) + b
    dgrad    dx = all_gather_matmul(dy, w.T)
    wgrad    dw = dy_full.T @ x, local, on the dy that dgrad gathered

    Raises ValueError for shapes or dtypes that do not fit, SignatureMismatch naming the rank that differs.
    Source: Korthikanti et al. 2022, section 4.2.2.
    """
    at = place(group)
    with in_step(at):
        if x.dim() != 2 + dim or dim not in (0, 1):
            raise ValueError(
                f"with dim={dim} x must have {2 + dim} dimensions (dim 0 or 1), not shape {tuple(x.shape)}"
            )
        rows = rows_of_full(x.shape, at, sizes, dim)
        (sink,) = main_grads_of([weight])
        x, weight = _autocast(at.device_type, x), _autocast(at.device_type, weight)
        bias = None if bias is None else _autocast(at.device_type, bias)
        _check_operands(at, x, weight, bias)
        flat = x.flatten(0, -2)
        needs_grad = _mask(x, weight, bias)
        if torch.compiler.is_compiling() or not needs_grad:
            y = gradients.op("matmul_reduce_scatter")(
                [flat], [weight], bias, at.name, at.rank, rows.sizes, rows.batch, engine, needs_grad, layer
            )
        else:
            y = autograd.row_linear(_where(at, rows, engine, layer), flat, weight, bias, needs_grad, sink)
        return _unflatten(y, rows.batch, rows.sizes[at.rank], dim)


def matmul_all_reduce(
    x: Tensor,
    weight: Tensor,
    group: Group,
    *,
    bias: Tensor | None = None,
    engine: str = "auto",
    layer: str = "",
) -> Tensor:
    """A row-parallel linear layer without sequence parallelism.

        x       [..., K]  all rows, this rank's columns
        weight  [N, K]    this rank's columns of the full weight
        bias    [N]       the full bias, added once
        return  [..., N]  the same bits on every rank

    forward  y = all_reduce(x @ w.T) + b
    dgrad    dx = dy @ w, local          wgrad  dw = dy.T @ x, local (dy is the same on all ranks)

    Raises ValueError for shapes or dtypes that do not fit, SignatureMismatch naming the rank that differs.
    Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
    """
    at = place(group)
    with in_step(at):
        (sink,) = main_grads_of([weight])
        x, weight = _autocast(at.device_type, x), _autocast(at.device_type, weight)
        bias = None if bias is None else _autocast(at.device_type, bias)
        _check_operands(at, x, weight, bias)
        flat = x.flatten(0, -2)
        needs_grad = _mask(x, weight, bias)
        if torch.compiler.is_compiling() or not needs_grad:
            y = gradients.op("matmul_all_reduce")(flat, weight, bias, at.name, engine, needs_grad, layer)
        else:
            y = autograd.reduced_linear(
                Where(at.name, at.rank, (), 1, engine, layer), flat, weight, bias, needs_grad, sink
            )
        return y.reshape(*x.shape[:-1], weight.shape[0])


def all_gather_wgrad(
    x: Tensor,
    dys: Sequence[Tensor],
    group: Group,
    *,
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    engine: str = "auto",
) -> tuple[Tensor, ...]:
    """Weight gradients of column-parallel layers, whose input was saved as a shard. Not differentiable.

        x       [T_r, K]  this rank's rows
        dys     [T, N_i]  gradients of the outputs
        return  [N_i, K]  dw_i = dy_i.T @ all_gather(x)

    Raises ValueError for shapes or dtypes that do not fit, SignatureMismatch naming the rank that differs.
    """
    at = place(group)
    with in_step(at):
        rows = rows_of_shard(x, at, sizes, dim)
        flat = [dy.detach().flatten(0, -2) for dy in dys]
        for dy in flat:
            if dy.shape[0] != rows.total or dy.dtype != x.dtype:
                raise ValueError(
                    f"rank {at.rank}: dy has {dy.shape[0]} rows of {dy.dtype}, x {rows.total} in all of {x.dtype}"
                )
        return tuple(
            gradients.op("all_gather_wgrad")(
                x.detach().flatten(0, -2), flat, at.name, rows.sizes, rows.batch, engine, "", x.dtype
            )
        )


def local_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear of x [..., K], w [N, K], b [N] -> [..., N], for a weight that may have a main_grad.

    forward  y = x @ w.T + b          dgrad  dx = dy @ w          wgrad  dw = dy.T @ x, all local

    Raises ValueError for a main_grad of another shape, RuntimeError where a weight with main_grad is compiled.
    """
    (sink,) = main_grads_of([weight])
    if sink is None:
        return F.linear(x, weight, bias)
    kind = x.device.type
    x, weight = _autocast(kind, x), _autocast(kind, weight)
    bias = None if bias is None else _autocast(kind, bias)
    y = autograd.local_linear(x.flatten(0, -2), weight, bias, sink)
    return y.view(*x.shape[:-1], y.shape[-1])


def in_step(at: Place) -> AbstractContextManager[None]:
    """A fault that this rank finds in its own arguments fails its peers too: they would wait for it in vain."""
    return nullcontext() if torch.compiler.is_compiling() or not at.name else communicator(at.name).in_step()


def _autocast(kind: str, t: Tensor) -> Tensor:
    """What torch.autocast does to the operands of a linear layer."""
    if not torch.is_autocast_enabled(kind) or t.dtype == torch.float64 or not t.is_floating_point():
        return t
    return t.to(torch.get_autocast_dtype(kind))


def _where(at: Place, rows: Rows, engine: str, layer: str) -> Where:
    return Where(at.name, at.rank, rows.sizes, rows.batch, engine, layer)


def _mask(*tensors: Tensor | None) -> int:
    """Bit i: tensor i needs a gradient. Zero under no_grad."""
    if not torch.is_grad_enabled():
        return 0
    return sum(1 << i for i, t in enumerate(tensors) if t is not None and t.requires_grad)


def _unflatten(y: Tensor, batch: int, length: int, dim: int) -> Tensor:
    return y if dim == 0 else y.view(batch, length, y.shape[-1])


def _check_operands(at: Place, x: Tensor, w: Tensor, b: Tensor | None) -> None:
    where = f"rank {at.rank}: "
    if w.dim() != 2 or x.dim() < 2:
        raise ValueError(
            f"{where}x has shape {tuple(x.shape)}, the weight {tuple(w.shape)}; a weight is [N, K]"
        )
    if x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"{where}x has {x.shape[-1]} columns, the weight {tuple(w.shape)} takes {w.shape[1]}"
        )
    if b is not None and tuple(b.shape) != (w.shape[0],):
        raise ValueError(
            f"{where}the bias has shape {tuple(b.shape)}, the weight {tuple(w.shape)} wants [{w.shape[0]}]"
        )
    for name, t in (("weight", w), ("bias", b)):
        if t is not None and (t.dtype != x.dtype or t.device != x.device):
            raise ValueError(f"{where}x is {x.dtype} on {x.device}, the {name} {t.dtype} on {t.device}")
    if not x.dtype.is_floating_point:
        raise ValueError(f"{where}x is {x.dtype}; the operations take floating-point tensors")
    if x.device.type != at.device_type:
        raise ValueError(f"{where}x is on {x.device}, the group {at.name!r} works on {at.device_type}")
