"""Dispatch the rows of a mixture of experts to their experts' owners, alone or fused with the following matmul.

    moe_dispatch          x [T_r, K]  ->  rows [max_rows, K]
    moe_dispatch_matmul   x [T_r, K]  ->  rows @ w_e.T [max_rows, N], w_e of each row's expert
    moe_dispatch_gated    x [T_r, K]  ->  act(rows @ gate_e.T) * (rows @ up_e.T)

rank r, chunked     copy x to own slot | publish | own rows | wait r+1 | its rows for my experts | wait r+2 | ...
rank r, triton      some programs publish x; all read the rows they need from r+1, r+2, ... (kernels/moe_exchange.py)
rank r, triton,     push chunks of rows to their owners, expert by expert; an expert's tiles start when its rows have
with the matmul     arrived (kernels/moe_dispatch_matmul.py)

dgrad    dx = moe_combine of the rows' gradients, without weights; with a matmul, moe_matmul_combine(dy, w_e.T)
wgrad    dw_e = dy[rows of e].T @ rows[rows of e], local, on the rows that were dispatched
saved    the plan; with a matmul also rows and weights; with a gated one also both products

Tokens are published once, not k times: an owner reads the rows that it needs. A graph compiled for CPU learns only
during the call whether there is room for all rows: every rank checks this before it communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fusedtp.comm import Group, place, propagate_errors
from fusedtp.comm.device_view import odd, peers_of
from fusedtp.comm.launching import Launch, layouts
from fusedtp.comm.signature import COMM_DTYPES

from ..cpu import accumulator
from ..launch.config import ALL_REGISTERS, VECTOR, Config, Machine, block, gather_chunk, gather_programs
from ..launch.operands import group_tiles, grouped_descriptors
from ..launch.run import DTYPES, check, machine_for, of_one_layout
from ..main_grad import MainGrad, main_grads_of
from ..operation import OPERATIONS, Operation, Shared, Spec, as_autocast, needs_grad, wanted
from ..operation import Plan as Call
from ..pointwise import ACTIVATIONS
from ..rows import Rows
from ..shards import ring
from . import fp8
from .grouped import (
    check_grouped,
    fp32_precision,
    gated_engine,
    gated_grads,
    group_config,
    grouped_gated,
    grouped_matmul,
    matmul_engine,
    wgrads,
)
from .plan import (
    Blocks,
    Exchange,
    MoEHandle,
    PackedIndex,
    RoutingPlan,
    as_chosen,
    known_room,
    make_plan,
    offsets_of,
    place_of,
    unpacked,
    without_dropped,
)

CHUNK = 64  # most rows per flag; predicted times grow with more, as the first expert starts later, and with fewer


def moe_dispatch(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    num_experts: int,
    group: Group | None,
    *,
    max_rows: int | None = None,
    sizes: Sequence[int] | None = None,
    engine: str = "auto",
    layer: str = "",
    weights_sum: float | None = None,
    comm_dtype: str = "",
) -> tuple[Tensor, Tensor, MoEHandle]:
    """Send each token to the experts that it chose. Rank r owns experts r E / W, ..., (r + 1) E / W - 1.

        x            [T_r, K]  this rank's tokens, which may be none
        expert_ids   [T_r, k]  integers below num_experts, distinct within a token; -1 drops a choice
        weights      [T_r, k]  factors of the experts' outputs in the combine; ignored for dropped choices
        group                  ProcessGroup, 1-D DeviceMesh, VirtualGroup or name; None if all experts are here
        max_rows               most rows that a rank's experts receive, the same on all ranks; default: enough for any
                               routing, T * min(k, E / W), or in eager code on CPU the number that arrived
        sizes                  tokens of every rank; default: as many as here on all of them
        weights_sum            the expected sum of a token's weights; checked on CPU, for tokens without a dropped
                               choice, up to the rounding of weights.dtype
        comm_dtype             "": rows travel in x's dtype; "fp8": in fp8-e4m3 with a scale for each 128 columns, and
                               rounded like this on one rank too; see fp8.py. Gradients travel unrounded
        return rows  [max_rows, K]  by expert, source rank and choice (token * k + j)
               offsets  int32 [E / W + 1]  where each expert's rows begin; rows past the last one are undefined
               handle   for moe_combine

    Gradients of x come from this function, gradients of the weights from moe_combine. An expert's rows are in the order
    of all ranks' tokens, so its results do not depend on how tokens or experts are split.
    Raises ValueError for shapes, ids, or weights that do not fit (on CPU also for their values), and for more rows
    than max_rows, on all ranks (if a kernel finds too many, fusedtp.check raises TooManyRows); SignatureMismatch
    naming the rank that differs in num_experts, k, max_rows, dtype or width.
    """
    at = place_of(group, x)
    with propagate_errors(at):
        plan, where = make_plan(
            x, expert_ids, weights, num_experts, at, max_rows=max_rows, sizes=sizes, engine=engine, layer=layer,
            weights_sum=weights_sum, comm_dtype=comm_dtype,
        )  # fmt: skip
        return dispatch(x, without_dropped(weights, expert_ids, x), plan, known_room(plan, where))


def dispatch(x: Tensor, weights: Tensor, plan: RoutingPlan, at: Exchange) -> tuple[Tensor, Tensor, MoEHandle]:
    """moe_dispatch with an existing plan."""
    rows, row_weights = dispatch_rows(x, weights.detach(), plan, at)
    offsets = offsets_of(plan, at)
    return rows, offsets, MoEHandle(weights, row_weights, plan, at, offsets)


def dispatch_rows(x: Tensor, weights: Tensor | None, plan: RoutingPlan, at: Exchange) -> tuple[Tensor, Tensor]:
    """x [T_r, K] -> rows [max_rows, K], differentiable; weights [T_r, k] -> the weight of each row [max_rows]."""
    if needs_grad(x):
        made: tuple[Tensor, Tensor] = _Dispatch.apply(at, x, weights, *plan)
        return made
    rows, row_weights = op(at.spec, x, weights, *plan, at.max_rows)
    return rows, row_weights


class _Dispatch(Function):
    @staticmethod
    def forward(ctx: Any, at: Exchange, x: Tensor, weights: Tensor | None, *plan: Tensor) -> Any:
        rows, row_weights = op(at.spec, x, weights, *plan, at.max_rows)
        ctx.save_for_backward(*plan)
        ctx.at = at._replace(comm_dtype="")
        ctx.mark_non_differentiable(row_weights)
        return rows, row_weights

    @staticmethod
    def backward(ctx: Any, drows: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        wanted(ctx)
        at, plan = ctx.at, ctx.saved_tensors
        dx = OPERATIONS["moe_combine"](at.spec, drows, None, False, *plan, at.max_rows)
        return None, dx, None, None, None, None


# -- with the matmul -------------------------------------------------------------------------------------------------


def moe_dispatch_matmul(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    matrices: Tensor,
    num_experts: int,
    group: Group | None,
    **options: Any,
) -> tuple[Tensor, Tensor, MoEHandle]:
    """moe_dispatch, then grouped_matmul of its rows; a single kernel where kernels run.

        x, expert_ids, weights, num_experts, group   as in moe_dispatch, and its options
        matrices   [E / W, N, K]  of this rank's experts, in x's dtype; autocast casts both
        return     y [max_rows, N], offsets, handle; rows of y past offsets[-1] are undefined

    The result is bitwise equal to that of the two calls. With comm_dtype "fp8", the dispatch is not fused.
    Raises ValueError as the two functions do.
    """
    return _with_matmul(x, expert_ids, weights, [matrices], "", num_experts, group, options)


def moe_dispatch_gated(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate: Tensor,
    up: Tensor,
    num_experts: int,
    group: Group | None,
    *,
    act: str = "silu",
    **options: Any,
) -> tuple[Tensor, Tensor, MoEHandle]:
    """moe_dispatch, then grouped_gated of its rows: like moe_dispatch_matmul, with gate, up [E / W, N, K] and `act`."""
    at = place_of(group, x)
    with propagate_errors(at):
        if act not in ACTIVATIONS:
            raise ValueError(f"rank {at.rank}: act is {act!r}; it must be one of {', '.join(ACTIVATIONS)}")
    return _with_matmul(x, expert_ids, weights, [gate, up], act, num_experts, group, options)


def _with_matmul(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    matrices: list[Tensor],
    act: str,
    num_experts: int,
    group: Group | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, MoEHandle]:
    at = place_of(group, x)
    with propagate_errors(at):
        if not options.get("comm_dtype"):
            (x,) = as_autocast(x.device.type, x)
        plan, where = make_plan(x, expert_ids, weights, num_experts, at, **options)
        where = known_room(plan, where)
        return dispatch_with_matmul(x, without_dropped(weights, expert_ids, x), matrices, act, plan, where)


def dispatch_with_matmul(
    x: Tensor, weights: Tensor, matrices: Sequence[Tensor], act: str, plan: RoutingPlan, at: Exchange
) -> tuple[Tensor, Tensor, MoEHandle]:
    """moe_dispatch_matmul, or with act moe_dispatch_gated, with an existing plan."""
    if at.comm_dtype:
        rows, offsets, handle = dispatch(x, weights, plan, at)
        with propagate_errors(place(at.group)):
            if act:
                y = grouped_gated(rows, matrices[0], matrices[1], offsets, act=act)
            else:
                y = grouped_matmul(rows, matrices[0], offsets)
        return y, offsets, handle
    with propagate_errors(place(at.group)):
        main_grads = main_grads_of(matrices)
        x, *matrices = as_autocast(x.device.type, x, *matrices)
        offsets = offsets_of(plan, at)
        check_grouped(x, offsets, **dict(zip(("gate", "up") if act else ("matrices",), matrices, strict=True)))
        scalars = weights.detach()
        if needs_grad(x, *matrices):
            y, row_weights = _DispatchMatmul.apply(at, act, main_grads, x, scalars, offsets, *plan, *matrices)
        else:
            _, row_weights, y = matmul_op(at.spec, x, scalars, matrices, offsets, act, False, False, *plan, at.max_rows)
    return y, offsets, MoEHandle(weights, row_weights, plan, at, offsets)


class _DispatchMatmul(Function):
    @staticmethod
    def forward(
        ctx: Any,
        at: Exchange,
        act: str,
        main_grads: Sequence[MainGrad | None],
        x: Tensor,
        weights: Tensor,
        offsets: Tensor,
        table: Tensor,
        orders: Tensor,
        index: Tensor,
        *matrices: Tensor,
    ) -> tuple[Tensor, Tensor]:
        plan = table, orders, index
        need_x, need_matrices = ctx.needs_input_grad[3], any(ctx.needs_input_grad[9:])
        rows, row_weights, y, *products = matmul_op(
            at.spec, x, weights, list(matrices), offsets, act, act != "", need_matrices, *plan, at.max_rows
        )
        # save only what a gradient reads: a saved tensor keeps its memory and must not change in place
        ctx.save_for_backward(rows if need_matrices else None, offsets, *plan, *products, *(matrices if need_x else ()))
        ctx.at, ctx.act, ctx.main_grads, ctx.products, ctx.kept = at, act, main_grads, len(products), None
        ctx.mark_non_differentiable(row_weights)
        return y, row_weights

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        needs, at, engine = wanted(ctx), ctx.at, ctx.at.local_engine
        rows, offsets, table, orders, index, *saved = ctx.saved_tensors
        products, matrices = saved[: ctx.products], saved[ctx.products :]
        need_x, need_matrices = needs[3], needs[9:]
        dx, dws = None, [None] * len(need_matrices)
        follows = need_x and rows is not None and not any(need_matrices) and not at.several
        dys = gated_grads(ctx, engine, dy, products, offsets, follows)
        if need_x:
            dx = OPERATIONS["moe_matmul_combine"](
                at.spec, dys, [w.mT for w in matrices], offsets, None, table, orders, index, at.max_rows
            )
        if any(need_matrices):
            dws = wgrads(engine, dys, rows, offsets, ctx.main_grads, need_matrices)
        return None, None, None, dx, None, None, None, None, None, *dws


# -- engines ---------------------------------------------------------------------------------------------------------

Moved = tuple[Tensor, Tensor]  # rows [max_rows, K], and a scalar for each [max_rows], or [0] without scalars


def local(call: Call, x: Tensor, scalars: Tensor | None, plan: RoutingPlan, at: Exchange) -> Moved:
    """All experts are here. The host never waits for the device."""
    order = plan.orders[: at.max_rows]
    rows = x.index_select(0, order // at.top_k)
    return rows, x.new_empty(0) if scalars is None else scalars.reshape(-1).index_select(0, order)


def collective(call: Call, x: Tensor, scalars: Tensor | None, plan: RoutingPlan, at: Exchange) -> Moved:
    """The process group's all_to_all: between hosts, and where no other engine runs.

    The host reads how many rows go where; on a GPU it waits for the device. Choices travel in their source's order,
    which is by owner; the receiver then copies each block to its place.
    """
    blocks = Blocks(plan.table, at)
    blocks.check_room(at)
    sent, received = blocks.lengths[at.rank], blocks.received
    choices = plan.orders[at.choices_of(at.rank)][: sum(sent)]
    payloads = [(x.new_empty(at.max_rows, x.shape[1]), x.index_select(0, choices // at.top_k))]
    if scalars is not None:
        payloads.append((scalars.new_empty(at.max_rows), scalars.reshape(-1).index_select(0, choices)))
    with call.comm.agreed(call.signature):
        for out, payload in payloads:
            parts = call.comm.all_to_all(payload, sent, received).split(received)
            for source, row, begin, n in blocks.each:
                begin -= blocks.begins[source]
                out[row : row + n] = parts[source][begin : begin + n]
    return payloads[0][0], payloads[1][0] if scalars is not None else x.new_empty(0)


def chunked(call: Call, x: Tensor, scalars: Tensor | None, plan: RoutingPlan, at: Exchange) -> Moved:
    """On CPU: read the rows of each source in place, own rows first."""
    blocks, width = Blocks(plan.table, at), x.shape[1]
    blocks.check_room(at)
    rows = x.new_empty(at.max_rows, width)
    of_rows = x.new_empty(0) if scalars is None else scalars.new_empty(at.max_rows)
    after = _aligned(max(at.sizes) * width * x.element_size())

    def take(source: int, theirs: Tensor, their_scalars: Tensor | None) -> None:
        first = blocks.begins[source]
        choices = plan.orders[at.choices_of(source)][first : first + blocks.received[source]]
        tokens = choices // at.top_k
        for _source, row, begin, n in blocks.of(source):
            here = slice(begin - first, begin - first + n)
            torch.index_select(theirs, 0, tokens[here], out=rows[row : row + n])
            if their_scalars is not None:
                torch.index_select(their_scalars.view(-1), 0, choices[here], out=of_rows[row : row + n])

    with call.call() as running:

        def shared(p: int) -> tuple[Tensor, Tensor | None]:
            tokens = running.buffer(p, (at.sizes[p], width), x.dtype)
            if scalars is None:
                return tokens, None
            return tokens, running.buffer(p, (at.sizes[p], at.top_k), scalars.dtype, after)

        for mine, given in zip(shared(at.rank), (x, scalars), strict=True):
            if mine is not None and given is not None:
                mine.copy_(given)
        running.publish_all()
        take(at.rank, x, None if scalars is None else scalars.contiguous())
        for p in ring(call.comm, own="first")[1:]:
            with call.comm.span(f"wait {p}"):
                running.wait(p)
            take(p, *shared(p))
    return rows, of_rows


def triton(call: Call, x: Tensor, scalars: Tensor | None, plan: RoutingPlan, at: Exchange) -> Moved:
    """A kernel that reads the plan on the device; the scalars travel in a separate launch."""
    rows = _launch_dispatch(call, x, at.top_k, plan, at)
    return rows, x.new_empty(0) if scalars is None else _scalars_of_rows(call, scalars, plan, at)


def _scalars_of_rows(call: Call, scalars: Tensor, plan: RoutingPlan, at: Exchange) -> Tensor:
    return _launch_dispatch(call, scalars.reshape(-1, 1), 1, plan, at)[:, 0]


def _launch_dispatch(call: Call, x: Tensor, choices_per_row: int, plan: RoutingPlan, at: Exchange) -> Tensor:
    with call.call() as running:
        view = running.kernel_view()
        key = choices_per_row, layouts(x)
        launch = call.launches.get(key)
        if launch is None:
            check(view, call.slot_bytes, x, [], dtypes=(*DTYPES, torch.uint8))
            launch = prepare_dispatch(view, x, choices_per_row, at, None, machine_for(view, x))
            call.launches[key] = launch
        rows = x.new_empty(at.max_rows, x.shape[1])
        index = unpacked(plan.packed, at)
        launch.run(view, x.device, None, dispatch_pointers(call.peers(view), x, plan.orders, index, rows))
    return rows


def _in_wire_form(move: Callable[..., Moved]) -> Callable[..., Moved]:
    """An engine of the operation: rows are packed before they travel and unpacked on arrival."""

    def engine(
        call: Call, x: Tensor, scalars: Tensor | None, table: Tensor, orders: Tensor, index: Tensor, max_rows: int
    ) -> Moved:  # fmt: skip
        at, plan = Exchange.of(call.spec, max_rows), RoutingPlan(table, orders, index)
        if not at.comm_dtype:
            return move(call, x, scalars, plan, at)
        rows, of_rows = move(call, fp8.pack(x), scalars, plan, at)
        return fp8.unpack(rows, x.shape[1], x.dtype), of_rows

    return engine


def _then_matmul(move: Callable[..., Moved]) -> Callable[..., list[Tensor]]:
    """An engine of the operation with a matmul: multiply once all rows have arrived."""

    def engine(
        call: Call, x: Tensor, scalars: Tensor | None, matrices: Sequence[Tensor], offsets: Tensor, act: str,
        keep: bool, keep_rows: bool, table: Tensor, orders: Tensor, index: Tensor, max_rows: int,
    ) -> list[Tensor]:  # fmt: skip
        at, plan = Exchange.of(call.spec, max_rows), RoutingPlan(table, orders, index)
        rows, of_rows = move(call, x, scalars, plan, at)
        kept = rows if keep_rows else rows.new_empty(0, rows.shape[1])
        if act:
            gate, up = matrices
            return [kept, of_rows, *gated_engine(at.local_engine, rows, gate, up, offsets, act, keep)]
        return [kept, of_rows, matmul_engine(at.local_engine, [rows], matrices, offsets, None)]

    return engine


def triton_matmul(
    call: Call, x: Tensor, scalars: Tensor | None, matrices: Sequence[Tensor], offsets: Tensor, act: str, keep: bool,
    keep_rows: bool, table: Tensor, orders: Tensor, index: Tensor, max_rows: int,
) -> list[Tensor]:  # fmt: skip
    """One launch: an expert's tiles start when its rows have arrived. The scalars travel in a separate launch."""
    at, plan = Exchange.of(call.spec, max_rows), RoutingPlan(table, orders, index)
    precision = fp32_precision()
    with call.call() as running:
        view = running.kernel_view()
        matrices = of_one_layout(matrices)
        key = max_rows, act, keep, precision, layouts(x, *matrices)
        launch = call.launches.get(key)
        if launch is None:
            check(view, call.slot_bytes, x, matrices)
            launch = prepare_dispatch_matmul(view, x, matrices, at, act, keep, None, precision, machine_for(view, x))
            call.launches[key] = launch
        outs = matmul_outputs(x, matrices, at, keep, keep_rows)
        tokens = orders[at.choices_of(at.rank)] // at.top_k
        packed = unpacked(index, at)
        launch.run(
            view,
            x.device,
            None,
            dispatch_matmul_pointers(launch, call.peers(view), x, tokens, matrices, offsets, packed, outs),
        )
    of_rows = x.new_empty(0) if scalars is None else _scalars_of_rows(call, scalars, plan, at)
    rows, *products = [x.new_empty(0, x.shape[1]) if out is None else out for out in outs]
    return [rows, of_rows, *products]


