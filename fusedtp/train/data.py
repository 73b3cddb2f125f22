"""Batches of tokens in one global order: a function of (seed, number of the sample), the same on any layout of ranks.

The text is cut into windows of `length` tokens, which an epoch visits once each in a random order of its own; where
the cuts begin differs from epoch to epoch, so that the last tokens get their turn. Steps take samples as they come:

    samples of a step [batch] = [accumulate, dp, batch / (accumulate * dp)]

Each data-parallel rank takes its rows of every microbatch, tensor-parallel ranks of one data-parallel rank the same. So
one process sees the tokens that all ranks together see, and how far a run has come is one number, `samples`: whoever
goes on from it, on however many ranks, repeats and skips nothing.

Documents are packed as they follow each other, so that a window may hold several. "separate" keeps them apart:
attention, positions and labels end where a document does. A document that is longer than a window goes on in the next.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

IGNORED = -100  # the label of a token that nothing is predicted for
Documents = Literal["joined", "separate"]


@dataclass(frozen=True)
class Microbatch:
    """What a model takes at once: input_ids and labels [B, S] int64, labels being the tokens that follow.

    positions, document_ids   [B, S], where documents are kept apart
    first_token               place of its first token among all of the step, over microbatches and ranks
    num_labels                what the sum of token losses is divided by, so that the mean over data-parallel ranks of
                              the sum over microbatches is the mean over all labels of the step
    """

    input_ids: Tensor
    labels: Tensor
    first_token: int
    num_labels: float
    positions: Tensor | None = None
    document_ids: Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        """Of the forward of fusedtp.nn.CausalLM."""
        return {
            "input_ids": self.input_ids, "labels": self.labels, "positions": self.positions,
            "document_ids": self.document_ids, "num_labels": self.num_labels,
        }  # fmt: skip

    def to(self, device: str | torch.device) -> Microbatch:
        def moved(x: Tensor | None) -> Any:
            return None if x is None else x.to(device, non_blocking=True)

        return Microbatch(
            moved(self.input_ids), moved(self.labels), self.first_token, self.num_labels, moved(self.positions),
            moved(self.document_ids),
        )  # fmt: skip


class Windows:
    """Windows of `length` tokens of a token file that text.build wrote. Raises ValueError if it does not hold one."""

    def __init__(self, folder: Path, name: str, length: int, documents: Documents = "joined") -> None:
        index = json.loads((folder / "index.json").read_text())
        path = folder / f"{name}.bin"
        size = path.stat().st_size // np.dtype(index["dtype"]).itemsize
        if size <= length:
            raise ValueError(
                f"{name} text has {size} tokens; --length {length} needs {length + 1}: "
                "give more text to --data or a smaller --length"
            )
        self.tokens = np.memmap(path, dtype=index["dtype"], mode="r")
        self.ends = np.fromfile(folder / f"{name}.ends", np.int64) if documents == "separate" else None
        self.length = length
        self.count = (size - 1) // length  # windows of an epoch

    def starts(self, seed: int, samples: np.ndarray) -> np.ndarray:
        """First tokens of samples, by their numbers, which count on over epochs."""
        epochs, places = np.divmod(samples, self.count)
        slack = (len(self.tokens) - 1) % self.length
        found = np.empty(len(samples), np.int64)
        for epoch in np.unique(epochs):
            order, offset = _order(seed, int(epoch), self.count, slack)
            of_epoch = epochs == epoch
            found[of_epoch] = order[places[of_epoch]] * self.length + offset
        return found

    def spread(self, count: int) -> np.ndarray:
        """First tokens of `count` windows spread evenly over the file."""
        return np.linspace(0, len(self.tokens) - self.length - 1, count).astype(np.int64)

    def num_labels(self, starts: np.ndarray) -> int:
        """Labels of these windows: a token that ends a document has none where documents are kept apart."""
        total = len(starts) * self.length
        if self.ends is None:
            return total
        first, last = (np.searchsorted(self.ends, starts + at, "right") for at in (0, self.length))
        return total - int((last - first).sum())

    def read(self, starts: np.ndarray) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """(input_ids, labels, positions, document_ids), each [len(starts), length] int64; the last two may be None."""
        if self.ends is None:
            rows = [self.tokens[start : start + self.length + 1] for start in starts]
            tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
            return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None, None
        at = starts[:, None] + np.arange(self.length + 1)  # [B, S + 1]
        ids = self.tokens[at].astype(np.int64)
        document = np.searchsorted(self.ends, at, "right")
        begins = np.concatenate(([0], self.ends))[document]  # of the document that holds each token
        labels = np.where(document[:, 1:] == document[:, :-1], ids[:, 1:], IGNORED)
        positions = (at - np.maximum(begins, starts[:, None]))[:, :-1]
        found = (ids[:, :-1], labels, positions, (document - document[:, :1])[:, :-1])
        return tuple(torch.from_numpy(np.ascontiguousarray(each)) for each in found)  # type: ignore[return-value]


@lru_cache(4)
def _order(seed: int, epoch: int, count: int, slack: int) -> tuple[np.ndarray, int]:
    """The windows of an epoch in their order, and how many tokens its cuts are shifted by, up to `slack`."""
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    return generator.permutation(count), int(generator.integers(0, slack + 1))


class Batches:
    """What one data-parallel rank of `dp` trains on, and the held-out text that it is validated on.

    samples   how many of the global order have been trained on: the state of the data
    """

    def __init__(
        self,
        folder: Path,
        *,
        length: int,
        batch: int,
        accumulate: int = 1,
        seed: int = 0,
        dp: int = 1,
        dp_rank: int = 0,
        device: str | torch.device = "cpu",
        documents: Documents = "joined",
    ) -> None:
        self.train = Windows(folder, "train", length, documents)
        self.held_out = Windows(folder, "held_out", length, documents)
        self.batch, self.accumulate, self.seed = batch, accumulate, seed
        self.dp, self.dp_rank, self.device = dp, dp_rank, device
        self.samples = 0

    @property
    def tokens(self) -> int:
        """Of a step, over all data-parallel ranks."""
        return self.batch * self.train.length

    def step(self, scale: float = 1.0) -> Iterator[Microbatch]:
        """This rank's microbatches of the next step; their loss is to be multiplied by a scale."""
        numbers = np.arange(self.samples, self.samples + self.batch)
        self.samples += self.batch
        return self._split(self.train, self.train.starts(self.seed, numbers), self.accumulate, scale)

    def validation(self, count: int, pieces: int = 1) -> Iterator[Microbatch]:
        """This rank's part of `count` batches of held-out text in `pieces` each, the same ones every time."""
        for starts in self.held_out.spread(count * self.batch).reshape(count, -1):
            yield from self._split(self.held_out, starts, pieces)

    def prompt(self, size: int) -> list[int]:
        """The first tokens of the held-out text."""
        return [int(token) for token in self.held_out.tokens[:size]]

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples = state_dict["samples"]

    def _split(
        self, windows: Windows, starts: np.ndarray, accumulate: int, scale: float = 1.0
    ) -> Iterator[Microbatch]:
        num_labels = max(1, windows.num_labels(starts)) / self.dp / scale
        for microbatch, rows in enumerate(starts.reshape(accumulate, self.dp, -1)[:, self.dp_rank]):
            input_ids, labels, positions, document_ids = windows.read(rows)
            place = (microbatch * self.dp + self.dp_rank) * rows.size * windows.length
            found = Microbatch(input_ids, labels, place, num_labels, positions, document_ids)
            yield found.to(self.device)
