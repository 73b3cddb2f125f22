"""Small models of every transformers configuration with a tensor-parallel plan and a causal language model."""

from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from fusedtp.parallel.twin import small_config

transformers.logging.set_verbosity_error()

# What the rules above do not give, or what their values contradict.
MORE: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 4},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
}

# Families without a small configuration -> why.
LARGE = {"phi4_multimodal": "its vision and audio towers have fixed widths"}


def families() -> list[str]:
    """Names of the configurations, as in AutoConfig."""
    return [
        name
        for name in CONFIG_MAPPING
        if getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None)
        and CONFIG_MAPPING[name] in MODEL_FOR_CAUSAL_LM_MAPPING
    ]


def config_of(name: str, **changes: Any) -> Any:
    more = MORE.get(name, {})
    return small_config(CONFIG_MAPPING[name](), 4, **{**more, **changes})


def model_of(name: str, attention: str | None = None, **changes: Any) -> nn.Module:
    """A small one in fp32 with random weights, the same on every rank; also norms and biases are random."""
    config = config_of(name, **changes)
    if attention is not None:
        config._attn_implementation = attention
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model.eval()
