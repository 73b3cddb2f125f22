"""Small models of every transformers configuration that has a tensor-parallel plan, and of some that have none.

families    have a plan and a causal language model
towers      have a plan but no causal language model: text models of vision-language models, and encoders
UNPLANNED   causal language models without a plan; their plan is inferred
"""

import importlib
import inspect
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from fusedtp.parallel.twin import small_config

transformers.logging.set_verbosity_error()


def _rotary(*sections: int, **more: Any) -> dict[str, Any]:
    """Multimodal rotary embeddings: each token has three positions."""
    own = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), **more}
    return {"rope_parameters": own}


# Extra settings, where small_config sets no value or one that contradicts the rest.
MORE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "ernie4_5_vl_moe_text": _rotary(1, 1, 2),
    **dict.fromkeys(("glm4v_text", "glm_image_text", "glm_ocr_text"), _rotary(2, 1, 1)),
    "glm4v_moe_text": _rotary(1, 1, 0, partial_rotary_factor=0.5),
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 4},
    "neomme": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    },
    **dict.fromkeys(("paddleocr_vl_text", "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text"), _rotary(2, 1, 1)),
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "step3p5": {"sliding_window": 8},
}

# Families that have no small configuration -> reason.
LARGE = {"phi4_multimodal": "its vision and audio towers have fixed widths"}

# Configurations with a plan that are neither causal language models nor text towers -> reason.
OTHERS = {
    **dict.fromkeys(
        (
            "deepseek_ocr2_encoder",
            "dots3_note_vision_encoder",
            "ernie4_5_vl_moe_vision",
            "gemma4_vision",
            "llama4_vision_model",
            "muse_glimmer_vision",
        ),
        "takes images",
    ),
    **dict.fromkeys(("higgs_audio_v2", "muse_glimmer", "muse_spark"), "a whole model of images or sounds"),
    **dict.fromkeys(
        (
            "muse_glimmer_assistant",
            "qwen3_omni_moe_talker_code_predictor",
            "qwen3_omni_moe_talker_text",
            "voxtral_realtime_text",
        ),
        "takes what another model computed",
    ),
    **dict.fromkeys(
        ("t5_gemma_module", "t5gemma2_decoder", "t5gemma2_text"), "half of an encoder-decoder's configuration"
    ),
}


# transformers' plan covers only the head.
HEAD_ONLY = ("bamba", "diffllama", "gpt_oss")


UNPLANNED = (
    "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "bitnet",
    "blenderbot-small", "bloom", "camembert", "codegen", "cpmant", "ctrl", "data2vec-text", "electra", "ernie",
    "falcon", "falcon_mamba", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox_japanese", "gptj", "jetmoe",
    "mamba", "mbart", "megatron-bert", "modernbert-decoder", "moshi", "mpt", "mvp", "openai-gpt", "opt", "pegasus",
    "persimmon", "prophetnet", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "stablelm",
    "xglm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod",
)  # fmt: skip


def _planned(causal: bool) -> list[str]:
    return [
        name
        for name in CONFIG_MAPPING
        if (name in HEAD_ONLY or getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None))
        and (CONFIG_MAPPING[name] in MODEL_FOR_CAUSAL_LM_MAPPING) == causal
    ]


def families() -> list[str]:
    """Configuration names, as in AutoConfig."""
    return _planned(causal=True)


def towers() -> list[str]:
    """Configuration names, as in AutoConfig."""
    return [name for name in _planned(causal=False) if name not in OTHERS]


def class_of(name: str) -> type[PreTrainedModel]:
    """The model class: the causal language model, or the tower."""
    config = CONFIG_MAPPING[name]
    if config in MODEL_FOR_CAUSAL_LM_MAPPING:
        found: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[config]
        return found
    module = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    classes = [
        each
        for _, each in inspect.getmembers(module, inspect.isclass)
        if issubclass(each, PreTrainedModel) and getattr(each, "config_class", None) is config
    ]
    return next(each for each in classes if each.__name__.endswith("Model") and "PreTrained" not in each.__name__)


def config_of(name: str, **changes: Any) -> Any:
    whole, more = CONFIG_MAPPING[name](), MORE.get(name, {})
    text = whole.get_text_config()  # AutoModelForCausalLM uses it too
    config = text if class_of(name).config_class is type(text) else whole
    return small_config(config, 4, **{**more, **changes})


def model_of(name: str, attention: str | None = None, **changes: Any) -> nn.Module:
    """A small fp32 model with random weights, equal on every rank."""
    config = config_of(name, **changes)
    if attention is not None:
        config._attn_implementation = attention
    return random_model(class_of(name), config)


def random_model(kind: Any, config: Any) -> nn.Module:
    """A model of this class with random weights, equal on every rank. Norms and biases are random too."""
    torch.manual_seed(0)
    model: nn.Module = kind._from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model.eval()
