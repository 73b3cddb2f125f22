"""Batches of byte tokens: a pure function of (seed, step), the same on any layout of ranks.

A step's windows are drawn for the whole job; a data-parallel rank takes its rows of every microbatch, and
tensor-parallel ranks of one data-parallel rank take the same rows:

    windows of a step [batch] = [accumulate, dp, batch / (accumulate * dp)]

so one process that takes all rows sees the tokens that all ranks together see.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class Windows:
    """Windows of `length` tokens and their shifted labels from a memory-mapped token file.

    Raises ValueError when the file does not hold one window.
    """

    def __init__(self, path: Path, length: int) -> None:
        size = path.stat().st_size
        if size <= length:
            raise ValueError(
                f"{path.stem} text has {size} bytes; --length {length} needs {length + 1}: "
                "give more text to --data or a smaller --length"
            )
        self.tokens = np.memmap(path, dtype=np.uint8, mode="r")
        self.length = length

    def drawn(self, seed: int, step: int, count: int) -> np.ndarray:
        """Start positions of a step's windows."""
        random = np.random.Generator(np.random.Philox(key=[seed, step]))
        return random.integers(0, len(self.tokens) - self.length, size=count)

    def spread(self, count: int) -> np.ndarray:
        """Start positions of `count` windows spread evenly over the file."""
        return np.linspace(0, len(self.tokens) - self.length - 1, count).astype(np.int64)

    def read(self, starts: np.ndarray) -> tuple[Tensor, Tensor]:
        """(input_ids, labels), both [len(starts), length] int64; labels are the following tokens."""
        rows = np.stack([self.tokens[start : start + self.length + 1] for start in starts])
        tokens = torch.from_numpy(rows.astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Batches:
    """What one data-parallel rank of `dp` trains on, and the held-out text that it is validated on."""

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
    ) -> None:
        self.train = Windows(folder / "train.bin", length)
        self.held_out = Windows(folder / "held_out.bin", length)
        self.batch, self.accumulate, self.seed = batch, accumulate, seed
        self.dp, self.dp_rank, self.device = dp, dp_rank, device

    def microbatches(self, step: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        """This rank's (input_ids, labels, place of its first token in the step) of every microbatch."""
        starts = self.train.drawn(self.seed, step, self.batch).reshape(self.accumulate, self.dp, -1)
        for microbatch, rows in enumerate(starts[:, self.dp_rank]):
            place = (microbatch * self.dp + self.dp_rank) * rows.size * self.train.length
            yield *self._read(self.train, rows), place

    def validation(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of `count` batches of held-out text, the same ones every time."""
        starts = self.held_out.spread(count * self.batch)
        for rows in starts.reshape(count, self.dp, -1)[:, self.dp_rank]:
            yield self._read(self.held_out, rows)

    def prompt(self, size: int) -> bytes:
        """The first bytes of the held-out text."""
        return bytes(self.held_out.tokens[:size])

    def _read(self, windows: Windows, starts: np.ndarray) -> tuple[Tensor, Tensor]:
        input_ids, labels = windows.read(starts)
        return input_ids.to(self.device), labels.to(self.device)
