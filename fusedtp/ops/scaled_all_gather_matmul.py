"""y_i [T, N_i] = all_gather(x_scale * x) @ (w_scale_i * w_i).T + b_i of fp8 operands: half the bytes on the link.

The gather of all_gather_matmul, with the same kernel. Rows travel with their scales, Note [Packed rows] in fp8.py:

rank r, chunked     packed x to slot | publish | x @ w, scaled | wait r+1 | x_{r+1} @ w, scaled | ...
rank r, triton      some programs push packed rows to every peer; a tile of fp8 products is summed in fp32, then
                    multiplied by the scales of its rows, which follow their values, and of its columns
rank r, few rows    all programs push packed rows to every rank, then multiply the rows of all ranks together

forward  y_i, summed and scaled in fp32, + b_i, rounded once
no gradients: fusedtp.nn.FP8Linear has them, using the fp8 operations
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedtp.comm import Group, place, propagate_errors
from fusedtp.comm.communicator import copied
from fusedtp.comm.device_view import peers_of
from fusedtp.comm.launching import Launch, layouts

from . import fp8
from .all_gather_matmul import (
    WIDEST_FP8,
    choose_config,
    come_together,
    gather_args,
    gather_tiles,
    pointers,
    sending_of,
    together_args,
    together_config,
    weight_args,
    without_senders,
)
from .launch.config import ALL_REGISTERS, VECTOR, Config, Machine
from .launch.plain import scale_step
from .launch.run import check, machine_for
from .operation import FusedKernel, OnRank, Operation, Plan, Shared, Spec
from .rows import Rows, rows_of_shard
from .shards import gathered, shards_as_they_arrive

Result = list[Tensor]  # y_i, and the packed rows of all ranks if `keep`


def scaled_all_gather_matmul(
    x: Tensor,
    x_scale: Tensor,
    weights: Sequence[Tensor],
    w_scales: Sequence[Tensor],
    group: Group,
    *,
    biases: Sequence[Tensor | None] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    engine: str = "auto",
    layer: str = "",
) -> tuple[Tensor, ...]:
    """Column-parallel linear layers of fp8 operands on token shards, one gather for all of them.

        x         [T_r, K]   this rank's rows, float8_e4m3fn or float8_e5m2; with dim=1 [B, S_r, K]
        x_scale   [T_r, 1]   fp32, one per row; with dim=1 [B, S_r, 1]. Or one element for all rows of this rank
        weights   [N_i, K]   this rank's rows of each full weight, in either format
        w_scales  [N_i, 1]   fp32, or one element each
        biases    [N_i]      in `dtype`, or None, one entry per weight
        dtype     of the results: bfloat16, float16 or float32
        sizes, engine, layer as in all_gather_matmul; `triton` needs a GPU that multiplies fp8, or the interpreter
        return    [T, N_i]   one per weight, summed and scaled in fp32, rounded once; with dim=1 [B, S, N_i]

    A row takes K bytes (rounded up to 16) plus 16 on the link. The format of x must be equal on all ranks; scales are
    each rank's own. Operands have no gradients; use the layer fusedtp.nn.FP8Linear for training.

    Raises ValueError for shapes, dtypes or an engine that do not fit, SignatureMismatch naming the rank that differs.
    Source: Micikevicius et al. 2022, "FP8 formats for deep learning"; Korthikanti et al. 2022, section 4.2.2.
    """
    at = place(group)
    with propagate_errors(at):
        weights, w_scales = list(weights), list(w_scales)
        biases = [None] * len(weights) if biases is None else list(biases)
        if not weights or not len(weights) == len(w_scales) == len(biases):
            raise ValueError(
                f"rank {at.rank}: got {len(weights)} weights, {len(w_scales)} scales and {len(biases)} biases; give at "
                "least one weight, and a scale and a bias or None for each"
            )
        rows = rows_of_shard(x, at, sizes, dim)
        fp8.check(at, x, x_scale, weights, w_scales, biases, dtype)
        flat = x if dim == 0 else x.flatten(0, -2)
        spec = Spec(at.name, at.rank, rows.sizes, rows.batch, engine, 0, layer)
        packed = fp8.pack(flat, x_scale)
        ys = op(spec, packed, x.dtype, weights, w_scales, biases, dtype, False)
        return tuple(ys if dim == 0 else (y.view(rows.batch, rows.length, y.shape[1]) for y in ys))


# -- engines: packed is [T_r, row_bytes(K)] uint8 of values of `kind` --------------------------------------------------


def reference(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Result:
    """The formula on one device: the full x [T, K] and full weights, dequantized (value * scale)."""
    return [torch.nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]


def _products(
    packed: Tensor,
    kind: torch.dtype,
    weights: Sequence[Tensor],
    w_scales: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    dtype: torch.dtype,
) -> Result:
    values, scale = fp8.unpack(packed, weights[0].shape[1], kind)
    each = zip(weights, w_scales, biases, strict=True)
    return [fp8.product(values, scale, w, w_scale, b, dtype) for w, w_scale, b in each]


def local(
    plan: Plan, packed: Tensor, kind: torch.dtype, weights: list[Tensor], w_scales: list[Tensor],
    biases: list[Tensor | None], dtype: torch.dtype, keep: bool,
) -> Result:  # fmt: skip
    """A group of one rank."""
    ys = _products(packed, kind, weights, w_scales, biases, dtype)
    return [*ys, copied(packed)] if keep else ys


def collective(
    plan: Plan, packed: Tensor, kind: torch.dtype, weights: list[Tensor], w_scales: list[Tensor],
    biases: list[Tensor | None], dtype: torch.dtype, keep: bool,
) -> Result:  # fmt: skip
    """The process group's all_gather, then matmuls."""
    full = gathered(plan, packed)
    ys = _products(full, kind, weights, w_scales, biases, dtype)
    return [*ys, full] if keep else ys


