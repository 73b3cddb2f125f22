"""Which (token, slot) pairs an expert of limited capacity drops; the result does not depend on the split of tokens.

    capacity = ceil(factor * k * T / E)      T tokens of all ranks

An expert keeps the first `capacity` of its pairs in one of two orders:

    "position"      by slot, then by token: every first choice comes before any second one (GShard, algorithm 1; for
                    k = 1 the Switch Transformer's). Tokens are in rank order, and in row order within a rank
    "probability"   by weight, largest first; equal weights by position

A rank sees only its own pairs. By position, it also needs the number of tokens on every rank, and of pairs of each slot
and expert: an all-gather of [k E + 1] counts. By probability, it sorts the pairs of all ranks: an all-gather of
[T, 2 k] numbers, which requires every rank's number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fusedtp.comm import Group, place
from fusedtp.comm.constant import constant_to_compiler
from fusedtp.ops.tokens import gather_tokens

from .balance import LAYER, count, propagating_errors

RULES = ("position", "probability")


class Kept(NamedTuple):
    """This rank's choices after dropping.

    expert_ids   int32 [T_r, k]   -1 if dropped
    weights      [T_r, k]         0 without a gradient if dropped; the others are unchanged
    dropped      int64 [E]        number of this rank's pairs that each expert dropped
    capacity     int64 scalar     the most pairs, over all ranks, that an expert keeps
    """

    expert_ids: Tensor
    weights: Tensor
    dropped: Tensor
    capacity: Tensor


Tokens = TypeVar("Tokens", int, Tensor)


def capacity_of(factor: float, top_k: int, tokens: Tokens, num_experts: int) -> Tokens:
    """ceil(factor * k * T / E), computed exactly: for an int, or on the device for an int64 tensor.

    The factor is rounded to a fraction with a denominator up to 10**6, so that 1.1 of 100 tokens is 110, where floats
    would give 111. A factor above E acts like E: no expert has more than all k T pairs. Raises ValueError for a factor
    that is not a positive number.
    """
    numerator, denominator = _ratio(factor, num_experts)
    return -(-(tokens * (numerator * top_k)) // (denominator * num_experts))


@constant_to_compiler
def _ratio(factor: float, most: int) -> tuple[int, int]:
    if not 0 < factor < math.inf:
        raise ValueError(f"the capacity factor is {factor}, must be positive")
    exact = max(Fraction(1, 10**6), Fraction(min(float(factor), most)).limit_denominator(10**6))
    return exact.numerator, exact.denominator


def keep_capacity(
    expert_ids: Tensor,
    weights: Tensor,
    num_experts: int,
    factor: float,
    *,
    by: str = "position",
    group: Group | None = None,
    sizes: Sequence[int] | None = None,
) -> Kept:
    """Drop what exceeds the experts' capacity.

    expert_ids   [T_r, k]   integers in [0, E); one below 0 is dropped already, and takes no place
    weights      [T_r, k]   any float dtype
    group        the ranks whose tokens share the experts; None: this one alone
    sizes        number of rows on each rank, used by probability only; None: as many as on this rank
    Raises ValueError for shapes that do not fit, naming the rank. Nothing waits for the host.
    Source: Lepikhin et al. 2020, "GShard", section 2.2; Fedus et al. 2021, "Switch Transformers", equation 3.
    """
    with propagating_errors(group):
        rank, sizes = _checked(expert_ids, weights, by, group, sizes)
        ids, (rows, top_k) = expert_ids.long(), expert_ids.shape
        if by == "position":
            ahead, tokens = _of_other_ranks(ids, num_experts, group)
            positions = _positions(ids, num_experts) + ahead
        else:
            keys, every = _gathered(weights.detach(), ids, group, sizes)
            positions = _positions(every, num_experts, keys)[sum(sizes[:rank]) :][:rows]
            tokens = ids.new_full((), sum(sizes))
        capacity = capacity_of(factor, top_k, tokens, num_experts)
    gone = (positions >= capacity) & (ids >= 0)
    dropped = count(ids.masked_fill(~gone, -1), num_experts)
    out = gone | (ids < 0)
    return Kept(ids.masked_fill(out, -1).int(), weights.masked_fill(out, 0.0), dropped, capacity)


def _checked(
    expert_ids: Tensor, weights: Tensor, by: str, group: Group | None, sizes: Sequence[int] | None
) -> tuple[int, tuple[int, ...]]:
    """This rank, and the number of rows on each rank."""
    rank, world_size = (0, 1) if group is None else place(group)[1:3]
    if expert_ids.dim() != 2 or expert_ids.is_floating_point() or expert_ids.shape != weights.shape:
        raise ValueError(
            f"rank {rank}: wanted integer expert_ids and weights of one shape [T, k], got {tuple(expert_ids.shape)} of "
            f"{expert_ids.dtype} and {tuple(weights.shape)}"
        )
    if by not in RULES:
        raise ValueError(f"rank {rank}: by is {by!r}, must be one of {', '.join(RULES)}")
    known = (expert_ids.shape[0],) * world_size if sizes is None else tuple(int(n) for n in sizes)
    if len(known) != world_size or min(known) < 0 or known[rank] != expert_ids.shape[0]:
        raise ValueError(
            f"rank {rank}: sizes is {list(known)}, wanted {world_size} row counts, {expert_ids.shape[0]} for this rank"
        )
    return rank, known


def _positions(ids: Tensor, num_experts: int, keys: Tensor | None = None) -> Tensor:
    """ids [T, k] -> int64 [T, k]: how many pairs of the same expert come before each, by slot, then by token.

    keys   [T, k]   if given, order by them first, largest first; NaN counts as infinite
    """
    flat = ids.t().reshape(-1)  # slot-major, and every sort below is stable
    bins = torch.where(flat < 0, num_experts, flat)
    order = torch.arange(len(flat), device=ids.device)
    if keys is not None:
        key = keys.t().reshape(-1)
        order = key.masked_fill(key.isnan(), torch.inf).sort(descending=True, stable=True).indices
    bins, by_expert = bins[order].sort(stable=True)
    counts = count(bins, num_experts + 1)
    first = counts.cumsum(0) - counts
    places = torch.arange(len(flat), device=ids.device) - first[bins]
    return torch.zeros_like(flat).scatter(0, order[by_expert], places).view(ids.shape[1], ids.shape[0]).t()


def _of_other_ranks(ids: Tensor, num_experts: int, group: Group | None) -> tuple[Tensor, Tensor]:
    """int64 [T_r, k]: how many pairs of other ranks precede each of this rank's in its expert's order; and T."""
    rows, top_k = ids.shape
    tokens = ids.new_full((1,), rows)
    if group is None:
        return torch.zeros_like(ids), tokens[0]
    rank, world_size = place(group)[1:3]
    slot = torch.arange(top_k, device=ids.device) * num_experts
    mine = count(torch.where(ids < 0, -1, ids + slot), top_k * num_experts)
    table = gather_tokens(torch.cat([mine, tokens])[None], group, (1,) * world_size, LAYER)
    counts = table[:, :-1].view(world_size, top_k, num_experts)
    others = counts.sum(0) - counts[rank]
    before = others.cumsum(0) - others + counts[:rank].sum(0)  # in earlier slots, then on earlier ranks
    return before.view(-1)[ids.clamp(min=0) + slot], table[:, -1].sum()


def _gathered(weights: Tensor, ids: Tensor, group: Group | None, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Both [T_r, k] -> [T, k] of all ranks, in one message: as floats, which can represent any expert id."""
    if group is None:
        return weights, ids
    wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
    both = gather_tokens(torch.cat([wide, ids.to(wide.dtype)], 1), group, sizes, LAYER)
    keys, every = both.split(ids.shape[1], 1)
    return keys, every.long()
