"""An exchange in rounds, where an owner has room for fewer rows than come: M at a time.

    rows of an owner    | 0 .. M-1 | M .. 2M-1 | 2M .. |      by (expert, source, choice), as always
                          round 0    round 1     round 2
    a round             dispatch of its choices -> compute(rows, offsets) -> their rows back, one for each choice
    after the last      the weighted sum of each token's choices, once

The plan is made once; what a round moves follows from it on the device: row r of an owner is in round r // M. A round's
plan is a plan like any other, of tokens with one choice. Its table holds the part of each block that lies in the
round's window, and in its orders the choices of the round come first, the others after them, as dropped ones do.

Every choice has its row in one round and zeros in the others, so the rounds' parts add up exactly, and the sum over a
token's choices is made afterwards, in their order, in fp32, rounded once: the bits of an exchange without a bound. So
are those of dx, for which the choices' gradients are kept apart until the last. (A zero may lose its sign. And the last
sum is torch's: compilers may join a product and a sum there and not in the kernels' combine, or the other way round,
which rounds the fp32 sums of `triton` otherwise.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusedtp.comm import Group, Place, alone, propagate_errors

from .combine import combine_rows, moe_combine
from .dispatch import dispatch, dispatch_rows
from .plan import (
    Blocks,
    Exchange,
    RoutingPlan,
    check_outputs,
    host_knows,
    make_plan,
    offsets_of,
    packed_index,
    place_of,
    places_of,
    without_dropped,
)

Compute = Callable[[Tensor, Tensor], Tensor]


class RecvUsage(NamedTuple):
    """What an exchange in rounds used of its owners' capacity, on the device.

    bound    rows that an owner has room for
    used     int32 [W]   rows that every owner got, in all rounds
    rounds   int32 []    rounds in which rows moved
    """

    bound: int
    used: Tensor
    rounds: Tensor


def moe_rounds(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    num_experts: int,
    group: Group | None,
    compute: Compute,
    *,
    max_rows: int,
    sizes: Sequence[int] | None = None,
    engine: str = "auto",
    layer: str = "",
    weights_sum: float | None = None,
    comm_dtype: str = "",
) -> tuple[Tensor, RecvUsage]:
    """Dispatch, experts and combine with room for max_rows rows, in as many rounds as that takes.

        x, expert_ids, weights, num_experts, group, sizes, engine, weights_sum, comm_dtype    as in moe_dispatch
        compute      (rows [R, K], offsets [E / W + 1]) -> y [R, N] with R <= max_rows, once a round; each row by itself
        max_rows     at least 1, the same on all ranks
        return       y [T_r, N], and RecvUsage

    The result, dx and the weights' gradients are those of moe_dispatch and moe_combine without a bound; gradients of
    what compute uses are the sums of the rounds'. There are as many rounds as the fullest owner needs where the host
    knows the plan (on CPU, and by all_to_all), the same number on all ranks. Elsewhere nothing waits for the device:
    there are as many as any routing may need, ceil(T min(k, E / W) / max_rows), and those without rows end at once.

    Rounds after the first keep none of their rows for backward: their dispatch and compute are repeated there, so that
    at most two rounds' rows are held at a time, the first one's and the repeated one's. (Not under torch.compile.)
    Raises what moe_dispatch raises, but not for too many rows; ValueError for max_rows below 1.
    """
    at = place_of(group, x)
    with propagate_errors(at):
        if max_rows < 1:
            raise ValueError(f"rank {at.rank}: max_rows is {max_rows}; a round moves at least 1 row")
        plan, where = make_plan(
            x, expert_ids, weights, num_experts, at, max_rows=max_rows, sizes=sizes, engine=engine, layer=layer,
            weights_sum=weights_sum, comm_dtype=comm_dtype,
        )  # fmt: skip
    weights = without_dropped(weights, expert_ids, x)
    usage = _usage(plan, where)
    found = Blocks(plan.table, where).rows if host_knows(plan, where) else None
    most = where.max_recv_rows if found is None else max(found)
    if most <= max_rows:
        rows, offsets, handle = dispatch(x, weights, plan, _fitted(where, found, 0))
        return moe_combine(_computed(at, compute, rows, offsets), handle), usage
    here, own = _choices_alone(where, x.device)
    choices, _ = dispatch_rows(x, None, own, here)
    parts = _all_rounds(choices, plan, where, found, -(-most // max_rows), partial(_computed, at, compute))
    return combine_rows(parts, weights, weights.detach().reshape(-1), own, here), usage


def _computed(at: Place, compute: Compute, rows: Tensor, offsets: Tensor) -> Tensor:
    """compute(rows, offsets). If it raises, the other ranks, which wait for its rows, are told."""
    with propagate_errors(at):
        return compute(rows, offsets)


def _usage(plan: RoutingPlan, at: Exchange) -> RecvUsage:
    used = plan.table.view(at.world_size, at.world_size, at.experts_here).sum((0, 2), dtype=torch.int32)
    return RecvUsage(at.bound, used, (used.max() + at.bound - 1) // at.bound)


def _fitted(at: Exchange, found: Sequence[int] | None, i: int) -> Exchange:
    """The exchange of round i: with room for what comes where the host knows it, except for kernels."""
    if found is None or at.engine == "triton":
        return at
    return at._replace(max_rows=min(max(found[at.rank] - i * at.bound, 0), at.bound))


def _choices_alone(at: Exchange, device: torch.device) -> tuple[Exchange, RoutingPlan]:
    """An exchange of this rank with itself: the rows are its choices, in their order."""
    count = at.tokens * at.top_k
    here = Exchange(alone(device.type).name, 0, (at.tokens,), 1, at.top_k, count, "local")
    table = torch.full((1, 1), count, dtype=torch.int32, device=device)
    order = torch.arange(count, dtype=torch.int32, device=device)
    return here, RoutingPlan(table, order, order.new_empty(0))


def _all_rounds(
    choices: Tensor,
    plan: RoutingPlan,
    where: Exchange,
    found: Sequence[int] | None,
    rounds: int,
    compute: Compute,
) -> Tensor:
    """choices [T_r k, K] -> [T_r k, N]: what the experts make of each choice, zeros of dropped ones."""
    at = where._replace(sizes=tuple(n * where.top_k for n in where.sizes), top_k=1)
    windows = Windows(plan, at)
    parts: Tensor | None = None
    for i in range(rounds):
        here = _fitted(at, found, i)
        of_round = windows.plan(i, here)

        def forth(choices: Tensor, of_round: RoutingPlan = of_round, here: Exchange = here) -> Tensor:
            rows, _ = dispatch_rows(choices, None, of_round, here)
            return compute(rows, offsets_of(of_round, here))

        keep = i == 0 or torch.compiler.is_compiling()
        y = forth(choices) if keep else checkpoint(forth, choices, use_reentrant=False)
        check_outputs(y, here)
        part = combine_rows(y, None, None, of_round, here)
        parts = part if parts is None else parts + part
    assert parts is not None
    return parts


class Windows:
    """The plans of the rounds, from the plan of all rows. Nothing here waits for the device.

    begins   int64 [W, E]    the owner's row where each block begins
    source   int64 [T k]     of each entry of the orders
    round    int64 [T k]     in which that choice's row moves; -1 of dropped ones
    """

    def __init__(self, plan: RoutingPlan, at: Exchange) -> None:
        w, each = at.world_size, at.experts_here
        self.orders, self.counts = plan.orders, plan.table.long()
        by_owner = self.counts.view(w, w, each).permute(1, 2, 0).reshape(w, each * w)
        begins = by_owner.cumsum(1) - by_owner
        self.begins = begins.view(w, each, w).permute(2, 0, 1).reshape(w, w * each)
        sizes = torch.cat([self.counts.new_full((1,), n * at.top_k) for n in at.sizes])
        # blocks in the order of the orders; each source's last one holds its dropped choices
        blocks = torch.cat([self.counts, (sizes - self.counts.sum(1))[:, None]], 1).reshape(-1)
        rows = torch.cat([self.begins, self.begins.new_zeros(w, 1)], 1).reshape(-1)
        ends = blocks.cumsum(0)
        places = torch.arange(self.orders.shape[0], device=ends.device)
        block = torch.searchsorted(ends, places, right=True)
        row = (rows - ends + blocks)[block] + places
        self.source = block // (w * each + 1)
        self.round = torch.where(block % (w * each + 1) == w * each, -1, row // at.bound)

    def plan(self, i: int, at: Exchange) -> RoutingPlan:
        """Of round i."""
        low, high = i * at.bound, (i + 1) * at.bound
        table = (self.begins + self.counts).clamp(low, high) - self.begins.clamp(low, high)
        first = torch.sort(2 * self.source + (self.round != i), stable=True).indices
        table, orders, index = table.to(torch.int32), self.orders[first], self.orders.new_empty(0)
        if at.engine == "triton":
            index = packed_index(table, places_of(orders[at.choices_of(at.rank)]), at)
        return RoutingPlan(table, orders, index)
