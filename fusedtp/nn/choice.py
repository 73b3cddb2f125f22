"""A top k that is the same on every device. It uses stable sorts, since torch.topk leaves the order of ties open."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP_SCORES = ("top2", "max")


def best(key: Tensor, k: int) -> Tensor:
    """key [..., E] -> int64 [..., k]: indices of the largest keys, largest first; ties go to the lower index.

    NaN counts as infinite (otherwise its sign bit would decide on a GPU), so that any row gives k different indices.
    """
    key = key.masked_fill(key.isnan(), torch.inf)
    return key.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def best_in_groups(key: Tensor, k: int, num_groups: int, top_groups: int, group_score: str) -> Tensor:
    """key [T, E] -> int64 [T, k]: `best` among the experts of each row's best groups.

    group_score   score of a group of E / num_groups neighbouring experts: the largest key ("max"), or the sum of the
                  two largest ("top2"; of the only one if groups have one expert). Ties go to the first group.
    Source: DeepSeek-V2, arXiv 2405.04434, section 2.2.2; DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
    """
    tokens, num_experts = key.shape
    each = num_experts // num_groups
    grouped = key.view(tokens, num_groups, each)
    if group_score == "max":
        score = grouped.amax(-1)
    else:
        score = grouped.topk(min(2, each), dim=-1).values.sum(-1)
    # Ascending, so that indices among the candidates are in the order of ids. Only candidates are compared: an expert
    # of another group can never be chosen, whatever its key.
    groups = best(score, top_groups).sort(-1).values
    candidates = groups[..., None] * each + torch.arange(each, device=key.device)
    candidates = candidates.view(tokens, top_groups * each)
    return candidates.gather(1, best(key.gather(1, candidates), k))