def _fake(
    spec: Spec, x: Tensor, scalars: Tensor | None, table: Tensor, orders: Tensor, index: Tensor, max_rows: int
) -> Moved:
    of_rows = x.new_empty(0) if scalars is None else scalars.new_empty(max_rows)
    return x.new_empty(max_rows, x.shape[1]), of_rows


def _fake_matmul(
    spec: Spec, x: Tensor, scalars: Tensor | None, matrices: Sequence[Tensor], offsets: Tensor, act: str, keep: bool,
    keep_rows: bool, table: Tensor, orders: Tensor, index: Tensor, max_rows: int,
) -> list[Tensor]:  # fmt: skip
    products = [x.new_empty(max_rows, matrices[0].shape[1]) for _ in range(3 if keep else 1)]
    rows, of_rows = _fake(spec, x, scalars, table, orders, index, max_rows)
    return [rows if keep_rows else rows.new_empty(0, rows.shape[1]), of_rows, *products]


# -- slot bytes, from the rows of all ranks and the routing ------------------------------------------------------------


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def dispatch_bytes(at: Exchange, choices_per_row: int, k: int, dtype: torch.dtype) -> int:
    """Bytes the kernel needs in a slot: the largest x of any rank, with one row per `choices_per_row` choices."""
    return max(at.sizes) * at.top_k // choices_per_row * k * dtype.itemsize


