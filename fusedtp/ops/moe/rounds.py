"""An exchange in rounds: an owner that has room for fewer rows than arrive receives M at a time.

    rows of an owner    | 0 .. M-1 | M .. 2M-1 | 2M .. |      by (expert, source, choice), as always
                          round 0    round 1     round 2
    a round             dispatch its choices -> the experts -> sum each token's choices in this round
    y                   the sum of the rounds

The plan is made once, and each round's share is derived from it on the device: row r of an owner is in round r // M. A
round's plan is an ordinary plan. Its table holds the part of each block that lies in the round's window. Its orders
list the choices of the round first; the others follow, like dropped choices. The rows that an owner takes from a source
in a round are contiguous in the source's order: blocks of consecutive experts, of which the first and the last may be
partial. So a round's orders are copied pieces and need no sort (`moe_window_kernel` in kernels/moe_plan.py).

A token with choices in several rounds is summed round by round and rounded to its dtype each time. A choice's weight
gets its gradient in one round and zeros in the others. (A zero may lose its sign.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusedtp.comm import Group, Place, place, propagate_errors
from fusedtp.comm.device_view import odd
from fusedtp.comm.launching import Launch

from ..launch.config import Config, power_of_two
from ..main_grad import main_grad_of
from ..operation import as_autocast
from ..pointwise import ACTIVATIONS
from .combine import moe_combine, moe_matmul_combine
from .dispatch import dispatch, dispatch_with_matmul
from .plan import (
    Blocks,
    Exchange,
    RoutingPlan,
    index_size,
    make_plan,
    may_wait,
    packed_index,
    place_of,
    places_of,
    plan_index,
    plans_by_kernel,
    unpacked,
    without_dropped,
)

STEPS = 16  # number of different max_rows that kernels are launched with, up to the bound


class Mlp(NamedTuple):
    """Experts down (act(gate x) * (up x)), or down act(up x); their matmuls run while rows travel.

    gate, up    [E / W, F, K]  of this rank's experts; gate None: ungated
    down        [E / W, N, F]
    act         gated: the name of the activation, see grouped_gated
                ungated: a function of up's product; it must not draw random numbers
    """

    gate: Tensor | None
    up: Tensor
    down: Tensor
    act: str | Callable[[Tensor], Tensor]


Compute = Callable[[Tensor, Tensor], Tensor]


class RecvUsage(NamedTuple):
    """How much of its owners' capacity an exchange in rounds used, on the device.

    bound    rows that an owner has room for
    used     int32 [W]   rows that every owner received, over all rounds
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
    compute: Compute | Mlp,
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
        compute      an Mlp, or (rows [R, K], offsets [E / W + 1]) -> y [R, N] with R <= max_rows, called once per
                     round; it must treat each row independently
        max_rows     at least 1, the same on all ranks
        return       y [T_r, N], and RecvUsage

    If all rows fit in one round, the result and all gradients are bitwise equal to those of the unbounded calls:
    moe_dispatch and moe_combine around compute, or with an Mlp moe_dispatch_gated (or moe_dispatch_matmul) and
    moe_matmul_combine. If not, y, dx and the gradients of compute's parameters are accumulated round by round, in their
    own dtype; a choice's weight gets its gradient from the one round that moved its row.

    The fullest owner determines the number of rounds, the same on all ranks; on a GPU the host waits once to learn it.
    Under torch.compile and during graph capture it cannot wait, and the number is the most that any routing needs,
    ceil(T min(k, E / W) / max_rows); rounds without rows return at once.

    Rounds after the first save only x for backward and are recomputed there, so that at most two rounds' rows are in
    memory at a time: the first round's and the recomputed one's. (Not under torch.compile.) A split backward recomputes
    them in both passes; in between, torch holds one gradient per round, that of the rows that combine sends.
    Raises what moe_dispatch raises, except for too many rows; ValueError for max_rows below 1.
    """
    at = place_of(group, x)
    with propagate_errors(at):
        if max_rows < 1:
            raise ValueError(f"rank {at.rank}: max_rows is {max_rows}; a round moves at least 1 row")
        if isinstance(compute, Mlp):
            _check_act(at, compute)
            if not comm_dtype:  # comm_dtype quantizes the original x
                (x,) = as_autocast(x.device.type, x)
        plan, where = make_plan(
            x, expert_ids, weights, num_experts, at, max_rows=max_rows, sizes=sizes, engine=engine, layer=layer,
            weights_sum=weights_sum, comm_dtype=comm_dtype,
        )  # fmt: skip
    weights, usage = without_dropped(weights, expert_ids, x), _usage(plan, where)
    found = _rows_of_owners(plan, where) if may_wait() else None
    most = where.max_recv_rows if found is None else max(found)
    if most <= max_rows:
        return _one_round(x, weights, compute, plan, _fitted(where, found, 0)), usage
    windows, random = Windows(plan, where), True
    if isinstance(compute, Mlp):
        compute, random = _cast_once(compute, x, comm_dtype), False
    if torch.is_grad_enabled():
        x = x.clone()  # backward reads it later: an in-place change of x must not matter, whatever the number of rounds
    y: Any = None
    for i in range(-(-most // max_rows)):
        here = _fitted(where, found, i)._replace(several=True)
        given = x, weights, compute, windows.plan(i, here), here
        if i == 0 or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            part = _one_round(*given)
        else:
            part = checkpoint(_one_round, *given, use_reentrant=False, preserve_rng_state=random)
        y = part if y is None else y + part
    return y, usage


def _cast_once(experts: Mlp, x: Tensor, comm_dtype: str) -> Mlp:
    """Apply autocast once for all rounds; gradients still go to main_grad."""

    def cast(w: Tensor | None) -> Tensor | None:
        if w is None or comm_dtype:
            return w
        (low,) = as_autocast(x.device.type, w)
        if low is not w and main_grad_of(w) is not None:
            low.main_grad = main_grad_of(w)
        return low

    gate, up, down = (cast(w) for w in experts[:3])
    assert up is not None and down is not None
    return Mlp(gate, up, down, experts.act)


def _check_act(at: Place, experts: Mlp) -> None:
    act = experts.act
    if experts.gate is None and not callable(act):
        raise ValueError(f"rank {at.rank}: act is {act!r}; without gate it must be a function")
    if experts.gate is not None and (callable(act) or act not in ACTIVATIONS):
        raise ValueError(f"rank {at.rank}: act is {act!r}; with gate it must be one of {', '.join(ACTIVATIONS)}")


def _one_round(x: Tensor, weights: Tensor, compute: Compute | Mlp, plan: RoutingPlan, at: Exchange) -> Tensor:
    """x [T_r, K], weights [T_r, k], 0 for dropped choices -> weighted sums of the choices in the plan, [T_r, N]."""
    if not isinstance(compute, Mlp):
        rows, offsets, handle = dispatch(x, weights, plan, at)
        with propagate_errors(place(at.group)):  # the other ranks wait for the result of compute
            y = compute(rows, offsets)
        return moe_combine(y, handle)
    gate, up, down, act = compute
    first, gated = ([up], "") if gate is None or callable(act) else ([gate, up], act)
    hidden, _, handle = dispatch_with_matmul(x, weights, first, gated, plan, at)
    with propagate_errors(place(at.group)):
        if callable(act):
            hidden = act(hidden)
        return moe_matmul_combine(hidden, down, handle)


def _usage(plan: RoutingPlan, at: Exchange) -> RecvUsage:
    if plan.packed.shape[0]:
        used = unpacked(plan.packed, at).totals[: at.world_size].clone()  # a view would keep all of `packed` alive
    else:
        used = plan.table.view(at.world_size, at.world_size, at.experts_here).sum((0, 2), dtype=torch.int32)
    return RecvUsage(at.bound, used, (used.max() + at.bound - 1) // at.bound)


def _rows_of_owners(plan: RoutingPlan, at: Exchange) -> list[int]:
    """Rows of each owner. Waits for the device."""
    if at.engine == "triton" and plan.packed.shape[0]:
        return unpacked(plan.packed, at).totals[: at.world_size].tolist()
    return Blocks(plan.table, at).rows


def _fitted(at: Exchange, found: Sequence[int] | None, i: int) -> Exchange:
    """The exchange of round i, with max_rows trimmed to the rows that arrive if the host knows them.

    For kernels, max_rows is equal on all ranks and takes few values, because each value needs its own prepared launch.
    """
    if found is None:
        return at
    if at.engine != "triton":
        return at._replace(max_rows=min(max(found[at.rank] - i * at.bound, 0), at.bound))
    step = max(1, -(-at.bound // STEPS))
    return at._replace(max_rows=min(-(-max(1, max(found) - i * at.bound) // step) * step, at.recv_capacity))


# -- the rounds' plans -------------------------------------------------------------------------------------------------


class Windows:
    """The plans of the rounds, from the plan of all rows. The host never waits for the device here.

    Where kernels run, one makes a round's table and orders and another its index. In torch:

    begins   int64 [W, E]    the owner's row where each block begins
    source   int64 [T k]     the source of each entry of the orders
    round    int64 [T k]     the round in which that choice's row moves; -1 for dropped choices
    """

    def __init__(self, plan: RoutingPlan, at: Exchange) -> None:
        self.given = plan
        self.by_kernel = at.engine == "triton" and plans_by_kernel(plan.table.device)
        if not self.by_kernel:
            self._look(plan, at)

    def _look(self, plan: RoutingPlan, at: Exchange) -> None:
        w, each = at.world_size, at.experts_here
        self.counts = plan.table.long()
        by_owner = self.counts.view(w, w, each).permute(1, 2, 0).reshape(w, each * w)
        begins = by_owner.cumsum(1) - by_owner
        self.begins = begins.view(w, each, w).permute(2, 0, 1).reshape(w, w * each)
        sizes = torch.cat([self.counts.new_full((1,), n * at.top_k) for n in at.sizes])
        # blocks as they lie in the orders; each source's last block holds its dropped choices
        blocks = torch.cat([self.counts, (sizes - self.counts.sum(1))[:, None]], 1).reshape(-1)
        rows = torch.cat([self.begins, self.begins.new_zeros(w, 1)], 1).reshape(-1)
        ends = blocks.cumsum(0)
        places = torch.arange(plan.orders.shape[0], device=ends.device)
        block = torch.searchsorted(ends, places, right=True)
        row = (rows - ends + blocks)[block] + places
        self.source = block // (w * each + 1)
        self.round = torch.where(block % (w * each + 1) == w * each, -1, row // at.bound)

    def plan(self, i: int, at: Exchange) -> RoutingPlan:
        """The plan of round i."""
        if self.by_kernel:
            window, made = plan_window(self.given, i, at)
            window.start(made.table.device)
            plan_index(made.table, made.packed, at)[0].start(made.table.device)
            return made
        low, high = i * at.bound, (i + 1) * at.bound
        table = (self.begins + self.counts).clamp(low, high) - self.begins.clamp(low, high)
        first = torch.sort(2 * self.source + (self.round != i), stable=True).indices
        table, orders = table.to(torch.int32), self.given.orders[first]
        index = orders.new_empty(0)
        if at.engine == "triton":
            index = packed_index(table, places_of(orders[at.choices_of(at.rank)]), at)
        return RoutingPlan(table, orders, index)


def plan_window(plan: RoutingPlan, i: int, at: Exchange, block: int = 256) -> tuple[Launch, RoutingPlan]:
    """The launch that makes round i's plan, and that plan. Of the index it fills only `places`.

    Of the orders it writes only this rank's and the parts of the others' that its experts take. A choice of another
    round has no place; its entry is T_r k.
    """
    from fusedtp.kernels.moe_plan import moe_window_kernel

    table, orders = (part.new_empty(part.shape) for part in plan[:2])
    made = RoutingPlan(table, orders, orders.new_empty(index_size(at)))
    w, each = at.world_size, at.experts_here
    args = dict(
        sizes=tuple(odd(n * at.top_k) for n in at.sizes),
        table=plan.table.contiguous(),
        orders=plan.orders,
        low=i * at.bound,
        high=(i + 1) * at.bound,
        table_out=table,
        orders_out=orders,
        places=unpacked(made.packed, at).places,
        rank2=odd(at.rank),
        WORLD=w,
        HERE=each,
        SOURCES=power_of_two(w),
        EXPERTS=power_of_two(each),
        BLOCK=block,
    )
    return Launch(moe_window_kernel, w * w * each + 1, args, Config(0, 0, 0, num_warps=4)), made
