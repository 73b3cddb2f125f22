"""A tiny copy of a transformers model: the same classes, layer kinds and plan; small widths, random weights.

heads           as many as the ranks need, so that they share query and kv heads as in the model
widths          8 per head, 8 times the number of heads for the hidden size, one and a half times that in between
layers          one of each kind that the configuration lists, at least two
experts         as many as ranks, at least four; two per token

The copy is built from class and configuration. So each module of the model must have the same code as its counterpart
in the copy: class, forward, hooks, settings. Otherwise OtherCode is raised: a proof of the copy would mean nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from .foreign_styles import is_linear
from .plan import generic


class NoTwin(Exception):
    """Why a model has no small copy."""


class OtherCode(NoTwin):
    """Why a module of the model has other code than its counterpart in a small copy of the model's class."""


TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
# Fields that count heads but are kept, so the width must be divisible by them.
HEADS = ("encoder_attention_heads", "decoder_attention_heads", "attention_heads", "num_heads")


def small_fields(fields: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Field of a configuration -> its small value."""
    heads, kv_heads = _heads(fields, ranks)
    others = [fields[name] for name in HEADS if type(fields.get(name)) is int and 8 * heads % fields[name]]
    values: dict[str, Any] = {
        r"vocab_size|vocab_size_per_layer_input|decoder_vocab_size": 50,
        r"hidden_size|d_model|n_embd|dim": 8 * math.lcm(heads, *others),
        r"hidden_size_per_layer_input": 8,
        r"num_attention_heads|n_head|n_heads|linear_num_heads": heads,
        r"num_(key_value|global_key_value)_heads": kv_heads,
        r"(global_|swa_|linear_)?head_dim|kv_channels|(swa_)?v_head_dim|qk_head_dim": 8,
        r"projector_(in|out)put_dim|vision_output_dim": 8 * heads,
        r"qk_(nope|rope)_head_dim": 4,
        r"(q|o)_lora_rank": 16,
        r"kv_lora_rank|laurel_rank|hc_lowrank": 12,
        r".*intermediate_size.*|.*ffn_hidden_size.*|n_inner|((en|de)coder_)?ffn_dim|d_ff": 12 * heads,
        r"(en|de)coder_layers|num_decoder_layers|(en|de)coder_num_hidden_layers|depth": 2,
        r"num_experts|n_routed_experts|num_local_experts|moe_num_experts|zero_expert_num": max(ranks, 4),
        r"n_group|topk_group|num_expert_group.*": 1,
        r"num_experts_per_tok(en)?|moe_top_?k|top_k_experts|moe_k|experts_per_token": 2,
        r"linear_num_(key|value)_heads": heads,
        r"linear_(key|value)_head_dim": 8,
        r"max_position_embeddings|n_positions|n_ctx|max_(source|target)_positions": 64,
        r"sliding_window": 8,
        r"index_n_heads|index_topk": 4,
        r"index_head_dim": 8,
        r"index_kpool": 2,
        r"mamba_(n|num)_heads|mamba_d_state|ssm_state_size|mamba_d_head|mamba_head_dim": 8,
        r"mamba_dt_rank": 4,
        r"mamba_n_groups|n_groups": 1,
        r"mamba_chunk_size|chunk_size": 8,
        r".*layer_period|.*_interval|layer_group_size": 2,
        r".*layer_offset": 1,
    }
    found: dict[str, Any] = {}
    for field, value in fields.items():
        if type(value) is int and (value or not field.endswith("head_dim")):
            found |= {field: to for pattern, to in values.items() if re.fullmatch(pattern, field)}  # noqa: B035
    for field in ("first_k_dense_replace", "num_dense_layers"):
        if fields.get(field):
            found[field] = 1
    if fields.get("mlp_only_layers"):
        found["mlp_only_layers"] = [0]
    number, width, expand, hidden = map(fields.get, ("mamba_n_heads", "mamba_d_head", "mamba_expand", "hidden_size"))
    if isinstance(width, int) and number and expand and number * width == expand * hidden:  # some models require it
        found["mamba_d_head"] = expand * found["hidden_size"] // found["mamba_n_heads"]
    if fields.get("qk_rope_head_dim") and fields.get("head_dim") == fields["qk_rope_head_dim"]:
        found["head_dim"] = found["qk_rope_head_dim"]
    if "num_kv_shared_layers" in fields:
        found["num_kv_shared_layers"] = 0
    if "num_layers_per_stack" in fields:
        found["num_layers_per_stack"] = None
    if fields.get("moe_num_experts") and isinstance(fields["moe_num_experts"], list):
        found["moe_num_experts"] = [max(ranks, 4) for _ in fields["moe_num_experts"]]
    return found | _image(fields) | _rotary(fields, found) | _layers(fields, ranks)


def _image(fields: dict[str, Any]) -> dict[str, Any]:
    """Images of 4 x 4 patches, unless the model attends within windows or merges patches from stage to stage."""
    size: Any = fields.get("image_size")
    patch: Any = fields.get("patch_size")
    if not isinstance(patch, int | list) or type(size) is not type(patch) or fields.keys() & {"window_size", "depths"}:
        return {}
    return {"image_size": 4 * patch if isinstance(patch, int) else [4 * each for each in patch]}


def small_parts(fields: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Nested configuration -> the same, small, with special tokens of the small vocabulary."""
    found: dict[str, Any] = {}
    for part, value in fields.items():
        if isinstance(value, dict) and "model_type" in value:
            tokens = {name: i for i, name in enumerate(TOKENS) if value.get(name) is not None}
            found[part] = {**value, **small_fields(value, ranks), **small_parts(value, ranks), **tokens}
    return found


def _rotary(fields: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """For multi-section rotary embeddings: sections that add up to half of the small head's rotated features."""
    found: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        own = fields.get(name)
        if isinstance(own, dict) and own.get("mrope_section"):
            size = small.get("head_dim") or small["hidden_size"] // small["num_attention_heads"]
            half = int(size * own.get("partial_rotary_factor", fields.get("partial_rotary_factor") or 1)) // 2
            count = len(own["mrope_section"])
            sections = [half // count] * (count - 1)
            found[name] = {**own, "mrope_section": [*sections, half - sum(sections)]}
    return found


def _heads(fields: dict[str, Any], ranks: int) -> tuple[int, int]:
    """Numbers of query and kv heads that the ranks share in the same way as the model's own."""
    heads = fields.get("num_attention_heads") or fields.get("n_head") or ranks
    kv_heads = fields.get("num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        return max(ranks, 2), max(ranks, 2)
    if kv_heads == heads:
        return (max(ranks, 2),) * 2
    if kv_heads < ranks:
        return max(ranks, 2), kv_heads
    return 2 * ranks, ranks


def _layers(fields: dict[str, Any], ranks: int) -> dict[str, Any]:
    """One layer of each kind (at least two), and the matching entries of fields that list values or layers."""
    count = next((name for name in ("num_hidden_layers", "n_layer", "num_layers", "depth") if name in fields), None)
    if count is None or not isinstance(fields[count], int):
        return {}
    chosen = {name: v for name, v in fields.items() if LAYERS.fullmatch(name) and _are_indices(v, fields[count])}
    lists = {name: v for name, v in fields.items() if isinstance(v, list) and len(v) == fields[count] > 2}
    lists = {name: v for name, v in lists.items() if name not in chosen}
    marks = [[i in v for i in range(fields[count])] for v in chosen.values()]
    first: dict[tuple[Any, ...], int] = {}
    for i, kind in enumerate(zip(*lists.values(), *marks, strict=True)):
        first.setdefault(tuple(map(str, kind)), i)
    kept = sorted(first.values()) or [0, 1]
    kept = kept if len(kept) > 1 else [kept[0]] * 2
    found: dict[str, Any] = {name: [values[i] for i in kept] for name, values in lists.items()}
    wide = [name for name in found if re.fullmatch(r".*intermediate_size.*", name)]
    by_index: dict[str, Any] = {
        name: {new: {**own[old], **small_fields(own[old], ranks)} for new, old in enumerate(kept) if old in own}
        for name, own in ((name, _by_layer(value)) for name, value in fields.items())
        if own
    }
    by_index |= {name: [new for new, old in enumerate(kept) if old in v] for name, v in chosen.items()}
    return found | by_index | {name: [48] * len(kept) for name in wide} | {count: len(kept)}


LAYERS = re.compile(r".*(layer|ind(ex|ic)|idx).*")  # names of fields that list indices of layers


def _are_indices(value: Any, count: int) -> bool:
    """Whether it lists some of `count` layers."""
    listed = isinstance(value, list) and len(value) > 0 and all(type(each) is int for each in value)
    return listed and value == sorted(set(value)) and value[0] >= 0 and value[-1] < count


def _by_layer(value: Any) -> dict[int, dict[str, Any]]:
    """Layer index -> overrides, if the field is such a dictionary; otherwise empty."""
    if not isinstance(value, dict) or not all(str(key).isdigit() for key in value):
        return {}
    return {int(key): dict(own) for key, own in value.items() if isinstance(own, dict)}


def small_config(config: Any, ranks: int, **more: Any) -> Any:
    """The configuration of the twin, with `more` taken as it is. Raises NoTwin."""
    fields = config.to_dict()
    small = small_fields(fields, ranks) | small_parts(fields, ranks)
    small |= {name: i for i, name in enumerate(TOKENS) if name in fields}
    dropped = ("quantization_config", "distributed_config")
    kept = {name: value for name, value in fields.items() if name not in dropped}
    try:
        made = type(config)(**{**kept, **small, **more})
    except Exception as error:  # configurations validate themselves and may raise anything
        raise NoTwin(f"no small configuration: {type(error).__name__}: {error}") from error
    own = config._attn_implementation  # transformers' other implementations do not support fp32, or not on a CPU
    made._attn_implementation = own if own in (None, "eager", "sdpa") or _registered(own) else "eager"
    return made


def _registered(attention: str) -> bool:
    """Whether this attention is a function registered by the user."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function = ALL_ATTENTION_FUNCTIONS.get(attention)
    return function is not None and "/" not in attention and not _of_library(function)  # a slash: a hub kernel


def twin_of(model: nn.Module, ranks: int) -> nn.Module:
    """The twin of a transformers model in fp32, the same on every rank. Raises NoTwin."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(type(model), "_from_config"):
        raise NoTwin("it is not a transformers model")
    small = small_config(config, ranks)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            made = type(model)(small)
        except Exception as error:
            raise NoTwin(f"its small copy cannot be built: {type(error).__name__}: {error}") from error
        elements = sum(p.numel() for p in made.parameters())
        if elements > LARGEST:
            raise NoTwin(f"its small copy has {elements} parameters, as some fields of its configuration are unknown")
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.is_floating_point():
                    nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    check_same_code(model, made)
    return made.float().eval()


LARGEST = 32_000_000
# Hooks and forwards from these libraries do not change what a module computes.
LIBRARIES = {"accelerate", "fusedtp", "liger_kernel", "peft", "torch", "transformers"}
STATES = re.compile(r"training|gradient_checkpointing|name_or_path|forward|_old_forward|_compiled_call_impl|_is_.*")


def check_same_code(model: nn.Module, twin: nn.Module) -> None:
    """Raises OtherCode naming a module of the model if none of its counterparts in the twin has the same code."""
    there: dict[str, list[nn.Module]] = {}
    for name, module in twin.named_modules(remove_duplicate=False):
        there.setdefault(generic(name), []).append(module)
    quantized = getattr(getattr(model, "config", None), "quantization_config", None) is not None
    for name, module, layer in _modules(model):
        small = there.get(generic(name), [])
        if quantized and any(map(is_linear, small)):
            continue
        faults = [_differs(module, layer, each) for each in small]
        if "" not in faults:
            why = faults[0] if faults else "no such module"
            raise OtherCode(f"{name or 'the model'} differs from a small copy of the same class: {why}")


def _modules(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """(name without adapters, module, the module itself or the one that PEFT wrapped in it)."""
    layer: Any = model
    while layer is not None and _library(type(layer).__module__) == "peft":
        layer = getattr(layer, "base_layer", None) or getattr(layer, "original_module", None)
    if layer is not None:
        yield name, model, layer
        for child, inner in layer.named_children():
            yield from _modules(inner, f"{name}.{child}".strip("."))


def _differs(module: nn.Module, layer: nn.Module, small: nn.Module) -> str:
    """How the code of a module of the model differs from its counterpart in the twin, or ""."""
    if type(layer) is not type(small):
        return f"{type(layer).__name__} instead of {type(small).__name__}"
    if _forward(layer) != _forward(small):
        return "its own forward"
    stack_layer = sum(map(is_linear, layer.modules())) > 3  # hooks on whole layers see whole hidden states
    if not stack_layer and not _hooks(module) | _hooks(layer) <= _hooks(small):
        return "a hook"
    theirs = _library(type(layer).__module__) == "transformers"  # `small_fields` accounts for their differences
    for key, value in layer.__dict__.items():
        if STATES.fullmatch(key) or (theirs and not callable(value)):
            continue
        if key in small.__dict__:
            same = _setting(value) == _setting(small.__dict__[key])
        else:
            same = not callable(value) or not callable(getattr(type(layer), key, None)) or _of_library(value)
        if not same:
            return f"a different {key}"
    return ""


def _hooks(module: nn.Module) -> set[Any]:
    kinds = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return {_code(hook) for hooks in kinds for hook in hooks.values() if not _of_library(hook)}


def _forward(module: nn.Module) -> Any:
    """The code of its forward, without accelerate's wrapper, which only moves tensors."""
    own = module.__dict__.get("_old_forward" if hasattr(module, "_hf_hook") else "forward")
    return _code(type(module).forward if own is None or _of_library(own) else own)


def _setting(value: Any) -> Any:
    """The part of a setting that must not depend on the model's size: strings, bools, code; no numbers, no None."""
    if isinstance(value, (bool, str)):
        return value
    return _code(value) if callable(value) and not isinstance(value, nn.Module) else None


def _function(value: Any) -> Any:
    while isinstance(value, partial):
        value = value.func
    return getattr(value, "__func__", value)


def _code(value: Callable[..., Any]) -> Any:
    """Equal for functions with the same source, and for objects of the same class."""
    value = _function(value)
    own = value if isinstance(value, type) else type(value)
    return getattr(value, "__code__", (own, getattr(value, "__qualname__", "")))


def _of_library(value: Any) -> bool:
    value = _function(value)
    return _library(getattr(value, "__globals__", {}).get("__name__") or type(value).__module__) in LIBRARIES


def _library(module: str) -> str:
    return module.partition(".")[0]
