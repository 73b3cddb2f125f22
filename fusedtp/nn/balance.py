"""Load balancing of experts: counts, auxiliary losses, the loss-free bias, and sinkhorn.

T tokens on all ranks, E experts, k choices per token; c_i of the k T choices are expert i; p_ti is token t's
probability of expert i: its scores, divided by their sum.

    switch_loss      E / (k T^2)  sum_i c_i sum_t p_ti               1 if the load is even, up to E
    gshard_loss      1 / (E T^2)  sum_i c_i sum_t p_ti               c_i counts first choices only
    sequence_loss    E / (k S^2)  sum_i c_i sum_t p_ti               per sequence of S tokens; mean over sequences
    log_z_squares    1 / T        sum_t (log sum_i exp logit_ti)^2
    update_bias_     b_i += u sign(mean_j c_j - c_i)

The losses need sums over all ranks, which take one message: `over_ranks`. Counts have no gradient.

Note [Gradients of a global loss]
Every rank computes the loss over all ranks' tokens. The p_ti of this rank's tokens enter the sums once, and the sum's
backward is the identity: so a rank's gradient is that with respect to its own tokens, and gradients of replicated
parameters are summed over ranks, as everywhere in this library. The result equals that of one process with all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from fusedtp.comm import Group, place, propagate_errors
from fusedtp.ops.tokens import all_reduce_sum, gather_tokens

from .layout import TokenLayout

LOSSES = ("balance_loss", "sequence_loss", "z_loss")
KINDS = ("switch", "gshard")  # of balance_loss
LAYER = "router"  # the layer name that messages are counted under


def propagating_errors(group: Group | None) -> AbstractContextManager[None]:
    """A context for checks that may fail on this rank only: its peers then raise too, instead of waiting."""
    if group is None or torch.compiler.is_compiling():
        return nullcontext()
    return propagate_errors(place(group))


def count(indices: Tensor, size: int) -> Tensor:
    """How often each of 0 .. size - 1 occurs: int64 [size]. Negative indices are not counted.

    Integer sums do not depend on their order; unlike with torch.bincount, the shape does not depend on the data.
    """
    flat = indices.reshape(-1).long()
    bins = torch.where(flat < 0, size, flat)
    return flat.new_zeros(size + 1).scatter_add(0, bins, torch.ones_like(bins))[:size]


def max_violation(counts: Tensor) -> Tensor:
    """(max_i c_i - mean c) / mean c over the last dim, fp32; 0 if there are no tokens.

    Source: MaxVio of Wang et al. 2024, arXiv 2408.15664.
    """
    mean = counts.double().mean(-1)
    return ((counts.amax(-1) - mean) / mean.clamp(min=1e-30)).float()


def over_ranks(parts: Mapping[str, Tensor], group: Group | None) -> dict[str, Tensor]:
    """The sum of every part over the ranks of `group`, in one message; its backward is the identity.

    In fp64: counts up to 2**53 are exact, and the split over ranks hardly affects the other sums.
    """
    wide = {name: part.double() for name, part in parts.items()}
    if group is None:
        return wide
    flat = torch.cat([part.reshape(-1) for part in wide.values()])
    pieces = all_reduce_sum(flat, group, LAYER).split([part.numel() for part in wide.values()])
    return {name: piece.view(part.shape) for (name, part), piece in zip(wide.items(), pieces, strict=True)}


def mean_over_ranks(value: Tensor, group: Group | None) -> Tensor:
    """The mean of one number per rank over `group`, fp64."""
    total = over_ranks({"value": value}, group)["value"]
    return total if group is None else total / place(group).world_size


# -- losses ----------------------------------------------------------------------------------------------------------


def switch_loss(chosen: Tensor, probability: Tensor, tokens: Tensor, top_k: int) -> Tensor:
    """chosen, probability [E]: sums over all ranks' tokens.

    Source: Fedus et al. 2021, "Switch Transformers", equations 4 to 6 without alpha, there for k = 1: the fraction of
    choices that fall on an expert times its mean probability, summed, times E.
    """
    return (chosen * probability).sum() * (chosen.numel() / top_k) / tokens.clamp(min=1).square()


def gshard_loss(first: Tensor, probability: Tensor, tokens: Tensor) -> Tensor:
    """first [E]: number of tokens, over all ranks, with each expert as their first choice.

    Source: Lepikhin et al. 2020, "GShard", section 2.2 and algorithm 1: the auxiliary loss before its coefficient.
    """
    return (first * probability).sum() / first.numel() / tokens.clamp(min=1).square()


def sequence_loss(probability: Tensor, expert_ids: Tensor, layout: TokenLayout, group: Group | None = None) -> Tensor:
    """This rank's part of the sum over sequences; a scalar, fp64.

    probability   [T_r, E]   of this rank's tokens
    expert_ids    [T_r, k]   the top k by unbiased scores, as equation 18 has it
    group         the ranks over which the layout splits its tokens: a sequence's counts are summed over them
    Source: DeepSeek-V3, arXiv 2412.19437, equations 17 to 20 without alpha.
    """
    (rows, num_experts), length, top_k = probability.shape, max(layout.length, 1), expert_ids.shape[1]
    of = torch.arange(layout.start, layout.start + rows, device=probability.device) // length
    counts = count(of[:, None] * num_experts + expert_ids, layout.batch * num_experts)
    if layout.is_split:
        counts = over_ranks({"counts": counts}, group)["counts"]
    share = (counts.double() * (num_experts / (top_k * length))).to(probability.dtype)
    return (probability * share.view(layout.batch, num_experts)[of]).sum(dtype=torch.float64) / length


def log_z_squares(logits: Tensor) -> Tensor:
    """logits [T_r, E] -> the sum over tokens of (log sum exp)^2; a scalar, fp64.

    Source: Zoph et al. 2022, "ST-MoE", equation 5.
    """
    return logits.logsumexp(-1).square().sum(dtype=torch.float64)


class Chosen(NamedTuple):
    """For this rank's tokens: logits and probability [T_r, E], the chosen experts [T_r, k], and the experts that scores
    alone would choose."""

    logits: Tensor
    probability: Tensor
    expert_ids: Tensor
    unbiased_ids: Tensor


def losses(
    of: Chosen,
    wanted: Mapping[str, float],
    kind: str,
    layout: TokenLayout | None,
    group: Group | None,
    sequence_group: Group | None,
) -> dict[str, Tensor]:
    """The losses with a nonzero coefficient in `wanted`, without that coefficient, over all ranks: fp64 scalars.

    All sums over `group` take one message.
    """
    rows, num_experts = of.logits.shape
    parts = {"tokens": of.logits.new_full((), float(rows))}
    if wanted["balance_loss"]:
        parts["chosen"] = count(of.expert_ids if kind == "switch" else of.expert_ids[:, :1], num_experts)
        parts["probability"] = of.probability.sum(0, dtype=torch.float64)
    if wanted["sequence_loss"]:
        assert layout is not None
        among = group if sequence_group is None else sequence_group
        parts["sequence_loss"] = sequence_loss(of.probability, of.unbiased_ids, layout, among)
        counted_here = layout.rank == 0 or not layout.is_split
        parts["sequences"] = of.logits.new_full((), float(layout.batch if counted_here else 0))
    if wanted["z_loss"]:
        parts["z_loss"] = log_z_squares(of.logits)
    sums = over_ranks(parts, group)
    found, tokens = {}, sums["tokens"]
    if wanted["balance_loss"]:
        if kind == "switch":
            top_k = of.expert_ids.shape[1]
            found["balance_loss"] = switch_loss(sums["chosen"], sums["probability"], tokens, top_k)
        else:
            found["balance_loss"] = gshard_loss(sums["chosen"], sums["probability"], tokens)
    if wanted["sequence_loss"]:
        found["sequence_loss"] = sums["sequence_loss"] / sums["sequences"].clamp(min=1)
    if wanted["z_loss"]:
        found["z_loss"] = sums["z_loss"] / tokens.clamp(min=1)
    return found


# -- without a loss --------------------------------------------------------------------------------------------------


@torch.no_grad()
def update_bias_(bias: Tensor, counts: Tensor, rate: float, group: Group | None = None) -> Tensor:
    """Once per step, after the optimizer: more bias for experts with fewer tokens than the mean, less for the others.

    bias     [..., E]   changed in place and returned; biases of all layers may be stacked, for a single message
    counts   [..., E]   tokens per expert of this rank, summed over the step's microbatches
    rate     u, 0.001 in both papers
    group    the ranks whose tokens count; None: counts are complete
    Raises ValueError for shapes that differ or a negative rate.
    Source: Wang et al. 2024, arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
    """
    if bias.shape != counts.shape or not rate >= 0:
        raise ValueError(
            f"wanted bias and counts of one shape and a rate of at least 0, got {tuple(bias.shape)}, "
            f"{tuple(counts.shape)} and {rate}"
        )
    total = over_ranks({"counts": counts}, group)["counts"]
    gap = total.sum(-1, keepdim=True) - total * total.shape[-1]  # E (mean - c), of integers
    return bias.add_(gap.sign().to(bias.dtype), alpha=rate)


@torch.no_grad()
def sinkhorn(logits: Tensor, iterations: int, group: Group | None = None) -> Tensor:
    """The log of exp(logits) after alternately scaling rows and columns, which divides tokens evenly among experts.

    logits   [T_r, E]
    return   [T_r, E]   its exp sums to exactly T / E in every column and to nearly 1 in every row, closer with more
                        iterations. The largest entry of a row is its token's expert.
    Columns are summed over the ranks of `group`, with one all-gather of [E + 1] per iteration. Logs are used so that no
    entry overflows or underflows. The number of iterations is fixed, so that the device never waits for the host. A
    token with logits that are not finite is treated as having no preference, so that it does not change the expert of
    any other token; its own logits are returned unchanged.
    Source: Sinkhorn and Knopp 1967; for experts, Clark et al. 2022, "Unified Scaling Laws for Routed Language Models",
    S-BASE.
    """
    usable = logits.isfinite().all(1, keepdim=True)
    plan, rows = logits.where(usable, 0.0), logits.new_full((1,), float(logits.shape[0]))
    for _ in range(iterations):
        plan = plan - plan.logsumexp(1, keepdim=True)
        columns = _every_rank(torch.cat([plan.logsumexp(0), rows])[None], group)
        even = (columns[:, -1].sum() / logits.shape[1]).log()
        plan = plan - columns[:, :-1].logsumexp(0) + even
    return plan.where(usable, logits)


def _every_rank(x: Tensor, group: Group | None) -> Tensor:
    """x [1, n] -> [W, n]."""
    if group is None:
        return x
    return gather_tokens(x, group, (1,) * place(group).world_size, LAYER)
