"""MoE dispatch and combine as calls of the fused cases: random routing, results computed from the definition.

A call's `sizes` are the tokens of each rank. A row has `k` elements in a dispatch, the first width in a combine. A
fused matmul maps rows of `k` to rows of the first width with the experts' [width, k] matrices. Every rank owns EXPERTS
experts, a token chooses TOP_K, and a sixth of the choices are dropped. Rows that no rank writes stay NaN. The meaning
of `keep` depends on the operation:

    moe_dispatch          x has one row per choice instead of one per token, as for the scale factors of rows
    moe_dispatch_matmul   gated; its two products, which are not rounded, are compared
    moe_matmul_combine    the sum of two products, of the rows and of the rows plus one, without routing weights
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusedtp.ops.launch.config import Machine
from fusedtp.ops.moe.combine import combine_bytes, plan_combine, plan_matmul_combine
from fusedtp.ops.moe.dispatch import (
    dispatch_bytes,
    dispatch_matmul_bytes,
    plan_dispatch,
    plan_dispatch_matmul,
)
from fusedtp.ops.moe.plan import Exchange, packed_index, places_of, sort_choices, unpacked

from .dense import Call

OPERATIONS = ("moe_dispatch", "moe_combine", "moe_dispatch_matmul", "moe_matmul_combine")
EXPERTS, TOP_K = 2, 2
ROUTINGS = ("any", "first", "last", "none")  # the experts that tokens choose; "none": every choice is dropped


def exchange_of(call: Call, rank: int = 0) -> Exchange:
    """The exchange of the call, as seen by a rank."""
    at = Exchange("", rank, call.sizes, EXPERTS * len(call.sizes), TOP_K, 0, "triton")
    return at._replace(max_rows=at.max_recv_rows)


def row_width(call: Call) -> int:
    """Elements of a row that is sent."""
    return call.k if call.operation.startswith("moe_dispatch") else call.widths[0]


def choices_per_row(call: Call) -> int:
    """For a dispatch: number of choices that share one row of x."""
    return 1 if call.operation == "moe_dispatch" and call.keep else TOP_K


def slot_bytes(call: Call) -> int:
    """Bytes that the call needs in a slot."""
    at = exchange_of(call)
    if call.operation == "moe_dispatch":
        return dispatch_bytes(at, choices_per_row(call), row_width(call), call.dtype)
    if call.operation == "moe_dispatch_matmul":
        return dispatch_matmul_bytes(at, row_width(call), call.dtype)
    return combine_bytes(max(call.sizes), TOP_K, row_width(call), call.dtype)


@dataclass
class Routed:
    """A call's inputs by rank, and the expected outputs.

    table     [W, E], of all ranks
    experts   for a matmul: [E / W, N, K] of every rank; one matrix, or gate and up if gated
    """

    x: list[Tensor]
    orders: list[Tensor]
    words: list[Tensor]
    weights: list[Tensor]
    wanted: dict[str, list[Tensor]]
    table: Tensor
    experts: Sequence[Sequence[Tensor]] = ()


def routed(call: Call, seed: int) -> Routed:
    """Random inputs from `seed`. Integers and powers of two, so all results are exact."""
    generator = torch.Generator().manual_seed(seed)
    world, experts = len(call.sizes), EXPERTS * len(call.sizes)
    tokens = sum(call.sizes)
    width = call.widths[0] if call.operation == "moe_combine" else call.k
    ids = _chosen(torch.rand(tokens, experts, generator=generator), call.routing)
    ids = torch.where(torch.rand(tokens, TOP_K, generator=generator) < 1 / 6, -1, ids)
    weights = 2.0 ** torch.randint(-1, 2, (tokens, TOP_K), generator=generator)
    of_token = TOP_K // choices_per_row(call)  # rows of x
    x = torch.randint(-4, 5, (tokens * of_token, width), generator=generator).to(call.dtype)
    sorted_ = [sort_choices(part, experts) for part in ids.split(list(call.sizes))]
    table = torch.stack([counts for counts, _order in sorted_])
    at = [exchange_of(call, rank) for rank in range(world)]
    words = [packed_index(table, places_of(sorted_[each.rank][1]), each) for each in at]
    of = [_rows(x.view(tokens, of_token, width), ids, each) for each in at]
    given = list(x.split([size * of_token for size in call.sizes]))
    wanted = {"rows": of}
    if call.operation == "moe_combine":  # expert i multiplies by i + 1, so that each choice matters
        factors = torch.where(ids >= 0, ids + 1.0, 0.0) * weights
        given = [_times(rows, ids, each) for rows, each in zip(of, at, strict=True)]
        wanted = {"y": list((x * factors.sum(1, keepdim=True)).to(call.dtype).split(list(call.sizes)))}
    every: list[Tensor] = []
    if "matmul" in call.operation:
        shape = (2 if call.keep else 1, experts, call.widths[0], width)
        every = [*torch.randint(-2, 3, shape, generator=generator).to(call.dtype)]
    split = [each.split(EXPERTS) for each in every]
    own = [[each[rank] for each in split] for rank in range(world)]
    if call.operation == "moe_dispatch_matmul":
        for i, name in enumerate(("gate", "up") if gated(call) else ("y",)):
            wanted[name] = [_products(of[r], own[r][i], at[r], ids) for r in range(world)]
    elif every:
        given, wanted = of, {"y": _summed(call, x, ids, weights, every)}
    orders = [order for _counts, order in sorted_]
    return Routed(given, orders, words, list(weights.split(list(call.sizes))), wanted, table, own)


def gated(call: Call) -> bool:
    """Whether each expert has two matrices, the first half of a gated MLP."""
    return call.operation == "moe_dispatch_matmul" and call.keep


def _chosen(scores: Tensor, routing: str) -> Tensor:
    """scores [T, E] -> ids [T, TOP_K]. "first", "last": all tokens choose the same experts; others get no rows."""
    if routing == "any":
        return scores.argsort(1)[:, :TOP_K]
    first = {"first": 0, "last": scores.shape[1] - TOP_K, "none": 0}[routing]
    ids = torch.arange(first, first + TOP_K).repeat(scores.shape[0], 1)
    return ids.fill_(-1) if routing == "none" else ids


def _mine(ids: Tensor, at: Exchange) -> list[tuple[int, int, int]]:
    """(expert, token, choice) of every row of this rank's experts, in order."""
    first, chosen = at.rank * at.experts_here, list(enumerate(ids.tolist()))
    here = range(first, first + at.experts_here)
    return [(e, t, own.index(e)) for e in here for t, own in chosen if e in own]


