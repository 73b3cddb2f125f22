"""An exchange in two stages, for links between nodes that are slower than those within a node.

    token ---- between nodes ----> relay ---- within the node ----> experts
               once to each node that has one of its experts        once for each of them

There are N nodes of L ranks; rank (n, l) is at place l of node n. Node n has the experts n E / N, ...; place l has the
l-th part of them. A token of rank (n, l) goes over `between`, the ranks at place l of all nodes, to at most N relays
(m, l), together with its ids and weights. The relay dispatches it to the experts of its node over `within`. On the way
back a relay sums its node's outputs for a token, in fp32, rounded once, and the token's rank sums over nodes.

So between nodes one row travels per (token, node) pair, not per choice (DeepSeek-V3, section 3.2.2), and a sum has one
more rounding than in one stage. An expert's rows are ordered by their token's place, then node, then position in the
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedtp.comm import Group, Place, propagate_errors

from ..cpu import accumulator
from .combine import moe_combine
from .dispatch import dispatch_rows, moe_dispatch
from .plan import check_choices, place_of


def moe_in_stages(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    num_experts: int,
    between: Group | None,
    within: Group | None,
    compute: Callable[[Tensor, Tensor], Tensor],
    *,
    sizes: Sequence[Sequence[int]] | None = None,
    engine: str = "auto",
    engine_between: str = "collective",
    comm_dtype: str = "",
    layer: str = "",
) -> Tensor:
    """Dispatch, experts and combine, through one relay per node.

        x, expert_ids, weights    as in moe_dispatch
        between      the ranks at this rank's place of every node, in node order; None: there is one node
        within       the ranks of this node, in place order; None: a node is one rank
        compute      (rows [R, K] of this rank's experts, offsets [E / (N L) + 1] int32) -> y [R, N']
        sizes        tokens of every rank, sizes[node][place]; default: as many as here on all of them
        engine, engine_between    of the exchanges within and between nodes; comm_dtype: of the rows in both
        return       [T_r, N']

    Gradients reach x, the weights, and the parameters of compute. A relay has room for the tokens of all ranks at its
    place. Raises ValueError as moe_dispatch does, and if num_experts is not a multiple of the number of ranks.
    """
    outer, inner = place_of(between, x), place_of(within, x)
    nodes, places = outer.world_size, inner.world_size
    with (
        propagate_errors(inner),
        propagate_errors(outer),
    ):  # an error in the first stage also concerns this node's ranks
        if num_experts % (nodes * places):
            raise ValueError(
                f"node {outer.rank}, place {inner.rank}: num_experts is {num_experts}; it must be a multiple of "
                f"{nodes} nodes x {places} ranks"
            )
        table = _sizes(x, sizes, outer, inner)
        of_place = [row[inner.rank] for row in table]
        check_choices(x, expert_ids, weights, num_experts, outer)
        each = num_experts // nodes
        goes = _nodes(expert_ids, each, nodes)
        ones = weights.new_ones(goes.shape)
        how: dict[str, Any] = dict(max_rows=sum(of_place), sizes=of_place, engine=engine_between, layer=layer)
        rows, offsets, handle = moe_dispatch(x, goes, ones, nodes, between, comm_dtype=comm_dtype, **how)
        with_ids = _with_ids(expert_ids, weights, x.dtype)
        choices, _ = dispatch_rows(with_ids, None, handle.plan, handle.at._replace(comm_dtype=""))
    ids, kept_weights = _of_node(choices, offsets, outer.rank, each)
    relayed = [sum(row[p] for row in table) for p in range(places)]
    own, own_offsets, own_handle = moe_dispatch(
        rows,
        ids,
        kept_weights,
        each,
        within,
        sizes=relayed,
        engine=engine,
        comm_dtype=comm_dtype,
        layer=layer,
    )
    with propagate_errors(inner), propagate_errors(outer):
        made = compute(own, own_offsets)
    summed = moe_combine(made, own_handle)
    return moe_combine(summed, handle)


def _sizes(x: Tensor, sizes: Sequence[Sequence[int]] | None, outer: Place, inner: Place) -> list[list[int]]:
    """[N][L] tokens of every rank."""
    nodes, places = outer.world_size, inner.world_size
    table = [[x.shape[0]] * places] * nodes if sizes is None else [[int(n) for n in row] for row in sizes]
    if [len(row) for row in table] != [places] * nodes or table[outer.rank][inner.rank] != x.shape[0]:
        raise ValueError(
            f"node {outer.rank}, place {inner.rank}: sizes is {table}; wanted token counts of {nodes} nodes x {places} "
            f"ranks, {x.shape[0]} for this rank"
        )
    return table


def _nodes(expert_ids: Tensor, each: int, nodes: int) -> Tensor:
    """expert_ids [T, k] -> [T, N]: n if the token goes to node n, else -1."""
    every = torch.arange(nodes, dtype=expert_ids.dtype, device=expert_ids.device)
    of_choice = torch.div(expert_ids, each, rounding_mode="floor")  # -1 stays below zero
    return torch.where((of_choice[:, :, None] == every).any(1), every, -1)


def _with_ids(expert_ids: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, 2 k]: ids and weights in a dtype that holds both exactly (ids below 2**24)."""
    wide = accumulator(dtype)
    return torch.cat([expert_ids.to(wide), weights.to(wide)], 1)


def _of_node(choices: Tensor, offsets: Tensor, node: int, each: int) -> tuple[Tensor, Tensor]:
    """choices [R, 2 k] of the tokens that arrived -> ids among this node's experts, -1 for others, and their weights:

    [R, min(k, experts of this node)] each, with a token's choices in order.
    Rows past offsets[-1] are undefined on input and choose no expert.
    """
    ids, weights = choices.chunk(2, 1)
    arrived = torch.arange(choices.shape[0], device=choices.device)[:, None] < offsets[-1]
    here = arrived & (ids >= node * each) & (ids < (node + 1) * each)
    chosen = torch.where(here, ids - node * each, -1.0).to(torch.int32)
    weights = torch.where(here, weights, 0.0)
    if chosen.shape[1] > each:
        first = torch.sort(~here, dim=1, stable=True).indices[:, :each]
        chosen, weights = chosen.gather(1, first), weights.gather(1, first)
    return chosen, weights
