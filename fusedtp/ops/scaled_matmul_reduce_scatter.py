"""y [T_r, N] = reduce_scatter((x_scale * x) [T, K_r] @ (w_scale * w) [N, K_r].T) + b of fp8 operands.

The reduce-scatter of matmul_reduce_scatter, with the same kernels. Products are in fp8. Scales are each rank's own, so
a partial is scaled in fp32 before it is rounded to the dtype of the result and sent:

rank r, chunked     rows of r+1, scaled, into slot | publish to r+1 | rows of r+2 | ... | own rows | wait for all | sum
rank r, triton      sum a tile of fp8 products in fp32, scale it and push it to its owner, which sums over ranks

forward  y, summed over ranks in rank order in fp32, + b, rounded once
no gradients: fusedtp.nn.FP8Linear has them, using the fp8 operations
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fusedtp.comm import Group, place, propagate_errors
from fusedtp.comm.device_view import peers_of
from fusedtp.comm.launching import Launch, layouts

from . import fp8
from .launch.plain import scale_step
from .launch.run import check, machine_for
from .matmul import sum_in_rank_order
from .matmul_reduce_scatter import kernel_for, pointers, prepare, prepare_few_rows, scatter_slot_bytes
from .operation import FusedKernel, OnRank, Operation, Plan, Shared, Spec
from .rows import rows_of_full
from .shards import arrived_partials, partials_of, ring, scattered

OPERANDS = "Tensor x, Tensor x_scale, Tensor weight, Tensor w_scale, Tensor? bias, ScalarType dtype"  # of engines


def scaled_matmul_reduce_scatter(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    group: Group,
    *,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    engine: str = "auto",
    layer: str = "",
) -> Tensor:
    """A row-parallel linear layer of fp8 operands whose output is sharded by tokens.

        x        [T, K]    all rows, this rank's columns, float8_e4m3fn or float8_e5m2; with dim=1 [B, S, K]
        x_scale  [T, 1]    fp32, one per row of these columns; with dim=1 [B, S, 1]. Or one element
        weight   [N, K]    this rank's columns of the full weight, in either format
        w_scale  [N, 1]    fp32, or one element
        bias     [N]       the full bias, in `dtype`; added once
        dtype    of the result and of the partials that are sent: bfloat16, float16 or float32
        sizes, engine, layer as in matmul_reduce_scatter; `triton` needs a GPU that multiplies fp8, or the interpreter
        return   [T_r, N]  summed over ranks, in rank order, rounded once; with dim=1 [B, S_r, N]

    The exchange is in `dtype`, not fp8: only the matmul gets faster. Formats and scales are each rank's own. Operands
    have no gradients; use the layer fusedtp.nn.FP8Linear for training.

    Raises ValueError for shapes, dtypes or an engine that do not fit, SignatureMismatch naming the rank that differs.
    Source: Micikevicius et al. 2022, "FP8 formats for deep learning"; Korthikanti et al. 2022, section 4.2.2.
    """
    at = place(group)
    with propagate_errors(at):
        rows = rows_of_full(x, at, sizes, dim)
        fp8.check(at, x, x_scale, [weight], [w_scale], [bias], dtype)
        spec = Spec(at.name, at.rank, rows.sizes, rows.batch, engine, 0, layer)
        flat = x if dim == 0 else x.flatten(0, -2)
        y = op(spec, flat, x_scale.reshape(-1, 1), weight, w_scale.reshape(-1, 1), bias, dtype)
        return y if dim == 0 else y.view(rows.batch, rows.sizes[at.rank], y.shape[1])


# -- engines ---------------------------------------------------------------------------------------------------------


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The formula on one device: the full x [T, K] and weight, dequantized (value * scale)."""
    return torch.nn.functional.linear(x, weight, bias)


