"""Attention masks, which keys a query may see: causal order, a sliding window, document boundaries.

The cheapest sufficient form is used: no mask, SDPA's `is_causal`, a dense boolean mask, or on a GPU
flex attention's block mask, which skips fully masked blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .layout import TokenLayout

# Below this length a dense mask is small, and compiling flex attention costs more time than it saves.
FLEX_LENGTH = 1024


@dataclass(frozen=True, eq=False)
class Mask:
    """One of: all keys (no field set), is_causal, dense, blocks.

    dense    bool [B or 1, 1, S, S], true if a query (row) sees a key (column)
    blocks   flex attention's BlockMask
    """

    is_causal: bool = False
    dense: Tensor | None = None
    blocks: Any = None


def attention_mask(
    layout: TokenLayout,
    is_causal: bool,
    window: int | None,
    device: torch.device,
    use_flex: bool | None = None,
) -> Mask:
    """The mask of a layout.

    A query at position i of its sequence sees the key at position j of the same sequence if
        is_causal: j <= i,    window: |i - j| < window,    documents: document_ids[i] == document_ids[j].
    use_flex: None uses flex attention on a GPU if a mask is needed and sequences are long.
    """
    if window is not None and window >= layout.length:
        window = None
    documents = None if layout.document_ids is None else layout.document_ids.to(device)
    if window is None and documents is None:
        return Mask(is_causal=is_causal)
    if use_flex is None:
        use_flex = device.type == "cuda" and layout.length >= FLEX_LENGTH
    if use_flex:
        return Mask(blocks=_blocks(layout, is_causal, window, documents, device))
    place = torch.arange(layout.length, device=device)
    ahead = place[:, None] - place[None, :]
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if is_causal:
        seen &= ahead >= 0
    if window is not None:
        seen &= ahead.abs() < window
    dense = seen[None, None]
    if documents is not None:
        dense = dense & (documents[:, None, :, None] == documents[:, None, None, :])
    return Mask(dense=dense)


def _blocks(
    layout: TokenLayout, is_causal: bool, window: int | None, documents: Tensor | None, device: torch.device
) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        fine = query >= key if is_causal else query == query
        if window is not None:
            fine = fine & ((query - key).abs() < window)
        if documents is not None:
            fine = fine & (documents[batch, query] == documents[batch, key])
        return fine

    batch = None if documents is None else layout.batch
    return create_block_mask(seen, batch, None, layout.length, layout.length, device=device)


def flex(q: Tensor, k: Tensor, v: Tensor, blocks: Any, grouped: bool) -> Tensor:
    """Flex attention over [B, heads, S, D]: compiled on a GPU, the slow reference elsewhere."""
    from torch.nn.attention.flex_attention import flex_attention

    attention: Any = flex_attention
    if q.is_cuda:
        attention = _compiled(flex_attention)
    return attention(q, k, v, block_mask=blocks, enable_gqa=grouped)


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function)
