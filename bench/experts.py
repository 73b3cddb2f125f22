"""Sizes of published mixtures of experts, and how rows are shared out among experts.

`source` names the repository on huggingface.co whose config.json has these numbers. They were compared with what others
keep of these files: a printed MixtralConfig of Mixtral-8x7B-Instruct-v0.1 and reprinted config.json of the other two.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Experts:
    """As in config.json: hidden_size, intermediate_size of one expert, number of experts, experts of a token."""

    name: str
    source: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int


EXPERTS = (
    Experts("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1", 4096, 14336, 8, 2),
    Experts("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 2048, 768, 128, 8),
    Experts("deepseek-v3", "deepseek-ai/DeepSeek-V3", 7168, 2048, 256, 8),
)
TINY = Experts("tiny-experts", "", 64, 40, 4, 2)  # no model: for a quick run
SKEWS = ("balanced", "skewed")


def shared_out(rows: int, experts: int, skew: str) -> tuple[int, ...]:
    """Rows of each expert. balanced: equal, as far as they can be; skewed: expert e has a part like 1 / (1 + e)."""
    parts = [1.0 if skew == "balanced" else 1 / (1 + e) for e in range(experts)]
    ends, total, so_far = [0], sum(parts), 0.0
    for part in parts:
        so_far += part
        ends.append(round(rows * so_far / total))
    return tuple(b - a for a, b in pairwise(ends))
