"""Routing in a second, slow version from the papers, in fp64: expert by expert and token by token.

All functions take the logits [T, E] of all tokens of all ranks; there are no ranks here.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor


def scores_of(logits: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return logits.exp() / logits.exp().sum(1, keepdim=True)
    return 1.0 / (1.0 + (-logits).exp())


def top(values: list[float], k: int, allowed: list[int] | None = None) -> list[int]:
    """The indices of the k largest values; of equal values, the lower index comes first."""
    places = range(len(values)) if allowed is None else allowed
    return sorted(places, key=lambda i: (-values[i], i))[:k]


def top_in_groups(values: list[float], k: int, groups: int, top_groups: int, how: str) -> list[int]:
    each = len(values) // groups
    ranked = []
    for g in range(groups):
        inside = sorted(values[g * each : (g + 1) * each], reverse=True)
        ranked.append(inside[0] if how == "max" else sum(inside[:2]))
    open_to = top(ranked, top_groups)
    return top(values, k, [i for i in range(len(values)) if i // each in open_to])


def choose(logits: Tensor, options: dict, bias: Tensor | None = None) -> Tensor:
    """The chosen experts, int [T, k], for the options of a Router."""
    k, groups = options["top_k"], options.get("num_groups", 1)
    key = logits if options.get("score_after_topk") else scores_of(logits, options.get("score", "softmax"))
    if bias is not None:
        key = key + bias
    limits = groups, options.get("top_groups", 1), options.get("group_score", "top2")
    rows = [top_in_groups(row, k, *limits) for row in key.tolist()]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), k)


def weights_of(logits: Tensor, ids: Tensor, options: dict) -> Tensor:
    score = options.get("score", "softmax")
    if options.get("score_after_topk"):
        chosen = scores_of(logits.gather(1, ids), score)
    else:
        chosen = scores_of(logits, score).gather(1, ids)
    if options.get("normalize"):
        chosen = chosen / chosen.sum(1, keepdim=True)
    return chosen * options.get("scale", 1.0)


def shares(logits: Tensor, score: str) -> Tensor:
    """The scores of each token, normalized to a sum of one."""
    scores = scores_of(logits, score)
    return scores / scores.sum(1, keepdim=True)


def balance_loss(logits: Tensor, ids: Tensor, score: str, kind: str) -> Tensor:
    """switch: Fedus et al. 2021, E sum_i f_i P_i.  gshard: Lepikhin et al. 2020, mean_i of c_i / S times m_i."""
    (tokens, experts), means = logits.shape, shares(logits, score).mean(0)
    total = logits.sum() * 0
    for i in range(experts):
        if kind == "switch":
            f = sum(e == i for row in ids.tolist() for e in row) / (tokens * ids.shape[1])
            total = total + experts * f * means[i]
        else:
            total = total + sum(row[0] == i for row in ids.tolist()) / tokens * means[i] / experts
    return total


def sequence_loss(logits: Tensor, top_k: int, score: str, batch: int, length: int) -> Tensor:
    """DeepSeek-V3, equations 17 to 20, for each sequence; returns the mean over sequences."""
    experts, total = logits.shape[1], logits.sum() * 0
    for rows in logits.split(length):
        means = shares(rows, score).mean(0)
        tops = [top(scores, top_k) for scores in scores_of(rows, score).tolist()]
        for i in range(experts):
            f = experts / (top_k * length) * sum(i in chosen for chosen in tops)
            total = total + f * means[i]
    return total / batch


def z_loss(logits: Tensor) -> Tensor:
    """Zoph et al. 2022, equation 5."""
    return logits.exp().sum(1).log().square().mean()


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """Scale rows to sums of 1, then columns to sums of T / E; repeat."""
    plan = logits.exp()
    for _ in range(iterations):
        plan = plan / plan.sum(1, keepdim=True)
        plan = plan / plan.sum(0, keepdim=True) * (plan.shape[0] / plan.shape[1])
    return plan


def dropped(ids: Tensor, weights: Tensor, experts: int, factor: str, by: str) -> set[tuple[int, int]]:
    """The (token, slot) pairs that no expert keeps: each expert keeps the first ones of a sorted list."""
    tokens, k = ids.shape
    capacity = math.ceil(Fraction(factor) * k * tokens / experts)
    gone = set()
    for expert in range(experts):
        pairs = [(slot, t) for slot in range(k) for t in range(tokens) if ids[t, slot] == expert]
        if by == "probability":
            pairs.sort(key=lambda pair: -weights[pair[1], pair[0]].item())
        gone |= {(t, slot) for slot, t in pairs[capacity:]}
    return gone