def chunked(
    plan: Plan, packed: Tensor, kind: torch.dtype, weights: list[Tensor], w_scales: list[Tensor],
    biases: list[Tensor | None], dtype: torch.dtype, keep: bool,
) -> Result:  # fmt: skip
    """Shard by shard as they arrive, own rows first. On CPU a peer's rows are read in place."""
    rows, comm = plan.rows, plan.comm
    outs = [packed.new_empty(rows.total, w.shape[0], dtype=dtype) for w in weights]
    full = packed.new_empty(rows.total, packed.shape[1]) if keep else None
    wide = [fp8.operand(w) for w in weights]
    with plan.call() as call:
        for p, shard in shards_as_they_arrive(call, comm, packed, rows):
            with comm.span(f"matmul {p}"):
                ys = _products(shard, kind, wide, w_scales, biases, dtype)
                for out, y in zip(outs, ys, strict=True):
                    rows.put(out, y, p)
            if full is not None:
                rows.put(full, shard, p)
    return outs if full is None else [*outs, full]


def triton(
    plan: Plan, packed: Tensor, kind: torch.dtype, weights: list[Tensor], w_scales: list[Tensor],
    biases: list[Tensor | None], dtype: torch.dtype, keep: bool,
) -> Result:  # fmt: skip
    """One launch: programs push packed rows, or copies bring them, while others multiply. Few rows are pushed first."""
    rows, x = plan.rows, packed.view(kind)
    weights = [fp8.columns_together(w) for w in weights]
    with plan.call() as call:
        copies = call.copies() if plan.copies else None
        view = call.kernel_view()
        key = copies is None, keep, dtype, layouts(x, *weights, *w_scales, *biases)
        launch = plan.launches.get(key)
        if launch is None:
            check(view, plan.slot_bytes, x, [], max(rows.total, *map(len, weights)), fp8.FORMATS)
            machine = machine_for(view, x)
            if come_together(rows, x.dtype):
                launch = prepare_together(x, weights, w_scales, rows, None, machine)
            else:
                launch = prepare(view, x, weights, w_scales, rows, None, machine, copies is not None)
            plan.launches[key] = launch
        outs, gathered = outputs(x, weights, rows, dtype, keep)
        sending = None if copies is None else sending_of(copies, plan.comm.rank, x, rows, launch.config)
        given = pointers(launch, plan.peers(view), x, weights, biases, outs, gathered)
        launch.run(view, x.device, sending, given | scale_pointers(w_scales), alike=True)
    return outs if gathered is None else [*outs, gathered.view(torch.uint8)]


def _fake(
    spec: Spec, packed: Tensor, kind: torch.dtype, weights: Sequence[Tensor], w_scales: Sequence[Tensor],
    biases: Sequence[Tensor | None], dtype: torch.dtype, keep: bool,
) -> Result:  # fmt: skip
    total = spec.batch * sum(spec.sizes)
    outs = [packed.new_empty(total, w.shape[0], dtype=dtype) for w in weights]
    return [*outs, packed.new_empty(total, packed.shape[1])] if keep else outs


def _launched(
    together: bool, at: OnRank, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], keep: bool,
    copied: bool, dtype: torch.dtype | None,
) -> tuple[Launch, dict[str, Tensor]]:  # fmt: skip
    x, x_scale, weights, w_scales, dtype = fp8.of_check(x, weights, dtype)
    packed = fp8.pack(x, x_scale).view(x.dtype)
    if together:
        launch = prepare_together(packed, weights, w_scales, at.rows, at.config, at.machine)
    else:
        launch = prepare(at.view, packed, weights, w_scales, at.rows, at.config, at.machine, copied)
    outs, gathered = outputs(packed, weights, at.rows, dtype, keep)
    peers = peers_of(at.view, at.rank, at.world_size, at.sig, at.machine.clock)
    given = pointers(launch, peers, packed, weights, biases, outs, gathered)
    return launch.given(given | scale_pointers(w_scales)), {f"y{i}": y for i, y in enumerate(outs)}


