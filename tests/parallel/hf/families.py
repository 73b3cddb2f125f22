"""Small models of every transformers configuration with a tensor-parallel plan and a causal language model."""

import re
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
LATENT = {"head_dim": 4}  # of DeepSeek's attention: that of its rotary keys
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
HALF_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
MORE: dict[str, dict[str, Any]] = {
    "axk1": LATENT,
    "bailing_hybrid": {**LATENT, **HYBRID, "mlp_layer_types": ["dense", "sparse"], "num_experts_per_token": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "deepseek_v2": {"num_experts_per_tok": 2, "head_dim": 4},
    "deepseek_v3": LATENT,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {
        "intermediate_size": [48] * 4,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.5, 0.0] * 2,
        "laurel_rank": 8,
    },
    "granitemoehybrid": HYBRID,
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "kimi_linear": {
        **LATENT,
        **HYBRID,
        "mlp_layer_types": ["dense", "sparse"],
        "num_experts_per_token": 2,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {**LATENT, "zero_expert_num": 2},
    "mimo_v2_flash": {
        "num_key_value_heads": 2,
        "rope_parameters": {"full_attention": HALF_ROTARY, "sliding_attention": HALF_ROTARY},
    },
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 4},
    "qwen3_5_moe_text": HYBRID,
    "qwen3_5_text": HYBRID,
    "qwen3_next": HYBRID,
    "qwen4_exp_text": {"layer_types": ["linear_attention", "indexed_attention"], "hc_lowrank": 8, "ple_embed_dim": 8,
                       "ngram_vocab_size_base": 50, "heads_per_ngram": 2,
                       "make_ngram_vocab_size_divisible_by": 1,
                       "split_ngram_parts": 2, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8,
                       "indexer_budget": 8, "indexer_compress_ratio": 2},
    "youtu": LATENT,
}  # fmt: skip


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
    default = made().to_dict()
    fields = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **_small(default)}
    for part, value in default.items():
        if isinstance(value, dict) and part.endswith("_config") and not part.startswith("per_layer"):
            fields[part] = {**value, **_small(value)}
    return made(**{**fields, **MORE.get(name, {}), **changes})


def _small(fields: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field, value in fields.items():
        if type(value) is int:
            for pattern, to in SMALL.items():
                if re.fullmatch(pattern, field):
                    found[field] = to
    return found


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
