"""The configuration of a causal language model; field names are those of Hugging Face's Llama if it has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .moe_config import MoEConfig
from .rope import RopeScaling

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class ModelConfig:
    """A new configuration is checked at once, and all its faults are reported together.

    num_key_value_heads and head_dim have defaults: one kv head per query head, and
    hidden_size / num_attention_heads. `dtype` is the dtype of activations, `param_dtype` that of parameters.

    attention_dropout drops attention weights and draws from the generator of the rank's own device, as torch's
    attention does. residual_dropout and embedding_dropout, in contrast, do not depend on the split of tokens. So
    with attention_dropout a run depends on the world size, and ranks must be seeded differently, or else the heads
    of all ranks drop the same weights: torch.manual_seed(seed + rank).
    """

    vocab_size: int = 256
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: Literal["silu", "gelu", "gelu_pytorch_tanh"] = "silu"
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    attention_output_bias: bool | None = None  # None: as attention_bias
    mlp_bias: bool = False
    qk_norm: bool = False
    is_causal: bool = True
    sliding_window: int | None = None
    tie_word_embeddings: bool = False
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    embedding_dropout: float = 0.0
    initializer_range: float = 0.02
    moe: MoEConfig | None = None  # experts instead of the MLP
    max_logits_bytes: int = 1 << 28  # if logits need more, the loss is computed in pieces, see linear_loss.py
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    param_dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", self.hidden_size // max(self.num_attention_heads, 1))
        if self.attention_output_bias is None:
            object.__setattr__(self, "attention_output_bias", self.attention_bias)
        faults = self.faults()
        if faults:
            raise ValueError("ModelConfig: " + "; ".join(faults))

    def faults(self) -> list[str]:
        """Descriptions of everything that is wrong with this configuration."""
        kv_heads, head_dim = self.num_key_value_heads or 0, self.head_dim or 0
        positive = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_logits_bytes",
        )
        found = [f"{name} is {getattr(self, name)}, must be at least 1" for name in positive if getattr(self, name) < 1]
        if self.num_hidden_layers < 0:
            found.append(f"num_hidden_layers is {self.num_hidden_layers}, must not be negative")
        if kv_heads > 0 and self.num_attention_heads % kv_heads:
            found.append(
                f"num_attention_heads is {self.num_attention_heads}, must be a multiple of "
                f"num_key_value_heads {kv_heads}"
            )
        if head_dim % 2:
            found.append(f"head_dim is {head_dim}, must be even for rotary embeddings")
        if self.sliding_window is not None and self.sliding_window < 1:
            found.append(f"sliding_window is {self.sliding_window}, must be at least 1")
        for name in ("attention_dropout", "residual_dropout", "embedding_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                found.append(f"{name} is {getattr(self, name)}, must be in [0, 1)")
        for name in ("rms_norm_eps", "rope_theta"):
            if not getattr(self, name) > 0.0:
                found.append(f"{name} is {getattr(self, name)}, must be positive")
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) not in DTYPES:
                found.append(f"{name} is {getattr(self, name)!r}, must be one of {', '.join(DTYPES)}")
        if self.hidden_act not in ("silu", "gelu", "gelu_pytorch_tanh"):
            found.append(f"hidden_act is {self.hidden_act!r}, must be silu, gelu or gelu_pytorch_tanh")
        if self.rope_scaling is not None:
            found += [f"rope_scaling: {fault}" for fault in self.rope_scaling.faults()]
        if self.moe is not None:
            found += [f"moe: {fault}" for fault in self.moe.faults()]
        return found

    @property
    def compute_dtype(self) -> torch.dtype:
        """`dtype` as a torch.dtype."""
        return DTYPES[self.dtype]

    @property
    def parameter_dtype(self) -> torch.dtype:
        """`param_dtype` as a torch.dtype."""
        return DTYPES[self.param_dtype]
