"""Dropout with a mask that is a function of (seed, step, layer, site, global token, feature).

There is no generator state, so the mask does not depend on how tokens are split over ranks or microbatches, nor on
recomputation. A 64-bit mixer gives each row two 32-bit words and each feature one; an element mixes its three
words in 32-bit arithmetic (wrapping int32 multiplications) and is kept if the result is above a threshold.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .layout import TokenLayout

EMBEDDING, AFTER_ATTENTION, AFTER_MLP, ROUTER = 0, 1, 2, 3


class HiddenDropout(nn.Module):
    """Dropout of hidden states, the same for any split of the tokens.

    x        [T_r, H]   rows [layout.start, layout.start + T_r) of the batch
    return   [T_r, H]   x / (1 - rate) if kept, else 0; x itself in evaluation or at rate 0
    Raises ValueError if the layout has no dropout state (CausalLM.set_dropout).
    """

    def __init__(self, rate: float, layer: int, site: int) -> None:
        super().__init__()
        self.rate, self.layer, self.site = rate, layer, site

    def forward(self, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        if layout is None or layout.dropout is None:
            raise ValueError("dropout needs a seed and a step: call CausalLM.set_dropout(seed, step) before each step")
        dropped = dropout_mask(
            layout.dropout.to(x.device), self.rate, 4 * self.layer + self.site, layout.start, *x.shape
        )
        return (x * (1.0 / (1.0 - self.rate))).masked_fill(dropped, 0.0)

    def extra_repr(self) -> str:
        return f"{self.rate}, layer={self.layer}, site={self.site}"


def dropout_state(seed: int, step: int, first_token: int = 0) -> Tensor:
    """The value of TokenLayout.dropout. first_token: global index of the batch's first token (over data
    parallel ranks and microbatches)."""
    return torch.tensor([seed, step, first_token], dtype=torch.int64)


def dropout_mask(state: Tensor, rate: float, site: int, start: int, rows: int, features: int) -> Tensor:
    """bool [rows, features], true if dropped, for tokens start .. start + rows - 1 of the batch."""
    return random_bits(state, site, start, rows, features) < int(rate * 2.0**32) - 2**31


def random_bits(state: Tensor, site: int, start: int, rows: int, features: int) -> Tensor:
    """int32 [rows, features], uniform over all int32, for tokens start .. start + rows - 1 of the batch."""
    device = state.device
    seed, step, first_token = state.unbind()
    key = _mix64(_mix64(_mix64(seed) ^ step) ^ site)
    token = torch.arange(rows, dtype=torch.int64, device=device) + (first_token + start)
    row = _mix64(key ^ _mix64(token))
    column = _mix64(torch.arange(features, dtype=torch.int64, device=device) + 1)
    low, high = row.to(torch.int32), (row >> 32).to(torch.int32)
    return _mix32(_mix32(column.to(torch.int32)[None, :] ^ low[:, None]) + high[:, None])


def _shift(x: Tensor, places: int, width: int) -> Tensor:
    """Logical shift right (torch's >> of signed integers keeps the sign)."""
    return (x >> places) & ((1 << (width - places)) - 1)


def _mix64(x: Tensor) -> Tensor:
    """The finalizer of splitmix64 (Steele et al. 2014)."""
    x = (x ^ _shift(x, 30, 64)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ _shift(x, 27, 64)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ _shift(x, 31, 64)


def _mix32(x: Tensor) -> Tensor:
    """A low-bias 32-bit finalizer (Wellons, lowbias32)."""
    x = (x ^ _shift(x, 16, 32)) * 0x7FEB352D
    x = (x ^ _shift(x, 15, 32)) * (0x846CA68B - (1 << 32))
    return x ^ _shift(x, 16, 32)