def dispatch_matmul_bytes(at: Exchange, k: int, dtype: torch.dtype) -> int:
    """Bytes the kernel needs in a slot: an owner's rows."""
    return at.recv_capacity * k * dtype.itemsize


def _slot_bytes(rows: Rows, shared: Shared, top_k: int, num_experts: int, bound: int, comm_dtype: int) -> int:
    """Published tokens, then the scalars, which may also travel in a separate launch."""
    row = fp8.row_bytes(shared.features) if COMM_DTYPES[comm_dtype] else shared.features * shared.dtype.itemsize
    scalars = top_k * accumulator(shared.dtype).itemsize if shared.with_bias else 0
    return _aligned(rows.longest * row) + rows.longest * scalars


def _slot_bytes_by_rows(rows: Rows, shared: Shared, *routing: int) -> int:
    at = Exchange.of(Spec("", 0, rows.sizes, routing=routing), 0)
    scalars = rows.longest * at.top_k * torch.float32.itemsize if shared.with_bias else 0
    return max(dispatch_matmul_bytes(at, shared.features, shared.dtype), scalars)


op = Operation(
    "moe_dispatch",
    "Tensor x, Tensor? scalars, Tensor table, Tensor orders, Tensor index, SymInt max_rows",
    "(Tensor, Tensor)",
    fake=_fake,
    shared=lambda x, scalars, *_: Shared(x.dtype, x.shape[1], with_bias=int(scalars is not None)),
    engines={move.__name__: _in_wire_form(move) for move in (local, collective, chunked, triton)},
    slot_bytes=dict(chunked=_slot_bytes, triton=_slot_bytes),
    choose=as_chosen,
)