def _rows(x: Tensor, ids: Tensor, at: Exchange) -> Tensor:
    """x [T, rows per token, K] -> [max_rows, K], NaN past the last row."""
    rows = x.new_full((at.max_rows, x.shape[2]), torch.nan)
    for row, (_expert, token, choice) in enumerate(_mine(ids, at)):
        rows[row] = x[token, choice % x.shape[1]]
    return rows


def _summed(call: Call, x: Tensor, ids: Tensor, weights: Tensor, experts: Sequence[Tensor]) -> list[Tensor]:
    """[T_r, N] of every rank: the weighted sum of its tokens' choices."""
    each = torch.zeros(*ids.shape, call.widths[0], dtype=torch.float64)
    for more, matrices in enumerate(experts):
        each += torch.einsum("tk,tjnk->tjn", x.double() + more, matrices.double()[ids.clamp(min=0)])
    if call.keep:
        weights = torch.ones_like(weights)
    out = (each * torch.where(ids >= 0, weights, 0.0)[:, :, None]).sum(1).to(call.dtype)
    return [*out.split(list(call.sizes))]


def _products(rows: Tensor, own: Tensor, at: Exchange, ids: Tensor) -> Tensor:
    """[max_rows, N], NaN past the last row."""
    made = rows.new_full((rows.shape[0], own.shape[1]), torch.nan)
    for row, (expert, _token, _choice) in enumerate(_mine(ids, at)):
        made[row] = (own[expert % at.experts_here].double() @ rows[row].double()).to(rows.dtype)
    return made


def _times(rows: Tensor, ids: Tensor, at: Exchange) -> Tensor:
    rows = rows.clone()
    for row, (expert, _token, _choice) in enumerate(_mine(ids, at)):
        rows[row] *= expert + 1
    return rows


def plan_exchange(
    call: Call, given: Routed, view: Any, rank: int, signature: int, machine: Machine
) -> tuple[Any, dict[str, Tensor]]:
    """This rank's launch of the call, and its outputs by name."""
    at = exchange_of(call, rank)
    layout, order = unpacked(given.words[rank], at), given.orders[rank]
    config = call.config(machine)
    x, end = given.x[rank].clone(), (layout, at, signature, config)
    choices = places_of(order).view(-1, TOP_K).to(torch.int32)
    if call.operation == "moe_dispatch":
        planned, rows = plan_dispatch(
            view, rank, x, choices_per_row(call), torch.cat(given.orders), *end, machine
        )  # fmt: skip
        return planned, {"rows": rows}
    matrices = [matrix.clone() for matrix in given.experts[rank]] if given.experts else []
    offsets = layout.offsets[: EXPERTS + 1]
    if call.operation == "moe_dispatch_matmul":
        planned, outs = plan_dispatch_matmul(
            view, rank, x, order // TOP_K, matrices, offsets, layout, at, signature, "silu" if gated(call) else "",
            gated(call), config, "ieee", machine,
        )  # fmt: skip
        found = zip(("rows", "y", "gate", "up"), outs, strict=False)
        return planned, {name: out for name, out in found if out is not None}
    if call.operation == "moe_matmul_combine":
        config = replace(config, part_tiles=-(-row_width(call) // (2 * call.tile)))  # two parts
        factors = None if call.keep else given.weights[rank]
        planned, y = plan_matmul_combine(
            view, rank, [x + more for more in range(len(matrices))], matrices, offsets,
            choices, factors, layout, at, signature, config, "ieee", machine,
        )  # fmt: skip
        return planned, {"y": y}
    planned, y = plan_combine(view, rank, x, choices, given.weights[rank], *end, machine)
    return planned, {"y": y}
