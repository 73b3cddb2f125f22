"""Attention maps of a split model, [B, heads, S, T], for output_attentions=True.

Each rank computes the maps of its own heads. A hook on the modules that hold the projections marks the maps among their
outputs, and marked maps are gathered at the end of the model: only returned maps are communicated. If a map has lost
its mark, because model code made another tensor of it or torch.compile traced it, ValueError is raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fusedtp.ops.tokens import gather_tokens

HEADS = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads")


def mark_maps(modules: Iterable[nn.Module], group: str, world_size: int) -> None:
    """Register hooks that mark maps among the outputs of modules with split projections.

    Skips modules that contain whole layers: one with a split MLP may return maps of an attention that is not split.
    """
    for module in modules:
        if not any(_holds_layers(child) for child in module.children()):
            module.register_forward_hook(partial(_mark, group=group, world_size=world_size))


def _holds_layers(module: nn.Module) -> bool:
    inside = list(module.modules())[1:] if not hasattr(module, "base_layer") else []  # PEFT's linear is one layer
    return any(p.dim() > 1 for each in inside for p in each.parameters(recurse=False))


def _mark(module: Any, args: Any, outputs: Any, *, group: str, world_size: int) -> None:
    if not isinstance(outputs, tuple) or torch.compiler.is_compiling():
        return
    for x in outputs[1:]:
        if type(x) is Tensor and x.dim() == 4 and x.is_floating_point():
            x._fusedtp_heads = group, world_size  # type: ignore[attr-defined]


def gather_maps(model: Any, outputs: Any) -> Any:
    """Outputs with marked maps gathered. Collective. Raises ValueError if an attention map lacks heads."""
    done = tree_map(partial(_gathered, model._fusedtp.gathered), outputs)
    if isinstance(done, Mapping):
        _refuse_parts(model, done, outputs)
    return done


def _gathered(counts: Any, x: Any) -> Any:
    mark = getattr(x, "_fusedtp_heads", None) if type(x) is Tensor else None
    if mark is None:
        return x
    group, world_size = mark
    counts["attention maps"] += 1
    return gather_tokens(x.movedim(1, 0), group, (x.shape[1],) * world_size).movedim(0, 1)


def _refuse_parts(model: Any, done: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
    """Raises ValueError for maps with another number of heads than the configuration has."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = [getattr(each, name, None) for each in (config, text) for name in HEADS]
    wanted = {n for each in found for n in (each if isinstance(each, list | tuple) else (each,))} - {None}
    for key, value in done.items():
        if "attentions" not in key or not wanted:
            continue
        before = tree_leaves(outputs[key])
        for x, own in zip(tree_leaves(value), before, strict=True):
            if isinstance(x, Tensor) and x.dim() == 4 and x is own and x.shape[1] not in wanted:
                raise ValueError(
                    f"{key}: this rank's {x.shape[1]} of {max(wanted)} heads cannot be gathered, because the model "
                    "returns them as new tensors; call it without torch.compile to get output_attentions"
                )