matmul_op = Operation(
    "moe_dispatch_matmul",
    "Tensor x, Tensor? scalars, Tensor[] matrices, Tensor offsets, str act, bool keep, bool keep_rows, Tensor table, "
    "Tensor orders, Tensor index, SymInt max_rows",
    "Tensor[]",
    fake=_fake_matmul,
    shared=lambda x, scalars, matrices, *_: Shared(x.dtype, x.shape[1], len(matrices), int(scalars is not None)),
    engines={
        **{move.__name__: _then_matmul(move) for move in (local, collective, chunked)},
        "triton": triton_matmul,
    },
    slot_bytes=dict(chunked=_slot_bytes, triton=_slot_bytes_by_rows),
    choose=as_chosen,
)


# -- the launchers of the kernels --------------------------------------------------------------------------------------


def prepare_dispatch(
    view: Any, x: Tensor, choices_per_row: int, at: Exchange, config: Config | None, machine: Machine
) -> Launch:
    """The launch of moe_dispatch_kernel without its pointers.

    x                 [M, K]   any strides; may be bytes
    choices_per_row            consecutive choices that share a row of x; this rank has M * choices_per_row of them
    """
    from fusedtp.kernels.moe_exchange import moe_dispatch_kernel

    config = config or pulling(machine, x)
    args = dict(
        sizes=tuple(odd(n * at.top_k) for n in at.sizes),
        stride_xm=x.stride(0),
        stride_xk=x.stride(1),
        choices_per_row=choices_per_row,
        K=x.shape[1],
        send_programs=config.send_programs,
        BLOCK_M=_published_at_once(x, config),
        PULL_M=_pulled_at_once(at, config),
        BLOCK_K=config.block_k,
    )
    return Launch(moe_dispatch_kernel, config.send_programs + config.other_programs, args, config)


