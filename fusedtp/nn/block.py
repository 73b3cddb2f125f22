"""One pre-norm Transformer layer, as in Llama."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .attention import Attention
from .config import ModelConfig
from .dropout import AFTER_ATTENTION, AFTER_MLP, HiddenDropout
from .hooks import opened
from .layout import TokenLayout
from .mlp import MLP
from .moe import MoE
from .norm import RMSNorm, add_norm, norm_of


def prefixed(prefix: str, plan: dict[str, str]) -> dict[str, str]:
    """A submodule's plan with names relative to its parent."""
    return {f"{prefix}.{name}": style for name, style in plan.items()}


def feed_forward(
    config: ModelConfig, layer: int, *, device: torch.device | str | None, dtype: torch.dtype
) -> MLP | MoE:
    """The feed-forward module of a layer: MLP or MoE."""
    moe = config.moe
    if moe is None or layer < moe.first_dense:
        return MLP(config, device=device, dtype=dtype)
    return MoE(
        config.hidden_size,
        moe.hidden,
        moe.num_experts,
        moe.top_k,
        shared=moe.shared,
        split_shared=moe.split_shared,
        act=config.hidden_act,
        capacity=moe.capacity,
        drop=moe.drop,
        layer=layer,
        device=device,
        dtype=dtype,
        **moe.exchange,
        **moe.router,
    )


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the mlp may be an MoE.

    x        [T_r, H]   this rank's tokens
    layout   None: one sequence of all tokens
    return   [T_r, H]
    """

    tp_plan = {**prefixed("self_attn", Attention.tp_plan), **prefixed("mlp", MLP.tp_plan)}

    def __init__(
        self,
        config: ModelConfig,
        layer: int = 0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dtype = dtype or config.parameter_dtype
        hidden, eps, rate = config.hidden_size, config.rms_norm_eps, config.residual_dropout
        self.input_layernorm = RMSNorm(hidden, eps, device=device, dtype=dtype)
        self.self_attn = Attention(config, device=device, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(hidden, eps, device=device, dtype=dtype)
        self.mlp = feed_forward(config, layer, device=device, dtype=dtype)
        self.tp_plan = {**prefixed("self_attn", Attention.tp_plan), **prefixed("mlp", self.mlp.tp_plan)}
        self.after_attention = HiddenDropout(rate, layer, AFTER_ATTENTION)
        self.after_mlp = HiddenDropout(rate, layer, AFTER_MLP)
        self.replicas: Any = None

    def forward(self, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        with opened(self):
            normed, x = norm_of(x, self.input_layernorm)
            attended = self.after_attention(self.self_attn(normed, layout), layout)
            normed, x = add_norm(attended, x, self.post_attention_layernorm)
            return x + self.after_mlp(self.mlp(normed, layout), layout)