op = Operation(
    "scaled_all_gather_matmul",
    "Tensor packed, ScalarType kind, Tensor[] weights, Tensor[] w_scales, Tensor?[] biases, "
    "ScalarType dtype, bool keep",
    "Tensor[]",
    fake=_fake,
    reference=reference,
    shared=lambda packed, kind, weights, *_: Shared(kind, weights[0].shape[1], len(weights)),
    engines=dict(local=local, collective=collective, chunked=chunked, triton=triton),
    slot_bytes=dict(
        chunked=lambda rows, shared: rows.longest * fp8.row_bytes(shared.features),
        triton=lambda rows, shared: rows.total * fp8.row_bytes(shared.features),
    ),
    choose=fp8.choose,
    copied=lambda rows, dtype: not come_together(rows, dtype),
    kernels=tuple(
        FusedKernel(
            f"scaled_{name}",
            f"{name}_kernel",
            partial(_launched, together),
            gathers=True,
            in_runs=True,
            in_fp8=True,
            example=dict(widths=(17, 5)),
        )
        for name, together in (("all_gather_matmul", False), ("few_rows_gather", True))
    ),
)


# -- the launcher: all_gather_matmul's kernel with scales --------------------------------------------------------------


def prepare(
    view: Any,
    x: Tensor,
    weights: Sequence[Tensor],
    w_scales: Sequence[Tensor],
    rows: Rows,
    config: Config | None,
    machine: Machine,
    copied: bool = False,
) -> Launch:
    """The launch without its pointers, for operands of these shapes, strides and alignments.

    x        [R_r, row_bytes(K)]   packed rows, as fp8
    w_i      [N_i, K]              rows contiguous
    config   None: the default
    copied   copies send x while the kernel runs
    """
    from fusedtp.kernels.all_gather_matmul import all_gather_matmul_kernel

    k = weights[0].shape[1]
    if config is None:
        cols, even = sum(w.shape[0] for w in weights), all(w.shape[0] % VECTOR == 0 for w in weights)
        extents = dict(rows=rows.total, cols=cols, k=k, even=even)
        config = choose_config("all_gather_matmul", machine, x.dtype, rows, view.flags_per_source, k, **extents)
        if config.block_n > WIDEST_FP8:
            config = replace(config, block_n=WIDEST_FP8, max_registers=ALL_REGISTERS)
        config = gather_tiles(config, machine, x[:, :k], weights)
    config = without_senders(config, machine) if copied else config
    args = gather_args(x, rows, config, machine) | weight_args(config, weights, k) | scale_args(x, k, w_scales)
    return Launch(all_gather_matmul_kernel, config.programs, args | dict(HALVES=args["TMA"]), config)


def prepare_together(
    x: Tensor,
    weights: Sequence[Tensor],
    w_scales: Sequence[Tensor],
    rows: Rows,
    config: Config | None,
    machine: Machine,
) -> Launch:
    """Like `prepare`, for few rows."""
    from fusedtp.kernels.all_gather_few_rows import few_rows_gather_kernel

    k = weights[0].shape[1]
    config = together_config(machine, x.dtype, rows, weights, k) if config is None else config
    args = together_args(x, rows, config, machine) | weight_args(config, weights, k) | scale_args(x, k, w_scales)
    return Launch(few_rows_gather_kernel, config.programs, args, config)


def scale_args(x: Tensor, k: int, w_scales: Sequence[Tensor]) -> dict[str, Any]:
    """The gather kernels' arguments for packed rows x and scales."""
    return dict(K=k, row_bytes=x.shape[1], strides_ws=tuple(map(scale_step, w_scales)))


def outputs(
    x: Tensor, weights: Sequence[Tensor], rows: Rows, dtype: torch.dtype, keep: bool
) -> tuple[list[Tensor], Tensor | None]:
    """The kernel's outputs: y_i, and the packed rows of all ranks if `keep`."""
    outs = [x.new_empty(rows.total, w.shape[0], dtype=dtype) for w in weights]
    return outs, x.new_empty(rows.total, x.shape[1]) if keep else None


def scale_pointers(w_scales: Sequence[Tensor]) -> dict[str, Any]:
    """Further missing arguments of a prepared launch."""
    return dict(w_scales=tuple(w_scales))
