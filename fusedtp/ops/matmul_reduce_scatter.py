"""y [T_r, N] = reduce_scatter(x [T, K_r] @ w [N, K_r].T) + b: a row-parallel linear layer, output sharded by tokens.

rank r, chunked     rows of r+1 into slot | publish to r+1 | rows of r+2 | ... | own rows | wait for all | sum
rank r+1            rows of r+2 into slot | publish to r+2 | ...

rank r, triton      push tiles to their owner: a window of r+1's, of r+2's, ..., of our own; in between, sum a tile that
                    all ranks pushed here some windows ago (kernels/matmul_reduce_scatter.py)
rank r, few rows    one tile holds the rows of all owners; send each owner its rows, then sum our own
                    (kernels/matmul_few_rows.py)

forward  y = sum over ranks of x @ w.T, in rank order, rounded once, + b
dgrad    dx = all_gather_matmul(dy, w.T)
wgrad    dw = dy_full.T @ x, local, on the dy that dgrad gathered
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

from .launch import tuned
from .launch.config import VECTOR, Config, Machine, block, deep, narrowed, tiles
from .launch.operands import MOST_DESCRIPTORS, describe_operands, even_depth, local_operands, local_tiles
from .launch.run import check, machine_for
from .linear_call import LinearCall, linear_call
from .main_grad import weight_grad
from .matmul import joined, matmul_into, side_by_side, sum_in_rank_order, sum_linear_into, to_fp32
from .operation import (
    OPERATIONS,
    Example,
    FusedKernel,
    OnRank,
    Operation,
    Plan,
    Shared,
    laid_alike,
    parts,
    wanted,
)
from .rows import Rows, rows_of_full
from .shards import arrived_partials, partials_of, ring, scattered

FEW_ROWS = 256  # rows of all ranks, up to which one tile holds them all
BEHIND = 2  # rounds after which most of a window has arrived; predicted times grow with fewer or more


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

        x       [T, K]    all rows, this rank's columns (K may differ between ranks); with dim=1 [B, S, K]
        weight  [N, K]    this rank's columns of the full weight
        bias    [N]       the full bias; added once, not W times. Its gradient is the sum over this rank's rows
        sizes   every rank's rows, the same list on all ranks; None: as torch.chunk splits them
        engine  "auto", "collective", "chunked" or "triton"
        layer   the kind of layer that the call and its backward are counted for
        return  [T_r, N]  summed over ranks, in rank order, rounded once; with dim=1 [B, S_r, N]

    The weight or bias may be a DTensor on the group's mesh; each rank uses its shard: Note [DTensors as operands] in
    operation.py. If the weight has an attribute `main_grad`, its gradient is added there: Note [main_grad] in
    main_grad.py.

    Raises ValueError for shapes or dtypes that do not fit, SignatureMismatch naming the rank that differs.
    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4.2.2.
    """
    call, operands = linear_call(op, rows_of_full, group, x, [weight], [bias], sizes, dim, engine, layer)
    spec, x = call.spec, operands.x
    if spec.needs_grad:
        y = _RowParallel.apply(call, x, *operands.given)
    else:
        own_weight, own_bias = operands.own
        y = op(spec, [x], [own_weight], own_bias, plan=call.plan)
    return y if dim == 0 else y.view(spec.batch, spec.sizes[spec.rank], y.shape[1])


