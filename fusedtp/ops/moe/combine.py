"""Return the outputs of a mixture of experts to their tokens and sum them, alone or fused with the last matmul.

    moe_combine           y [max_rows, N]  ->  out [T_r, N] = sum over a token's choices of weight * y[row]
    moe_matmul_combine    h [max_rows, K]  ->  out [T_r, N], the same of y = h @ w_e.T

rank r, chunked     rows of expert 0 to their tokens' ranks | of expert 1 | ... | publish | wait for all | sum
rank r, triton      some programs push rows; then all wait for all rows and sum (kernels/moe_exchange.py)
rank r, triton,     store finished tiles at their rows' destinations; columns are split into parts, and the first part
with the matmul     is summed while later ones are multiplied (kernels/moe_matmul_combine.py)

Sums are in the order of a token's choices, in fp32 (fp64 for fp64), rounded once.

dgrad    dy = weight * moe_dispatch(dout); with the matmul dh = weight * moe_dispatch_matmul(dout, w_e.T), in one call
weights  the inner products of those rows, before weighting, with y or h, sent back choice by choice
wgrad    dw_e = (rows of dout).T @ (weight * h), local: the weight multiplies h because its rows are shorter
saved    the plan and y; with the matmul, h and w but no product
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from fusedtp.comm import place, propagate_errors
from fusedtp.comm.device_view import MOST_PARTS, peers_of
from fusedtp.comm.launching import Launch, layouts

from ..cpu import accumulator, cache_blocks
from ..launch.config import ALL_REGISTERS, Config, Machine, gather_programs
from ..launch.operands import group_tiles, grouped_descriptors
from ..launch.run import check, machine_for, of_one_layout
from ..main_grad import MainGrad, main_grads_of
from ..operation import OPERATIONS, Operation, Shared, Spec, as_autocast, needs_grad, wanted
from ..operation import Plan as Call
from ..rows import Rows
from ..shards import ring
from .grouped import (
    check_grouped,
    fp32_precision,
    group_config,
    grouped_matmul,
    matmul_by_expert,
    matmul_engine,
    take_kept,
    wgrads,
)
from .plan import (
    Blocks,
    Exchange,
    MoEHandle,
    PackedIndex,
    RoutingPlan,
    as_chosen,
    check_outputs,
    own_places,
    unpacked,
)

NARROW = 128  # columns
PARTS = 4  # into which columns are split, if there are that many tiles


def moe_combine(y: Tensor, handle: MoEHandle) -> Tensor:
    """Bring the experts' outputs back and sum them per token.

        y        [max_rows, N]  in the order of the dispatched rows; rows past offsets[-1] are never read
        handle                  of the dispatch
        return   [T_r, N]       sum over a token's choices of weight * y, in their order, in fp32, rounded once

    Dropped choices add nothing. Gradients reach y and the weights.
    Raises ValueError if y has another number of rows.
    """
    at = handle.at
    with propagate_errors(place(at.group)):
        check_outputs(y, at)
        return combine_rows(y, handle.weights, handle.row_weights, handle.plan, at)


def combine_rows(
    y: Tensor, weights: Tensor | None, row_weights: Tensor | None, plan: RoutingPlan, at: Exchange
) -> Tensor:
    """y [max_rows, N] -> [T_r, N], weights [T_r, k] or None for ones; differentiable in both."""
    if needs_grad(y, weights):
        out: Tensor = _Combine.apply(at, y, weights, row_weights, *plan)
    else:
        out = op(at.spec, y, weights, False, *plan, at.max_rows)
    return out


class _Combine(Function):
    @staticmethod
    def forward(
        ctx: Any, at: Exchange, y: Tensor, weights: Tensor | None, row_weights: Tensor | None, *plan: Tensor
    ) -> Tensor:
        ctx.save_for_backward(y if ctx.needs_input_grad[2] else None, row_weights, *plan)
        ctx.at, ctx.weights_dtype = at._replace(comm_dtype=""), None if weights is None else weights.dtype
        out: Tensor = op(at.spec, y, weights, False, *plan, at.max_rows)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        _, need_y, need_weights, *_ = wanted(ctx)
        y, row_weights, *plan = ctx.saved_tensors
        at = ctx.at
        dy, _ = OPERATIONS["moe_dispatch"](at.spec, dout.contiguous(), None, *plan, at.max_rows)
        dy, dots = weigh_rows(dy, row_weights, y if need_weights else None)
        dweights = _of_choices(dots, ctx.weights_dtype, plan, at) if dots is not None else None
        return None, dy if need_y else None, dweights, None, None, None, None


def _of_choices(scalars: Tensor, dtype: torch.dtype, plan: Sequence[Tensor], at: Exchange) -> Tensor:
    """scalars [max_rows] of the rows -> [T_r, k] of the choices; zero for dropped choices."""
    each = op(at.spec, scalars[:, None], None, True, *plan, at.max_rows)
    return each.view(at.tokens, at.top_k).to(dtype)


# -- with the matmul -------------------------------------------------------------------------------------------------


def moe_matmul_combine(h: Tensor, experts: Tensor, handle: MoEHandle) -> Tensor:
    """moe_combine(grouped_matmul(h, experts, handle.offsets), handle) in one call; a single kernel where kernels run.

        h        [max_rows, K]  in the order of the dispatched rows; rows past handle.offsets[-1] are never read
        experts  [E / W, N, K]  of this rank
        handle                  of the dispatch; its engine runs
        return   [T_r, N]       bitwise equal to the result of the two operations

    Gradients differ from those of the two operations by one rounding: dgrad applies a choice's weight after the matmul,
    not before, and wgrad applies it to h. In fp16 the two operations are not fused: gradients may overflow before they
    are weighted.

    Raises ValueError as grouped_matmul and moe_combine do.
    """
    at, offsets, weights = handle.at, handle.offsets, handle.weights
    (main_grad,) = main_grads_of([experts])
    given = experts
    h, experts = as_autocast(h.device.type, h, experts)
    if h.dtype == torch.float16:
        return moe_combine(grouped_matmul(h, given, offsets), handle)
    with propagate_errors(place(at.group)):
        check_grouped(h, offsets, weights=experts)
        check_outputs(h, at, "h", "K")
        if needs_grad(h, experts, weights):
            out: Tensor = _MatmulCombine.apply(
                at, main_grad, h, experts, weights, handle.row_weights, offsets, *handle.plan
            )
        else:
            out = matmul_op(at.spec, [h], [experts], offsets, weights, *handle.plan, at.max_rows)
        return out


class _MatmulCombine(Function):
    @staticmethod
    def forward(
        ctx: Any,
        at: Exchange,
        main_grad: MainGrad | None,
        h: Tensor,
        experts: Tensor,
        weights: Tensor,
        row_weights: Tensor,
        offsets: Tensor,
        *plan: Tensor,
    ) -> Tensor:
        _, _, need_h, need_experts, need_weights, *_ = ctx.needs_input_grad
        ctx.save_for_backward(
            h if need_experts or need_weights else None, experts if need_h or need_weights else None, row_weights,
            offsets, *plan,
        )  # fmt: skip
        ctx.at, ctx.main_grad, ctx.weights_dtype, ctx.kept = (
            at._replace(comm_dtype=""),
            main_grad,
            weights.dtype,
            None,
        )
        out: Tensor = matmul_op(at.spec, [h], [experts], offsets, weights, *plan, at.max_rows)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        _, _, need_h, need_experts, need_weights, *_ = wanted(ctx)
        h, experts, row_weights, offsets, *plan = ctx.saved_tensors
        at, given = ctx.at, dout
        dh = dexperts = dweights = rows = None
        dout = dout.contiguous()
        if need_h or need_weights:
            keep_rows = need_experts or (ctx.needs_input_grad[3] and not at.several)
            rows, _, dh = OPERATIONS["moe_dispatch_matmul"](
                at.spec, dout, None, [experts.mT], offsets, "", False, keep_rows, *plan, at.max_rows
            )
            dh, dots = weigh_rows(dh, row_weights, h if need_weights else None, offsets)
            dweights = _of_choices(dots, ctx.weights_dtype, plan, at) if dots is not None else None
            if keep_rows and not need_experts:  # a weight pass follows
                ctx.kept = given, given._version, rows
        elif need_experts:
            rows = take_kept(ctx, given)
            if rows is None:
                rows, _ = OPERATIONS["moe_dispatch"](at.spec, dout, None, *plan, at.max_rows)
        if need_experts:
            weighed = weighed_rows(h, row_weights, offsets)
            assert rows is not None
            [dexperts] = wgrads(at.local_engine, [rows], weighed, offsets, [ctx.main_grad])
        return None, None, dh if need_h else None, dexperts, dweights, None, None, None, None, None


# -- sums over choices, and weighting of rows --------------------------------------------------------------------------


def _known(rows: Tensor, offsets: Tensor | None) -> slice:
    """The rows to compute with: on CPU, where reading offsets needs no wait, those that arrived; else all."""
    looks = offsets is not None and not offsets.is_cuda and not torch.compiler.is_compiling()
    return slice(0, int(offsets[-1]) if looks and offsets is not None else rows.shape[0])


def weigh_rows(
    rows: Tensor, weights: Tensor | None, others: Tensor | None, offsets: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(rows [R, N] * weights [R], inner products [R] of the unweighted rows and others [R, N]), in fp32 (fp64).

    weights None: ones; others None: no products. rows may be modified in place.
    """
    wide = accumulator(rows.dtype)
    if torch.compiler.is_compiling():
        dots = None if others is None else (rows.to(wide) * others.to(wide)).sum(1)
        return rows if weights is None else (rows * weights[:, None]).to(rows.dtype), dots
    dots = None if others is None else rows.new_empty(rows.shape[0], dtype=wide)
    known = _known(rows, offsets)
    here, of_rows = rows[known], None if weights is None else weights[known, None]
    for some in cache_blocks(here.shape[0], here.shape[1], wide, rows.device):
        part = here[some]
        if dots is None or others is None:
            if of_rows is not None:
                part.mul_(of_rows[some])  # torch multiplies in the wider of the two dtypes
            continue
        mine = part.to(wide)
        torch.sum(mine * others[known][some].to(wide), 1, out=dots[known][some])
        if of_rows is not None:
            torch.mul(mine, of_rows[some], out=mine)
            if mine.dtype != rows.dtype:
                here[some] = mine
    return rows, dots


