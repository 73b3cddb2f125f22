"""The tokens of a batch, and which of them are this rank's.

Between layers a model passes flattened tokens, [T_r, H]: rows [start, stop) of the T = batch * length
tokens in (sequence, position) order. Attention and loss see all T; everything else sees only this rank's rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


class Collected:
    """Values that layers record for the whole model, in layer order.

    Not a list: for each module that it shards, torch's FSDP2 replaces lists of tensors by new lists.
    """

    def __init__(self) -> None:
        self.found: list[Any] = []

    def append(self, value: Any) -> None:
        """Record one more value."""
        self.found.append(value)


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """The order and the split of a batch's tokens; passed along with x from layer to layer.

    positions, document_ids   [B, S] integers, or None (0..S-1, one document per sequence)
    sizes                     number of rows on each rank, in rank order; () if tokens are not split
    rotary, mask              tables computed from the above once by the model, not again in each layer
    dropout                   int64 [3] of (seed, step, first token of this batch), or None
    routings                  collects the decisions of each router; or None
    balance_group             routers balance over the tokens of these ranks; None: those that share the experts
    """

    batch: int
    length: int
    sizes: tuple[int, ...] = ()
    rank: int = 0
    positions: Tensor | None = None
    document_ids: Tensor | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    mask: Any = None
    dropout: Tensor | None = None
    routings: Collected | None = None
    balance_group: Any = None

    def __post_init__(self) -> None:
        if self.batch < 0 or self.length < 0:
            raise ValueError(f"batch {self.batch} and length {self.length} must not be negative")
        if self.sizes and (sum(self.sizes) != self.tokens or not 0 <= self.rank < len(self.sizes)):
            raise ValueError(f"rank {self.rank}: sizes {self.sizes} do not split {self.batch} x {self.length} tokens")
        for name in ("positions", "document_ids"):
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != (self.batch, self.length):
                raise ValueError(f"{name} has shape {tuple(value.shape)}, wanted {(self.batch, self.length)}")

    @property
    def tokens(self) -> int:
        """T, the number of tokens on all ranks together."""
        return self.batch * self.length

    @property
    def is_split(self) -> bool:
        """Whether rows are split over several ranks."""
        return len(self.sizes) > 1

    @property
    def start(self) -> int:
        """The index of this rank's first row among all T."""
        return sum(self.sizes[: self.rank])

    @property
    def rows(self) -> int:
        """T_r, the number of this rank's rows."""
        return self.sizes[self.rank] if self.sizes else self.tokens

    def take(self, x: Tensor) -> Tensor:
        """This rank's rows of x [T, ...]; x itself if tokens are not split."""
        return x[self.start : self.start + self.rows] if self.is_split else x

    def with_(self, **changes: Any) -> TokenLayout:
        """A copy with some fields changed."""
        return replace(self, **changes)


def document_ids_from_lengths(lengths: list[list[int]], device: torch.device | str = "cpu") -> Tensor:
    """[B, S] document ids from each sequence's document lengths, which sum to S in every row."""
    totals = {sum(row) for row in lengths}
    if len(totals) > 1:
        raise ValueError(f"document lengths of the sequences sum to different totals: {sorted(totals)}")
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row, dtype=torch.long)) for row in lengths]
    return torch.stack(rows).to(device)