def dispatch_pointers(peers: Any, x: Tensor, orders: Tensor, index: PackedIndex, rows: Tensor) -> dict[str, Any]:
    """The remaining arguments of a prepared dispatch. orders of all ranks; rows [max_rows, K] is the output."""
    return dict(
        peers=peers,
        x=x,
        begins=index.begins,
        orders=orders,
        in_sources=index.in_sources,
        sources=index.sources,
        arrivals=index.arrivals,
        totals=index.totals,
        max_rows=rows.shape[0],
        rows=rows,
    )


def plan_dispatch(
    view: Any, rank: int, x: Tensor, choices_per_row: int, orders: Tensor, index: PackedIndex, at: Exchange, sig: int,
    config: Config | None, machine: Machine,
) -> tuple[Launch, Tensor]:  # fmt: skip
    """The complete launch of a dispatch, not yet run, and its rows."""
    launch = prepare_dispatch(view, x, choices_per_row, at, config, machine)
    rows = x.new_empty(at.max_rows, x.shape[1])
    peers = peers_of(view, rank, at.world_size, sig, machine.clock)
    return launch.given(dispatch_pointers(peers, x, orders, index, rows)), rows


def prepare_dispatch_matmul(
    view: Any,
    x: Tensor,
    matrices: Sequence[Tensor],
    at: Exchange,
    act: str,
    keep: bool,
    config: Config | None,
    precision: str,
    machine: Machine,
) -> Launch:
    """The launch of moe_dispatch_matmul_kernel without its pointers.

    x          [M, K]      any strides
    matrices   [E, N, K]   one, or gate and up with the activation `act`; any strides, the same for both
    keep       whether gate's and up's products are stored too
    precision  for fp32 operands: "ieee" or "tf32"
    """
    from fusedtp.kernels.moe_dispatch_matmul import moe_dispatch_matmul_kernel

    assert len(matrices) == 1 + (act != "") and (act or not keep)
    e, n, k = matrices[0].shape
    moved = moving(machine, at, x, view.flags_per_source)
    config = config or _matmul_config(machine, moved, x.dtype, precision, at.max_rows, e, n, len(matrices), keep)
    config, taken = group_tiles(config, machine, [x], matrices, by_index=True, transposed=not act)
    args = dict(
        stride_xm=x.stride(0),
        stride_xk=x.stride(1),
        strides=matrices[0].stride(),
        TMA=taken["TMA"],
        ACROSS=taken["ACROSS"],
        E=e,
        N=n,
        K=k,
        chunk_rows=config.chunk,
        send_programs=config.send_programs,
        COPY_M=moved.block_m,
        COPY_K=moved.block_k,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP=config.group,
        EVEN_K=k % config.block_k == 0,
        HALVES=config.halves,
        ACT=act,
        PRECISION=precision,
    )
    return Launch(moe_dispatch_matmul_kernel, config.send_programs + config.other_programs, args, config)


