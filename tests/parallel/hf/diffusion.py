"""Diffusion transformers of diffusers, small and with random weights, and an example of each one's inputs.

They have no plan, and their inputs cannot be guessed: several kinds of tokens, a vector of the time step, positions.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import diffusers
import torch
from torch import Tensor, nn

import fusedtp
from tests.parallel.support import tp_mesh

from .parity import against

Inputs = dict[str, Any]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


class Case(NamedTuple):
    """kind: a class of diffusers; config: what it is made of; inputs: makes an example."""

    kind: str
    config: dict[str, Any]
    inputs: Callable[[], Inputs]


def heads(width: int = 8) -> dict[str, Any]:
    return {"num_attention_heads": 4, "attention_head_dim": width}


def image(text: tuple[int, int], channels: int = 4, **more: Any) -> Callable[[], Inputs]:
    """Two latent images [channels, 8, 8], with `text` tokens x features."""
    shared = {"timestep": torch.tensor([1.0, 2.0]), **more}
    return lambda: {
        "hidden_states": normal(2, channels, 8, 8), "encoder_hidden_states": normal(2, *text), **shared
    }  # fmt: skip


def flux() -> Inputs:
    return {
        "hidden_states": normal(1, 16, 4), "encoder_hidden_states": normal(1, 12, 32),
        "pooled_projections": normal(1, 32), "timestep": torch.ones(1), "guidance": torch.ones(1),
        "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(12, 3),
    }  # fmt: skip


def hunyuan_video() -> Inputs:
    return {
        "hidden_states": normal(1, 4, 1, 8, 8), "encoder_hidden_states": normal(1, 6, 16),
        "pooled_projections": normal(1, 8), "encoder_attention_mask": torch.ones(1, 6), "timestep": torch.tensor([1]),
        "guidance": torch.ones(1),
    }  # fmt: skip


def ltx() -> Inputs:
    return {
        "hidden_states": normal(1, 32, 8), "encoder_hidden_states": normal(1, 6, 16),
        "encoder_attention_mask": torch.ones(1, 6).bool(), "timestep": torch.tensor([5]), "num_frames": 2,
        "height": 4, "width": 4, "rope_interpolation_scale": (1.0, 32.0, 32.0),
    }  # fmt: skip


def qwen_image() -> Inputs:
    return {
        "hidden_states": normal(1, 16, 16), "encoder_hidden_states": normal(1, 7, 16),
        "encoder_hidden_states_mask": torch.ones(1, 7).bool(), "timestep": torch.ones(1), "img_shapes": [(1, 4, 4)],
    }  # fmt: skip


def video(text: tuple[int, int], *shape: int) -> Callable[[], Inputs]:
    return lambda: {
        "hidden_states": normal(1, *shape), "encoder_hidden_states": normal(1, *text), "timestep": torch.tensor([5])
    }  # fmt: skip


LATENT = {"in_channels": 4, "out_channels": 4, "num_layers": 2}
SQUARE = {"sample_size": 8, "patch_size": 2}
CASES: dict[str, Case] = {
    "AuraFlow": Case(
        "AuraFlowTransformer2DModel",
        {**SQUARE, **heads(), "in_channels": 4, "out_channels": 4, "num_mmdit_layers": 2, "num_single_dit_layers": 1,
         "caption_projection_dim": 32, "joint_attention_dim": 32, "pos_embed_max_size": 64},
        image((6, 32)),
    ),
    "CogVideoX": Case(
        "CogVideoXTransformer3DModel",
        {**LATENT, **heads(), "time_embed_dim": 2, "text_embed_dim": 8, "sample_width": 8, "sample_height": 8,
         "sample_frames": 8, "patch_size": 2, "temporal_compression_ratio": 4, "max_text_seq_length": 8},
        video((8, 8), 2, 4, 8, 8),
    ),
    "DiT": Case(
        "DiTTransformer2DModel",
        {**LATENT, **SQUARE, **heads(), "out_channels": 8, "num_embeds_ada_norm": 8},
        lambda: {"hidden_states": normal(2, 4, 8, 8), "timestep": torch.tensor([1, 2]),
                 "class_labels": torch.tensor([3, 4])},
    ),
    "FLUX.1": Case(
        "FluxTransformer2DModel",
        {**heads(16), "patch_size": 1, "in_channels": 4, "num_layers": 2, "num_single_layers": 2,
         "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8], "guidance_embeds": True},
        flux,
    ),
    "HunyuanVideo": Case(
        "HunyuanVideoTransformer3DModel",
        {**LATENT, **heads(12), "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 1, "patch_size_t": 1,
         "guidance_embeds": True, "text_embed_dim": 16, "pooled_projection_dim": 8, "rope_axes_dim": (4, 4, 4)},
        hunyuan_video,
    ),
    "LTX-Video": Case(
        "LTXVideoTransformer3DModel",
        {**heads(), "in_channels": 8, "out_channels": 8, "num_layers": 2, "cross_attention_dim": 32,
         "caption_channels": 16},
        ltx,
    ),
    "Lumina 2": Case(
        "Lumina2Transformer2DModel",
        {**SQUARE, "in_channels": 4, "hidden_size": 32, "num_layers": 2, "num_refiner_layers": 1,
         "num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 2, "axes_dim_rope": (4, 2, 2),
         "axes_lens": (32, 32, 32), "cap_feat_dim": 16},
        lambda: {"hidden_states": normal(1, 4, 8, 8), "encoder_hidden_states": normal(1, 6, 16),
                 "timestep": torch.tensor([0.5]), "encoder_attention_mask": torch.ones(1, 6).bool()},
    ),
    "PixArt": Case(
        "PixArtTransformer2DModel",
        {**LATENT, **SQUARE, **heads(), "out_channels": 8, "cross_attention_dim": 32, "caption_channels": 24,
         "use_additional_conditions": False},
        image((6, 24), timestep=torch.tensor([1, 2]), added_cond_kwargs={}),
    ),
    "Qwen-Image": Case(
        "QwenImageTransformer2DModel",
        {**heads(16), "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2,
         "joint_attention_dim": 16, "axes_dims_rope": (8, 4, 4)},
        qwen_image,
    ),
    "Sana": Case(
        "SanaTransformer2DModel",
        {**LATENT, **heads(), "patch_size": 1, "sample_size": 8, "num_cross_attention_heads": 4,
         "cross_attention_head_dim": 8, "cross_attention_dim": 32, "caption_channels": 8},
        image((6, 8), timestep=torch.tensor([1, 2])),
    ),
    "Stable Diffusion 3": Case(
        "SD3Transformer2DModel",
        {**LATENT, **SQUARE, **heads(), "joint_attention_dim": 32, "caption_projection_dim": 32,
         "pooled_projection_dim": 64},
        image((6, 32), pooled_projections=normal(2, 64)),
    ),
    "Wan": Case(
        "WanTransformer3DModel",
        {**LATENT, **heads(12), "patch_size": (1, 2, 2), "text_dim": 16, "freq_dim": 256, "ffn_dim": 32,
         "rope_max_seq_len": 32},
        video((6, 16), 4, 2, 8, 8),
    ),
}  # fmt: skip


def model_of(name: str) -> nn.Module:
    """In evaluation mode; all weights are random, since some of diffusers' start at zero."""
    torch.manual_seed(0)
    model: nn.Module = getattr(diffusers, CASES[name].kind)(**CASES[name].config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            matrix = parameter.dim() > 1
            parameter.normal_(0.0 if matrix else 0.5, parameter[:1].numel() ** -0.5 if matrix else 0.1)
    return model


def results(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """Output, a random weighted sum of it, and all gradients of that, by name."""
    found = model(**inputs, return_dict=False)
    found = found[0] if isinstance(found, tuple) else found
    loss = (found * torch.randn(found.shape, generator=torch.Generator().manual_seed(2))).sum()
    loss.backward()
    own = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: x.detach() for name, x in {"logits": found, "loss": loss, **own}.items()}


def compare(group: Any, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """parity.compare for a case. options: of fusedtp.parallelize."""
    plain, inputs = model_of(name), CASES[name].inputs()
    parallel = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group), example=inputs, **options)
    return against(group, plain, parallel, lambda model: results(model, inputs))
