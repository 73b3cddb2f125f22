"""y [T, N] = all_reduce(x [T, K_r] @ w [N, K_r].T) + b: a row-parallel linear layer without sequence parallelism.

one-shot    small results: every rank sends its full partial to every rank, and all sum (kernels/matmul_all_reduce.py)
few rows    reduce-scatter, then all-gather; rows of all owners share a tile (kernels/matmul_few_rows.py)
two-shot    large results: the same, with separate tiles for each owner's rows (kernels/matmul_all_reduce.py)
multimem    a separate engine: the NVLink switch sums (kernels/multimem_all_reduce.py)

forward  y = sum over ranks of x @ w.T, in rank order, + b, rounded once; the same bits on every rank
         (multimem: in the switch's order, with b in rank 0's partial)
dgrad    dx = dy @ w, local
wgrad    dw = dy.T @ x, local: dy is the same on all ranks
saved    x and the weight
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fusedtp.comm import Group
from fusedtp.comm.device_view import odd, peers_of
from fusedtp.comm.launching import Launch, layouts
from fusedtp.comm.memory import round_up

from .launch import tuned
from .launch.config import NARROWEST, VECTOR, Config, Machine, deep, narrowed, tiles
from .launch.operands import even_depth, local_tiles
from .launch.run import check, machine_for
from .linear_call import LinearCall, linear_call
from .main_grad import MainGrad, main_grads_of, weight_grad
from .matmul import linear, linear_into, matmul, sum_in_rank_order
from .matmul_reduce_scatter import (
    FEW_ROWS,
    are_few,
    matmul_args,
    pointers,
    prepare_few_rows,
    reduction,
    tile_count,
    window_args,
)
from .matmul_reduce_scatter import chunked as reduce_scatter_chunked
from .operation import (
    Example,
    FusedKernel,
    OnRank,
    Operation,
    Plan,
    Shared,
    as_autocast,
    laid_alike,
    parts,
    wanted,
)
from .rows import Rows, rows_of_all, split
from .shards import TWO_SHOT_BYTES, gather_rows

SUM_ROWS = 64  # rows of a tile that the switch sums at once
PART_ROWS = 16  # minimum rows in a part of a sum that is split at the end
ONE_SHOT_BYTES = 1 << 17  # triton: size of one partial; beyond it, W copies of everything cost more than a second hop


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
        engine  "auto", "collective", "chunked", "triton", or "multimem": summed by the NVLink switch, see below
        layer   the kind of layer that the call is counted for
        return  [..., N]  the same bits on every rank

    The weight or bias may be a DTensor on the group's mesh; each rank uses its shard: Note [DTensors as operands] in
    operation.py. If the weight has an attribute `main_grad`, its gradient is added there: Note [main_grad] in
    main_grad.py.

    "multimem" needs GPUs of sm_90 or later behind a switch that can sum; the switch chooses the order of the sum. The
    bias is added to rank 0's partial before rounding, so in fp16 this partial may overflow where the sum does not.
    Ranks of a virtual world and ranks without a GPU run its kernel without a switch.

    Raises ValueError for shapes or dtypes that do not fit, SignatureMismatch naming the rank that differs.
    Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
    """
    call, operands = linear_call(op, rows_of_all, group, x, [weight], [bias], None, 0, engine, layer)
    if call.spec.needs_grad:
        y = _AllReduced.apply(call, call.main_grads[0], operands.x, *operands.given)
    else:
        y = op(call.spec, operands.x, *operands.own, plan=call.plan)
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], y.shape[1])


def local_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear of x [..., K], w [N, K], b [N] -> [..., N]; the weight may have a main_grad.

    forward  y = x @ w.T + b          dgrad  dx = dy @ w          wgrad  dw = dy.T @ x, all local

    Raises ValueError if main_grad has another shape, RuntimeError if a weight with main_grad is compiled.
    """
    (main_grad,) = main_grads_of([weight])
    if main_grad is None:
        return torch.nn.functional.linear(x, weight, bias)
    x, weight, bias = as_autocast(x.device.type, x, weight, bias)
    y = _AllReduced.apply(None, main_grad, x.flatten(0, -2), weight, bias)
    return y.view(*x.shape[:-1], y.shape[-1])


class _AllReduced(Function):
    """Both gradients are local. If `call` is None, the forward is local too."""

    @staticmethod
    def forward(
        ctx: Any,
        call: LinearCall | None,
        main_grad: MainGrad | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        _, _, need_x, need_weight, _ = ctx.needs_input_grad
        ctx.lying = {}
        if call is not None:
            (x, weight, bias), ctx.lying = parts((x, weight, bias))
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        ctx.main_grad = main_grad
        return linear(x, weight, bias) if call is None else op(call.spec, x, weight, bias, plan=call.plan)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, _, need_x, need_w, need_b = wanted(ctx)
        dx = matmul(dy, weight) if need_x else None
        dw = weight_grad(dy, x, ctx.main_grad) if need_w else None
        return None, None, *laid_alike((dx, dw, dy.sum(0) if need_b else None), ctx.lying)


# -- engines ---------------------------------------------------------------------------------------------------------


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The formula on one device: the full x [T, K], the full weight."""
    return torch.nn.functional.linear(x, weight, bias)