def weighed_rows(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """rows [R, N] times weights [R], in a new tensor; past offsets[-1] undefined."""
    if torch.compiler.is_compiling():
        return (rows * weights[:, None]).to(rows.dtype)
    out = rows.new_empty(rows.shape)
    known = _known(rows, offsets)
    here, there, factors = rows[known], out[known], weights[known, None]
    for some in cache_blocks(here.shape[0], here.shape[1], weights.dtype, rows.device):
        torch.mul(here[some], factors[some], out=there[some])
    return out


def weighted_sum(parts: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """parts [T * k, N], the row of each choice places [T, k], weights [T, k] (None: ones) -> [T, N] in parts' dtype."""
    wide = accumulator(parts.dtype)
    if weights is None and places.shape[1] == 1:
        return parts.index_select(0, places[:, 0])
    weights = None if weights is None else weights.detach().to(wide)
    out = parts.new_empty(places.shape[0], parts.shape[1])
    if not out.numel():
        return out
    if parts.device.type == "cpu" and parts.dtype == torch.float32:
        # one pass that starts from zero; a product may be added without rounding (FMA)
        return F.embedding_bag(places, parts, per_sample_weights=weights, mode="sum")
    for some in cache_blocks(out.shape[0], out.shape[1], wide, parts.device):
        _sum_into(out[some], parts, places[some], None if weights is None else weights[some])
    return out


def _sum_into(out: Tensor, parts: Tensor, places: Tensor, weights: Tensor | None) -> None:
    """out [n, N] = sum_j weights[:, j] * parts[places[:, j]], j ascending; weights in the accumulator's dtype."""
    if weights is None and places.shape[1] == 2:  # torch adds two 16-bit numbers in fp32 and rounds once
        first, second = (parts.index_select(0, at) for at in places.unbind(1))
        torch.add(first, second, out=out)
        return
    wide = accumulator(out.dtype)
    total = out if out.dtype == wide else torch.empty_like(out, dtype=wide)
    for j, at in enumerate(places.unbind(1)):
        part = parts.index_select(0, at)
        if weights is None:
            total.copy_(part) if j == 0 else total.add_(part)
        elif j == 0:
            torch.mul(part.to(wide), weights[:, :1], out=total)
        else:
            total.addcmul_(part.to(wide), weights[:, j : j + 1])
    if total is not out:
        out.copy_(total)


# -- engines ---------------------------------------------------------------------------------------------------------


def local(call: Call, y: Tensor, places: Tensor, weights: Tensor | None, plan: RoutingPlan, at: Exchange) -> Tensor:
    """All experts are here. The host never waits for the device."""
    choices = torch.arange(at.tokens * at.top_k, device=y.device)[:, None]
    parts = F.pad(y, (0, 0, 0, choices.shape[0] - at.max_rows))
    return weighted_sum(torch.where(choices < plan.table.sum(), parts, 0), places, weights)


def collective(
    call: Call, y: Tensor, places: Tensor, weights: Tensor | None, plan: RoutingPlan, at: Exchange
) -> Tensor:
    """The process group's all_to_all, as in the dispatch; then the sums."""
    blocks, width = Blocks(plan.table, at), y.shape[1]
    back, received = blocks.lengths[at.rank], blocks.received
    payload = y.new_empty(sum(received), width)
    parts = payload.split(received)
    for source, row, begin, n in blocks.each:
        begin -= blocks.begins[source]
        parts[source][begin : begin + n] = y[row : row + n]
    mine = y.new_empty(at.tokens * at.top_k, width)
    mine[sum(back) :].zero_()
    with call.comm.agreed(call.signature):
        mine[: sum(back)] = call.comm.all_to_all(payload, received, back)
    return weighted_sum(mine, places, weights)


def chunked(call: Call, y: Tensor, places: Tensor, weights: Tensor | None, plan: RoutingPlan, at: Exchange) -> Tensor:
    """On CPU: every owner writes its rows into the slots of their tokens' ranks, which sum them."""
    return _pushed(call, y.new_empty(0, y.shape[1]), [(0, y)], places, weights, plan, at)


def _pushed(
    call: Call,
    nothing: Tensor,
    made: Iterable[tuple[int, Tensor]],
    places: Tensor,
    weights: Tensor | None,
    plan: RoutingPlan,
    at: Exchange,
) -> Tensor:
    """The sums, [T, N] like `nothing` [0, N]. `made` yields (first row, rows) of this rank, whole experts at a time.

    An expert's product is sent to its destination while it is still in the core's cache.
    """
    blocks, width = Blocks(plan.table, at), nothing.shape[1]
    blocks.check_room(at)
    with call.call() as running:
        parts = [running.buffer(p, (n * at.top_k, width), nothing.dtype) for p, n in enumerate(at.sizes)]
        due = deque(blocks.each)
        for first, rows in made:
            while due and due[0].row < first + rows.shape[0]:
                source, row, begin, n = due.popleft()
                parts[source][begin : begin + n].copy_(rows[row - first : row - first + n])
        assert not due, due
        running.publish_all()
        mine = parts[at.rank]
        mine[blocks.sent[at.rank] :].zero_()
        for p in ring(call.comm, own="first")[1:]:
            with call.comm.span(f"wait {p}"):
                running.wait(p)
        return weighted_sum(mine, places, weights)


def triton(call: Call, y: Tensor, places: Tensor, weights: Tensor | None, plan: RoutingPlan, at: Exchange) -> Tensor:
    """One launch, which reads the plan on the device."""
    with call.call() as running:
        view = running.kernel_view()
        key = places.shape[1], layouts(y)
        launch = call.launches.get(key)
        if launch is None:
            check(view, call.slot_bytes, y, [])
            launch = prepare_combine(view, y, places.shape[1], at, None, machine_for(view, y))
            call.launches[key] = launch
        out = y.new_empty(places.shape[0], y.shape[1])
        index = unpacked(plan.packed, at)
        given = combine_pointers(call.peers(view), y, places.to(torch.int32), weights, index, at, out)
        launch.run(view, y.device, None, given)
    return out


Combining = Callable[[Call, Tensor, Tensor, Tensor | None, RoutingPlan, Exchange], Tensor]


def _by_choices(combine: Combining) -> Callable[..., Tensor]:
    """An engine of the operation."""

    def engine(
        call: Call, y: Tensor, weights: Tensor | None, per_choice: bool, table: Tensor, orders: Tensor, index: Tensor,
        max_rows: int,
    ) -> Tensor:  # fmt: skip
        at, plan = Exchange.of(call.spec, max_rows), RoutingPlan(table, orders, index)
        places = own_places(plan, at)
        return combine(call, y, places.view(-1, 1 if per_choice else at.top_k), weights, plan, at)

    return engine


def _after_matmul(combine: Combining) -> Callable[..., Tensor]:
    """An engine of the operation with the matmul: all rows are multiplied first."""

    def engine(
        call: Call, hs: Sequence[Tensor], experts: Sequence[Tensor], offsets: Tensor, weights: Tensor | None,
        table: Tensor, orders: Tensor, index: Tensor, max_rows: int,
    ) -> Tensor:  # fmt: skip
        at, plan = Exchange.of(call.spec, max_rows), RoutingPlan(table, orders, index)
        places = own_places(plan, at).view(-1, at.top_k)
        y = matmul_engine(at.local_engine, hs, experts, offsets, None)
        return combine(call, y, places, weights, plan, at)

    return engine


def chunked_matmul(
    call: Call, hs: Sequence[Tensor], experts: Sequence[Tensor], offsets: Tensor, weights: Tensor | None,
    table: Tensor, orders: Tensor, index: Tensor, max_rows: int,
) -> Tensor:  # fmt: skip
    """Expert by expert: write each product directly into the memory of its tokens' ranks."""
    at, plan = Exchange.of(call.spec, max_rows), RoutingPlan(table, orders, index)
    places = own_places(plan, at).view(-1, at.top_k)
    nothing = hs[0].new_empty(0, experts[0].shape[1])
    return _pushed(call, nothing, matmul_by_expert(hs, experts, offsets), places, weights, plan, at)


def triton_matmul(
    call: Call, hs: Sequence[Tensor], experts: Sequence[Tensor], offsets: Tensor, weights: Tensor | None,
    table: Tensor, orders: Tensor, index: Tensor, max_rows: int,
) -> Tensor:  # fmt: skip
    """One launch: send a tile's rows home when it is finished, and sum them one part of the columns at a time."""
    at = Exchange.of(call.spec, max_rows)
    precision, words = fp32_precision(), unpacked(index, at)
    places = words.places[: at.tokens * at.top_k].view(-1, at.top_k)
    with call.call() as running:
        view = running.kernel_view()
        hs, experts = of_one_layout(hs), of_one_layout(experts)
        key = max_rows, precision, layouts(*hs, *experts)
        launch = call.launches.get(key)
        if launch is None:
            check(view, call.slot_bytes, hs[0], [*hs[1:], *experts])
            machine = machine_for(view, hs[0])
            launch = prepare_matmul_combine(view, hs, experts, at, None, precision, machine)
            call.launches[key] = launch
        out = hs[0].new_empty(at.tokens, experts[0].shape[1])
        given = matmul_combine_pointers(
            launch,
            call.peers(view),
            hs,
            experts,
            offsets,
            places,
            weights,
            words,
            at,
            out,
        )
        launch.run(view, out.device, None, given)
    return out


def _fake(
    spec: Spec, y: Tensor, weights: Tensor | None, per_choice: bool, table: Tensor, orders: Tensor, index: Tensor,
    max_rows: int,
) -> Tensor:  # fmt: skip
    at = Exchange.of(spec, max_rows)
    return y.new_empty(at.tokens * (at.top_k if per_choice else 1), y.shape[1])


def combine_bytes(tokens: int, top_k: int, n: int, dtype: torch.dtype) -> int:
    """Bytes a combine needs in a slot: top_k rows for each token of the rank with the most tokens."""
    return tokens * top_k * n * dtype.itemsize


def _slot_bytes(rows: Rows, shared: Shared, top_k: int, *_: int) -> int:
    return combine_bytes(rows.longest, top_k, shared.features, shared.dtype)


op = Operation(
    "moe_combine",
    "Tensor y, Tensor? weights, bool per_choice, Tensor table, Tensor orders, Tensor index, SymInt max_rows",
    "Tensor",
    fake=_fake,
    shared=lambda y, weights, per_choice, *_: Shared(
        y.dtype, y.shape[1], weights=1 + per_choice, with_bias=int(weights is not None)
    ),
    engines={by.__name__: _by_choices(by) for by in (local, collective, chunked, triton)},
    slot_bytes=dict(chunked=_slot_bytes, triton=_slot_bytes),
    choose=as_chosen,
)

matmul_op = Operation(
    "moe_matmul_combine",
    "Tensor[] hs, Tensor[] experts, Tensor offsets, Tensor? weights, Tensor table, Tensor orders, Tensor index, "
    "SymInt max_rows",
    "Tensor",
    fake=lambda spec, hs, experts, *_: hs[0].new_empty(spec.sizes[spec.rank], experts[0].shape[1]),
    shared=lambda hs, experts, offsets, weights, *_: Shared(
        hs[0].dtype, experts[0].shape[1], len(hs), int(weights is not None), int(fp32_precision() == "tf32")
    ),
    engines=dict(
        local=_after_matmul(local),
        collective=_after_matmul(collective),
        chunked=chunked_matmul,
        triton=triton_matmul,
    ),
    slot_bytes=dict(chunked=_slot_bytes, triton=_slot_bytes),
    choose=as_chosen,
)


# -- the launchers of the kernels --------------------------------------------------------------------------------------


def prepare_combine(view: Any, y: Tensor, top_k: int, at: Exchange, config: Config | None, machine: Machine) -> Launch:
    """The launch of moe_combine_kernel without its pointers. y [max_rows, N], any strides."""
    from fusedtp.kernels.moe_exchange import moe_combine_kernel

    config = config or returning(machine, y)
    columns = part_columns(y.shape[1], config.block_k)
    assert -(-y.shape[1] // columns) <= MOST_PARTS, config
    args = dict(
        stride_ym=y.stride(0),
        stride_yn=y.stride(1),
        N=y.shape[1],
        part_columns=columns,
        send_programs=config.send_programs,
        TOP_K=top_k,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_k,
    )
    return Launch(moe_combine_kernel, config.send_programs + config.other_programs, args, config)


def returning(machine: Machine, y: Tensor) -> Config:
    """Blocks of whole cache lines of a few rows; half of the programs send first."""
    if machine.clock == "host":
        senders, others = gather_programs(machine)
        return Config(64, 0, 256, send_programs=senders, other_programs=others)
    senders = max(1, machine.programs // 2)
    registers = ALL_REGISTERS if machine.clock == "cuda" else 0
    programs: dict[str, Any] = dict(send_programs=senders, other_programs=max(1, machine.programs - senders))
    return Config(8, 0, 2048 // max(2, y.element_size()), num_warps=4, max_registers=registers, **programs)


def part_columns(width: int, block: int) -> int:
    """Columns that travel together, whole blocks of a row: one part can be summed while the next one is sent."""
    return max(1, -(-width // (PARTS * block))) * block


def combine_pointers(
    peers: Any,
    y: Tensor,
    places: Tensor,
    weights: Tensor | None,
    index: PackedIndex,
    at: Exchange,
    out: Tensor,
) -> dict[str, Any]:
    """The remaining arguments of a prepared combine.

    places    int32 [T, k]  the position of each choice in this rank's order
    weights   fp32 [T, k], or None for ones
    """
    return dict(
        peers=peers,
        y=y,
        arrivals=index.arrivals,
        sources=index.sources,
        places=index.in_sources,
        begins=index.begins,
        totals=index.totals,
        max_rows=at.max_rows,
        choices=places,
        weights=None if weights is None else weights.contiguous(),
        out=out,
        T=out.shape[0],
    )


def plan_combine(
    view: Any, rank: int, y: Tensor, places: Tensor, weights: Tensor | None, index: PackedIndex, at: Exchange, sig: int,
    config: Config | None, machine: Machine,
) -> tuple[Launch, Tensor]:  # fmt: skip
    """The complete launch of a combine, not yet run, and its output."""
    launch = prepare_combine(view, y, places.shape[1], at, config, machine)
    out = y.new_empty(places.shape[0], y.shape[1])
    peers = peers_of(view, rank, at.world_size, sig, machine.clock)
    return launch.given(combine_pointers(peers, y, places, weights, index, at, out)), out


def prepare_matmul_combine(
    view: Any,
    hs: Sequence[Tensor],
    experts: Sequence[Tensor],
    at: Exchange,
    config: Config | None,
    precision: str,
    machine: Machine,
) -> Launch:
    """The launch of moe_matmul_combine_kernel without its pointers.

    hs         [max_rows, K]   one or two, any strides, the same for both
    experts    [E_r, N, K]     one for each of hs, likewise
    precision  for fp32 operands: "ieee" or "tf32", the same on all ranks
    """
    from fusedtp.kernels.moe_matmul_combine import moe_matmul_combine_kernel

    assert 1 <= len(hs) == len(experts) <= 2
    (r, k), (e, n, _) = hs[0].shape, experts[0].shape
    config = config or matmul_combine_config(machine, hs[0].dtype, precision, at, n, len(hs))
    config, taken = group_tiles(config, machine, hs, experts)
    assert -(-n // (config.block_n * config.part_tiles)) <= MOST_PARTS, config
    tokens = min(config.block_m, max(1, config.part * config.num_warps // config.block_n))  # summed at once
    args = taken | dict(
        strides=(*hs[0].stride(), *experts[0].stride()),
        E=e,
        R=r,
        N=n,
        K=k,
        part_tiles=config.part_tiles,
        pieces=min(2 * config.programs, -(-at.tokens // tokens)),
        TOP_K=at.top_k,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        PART_M=tokens,
        EVEN_K=k % config.block_k == 0,
        HALVES=config.halves,
        PRECISION=precision,
    )
    return Launch(moe_matmul_combine_kernel, config.programs, args, config)


def matmul_combine_pointers(
    launch: Launch,
    peers: Any,
    hs: Sequence[Tensor],
    experts: Sequence[Tensor],
    offsets: Tensor,
    places: Tensor,
    weights: Tensor | None,
    index: PackedIndex,
    at: Exchange,
    out: Tensor,
) -> dict[str, Any]:
    """The remaining arguments of a prepared matmul with its combine; places and weights as in `combine_pointers`."""
    left, right = hs, experts
    if launch.args["TMA"]:
        left, right = grouped_descriptors(launch.config, launch.args, hs, experts)
    (h, *h2), (w, *w2) = left, right
    return dict(
        peers=peers,
        x=h,
        w=w,
        x2=h2[0] if h2 else None,
        w2=w2[0] if w2 else None,
        offsets=offsets.contiguous(),
        to=index.to,
        at=index.to_places,
        begins=index.begins,
        totals=index.totals,
        max_rows=at.max_rows,
        choices=places,
        weights=None if weights is None else weights.contiguous(),
        out=out,
        T=out.shape[0],
    )


def plan_matmul_combine(
    view: Any, rank: int, hs: Sequence[Tensor], experts: Sequence[Tensor], offsets: Tensor, places: Tensor,
    weights: Tensor | None, index: PackedIndex, at: Exchange, sig: int, config: Config | None, precision: str,
    machine: Machine,
) -> tuple[Launch, Tensor]:  # fmt: skip
    """The complete launch of a matmul with its combine, not yet run, and its output."""
    hs, experts = of_one_layout(hs), of_one_layout(experts)
    launch = prepare_matmul_combine(view, hs, experts, at, config, precision, machine)
    out = hs[0].new_empty(places.shape[0], experts[0].shape[1])
    peers = peers_of(view, rank, at.world_size, sig, machine.clock)
    given = matmul_combine_pointers(launch, peers, hs, experts, offsets, places, weights, index, at, out)
    return launch.given(given), out


def matmul_combine_config(
    machine: Machine, dtype: torch.dtype, precision: str, at: Exchange, n: int, products: int = 1
) -> Config:
    """The tiles of the grouped matmul; parts depend only on values that all ranks share.

    The lint shows that the sum of two products would spill in the widest tile.
    """
    config = group_config(machine, dtype, precision, at.max_rows, at.experts_here, n)
    if products > 1:
        widest = NARROW // 2 if 0 < machine.capability < 90 else NARROW
        config = replace(config, block_n=min(config.block_n, widest))
    part = max(1, -(-n // (PARTS * config.block_n)))
    return replace(config, part_tiles=part, send_programs=machine.programs, other_programs=0)
