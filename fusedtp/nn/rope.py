"""Rotary position embeddings, half-split as in Llama: feature i is rotated against feature i + D/2.

Inverse frequencies (D/2 numbers) are computed from the configuration every time and never stored in a buffer: so a
model made on the meta device has no buffer to restore, and there is none in its state dict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fusedtp.ops import pointwise
from fusedtp.ops.first_order import first_order

from .layout import TokenLayout


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of positions beyond the trained context; names as in Hugging Face's rope_scaling.

    linear    all frequencies / factor                                   (Chen et al. 2023)
    llama3    low frequencies / factor, high ones kept, a ramp between   (Llama 3.1)
    yarn      similar, with a ramp over feature index, and cos, sin * attention_factor  (Peng et al. 2023)
    """

    rope_type: Literal["linear", "llama3", "yarn"] = "linear"
    factor: float = 1.0
    original_max_position_embeddings: int = 8192
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1

    def faults(self) -> list[str]:
        """Descriptions of everything that is wrong."""
        found = []
        if self.rope_type not in ("linear", "llama3", "yarn"):
            found.append(f"rope_type is {self.rope_type!r}, must be linear, llama3 or yarn")
        if not self.factor >= 1.0:
            found.append(f"factor is {self.factor}, must be at least 1")
        if self.original_max_position_embeddings < 1:
            found.append(
                f"original_max_position_embeddings is {self.original_max_position_embeddings}, must be at least 1"
            )
        if self.rope_type == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            found.append(
                f"low_freq_factor {self.low_freq_factor} must be positive and below "
                f"high_freq_factor {self.high_freq_factor}"
            )
        if self.rope_type == "yarn" and not 0 < self.beta_slow < self.beta_fast:
            found.append(f"beta_slow {self.beta_slow} must be positive and below beta_fast {self.beta_fast}")
        return found


def inverse_frequencies(
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, float]:
    """[D/2] angles per position, and the factor to multiply cos and sin with."""
    exponents = torch.arange(0, head_dim, 2, dtype=dtype, device=device) / head_dim
    plain = 1.0 / theta**exponents
    if scaling is None:
        return plain, 1.0
    if scaling.rope_type == "linear":
        return plain / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(plain, scaling), 1.0
    return _yarn(plain, head_dim, theta, scaling)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Keep wavelengths below context / high_freq_factor, divide those above context / low_freq_factor."""
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)  # within the trained context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return plain * (keep + (1.0 - keep) / scaling.factor)


def _yarn(plain: Tensor, head_dim: int, theta: float, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Keep features that turn more than beta_fast times within the trained context, divide the slow ones by factor."""

    def feature(turns: float) -> float:
        context = scaling.original_max_position_embeddings
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(feature(scaling.beta_fast)), 0)
    high = min(math.ceil(feature(scaling.beta_slow)), head_dim - 1)
    index = torch.arange(len(plain), dtype=plain.dtype, device=plain.device)
    divide = ((index - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
    attention_factor = scaling.attention_factor
    if attention_factor is None:
        attention_factor = 0.1 * math.log(scaling.factor) + 1.0
    return plain * (1.0 - divide + divide / scaling.factor), attention_factor


def rotary_tables(
    layout: TokenLayout,
    head_dim: int,
    theta: float = 10000.0,
    scaling: RopeScaling | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """cos and sin of every token's angles.

    return   two [B or 1, S, 1, D/2]   fp32 (fp64 for fp64 models); 1 if all sequences have positions 0..S-1
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    frequencies, factor = inverse_frequencies(head_dim, theta, scaling, device, wide)
    if layout.positions is None:
        positions = torch.arange(layout.length, device=device).unsqueeze(0)
    else:
        positions = layout.positions.to(device)
    angles = positions.to(wide)[:, :, None, None] * frequencies
    return angles.cos() * factor, angles.sin() * factor


class _Rotate(torch.autograd.Function):
    """The rotation without temporaries; its backward is the inverse rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_into(torch.empty_like(x, memory_format=torch.contiguous_format), x, cos, sin, -1)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        dx = torch.empty_like(dy, memory_format=torch.contiguous_format)
        return _rotate_into(dx, dy, cos, sin, 1), None, None


def _rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    (x1, x2), (out1, out2) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(x1, cos, out=out1).addcmul_(x2, sin, value=sign)
    torch.mul(x2, cos, out=out2).addcmul_(x1, sin, value=-sign)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, S, heads, D] by tables [B or 1, S, 1, D/2]; 16-bit x is rotated in fp32 and rounded once."""
    if x.dtype != cos.dtype:
        return rotate(x.to(cos.dtype), cos, sin).to(x.dtype)
    if torch.compiler.is_compiling():
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
    return _Rotate.apply(x, cos, sin)


def rotate_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the same tables; one launch on a GPU."""
    if cos.dtype == torch.float32 and pointwise.serves(q, k, cos, sin):
        return pointwise.rotate_pair(q, k, cos, sin)
    return rotate(q, cos, sin), rotate(k, cos, sin)