def matmul_outputs(
    x: Tensor, matrices: Sequence[Tensor], at: Exchange, keep: bool, keep_rows: bool
) -> list[Tensor | None]:
    """The rows if they are kept, else None; y; with `keep`, the products of gate and up."""
    _, n, k = matrices[0].shape
    rows = x.new_empty(at.max_rows, k) if keep_rows else None
    return [rows, *(x.new_empty(at.max_rows, n) for _ in range(3 if keep else 1))]


def dispatch_matmul_pointers(
    launch: Launch,
    peers: Any,
    x: Tensor,
    tokens: Tensor,
    matrices: Sequence[Tensor],
    offsets: Tensor,
    index: PackedIndex,
    outs: Sequence[Tensor | None],
) -> dict[str, Any]:
    """The remaining arguments of a prepared dispatch with its matmul. outs: see `matmul_outputs`.

    tokens    int32     the row of x for each row that this rank sends
    offsets   [E + 1]   int32, where the rows of each expert begin
    """
    rows, y, *products = outs
    assert y is not None
    w, *w2 = grouped_descriptors(launch.config, launch.args, [], matrices)[1] if launch.args["TMA"] else matrices
    return dict(
        peers=peers,
        x=x,
        index=tokens,
        begins=index.begins,
        places=index.at_owners,
        blocks=index.blocks,
        origins=index.origins,
        offsets=offsets.contiguous(),
        totals=index.totals,
        max_rows=y.shape[0],
        rows=rows,
        w=w,
        w2=w2[0] if w2 else None,
        y=y,
        gate_out=products[0] if products else None,
        up_out=products[1] if products else None,
    )


