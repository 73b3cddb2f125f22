"""Causal self-attention with grouped kv heads, rotary positions, windows and documents.

Tokens arrive flattened, [T_r, H]. The projections return all T tokens for this rank's heads, so attention itself is
the same as on one device; numbers of heads follow from the projections' widths:

    x [T_r, H] -> project q, k, v -> [T, heads * D] -> [B, S, heads, D] -> norm, rotate
      -> [B, heads, S, D] (a view) -> scaled_dot_product_attention -> [T, heads * D] (a view) -> o_proj
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import repeat
from torch import Tensor, nn

from .config import ModelConfig
from .layout import TokenLayout
from .linear import Linear, project
from .mask import Mask, attention_mask, flex
from .norm import RMSNorm
from .rope import rotary_tables, rotate_pair


class Attention(nn.Module):
    """Self-attention of one layer.

    x        [T_r, H]
    layout   describes the tokens; None: one sequence of all tokens
    return   [T_r, H]
    Attention dropout draws from the device's generator inside SDPA: an independent stream on every rank.
    Sources: Vaswani et al. 2017; Ainslie et al. 2023 (grouped kv heads); Dehghani et al. 2023 (qk norm).
    """

    tp_plan = {
        "q_proj": "colwise",
        "k_proj": "colwise",
        "v_proj": "colwise",
        "o_proj": "rowwise",
    }

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert config.head_dim is not None and config.num_key_value_heads is not None
        self.config, self.head_dim = config, config.head_dim
        dtype = dtype or config.parameter_dtype
        q_width = config.num_attention_heads * self.head_dim
        kv_width = config.num_key_value_heads * self.head_dim
        hidden, bias, out_bias = config.hidden_size, config.attention_bias, bool(config.attention_output_bias)
        self.q_proj = Linear(hidden, q_width, bias, device=device, dtype=dtype)
        self.k_proj = Linear(hidden, kv_width, bias, device=device, dtype=dtype)
        self.v_proj = Linear(hidden, kv_width, bias, device=device, dtype=dtype)
        self.o_proj = Linear(q_width, hidden, out_bias, device=device, dtype=dtype)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, device=device, dtype=dtype)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, device=device, dtype=dtype)

    def forward(self, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        q, k, v = project(x, (self.q_proj, self.k_proj, self.v_proj), layout)
        known = layout if layout is not None else TokenLayout(1, q.shape[0])
        known = prepared(known, self.config, q.device, q.dtype)
        assert known.rotary is not None
        batch, length, dim = known.batch, known.length, self.head_dim
        q, k, v = (t.reshape(batch, length, t.shape[1] // dim, dim) for t in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        rate = self.config.attention_dropout if self.training else 0.0
        y = attend(*rotate_pair(q, k, *known.rotary), v, known.mask, rate)
        return self.o_proj(y.reshape(batch * length, y.shape[2] * dim), layout)


def prepared(layout: TokenLayout, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> TokenLayout:
    """The layout with `rotary` and `mask` computed; they are the same for all layers of a model."""
    if layout.rotary is None:
        assert config.head_dim is not None
        tables = rotary_tables(layout, config.head_dim, config.rope_theta, config.rope_scaling, device, dtype)
        layout = layout.with_(rotary=tables)
    if layout.mask is None:
        use_flex = False if config.attention_dropout else None  # flex attention has no dropout
        mask = attention_mask(layout, config.is_causal, config.sliding_window, device, use_flex)
        layout = layout.with_(mask=mask)
    return layout


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for grouped heads.

    q        [B, S, heads, D]
    k, v     [B, S, kv_heads, D]   kv head j serves query heads j * g .. j * g + g - 1, g = heads / kv_heads
    return   [B, S, heads, D]
    """
    dtype = q.dtype
    if q.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        # Round only once, at the end. Also, on a CPU the 16-bit flash backward of torch 2.13 takes up to ten times as
        # long as fp32; with AVX512_BF16 and 512 tokens or more, though, bf16 would take 0.7 to 0.85 of fp32's time.
        q, k, v = q.float(), k.float(), v.float()
    grouped = q.shape[2] != k.shape[2]
    if grouped and (q.device.type == "cpu" or mask.dense is not None):
        # On CPU SDPA's own grouping is no faster than repeating heads; CUDA's fast kernels lack it with a mask.
        group = q.shape[2] // k.shape[2]
        k, v = (repeat(t, "b s h d -> b s (h g) d", g=group) for t in (k, v))
        grouped = False
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if mask.blocks is not None:
        y = flex(q, k, v, mask.blocks, grouped)
    else:
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask.dense, is_causal=mask.is_causal, dropout_p=dropout, enable_gqa=grouped
        )
    return y.transpose(1, 2).to(dtype)