class _RowParallel(Function):
    @staticmethod
    def forward(ctx: Any, call: LinearCall, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        spec, plan, (main_grad,), backward = call
        need_x, need_weight = spec.needs_grad & 1, spec.needs_grad & 2
        (x, weight, bias), ctx.lying = parts((x, weight, bias))
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        ctx.spec, ctx.main_grad, ctx.gathered_dy = backward, main_grad, None
        return op(spec, [x], [weight], bias, plan=plan)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, need_x, need_w, need_b = wanted(ctx)
        dx = dw = full = None
        if need_x:
            keep = ctx.needs_input_grad[2]
            dx, *gathered = OPERATIONS["all_gather_matmul"](ctx.spec, dy, [weight.t()], [None], keep)
            full = gathered[0] if keep else None
            if keep and not need_w:  # a weight pass follows
                ctx.gathered_dy = dy, dy._version, full
        elif ctx.gathered_dy is not None:
            (of, version, kept), ctx.gathered_dy = ctx.gathered_dy, None
            if of is dy and version == dy._version:  # else it belongs to another backward pass
                full = kept
        if need_w:
            full = OPERATIONS["all_gather_rows"](ctx.spec, dy) if full is None else full
            dw = weight_grad(full, x, ctx.main_grad)
        return None, *laid_alike((dx, dw, dy.sum(0) if need_b else None), ctx.lying)


# -- engines ---------------------------------------------------------------------------------------------------------


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The formula on one device: the full x [T, K], the full weight."""
    return torch.nn.functional.linear(x, weight, bias)


def local(plan: Plan, xs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """A group of one rank."""
    xs, weights = joined(xs, weights)
    y = xs[0].new_empty(plan.rows.total, weights[0].shape[0])
    sum_linear_into(y, xs, weights)
    return y if bias is None else y.add_(bias)


def collective(plan: Plan, xs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """Matmul, then the process group's reduce_scatter."""
    xs, weights = joined(xs, weights)
    partial = xs[0].new_empty(plan.rows.total, weights[0].shape[0])
    sum_linear_into(partial, xs, weights)
    return scattered(plan, partial, bias)


def chunked(plan: Plan, xs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """One matmul per owner, the next rank's rows first. On CPU owners read the partials in place."""
    rows, comm = plan.rows, plan.comm
    xs, weights = joined(xs, weights)
    width, dtype = weights[0].shape[0], xs[0].dtype
    transposed = [to_fp32(w).t() for w in weights]
    blocks = [rows.parts(x) for x in xs]
    with plan.call() as call:
        for p in ring(comm, own="last"):
            partial = partials_of(call, comm.rank, rows, width, dtype, p)
            with comm.span(f"matmul {p}"):
                for out, *own in zip(rows.runs(partial, p), *(of_x[p] for of_x in blocks), strict=True):
                    matmul_into(out, own, transposed)
            if p != comm.rank:
                call.publish(p)
        parts = arrived_partials(call, comm, rows, width, dtype)
        with comm.span("sum"):
            return sum_in_rank_order(parts, bias)


def triton(plan: Plan, xs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """One launch: tiles are pushed to their owner, which sums them between its products, or after them if few.

    An owner's slot has room for every rank's partial of its rows, so that no sender waits for space. With an uneven
    split of rows this is larger than the scattered tensor: Note [Slot bytes] in comm/workspace.py.
    """
    rows = plan.rows
    xs, weights = list(xs), list(weights)
    if len(xs) > MOST_DESCRIPTORS:
        xs, weights = [torch.cat(xs, 1)], [side_by_side(weights)]
    if len(xs) > 1 or xs[0].shape[1] % VECTOR:
        xs, weights = even_depth(xs, weights)
    with plan.call() as call:
        view = call.kernel_view()
        key = None if plan.alike else layouts(*xs, *weights, bias)
        launch = plan.launches.get(key)
        if launch is None:
            check(view, plan.slot_bytes, xs[0], [*xs[1:], *weights, bias])
            how = kernel_for(rows, weights[0].shape[0], xs[0].dtype)
            launch = plan.launches[key] = how(view, xs, weights, rows, None, machine_for(view, xs[0]))
        y = xs[0].new_empty(plan.own_rows, weights[0].shape[0])
        launch.run(view, y.device, None, pointers(launch, plan.peers(view), xs, weights, bias, y), alike=True)
    return y


def _launched(
    plan: Any, at: OnRank, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *_: Any
) -> tuple[Launch, dict[str, Tensor]]:
    xs = x.split([w.shape[1] for w in weights], 1)
    launch, y = plan(at.view, at.rank, at.world_size, xs, weights, biases[0], at.rows, at.sig, at.config, at.machine)
    return launch, {"y": y}


op = Operation(
    "matmul_reduce_scatter",
    "Tensor[] xs, Tensor[] weights, Tensor? bias",
    "Tensor",
    fake=lambda spec, xs, weights, bias: xs[0].new_empty(spec.batch * spec.sizes[spec.rank], weights[0].shape[0]),
    reference=reference,
    shared=lambda xs, weights, bias: Shared(xs[0].dtype, weights[0].shape[0], len(xs), int(bias is not None)),
    linear=lambda x, weights, biases: ([x], weights, biases[0]),
    engines=dict(local=local, collective=collective, chunked=chunked, triton=triton),
    slot_bytes=dict(
        chunked=lambda rows, shared: rows.total * shared.features * shared.dtype.itemsize,
        triton=lambda rows, shared: scatter_slot_bytes(rows, shared.features, shared.dtype),
    ),
    example=Example(
        "row",
        "scatter",
        shapes=lambda own, total, k, n: ((total, k), (n, k)),
        factors=lambda x, w: (x, w),
        call=lambda x, w, group, sizes, engine: matmul_reduce_scatter(x, w, group, sizes=sizes, engine=engine),
    ),
    kernels=(
        FusedKernel(
            "matmul_reduce_scatter",
            "matmul_reduce_scatter_kernel",
            lambda *given: _launched(plan_matmul_reduce_scatter, *given),
            scatters=True,
            in_runs=True,
            example=dict(chunk=1),
        ),
        FusedKernel(
            "few_rows_reduce_scatter",
            "few_rows_kernel",
            lambda *given: _launched(plan_few_rows_reduce_scatter, *given),
            scatters=True,
            one_tile=True,
            example=dict(chunk=1),
        ),
    ),
)


# -- the kernel's launcher; matmul_all_reduce shares parts of it -----------------------------------------------------


def scatter_slot_bytes(rows: Rows, n: int, dtype: torch.dtype) -> int:
    """Bytes the kernel needs in a slot: every source's partial of the largest shard."""
    return len(rows.sizes) * rows.longest * n * dtype.itemsize


def prepare(
    view: Any,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    rows: Rows,
    config: Config | None,
    machine: Machine,
) -> Launch:
    """The launch without its pointers, for operands of these shapes, strides and alignments.

    xs       [T, K_i]    rows in global order, any strides; the K_i are this rank's own
    weights  [N, K_i]    any strides
    config   None: the tuned one, or the default
    """
    from fusedtp.kernels.matmul_reduce_scatter import matmul_reduce_scatter_kernel

    world_size, n = len(rows.sizes), weights[0].shape[0]
    if config is None:
        config = reduction(
            machine, xs[0].dtype, rows.longest, n, view.flags_per_source,
            kernel="matmul_reduce_scatter", world_size=world_size, owners=world_size,
        )  # fmt: skip
        config = local_tiles(config, machine, xs, weights, rows.batch)
    config = for_products(config, len(xs))
    args = dict(
        sizes=tuple(odd(size) for size in rows.sizes),
        batch=rows.batch,
        **matmul_args(xs, weights, config, rows.batch),
        **window_args(config, rows.longest, n, world_size),
        **part_args(config, rows.longest, world_size),
    )
    return Launch(matmul_reduce_scatter_kernel, config.programs, args, config)


def for_products(config: Config, count: int) -> Config:
    """Halve block_k for several operands: the addresses of all their blocks stay in registers next to a large tile."""
    if count == 1 or config.tma or config.block_k <= 32:
        return config
    return replace(config, block_k=32, num_stages=config.num_stages + 1)


def are_few(rows: Rows, n: int, dtype: torch.dtype) -> bool:
    """Whether the rows of all ranks are multiplied together: one tile holds them all, each rank's in one run.

    dtype   of y [., n]. All ranks must choose the same kernel, so this uses only values that are equal on all ranks
    """
    most = FEW_ROWS if dtype.itemsize <= 2 and n % VECTOR == 0 else FEW_ROWS // 4  # see `tiles`
    return rows.batch == 1 and rows.total <= most


def kernel_for(rows: Rows, n: int, dtype: torch.dtype) -> Callable[..., Launch]:
    """The function that prepares the launch of a reduce-scatter with the full y [rows.total, n]."""
    return prepare_few_rows if are_few(rows, n, dtype) else prepare


def prepare_few_rows(
    view: Any,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    rows: Rows,
    config: Config | None,
    machine: Machine,
    result_at: int | None = None,
) -> Launch:
    """Like `prepare`, for few rows: block_m is at least their number.

    result_at   all-reduce only: byte offset of the sums in a slot; None: a reduce-scatter
    """
    from fusedtp.kernels.matmul_few_rows import few_rows_kernel

    total, n = rows.total, weights[0].shape[0]
    flags = view.flags_per_source if result_at is None else view.flags_per_source // 2
    if config is None:
        config = few_rows_config(machine, xs[0].dtype, total, n, flags, len(rows.sizes))
        config = local_tiles(config, machine, xs, weights)
    config = for_products(config, len(xs))
    assert total <= config.block_m and rows.batch == 1
    args = dict(
        sizes=tuple(odd(size) for size in rows.sizes),
        total=total,
        **matmul_args(xs, weights, config),
        group=config.chunk,
        result_at=result_at or 0,
        flags=flags,
        BROADCAST=result_at is not None,
    )
    return Launch(few_rows_kernel, config.programs, args, config)


def pointers(
    launch: Launch,
    peers: Any,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias: Tensor | None,
    y: Tensor,
) -> dict[str, Any]:
    """The remaining arguments of a prepared launch. bias [N] or None, the same on all ranks; y is the output."""
    bias = None if bias is None else bias.contiguous()
    args = dict(peers=peers, xs=tuple(xs), ws=tuple(weights), bias=bias, y=y)
    if launch.args["TMA"]:
        describe_operands(args, launch, xs, weights)
    return args


def plan_matmul_reduce_scatter(*given: Any) -> tuple[Launch, Tensor]:
    """(view, rank, world_size, xs, weights, bias, rows, sig, config, machine) -> the complete launch, not yet run, and
    its output [R_r, N]; see `prepare` and `pointers`."""
    return _planned(prepare, *given)


def plan_few_rows_reduce_scatter(*given: Any) -> tuple[Launch, Tensor]:
    """The same for few rows."""
    return _planned(prepare_few_rows, *given)


def _planned(
    prepare: Any,
    view: Any,
    rank: int,
    world_size: int,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias: Tensor | None,
    rows: Rows,
    sig: int,
    config: Config | None,
    machine: Machine,
) -> tuple[Launch, Tensor]:
    launch = prepare(view, xs, weights, rows, config, machine)
    y = xs[0].new_empty(rows.local(rank), weights[0].shape[0])
    peers = peers_of(view, rank, world_size, sig, machine.clock)
    return launch.given(pointers(launch, peers, xs, weights, bias, y)), y


def window_args(config: Config, owned: int, n: int, world_size: int) -> dict[str, int]:
    """How the kernel walks the chunks of each owner, which has up to `owned` rows. A round takes a window of chunks
    from every owner, enough to give every program one. Sums run BEHIND rounds later."""
    chunks = max(1, -(-tile_count(config, owned, n) // config.chunk))
    rounds = -(-chunks // max(1, config.programs // world_size))
    window = -(-chunks // rounds)
    return dict(group=config.chunk, window=window, behind=BEHIND * window)


def part_args(config: Config, owned: int, world_size: int) -> dict[str, int]:
    """Into how many parts the remaining sums are split at the end, at most one per rank, and the tile rows of each."""
    depth = max(1, min(owned, config.block_m))
    parts = min(world_size, depth)
    return dict(parts=parts, height=-(-depth // parts))


def matmul_args(xs: Sequence[Tensor], weights: Sequence[Tensor], config: Config, batch: int = 1) -> dict[str, Any]:
    """The arguments shared by all kernels that end with a sum over ranks."""
    ks = tuple(w.shape[1] for w in weights)
    return dict(
        **local_operands(config, xs, weights, batch),
        N=weights[0].shape[0],
        Ks=ks,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP=config.group,
        PART_M=min(config.block_m, max(1, config.part * config.num_warps // config.block_n)),
        PRODUCTS=len(ks),
        EVEN_K=all(k % config.block_k == 0 for k in ks),
    )


@tuned.remembered
def few_rows_config(
    machine: Machine, dtype: torch.dtype, total: int, n: int, flags: int, world_size: int = 0
) -> Config:
    """Configuration for few rows; the tuned one, if `world_size` is given."""
    even, found = n % VECTOR == 0, tuned.NOTHING
    if world_size:
        found = tuned.lookup("few_rows", machine, dtype, rows=total, cols=n, even=even, world=world_size)
    if found.get("block_m", total) < total:  # tuned for fewer rows of this class
        found = tuned.NOTHING
    shape = tuned.tile(tiles(machine, dtype, total, n, even), found)
    shape = replace(shape, block_m=block(total, shape.block_m, FEW_ROWS))
    if not found:
        if shape.block_m > 128:  # more would not fit the registers
            shape = replace(shape, block_n=min(shape.block_n, 64))
        shape = deep(narrowed(shape, machine, total, n), machine, dtype)
    chunk = tuned.chunk(found, 1, least=-(-tile_count(shape, total, n) // flags))
    return replace(shape, send_programs=tuned.programs(found, machine), other_programs=0, chunk=chunk)


@tuned.remembered
def reduction(
    machine: Machine,
    dtype: torch.dtype,
    owned: int,
    n: int,
    flags: int,
    *,
    kernel: str = "",
    world_size: int = 0,
    owners: int,
) -> Config:
    """Configuration for partial tiles: each of `owners` ranks owns `owned` rows and has `flags` flags for them.

    A rank multiplies the rows of all owners, which together fill the machine, but no tile has rows of two owners. The
    owner sums in the senders' tiles, so the configuration depends only on values that ranks share, and not on K. Tuned
    values are those of `kernel`, if it is given.
    """
    even, found = n % VECTOR == 0, tuned.NOTHING
    if kernel:
        found = tuned.lookup(kernel, machine, dtype, rows=owned, cols=n, even=even, world=world_size)
    rows = owned * owners if owned >= 128 else owned
    shape = tuned.tile(tiles(machine, dtype, rows, n, even), found)
    chunk = tuned.chunk(found, 1, least=-(-tile_count(shape, owned, n) // flags))
    return replace(shape, send_programs=tuned.programs(found, machine), other_programs=0, chunk=chunk)


def tile_count(shape: Config, rows: int, n: int) -> int:
    return -(-rows // shape.block_m) * -(-n // shape.block_n)
