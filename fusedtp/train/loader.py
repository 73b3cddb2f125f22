"""Steps from any iterable of batches: a list, a torch DataLoader, torchdata's StatefulDataLoader.

A batch is a mapping of int64 tensors [B, S], this data-parallel rank's rows:

    input_ids
    labels          the token that follows each, -100 for none. Default: the next one of the row
    positions, document_ids     where documents are kept apart

The iterable starts again when it ends. Its position is saved with a checkpoint: by its own state_dict if it has one,
else as the number of batches taken, and a resumed run reads and drops as many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fusedtp.train.data import IGNORED, Microbatch
from fusedtp.train.world import World


class FromLoader:
    """What the trainer asks of data (see fusedtp.train.data.Batches), from an iterable.

    accumulate   batches of a step
    tokens       of the last step, over all data-parallel ranks
    """

    def __init__(self, loader: Iterable[Mapping[str, Tensor]], world: World, accumulate: int = 1) -> None:
        if accumulate < 1:
            raise ValueError(f"accumulate is {accumulate}, must be positive")
        self.loader, self.world, self.accumulate, self.device = loader, world, accumulate, world.device
        self.tokens, self.taken = 0, 0
        self._batches: Iterator[Mapping[str, Tensor]] | None = None

    def step(self, scale: float = 1.0) -> Iterator[Microbatch]:
        """The next step's microbatches. Collective over the data-parallel ranks, which count their labels together."""
        batches = [self._next() for _ in range(self.accumulate)]
        labels = [_labels(batch) for batch in batches]
        count = sum(int((each != IGNORED).sum()) for each in labels)
        num_labels = max(1.0, self.world.mean(torch.tensor(count, device=self.device)))
        self.tokens = self.world.dp * sum(each.numel() for each in labels)
        for number, (batch, own) in enumerate(zip(batches, labels, strict=True)):
            place = (number * self.world.dp + self.world.dp_rank) * own.numel()
            yield Microbatch(
                batch["input_ids"], own, place, num_labels / scale, batch.get("positions"),
                batch.get("document_ids"),
            ).to(self.device)  # fmt: skip

    def _next(self) -> Mapping[str, Tensor]:
        self.taken += 1
        for _ in range(2):
            if self._batches is None:
                self._batches = iter(self.loader)
            if (batch := next(self._batches, None)) is not None:
                return batch
            self._batches = None
        raise ValueError("the data has no batch")

    def state_dict(self) -> dict[str, Any]:
        own = getattr(self.loader, "state_dict", None)
        return {"taken": self.taken} if own is None else {"taken": self.taken, "loader": own()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._batches, taken = None, int(state_dict["taken"])
        if "loader" in state_dict:
            self.loader.load_state_dict(state_dict["loader"])  # type: ignore[attr-defined]
        else:
            for _ in range(taken):
                self._next()
        self.taken = taken


def _labels(batch: Mapping[str, Tensor]) -> Tensor:
    if "labels" in batch:
        return batch["labels"]
    ids = batch["input_ids"]
    return torch.cat([ids[:, 1:], ids.new_full((len(ids), 1), IGNORED)], 1)