def local(
    plan: Plan, x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """A group of one rank."""
    return fp8.product(x, x_scale, w, w_scale, bias, dtype)


def collective(
    plan: Plan, x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Matmul, then the process group's reduce_scatter."""
    return scattered(plan, fp8.product(x, x_scale, w, w_scale, None, dtype), bias)


def chunked(
    plan: Plan, x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """One matmul per owner, the next rank's rows first. On CPU owners read the partials in place."""
    rows, comm, n = plan.rows, plan.comm, w.shape[0]
    wide, of_rows = fp8.operand(w), x_scale.expand(rows.total, 1)
    blocks, scales = rows.parts(x), rows.parts(of_rows)
    with plan.call() as call:
        for p in ring(comm, own="last"):
            partial = partials_of(call, comm.rank, rows, n, dtype, p)
            with comm.span(f"matmul {p}"):
                for out, block, scale in zip(rows.runs(partial, p), blocks[p], scales[p], strict=True):
                    out.copy_(fp8.product(block, scale, wide, w_scale, None, dtype))
            if p != comm.rank:
                call.publish(p)
        parts = arrived_partials(call, comm, rows, n, dtype)
        with comm.span("sum"):
            return sum_in_rank_order(parts, bias)


def triton(
    plan: Plan, x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """One launch: tiles are scaled and pushed to their owner, which sums them between its products."""
    rows, x, w = plan.rows, fp8.columns_together(x), fp8.columns_together(w)
    with plan.call() as call:
        view = call.kernel_view()
        key = layouts(x, w, x_scale, w_scale, bias)
        launch = plan.launches.get(key)
        if launch is None:
            check(view, plan.slot_bytes, x, [], max(rows.total, *w.shape), fp8.FORMATS)
            how = kernel_for(rows, w.shape[0], dtype)
            launch = scaled(how(view, [x], [w], rows, None, machine_for(view, x)), x_scale, w_scale)
            plan.launches[key] = launch
        y = x.new_empty(plan.own_rows, w.shape[0], dtype=dtype)
        given = pointers(launch, plan.peers(view), [x], [w], bias, y)
        launch.run(view, y.device, None, given | scale_pointers(x_scale, w_scale), alike=True)
    return y


def _launched(
    how: Callable[..., Launch], at: OnRank, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None],
    _: bool, __: bool, dtype: torch.dtype | None,
) -> tuple[Launch, dict[str, Tensor]]:  # fmt: skip
    x, x_scale, (w,), (w_scale,), dtype = fp8.of_check(x, weights, dtype)
    launch = scaled(how(at.view, [x], [w], at.rows, at.config, at.machine), x_scale, w_scale)
    y = x.new_empty(at.rows.local(at.rank), w.shape[0], dtype=dtype)
    peers = peers_of(at.view, at.rank, at.world_size, at.sig, at.machine.clock)
    given = pointers(launch, peers, [x], [w], biases[0], y)
    return launch.given(given | scale_pointers(x_scale, w_scale)), {"y": y}


op = Operation(
    "scaled_matmul_reduce_scatter",
    OPERANDS,
    "Tensor",
    fake=lambda spec, x, x_scale, weight, w_scale, bias, dtype: x.new_empty(
        spec.batch * spec.sizes[spec.rank], weight.shape[0], dtype=dtype
    ),
    reference=reference,
    shared=lambda x, x_scale, weight, w_scale, bias, dtype: Shared(dtype, weight.shape[0], 1, int(bias is not None)),
    engines=dict(local=local, collective=collective, chunked=chunked, triton=triton),
    slot_bytes=dict(
        chunked=lambda rows, shared: rows.total * shared.features * shared.dtype.itemsize,
        triton=lambda rows, shared: scatter_slot_bytes(rows, shared.features, shared.dtype),
    ),
    choose=fp8.choose,
    kernels=(
        FusedKernel(
            "scaled_matmul_reduce_scatter",
            "matmul_reduce_scatter_kernel",
            lambda *given: _launched(prepare, *given),
            scatters=True,
            in_runs=True,
            in_fp8=True,
            example=dict(chunk=1),
        ),
        FusedKernel(
            "scaled_few_rows_reduce_scatter",
            "few_rows_kernel",
            lambda *given: _launched(prepare_few_rows, *given),
            scatters=True,
            in_fp8=True,
            one_tile=True,
            example=dict(chunk=1),
        ),
    ),
)


# -- matmul_reduce_scatter's kernels with scales ----------------------------------------------------------------------


def scaled(launch: Launch, x_scale: Tensor, w_scale: Tensor) -> Launch:
    """A prepared launch for fp8 operands with these scales' strides. matmul_all_reduce uses this and the next too."""
    return replace(launch, args=launch.args | dict(stride_xs=scale_step(x_scale), stride_ws=scale_step(w_scale)))


def scale_pointers(x_scale: Tensor, w_scale: Tensor) -> dict[str, Tensor]:
    """Further missing arguments of a prepared launch."""
    return dict(x_scale=x_scale, w_scale=w_scale)
