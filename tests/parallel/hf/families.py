"""Small models of every transformers configuration with a tensor-parallel plan and a causal language model."""

import re
from functools import cache
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

transformers.logging.set_verbosity_error()

# Field of a configuration -> its value in a small one. Four heads of eight, four experts of which a token gets two.
SMALL: dict[str, Any] = {
    r"vocab_size|vocab_size_per_layer_input": 50,
    r"hidden_size|d_model|n_embd": 32,
    r"hidden_size_per_layer_input": 8,
    r"num_hidden_layers|n_layer|num_layers": 2,
    r"num_(attention|key_value|global_key_value)_heads|n_head": 4,
    r"(global_|swa_)?head_dim|kv_channels|(swa_)?v_head_dim|qk_nope_head_dim": 8,
    r"qk_rope_head_dim": 4,
    r"qk_head_dim": 12,
    r"(q|o)_lora_rank": 16,
    r"kv_lora_rank": 12,
    r".*intermediate_size.*|.*ffn_hidden_size.*": 48,
    r"num_experts|n_routed_experts|num_local_experts|moe_num_experts": 4,
    r"n_group|topk_group|num_expert_group.*": 1,
    r"num_experts_per_tok|moe_top_?k|top_k_experts|moe_k|experts_per_token": 2,
    r"linear_num_(key|value)_heads": 4,
    r"linear_(key|value)_head_dim": 8,
    r"max_position_embeddings": 64,
    r"sliding_window": 8,
    r"index_n_heads|index_topk": 4,
    r"index_head_dim": 8,
    r"mamba_(n|num)_heads|mamba_d_state|ssm_state_size|mamba_d_head|mamba_head_dim": 8,
    r"mamba_n_groups|n_groups": 1,
    r"mamba_chunk_size|chunk_size": 8,
}
# What the rules above do not give, or what their values contradict.
MORE: dict[str, dict[str, Any]] = {}


def families() -> list[str]:
    """Names of the configurations, as in AutoConfig."""
    return [
        name
        for name in CONFIG_MAPPING
        if getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None)
        and CONFIG_MAPPING[name] in MODEL_FOR_CAUSAL_LM_MAPPING
    ]


def config_of(name: str, **changes: Any) -> Any:
    made = CONFIG_MAPPING[name]
    fields: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for field, value in made().to_dict().items():
        if type(value) is int:
            fields |= {field: to for pattern, to in SMALL.items() if re.fullmatch(pattern, field)}
    return made(**{**fields, **MORE.get(name, {}), **changes})


def model_of(name: str, attention: str = "sdpa", **changes: Any) -> nn.Module:
    """A small one in fp32 with random weights, the same on every rank; also norms and biases are random."""
    config = config_of(name, **changes)
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model.eval()
