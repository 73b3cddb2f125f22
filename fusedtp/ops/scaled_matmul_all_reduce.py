"""y [T, N] = all_reduce((x_scale * x) [T, K_r] @ (w_scale * w) [N, K_r].T) + b of fp8 operands.

The all-reduce of matmul_all_reduce, with the same kernels. Products are in fp8. Scales are each rank's own, so a
partial is scaled in fp32 before it is rounded to the dtype of the result and sent:

one-shot    small results: every rank sends its full partial to every rank, and all sum
few rows    reduce-scatter, then all-gather; rows of all owners share a tile
two-shot    large results: the same, with separate tiles for each owner's rows

forward  y, summed over ranks in rank order in fp32, + b, rounded once; the same bits on every rank
no gradients: fusedtp.nn.FP8Linear has them, using the fp8 operations
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusedtp.comm import Group, place, propagate_errors
from fusedtp.comm.device_view import peers_of
from fusedtp.comm.launching import Launch, layouts

from . import fp8
from .launch.run import check, machine_for
from .matmul import sum_in_rank_order
from .matmul_all_reduce import (
    all_reduce_slot_bytes,
    kernel_for,
    prepare_few,
    prepare_one_shot,
    prepare_two_shot,
)
from .matmul_reduce_scatter import pointers
from .operation import FusedKernel, OnRank, Operation, Plan, Spec
from .rows import split
from .scaled_matmul_reduce_scatter import OPERANDS, local, reference, scale_pointers, scaled
from .scaled_matmul_reduce_scatter import chunked as reduce_scatter_chunked
from .scaled_matmul_reduce_scatter import op as reduce_scatter
from .shards import TWO_SHOT_BYTES, gather_rows


def scaled_matmul_all_reduce(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    group: Group,
    *,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    engine: str = "auto",
    layer: str = "",
) -> Tensor:
    """A row-parallel linear layer of fp8 operands without sequence parallelism.

        x        [..., K]  all rows, this rank's columns, float8_e4m3fn or float8_e5m2
        x_scale  [..., 1]  fp32, one per row of these columns; or one element
        weight   [N, K]    this rank's columns of the full weight, in either format
        w_scale  [N, 1]    fp32, or one element
        bias     [N]       the full bias, in `dtype`; added once
        dtype    of the result and of the partials that are sent: bfloat16, float16 or float32
        engine, layer as in matmul_all_reduce; `triton` needs a GPU that multiplies fp8, or the interpreter
        return   [..., N]  summed over ranks, in rank order, rounded once; the same bits on every rank

    The exchange is in `dtype`, not fp8: only the matmul gets faster. Formats and scales are each rank's own. Operands
    have no gradients; use the layer fusedtp.nn.FP8Linear for training.

    Raises ValueError for shapes, dtypes or an engine that do not fit, SignatureMismatch naming the rank that differs.
    Source: Micikevicius et al. 2022, "FP8 formats for deep learning"; Shoeybi et al. 2019, "Megatron-LM", section 3.
    """
    at = place(group)
    with propagate_errors(at):
        fp8.check(at, x, x_scale, [weight], [w_scale], [bias], dtype)
        flat = x if x.dim() == 2 else x.flatten(0, -2)
        spec = Spec(at.name, at.rank, split(flat.shape[0], at.world_size), 1, engine, 0, layer)
        y = op(spec, flat, x_scale.reshape(-1, 1), weight, w_scale.reshape(-1, 1), bias, dtype)
        return y if flat is x else y.view(*x.shape[:-1], weight.shape[0])


# -- engines ---------------------------------------------------------------------------------------------------------


def collective(
    plan: Plan, x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Matmul, then the process group's all_reduce."""
    partial = fp8.product(x, x_scale, w, w_scale, None, dtype)
    with plan.comm.agreed(plan.signature):
        return plan.comm.all_reduce(partial, bias)


