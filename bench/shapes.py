"""Shapes of published models, and the matmuls of one of their layers on a rank.

`source` names the repository on huggingface.co with these numbers in its config.json. All numbers were checked against
copies of these files:

    llama3-*, llama3.2-3b       Lightning-AI/litgpt on GitHub, litgpt/config.py, which names the config.json of each;
                                that of the 405B first had 16 kv heads, and 8 since a revision
    llama3.2-3b, qwen2.5-14b,   whole config.json in citsjtu2020/LLM-Prof on GitHub, sglang/Model_Config.md
    qwen3-4b, -8b, -32b
    qwen3-0.6b                  published printouts of transformers' AutoConfig of it
    qwen2.5-*                   pytorch/torchtune on GitHub, torchtune/models/qwen2_5/_model_builders.py
    mistral-7b                  shapes of its weights; and its model card: "Extended vocabulary to 32768"
    phi-4                       a whole config.json, reprinted in a tutorial
    experts                     a printed MixtralConfig of Mixtral-8x7B-Instruct-v0.1, reprinted config.json of others
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Model:
    """Fields of config.json: hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, ..."""

    name: str
    source: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


@dataclass(frozen=True)
class Layer:
    """y [T, N] = x [T, K] @ w [N, K].T on one rank of `tp`.

    kind   column   N is split: x is gathered first        (q, k, v in one; gate and up in one)
           row      K is split: y is summed afterwards     (o; down)
           square   not split
    """

    model: str
    name: str
    kind: str
    k: int
    n: int


MODELS = {
    model.name: model
    for model in (
        Model("llama3-8b", "meta-llama/Meta-Llama-3-8B", 4096, 14336, 32, 8, 128, 128256),
        Model("llama3-70b", "meta-llama/Meta-Llama-3-70B", 8192, 28672, 64, 8, 128, 128256),
        Model("llama3-405b", "meta-llama/Llama-3.1-405B", 16384, 53248, 128, 8, 128, 128256),
        Model("llama3.2-3b", "meta-llama/Llama-3.2-3B", 3072, 8192, 24, 8, 128, 128256),
        Model("qwen3-0.6b", "Qwen/Qwen3-0.6B", 1024, 3072, 16, 8, 128, 151936),
        Model("qwen3-4b", "Qwen/Qwen3-4B", 2560, 9728, 32, 8, 128, 151936),
        Model("qwen3-8b", "Qwen/Qwen3-8B", 4096, 12288, 32, 8, 128, 151936),
        Model("qwen3-32b", "Qwen/Qwen3-32B", 5120, 25600, 64, 8, 128, 151936),
        Model("qwen2.5-14b", "Qwen/Qwen2.5-14B", 5120, 13824, 40, 8, 128, 152064),
        Model("qwen2.5-72b", "Qwen/Qwen2.5-72B", 8192, 29568, 64, 8, 128, 152064),
        Model("mistral-7b", "mistralai/Mistral-7B-v0.3", 4096, 14336, 32, 8, 128, 32768),
        Model("phi-4", "microsoft/phi-4", 5120, 17920, 40, 10, 128, 100352),
        Model("tiny", "", 64, 160, 4, 2, 16, 509),  # not a real model: for quick runs of the suites
    )
}


def model_of(name: str) -> Model:
    """A model by name. Raises ValueError that lists the known names."""
    if name not in MODELS:
        raise ValueError(
            f"unknown shape {name!r}: it must be one of {', '.join(MODELS)}, or square-N for an N x N matrix"
        )
    return MODELS[name]


def layers(name: str, tp: int) -> list[Layer]:
    """The matmuls of a model's block on one rank of `tp`; for "square-N", one of N x N.

    Raises ValueError for an unknown name, or if heads or widths do not split into `tp` equal parts.
    If there are fewer kv heads than ranks, they are repeated, one per rank.
    """
    if name.startswith("square-") and name[7:].isdigit() and int(name[7:]) > 0:
        size = int(name[7:])
        return [Layer(name, "square", "square", size, size)]
    model = model_of(name)
    if model.heads % tp or model.intermediate % tp or (model.kv_heads % tp and tp % model.kv_heads):
        raise ValueError(
            f"{name} does not split over {tp} ranks: {model.heads} heads, {model.kv_heads} kv heads, "
            f"intermediate size {model.intermediate}"
        )
    kv_heads = max(1, model.kv_heads // tp)
    qkv = (model.heads // tp + 2 * kv_heads) * model.head_dim
    width = model.intermediate // tp
    return [
        Layer(name, "qkv", "column", model.hidden, qkv),
        Layer(name, "gate_up", "column", model.hidden, 2 * width),
        Layer(name, "o", "row", model.heads // tp * model.head_dim, model.hidden),
        Layer(name, "down", "row", width, model.hidden),
    ]


# -- mixtures of experts ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experts:
    """Fields of config.json: hidden_size, intermediate_size of one expert, number of experts, experts per token."""

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
TINY_EXPERTS = Experts("tiny-experts", "", 64, 40, 4, 2)  # not a real model: for quick runs
SKEWS = ("balanced", "skewed")


def shared_out(rows: int, experts: int, skew: str) -> tuple[int, ...]:
    """Rows per expert. balanced: as equal as possible; skewed: expert e gets a share proportional to 1 / (1 + e)."""
    parts = [1.0 if skew == "balanced" else 1 / (1 + e) for e in range(experts)]
    ends, total, so_far = [0], sum(parts), 0.0
    for part in parts:
        so_far += part
        ends.append(round(rows * so_far / total))
    return tuple(b - a for a, b in pairwise(ends))