def plan_dispatch_matmul(
    view: Any, rank: int, x: Tensor, tokens: Tensor, matrices: Sequence[Tensor], offsets: Tensor, index: PackedIndex,
    at: Exchange, sig: int, act: str, keep: bool, config: Config | None, precision: str, machine: Machine,
    keep_rows: bool = True,
) -> tuple[Launch, list[Tensor | None]]:  # fmt: skip
    """The complete launch of a dispatch with its matmul, not yet run, and its outputs, see `matmul_outputs`."""
    matrices = of_one_layout(matrices)
    launch = prepare_dispatch_matmul(view, x, matrices, at, act, keep, config, precision, machine)
    outs = matmul_outputs(x, matrices, at, keep, keep_rows)
    peers = peers_of(view, rank, at.world_size, sig, machine.clock)
    return launch.given(dispatch_matmul_pointers(launch, peers, x, tokens, matrices, offsets, index, outs)), outs


def moving(machine: Machine, at: Exchange, x: Tensor, flags: int) -> Config:
    """Blocks of whole cache lines of a few rows. Chunks depend only on sizes, top_k and experts, so all ranks agree."""
    senders, others = gather_programs(machine)
    longest = max(at.sizes) * min(at.top_k, at.experts_here)
    chunk = max(min(CHUNK, gather_chunk(longest, flags)), -(-longest // flags))
    if machine.clock == "host":
        return Config(64, 0, 256, send_programs=senders, other_programs=others, chunk=chunk)
    wide, every = 2048 // max(2, x.element_size()), ALL_REGISTERS if machine.clock == "cuda" else 0
    programs: dict[str, Any] = dict(send_programs=senders, other_programs=others)
    return Config(8, 0, wide, num_warps=4, chunk=chunk, max_registers=every, **programs)


def pulling(machine: Machine, x: Tensor) -> Config:
    """Configuration of a dispatch: one large program per SM of this rank; half of them publish first.

    No two programs wait on the same SM, so ranks that share a GPU have room for their other kernels. With many rows,
    each program has enough bytes in flight to keep memory busy.
    """
    width, itemsize = x.shape[1], x.element_size()
    if machine.clock == "host":
        senders, others = gather_programs(machine)
        return Config(64, 0, 256, send_programs=senders, other_programs=others)
    senders = max(1, machine.programs // 2)
    others = max(1, machine.programs - senders)
    columns = 2048 // max(2, itemsize)
    block_k = block(width, 1, columns)
    fits = 32 if width % VECTOR == 0 else 16  # rows that fit in registers; addresses of single elements take some too
    block_m = min(256, fits * columns // block_k)
    registers = 128 if machine.clock == "cuda" else 0  # the most that 512 threads can have each
    warps = 16 if machine.clock == "cuda" else 8
    programs: dict[str, Any] = dict(send_programs=senders, other_programs=others)
    return Config(block_m, 0, block_k, warps, max_registers=registers, **programs)


def _published_at_once(x: Tensor, config: Config) -> int:
    """Rows of a publisher's block: fewer if otherwise some publishers would have none."""
    return block(-(-x.shape[0] // config.send_programs), min(4, config.block_m), config.block_m)


def _pulled_at_once(at: Exchange, config: Config) -> int:
    """Rows of a pulled block: fewer if otherwise the programs that do not publish had under 16 blocks on average."""
    each = sum(at.sizes) * at.top_k // at.world_size // config.other_programs
    return block(each // 16, min(4, config.block_m), config.block_m)


def _matmul_config(
    machine: Machine,
    moved: Config,
    dtype: torch.dtype,
    precision: str,
    rows: int,
    groups: int,
    n: int,
    weights: int,
    keep: bool,
) -> Config:
    """The grouped matmul's own tiles; an eighth of the programs send before they multiply.

    With two 16-bit weights on sm_80, block_k is halved: the lint shows that they would spill.
    """
    tile = group_config(machine, dtype, precision, rows, groups, n, weights, keep)
    if weights > 1 and dtype.itemsize == 2 and 0 < machine.capability < 90:
        tile = replace(tile, block_k=tile.block_k // 2)
    return replace(tile, send_programs=moved.send_programs, other_programs=moved.other_programs, chunk=moved.chunk)