def local(plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A group of one rank."""
    return linear(x, weight, bias)


def collective(plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Matmul, then the process group's all_reduce."""
    partial = linear(x, weight)
    with plan.comm.agreed(plan.signature):
        return plan.comm.all_reduce(partial, bias)


def chunked(plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One-shot through the workspace, or `matmul_reduce_scatter` and an all-gather."""
    comm, shape = plan.comm, (x.shape[0], weight.shape[0])
    if plan.slot_bytes >= TWO_SHOT_BYTES:
        return gather_rows(comm, reduce_scatter_chunked(plan, [x], [weight], bias), plan.rows)
    with plan.call() as call:
        parts = [call.buffer(p, shape, x.dtype) for p in range(comm.world_size)]
        linear_into(parts[comm.rank], x, weight, None)
        call.publish_and_wait()
        return sum_in_rank_order(parts, bias)


def triton(plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One launch of the kernel for this size."""
    return _by_kernel(plan, False, x, weight, bias)


def multimem(plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One launch, in which the switch sums."""
    return _by_kernel(plan, True, x, weight, bias)


def _by_kernel(plan: Plan, by_switch: bool, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    comm, total, n = plan.comm, x.shape[0], weight.shape[0]
    if x.shape[1] % VECTOR:
        (x,), (weight,) = even_depth([x], [weight])
    with plan.call() as call:
        view = call.kernel_view()
        key = view.multicast is None, None if plan.alike else layouts(x, weight, bias)
        launch = plan.launches.get(key)
        if launch is None:
            check(view, plan.slot_bytes, x, [weight, bias])
            prepare = prepare_multimem if by_switch else kernel_for(plan.rows, n, x.dtype)
            launch = prepare(view, comm.world_size, x, weight, None, machine_for(view, x))
            plan.launches[key] = launch
        y = x.new_empty(total, n)
        given = pointers(launch, plan.peers(view), [x], [weight], bias, y)
        if by_switch:
            given["multicast"] = view.multicast
        launch.run(view, x.device, None, given, alike=True)
    return y


def _launched(
    plan: Any, at: OnRank, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *_: Any
) -> tuple[Launch, dict[str, Tensor]]:
    launch, y = plan(at.view, at.rank, at.world_size, x, weights[0], biases[0], at.sig, at.config, at.machine)
    return launch, {"y": y}


def _two_shot_slot_bytes(rows: Rows, shared: Shared) -> int:
    return all_reduce_slot_bytes(rows.total, shared.features, len(rows.sizes), shared.dtype, False)


op = Operation(
    "matmul_all_reduce",
    "Tensor x, Tensor weight, Tensor? bias",
    "Tensor",
    fake=lambda spec, x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]),
    reference=reference,
    shared=lambda x, weight, bias: Shared(x.dtype, weight.shape[0], 1, int(bias is not None)),
    linear=lambda x, weights, biases: (x, weights[0], biases[0]),
    engines=dict(local=local, collective=collective, chunked=chunked, triton=triton, multimem=multimem),
    slot_bytes=dict(
        multimem=lambda rows, shared: multimem_slot_bytes(rows.total, shared.features, shared.dtype),
        chunked=lambda rows, shared: rows.total * shared.features * shared.dtype.itemsize,
        triton=lambda rows, shared: all_reduce_slot_bytes(rows.total, shared.features, len(rows.sizes), shared.dtype),
    ),
    example=Example(
        "row",
        "all_reduce",
        shapes=lambda own, total, k, n: ((total, k), (n, k)),
        factors=lambda x, w: (x, w),
        call=lambda x, w, group, sizes, engine: matmul_all_reduce(x, w, group, engine=engine),
    ),
    kernels=(
        FusedKernel(
            "one_shot_all_reduce",
            "one_shot_kernel",
            lambda *given: _launched(plan_one_shot, *given),
            slot_bytes=lambda rows, shared: all_reduce_slot_bytes(
                rows.total, shared.features, len(rows.sizes), shared.dtype, True
            ),
        ),
        FusedKernel(
            "two_shot_all_reduce",
            "two_shot_kernel",
            lambda *given: _launched(plan_two_shot, *given),
            slot_bytes=_two_shot_slot_bytes,
            example=dict(chunk=1),
        ),
        FusedKernel(
            "few_rows_all_reduce",
            "few_rows_kernel",
            lambda *given: _launched(plan_few_rows, *given),
            slot_bytes=_two_shot_slot_bytes,
            one_tile=True,
            example=dict(chunk=1),
        ),
        FusedKernel(
            "multimem_all_reduce",
            "multimem_all_reduce_kernel",
            lambda *given: _launched(plan_multimem, *given),
            slot_bytes=lambda rows, shared: multimem_slot_bytes(rows.total, shared.features, shared.dtype),
            example=dict(chunk=1),
        ),
    ),
)


# -- the launchers of the kernels ------------------------------------------------------------------------------------


def is_one_shot(total: int, n: int, dtype: torch.dtype) -> bool:
    """Whether the kernel reduces [total, n] in one shot."""
    return total * n * dtype.itemsize <= ONE_SHOT_BYTES


def all_reduce_slot_bytes(total: int, n: int, world_size: int, dtype: torch.dtype, in_one: bool | None = None) -> int:
    """Bytes the kernel needs in a slot: all partials (one-shot), or the partials of our own rows and all sums."""
    if is_one_shot(total, n, dtype) if in_one is None else in_one:
        return world_size * total * n * dtype.itemsize
    return _result_at(total, n, world_size, dtype) + total * n * dtype.itemsize


def _result_at(total: int, n: int, world_size: int, dtype: torch.dtype) -> int:
    each = -(-total // world_size)
    return -(-world_size * each * n * dtype.itemsize // 16) * 16


def prepare_one_shot(
    view: Any,
    world_size: int,
    x: Tensor,
    weight: Tensor,
    config: Config | None,
    machine: Machine,
    dtype: torch.dtype | None = None,
) -> Launch:
    """The one-shot launch without its pointers, for operands of these shapes, strides and alignments.

    x        [T, K]     any strides; K is this rank's own
    weight   [N, K]     any strides
    config   None: the tuned one, or the default
    dtype    of y and of the partials that are sent, if it is not x's
    """
    from fusedtp.kernels.matmul_all_reduce import one_shot_kernel

    total, n = x.shape[0], weight.shape[0]
    flags = view.flags_per_source
    if config is None:
        config = one_shot_config(machine, x.dtype, total, n, flags, world_size)
        config = local_tiles(config, machine, [x], [weight])
    args = dict(
        **matmul_args([x], [weight], config),
        M=total,
        EVEN_N=n % config.block_n == 0,
    )
    return Launch(one_shot_kernel, config.programs, args, config)


@tuned.remembered
def one_shot_config(
    machine: Machine, dtype: torch.dtype, total: int, n: int, flags: int, world_size: int = 0
) -> Config:
    """Configuration of the one-shot kernel; the tuned one, if `world_size` is given.

    A program has two tiles if the width allows it: the first is in flight while the second is multiplied. It has one
    flag for all its tiles.
    """
    even, found = n % VECTOR == 0, tuned.NOTHING
    if world_size:
        found = tuned.lookup("one_shot", machine, dtype, rows=total, cols=n, even=even, world=world_size)
    shape = tuned.tile(tiles(machine, dtype, total, n, even), found)
    if not found:
        shape = deep(narrowed(shape, machine, total, n, each=2, narrowest=NARROWEST // 2), machine, dtype)
    programs = min(tuned.programs(found, machine), flags, max(1, tile_count(shape, total, n)))
    return replace(shape, send_programs=programs, other_programs=0)


def prepare_two_shot(
    view: Any,
    world_size: int,
    x: Tensor,
    weight: Tensor,
    config: Config | None,
    machine: Machine,
    dtype: torch.dtype | None = None,
) -> Launch:
    """Like `prepare_one_shot`, for the two-shot kernel."""
    from fusedtp.kernels.matmul_all_reduce import two_shot_kernel

    total, n = x.shape[0], weight.shape[0]
    each, flags = -(-total // world_size), view.flags_per_source // 2
    if config is None:
        config = reduction(
            machine, x.dtype, each, n, flags, kernel="two_shot", world_size=world_size, owners=world_size
        )
        config = local_tiles(config, machine, [x], [weight])
    args = dict(
        sizes=tuple(odd(size) for size in split(total, world_size)),
        **matmul_args([x], [weight], config),
        **window_args(config, each, n, world_size),
        result_at=_result_at(total, n, world_size, dtype or x.dtype),
        flags=flags,
    )
    return Launch(two_shot_kernel, config.programs, args, config)


def prepare_few(
    view: Any,
    world_size: int,
    x: Tensor,
    weight: Tensor,
    config: Config | None,
    machine: Machine,
    dtype: torch.dtype | None = None,
) -> Launch:
    """Like `prepare_one_shot`, for few rows."""
    rows = Rows(split(x.shape[0], world_size))
    result_at = _result_at(rows.total, weight.shape[0], world_size, dtype or x.dtype)
    return prepare_few_rows(view, [x], [weight], rows, config, machine, result_at)


def multimem_slot_bytes(total: int, n: int, dtype: torch.dtype) -> int:
    """Bytes the multimem kernel needs in a slot: rows padded to whole vector accesses."""
    return total * round_up(n, VECTOR) * dtype.itemsize


def prepare_multimem(
    view: Any, world_size: int, x: Tensor, weight: Tensor, config: Config | None, machine: Machine
) -> Launch:
    """Like `prepare_one_shot`, for the multimem kernel; its `multicast` argument is missing too."""
    from fusedtp.kernels.multimem_all_reduce import multimem_all_reduce_kernel

    total, n = x.shape[0], weight.shape[0]
    flags = view.flags_per_source // 2
    if config is None:
        config = multimem_config(machine, x.dtype, total, n, flags)
        config = local_tiles(config, machine, [x], [weight])
    chunks = -(-(-(-total // config.block_m) * -(-n // config.block_n)) // config.chunk)
    behind = max(1, min(-(-config.programs // 2), chunks))  # half a round: predicted times grow with fewer or more
    room = (flags - chunks) // behind + 1  # flags available to each of the sums that remain at the end
    parts = max(1, min(world_size, config.block_m // PART_ROWS, room))
    args = dict(
        **matmul_args([x], [weight], config),
        M=total,
        stride=round_up(n, VECTOR),
        group=config.chunk,
        behind=behind,
        parts=parts,
        height=-(-config.block_m // parts),
        flags=flags,
        SUM_M=sum_rows(config, x.dtype),
    )
    return Launch(multimem_all_reduce_kernel, config.programs, args, config)


def sum_rows(config: Config, dtype: torch.dtype) -> int:
    """Rows of a tile that the switch sums at once: at least 16 bytes a thread, see kernels/multimem.py."""
    pieces = config.block_n * dtype.itemsize // 16  # 16-byte pieces of a row
    return max(-(-32 * config.num_warps // pieces), min(config.block_m, SUM_ROWS))


@tuned.remembered
def multimem_config(machine: Machine, dtype: torch.dtype, total: int, n: int, flags: int) -> Config:
    """Configuration of the multimem kernel: every program multiplies, sums and copies."""
    shape = tiles(machine, dtype, total, n)
    if total <= FEW_ROWS:
        shape = deep(narrowed(shape, machine, total, n), machine, dtype)
    count = -(-total // shape.block_m) * -(-n // shape.block_n)
    return replace(shape, send_programs=machine.programs, other_programs=0, chunk=max(1, -(-count // flags)))


def kernel_for(rows: Rows, n: int, dtype: torch.dtype) -> Callable[..., Launch]:
    """The function that prepares the launch of an all-reduce with y [rows.total, n]."""
    if is_one_shot(rows.total, n, dtype):
        return prepare_one_shot
    return prepare_few if are_few(rows, n, dtype) else prepare_two_shot


def plan_one_shot(*given: Any) -> tuple[Launch, Tensor]:
    """The complete one-shot launch, not yet run, and its output [T, N]; same arguments as `plan_two_shot`."""
    return _planned(prepare_one_shot, *given)


def plan_two_shot(*given: Any) -> tuple[Launch, Tensor]:
    """(view, rank, world_size, x, weight, bias, sig, config, machine) -> the two-shot launch and its output [T, N]."""
    return _planned(prepare_two_shot, *given)


def plan_few_rows(*given: Any) -> tuple[Launch, Tensor]:
    """The same for few rows."""
    return _planned(prepare_few, *given)


def plan_multimem(*given: Any) -> tuple[Launch, Tensor]:
    """The same for the multimem kernel."""
    return _planned(prepare_multimem, *given)


def _planned(
    prepare: Any,
    view: Any,
    rank: int,
    world_size: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sig: int,
    config: Config | None,
    machine: Machine,
) -> tuple[Launch, Tensor]:
    launch = prepare(view, world_size, x, weight, config, machine)
    y = x.new_empty(x.shape[0], weight.shape[0])
    peers = peers_of(view, rank, world_size, sig, machine.clock)
    given = pointers(launch, peers, [x], [weight], bias, y)
    if prepare is prepare_multimem:
        given["multicast"] = view.multicast
    return launch.given(given), y
