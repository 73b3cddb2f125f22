"""Token embeddings, which parallelize may split over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .hooks import read
from .layout import TokenLayout


class VocabParallelEmbedding(nn.Module):
    """A plain embedding; if parallel, split over the vocabulary.

    input_ids   [T]      integers in [0, V), ids of all tokens
    weight      [V, H]
    return      [T_r, H] rows of this rank's tokens
    forward: a lookup; if parallel, a lookup of the ids in this rank's part of the vocabulary, then a
    reduce-scatter over rows. Raises IndexError for an id outside the vocabulary, as torch does.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.parallel: Any = None
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, input_ids: Tensor, layout: TokenLayout | None = None) -> Tensor:
        ids = input_ids if input_ids.dtype in (torch.int32, torch.int64) else input_ids.long()
        if layout is None:
            layout = TokenLayout(1, ids.shape[0])
        if hasattr(self.parallel, "embed"):
            return self.parallel.embed(ids, self, layout)
        return F.embedding(layout.take(ids), read(self, "weight"))

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"