def chunked(
    plan: Plan, x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """One-shot through the workspace, or `scaled_matmul_reduce_scatter` and an all-gather."""
    comm, shape = plan.comm, (x.shape[0], w.shape[0])
    if plan.slot_bytes >= TWO_SHOT_BYTES:
        own = reduce_scatter_chunked(plan, x, x_scale, w, w_scale, bias, dtype)
        return gather_rows(comm, own, plan.rows)
    with plan.call() as call:
        parts = [call.buffer(p, shape, dtype) for p in range(comm.world_size)]
        parts[comm.rank].copy_(fp8.product(x, x_scale, w, w_scale, None, dtype))
        call.publish_and_wait()
        return sum_in_rank_order(parts, bias)


def triton(
    plan: Plan, x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """One launch of the kernel for this size."""
    x, w = fp8.columns_together(x), fp8.columns_together(w)
    total, n = x.shape[0], w.shape[0]
    with plan.call() as call:
        view = call.kernel_view()
        key = layouts(x, w, x_scale, w_scale, bias)
        launch = plan.launches.get(key)
        if launch is None:
            check(view, plan.slot_bytes, x, [], max(total, *w.shape), fp8.FORMATS)
            how = kernel_for(plan.rows, n, dtype)
            launch = how(view, plan.comm.world_size, x, w, None, machine_for(view, x), dtype)
            launch = plan.launches[key] = scaled(launch, x_scale, w_scale)
        y = x.new_empty(total, n, dtype=dtype)
        args = pointers(launch, plan.peers(view), [x], [w], bias, y)
        launch.run(view, y.device, None, args | scale_pointers(x_scale, w_scale), alike=True)
    return y


def _launched(
    how: Callable[..., Launch], at: OnRank, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None],
    _: bool, __: bool, dtype: torch.dtype | None,
) -> tuple[Launch, dict[str, Tensor]]:  # fmt: skip
    x, x_scale, (w,), (w_scale,), dtype = fp8.of_check(x, weights, dtype)
    launch = how(at.view, at.world_size, x, w, at.config, at.machine, dtype)
    launch = scaled(launch, x_scale, w_scale)
    y = x.new_empty(x.shape[0], w.shape[0], dtype=dtype)
    peers = peers_of(at.view, at.rank, at.world_size, at.sig, at.machine.clock)
    given = pointers(launch, peers, [x], [w], biases[0], y)
    return launch.given(given | scale_pointers(x_scale, w_scale)), {"y": y}


def _kernel(name: str, how: Callable[..., Launch]) -> FusedKernel:
    """A kernel of matmul_all_reduce, with scales."""
    return FusedKernel(
        f"scaled_{name}_all_reduce",
        f"{name}_kernel",
        lambda *given: _launched(how, *given),
        slot_bytes=lambda rows, shared: all_reduce_slot_bytes(
            rows.total, shared.features, len(rows.sizes), shared.dtype, how is prepare_one_shot
        ),
        in_fp8=True,
        one_tile=how is prepare_few,
        example=dict(chunk=1),
    )


op = Operation(
    "scaled_matmul_all_reduce",
    OPERANDS,
    "Tensor",
    fake=lambda spec, x, x_scale, weight, w_scale, bias, dtype: x.new_empty(x.shape[0], weight.shape[0], dtype=dtype),
    reference=reference,
    shared=reduce_scatter.shared,
    engines=dict(local=local, collective=collective, chunked=chunked, triton=triton),
    slot_bytes=dict(
        chunked=lambda rows, shared: rows.total * shared.features * shared.dtype.itemsize,
        triton=lambda rows, shared: all_reduce_slot_bytes(rows.total, shared.features, len(rows.sizes), shared.dtype),
    ),
    choose=fp8.choose,
    kernels=(
        _kernel("one_shot", prepare_one_shot),
        _kernel("two_shot", prepare_two_shot),
        _kernel("few_rows", prepare_few),
    ),
)
