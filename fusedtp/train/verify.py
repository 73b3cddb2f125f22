"""--verify: the first steps again in one plain process, and how far the run is from them.

The reference is the same class, never parallelized: no process group, no fused operation, torch's AdamW and
torch's clipping, on the same parameters (seed, name) and batches (seed, step).

Note [What rounding may cause]
Both runs compute the same sums in another order. A result passes through n = 2 (8 layers + 4) operations forward
and backward; each rounds once to the working precision, with unit roundoff u, and sums up to k = max(tokens, widths)
terms in fp32, with unit roundoff v = 2^-24. Taken as independent, roundings add as a random walk does:

    e = sqrt(n) (u + sqrt(k) v)        relative error of the loss and of the gradient's norm in the first step

Training then carries the difference on, and at high learning rates grows it: a reference whose parameters were
changed by one rounding drifts off by a factor of up to 1.8 a step (AdamW, lr 3e-3, warm-up 15; far less with the
default schedule). So step t may differ by e 2^t, but never by more than a tenth. The first steps are the sharp
test: an operation that drops a reduction is wrong from step 0, by orders of magnitude more than e.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusedtp.train.build import build
from fusedtp.train.config import TrainConfig
from fusedtp.train.data import Batches
from fusedtp.train.environment import cores
from fusedtp.train.loop import backward
from fusedtp.train.optim import adamw, set_learning_rate
from fusedtp.train.world import World

ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-9}
GROWTH, LARGEST = 2.0, 0.1


class VerificationFailed(RuntimeError):
    """The parallel run is not the run of one process."""


@dataclass(frozen=True)
class Verification:
    """The largest differences over the compared steps.

    max_loss_difference        absolute, nats/byte
    max_grad_norm_difference   relative
    share_of_bound             the largest difference as a share of what rounding may cause in its step
    """

    steps: int
    max_loss_difference: float
    max_grad_norm_difference: float
    share_of_bound: float

    @property
    def passed(self) -> bool:
        """Whether rounding explains all differences; it does not explain a NaN."""
        return self.share_of_bound <= 1

    def in_words(self) -> str:
        verdict = "equal" if self.passed else "NOT EQUAL"
        return (
            f"{verdict}: loss differs by at most {self.max_loss_difference:.1e}, gradient norm by "
            f"{self.max_grad_norm_difference:.1e}, {self.share_of_bound:.1%} of what rounding may cause"
        )


def bound(config: TrainConfig, step: int) -> float:
    """Largest relative difference of a step that rounding explains; see Note [What rounding may cause]."""
    model, data = config.model, config.data
    operations = 2 * (8 * model.layers + 4)
    terms = max(data.batch * data.length, model.width, model.mlp_width)
    error = operations**0.5 * (ROUNDOFF[config.run.dtype] + terms**0.5 * ROUNDOFF["fp32"])
    return min(error * GROWTH**step, LARGEST)


def compare(
    config: TrainConfig, ours: Sequence[dict[str, Any]], reference: Sequence[dict[str, float]]
) -> Verification:
    """Differences between the records of a run and those of one process, step by step."""
    largest = torch.zeros(3, dtype=torch.float64)
    for step, (our, their) in enumerate(zip(ours, reference, strict=True)):
        loss = our["loss"] - their["loss"]
        norm = our["grad_norm"] / their["grad_norm"] - 1
        relative = torch.tensor([loss / their["loss"], norm], dtype=torch.float64).abs()
        share = relative.max() / bound(config, step)
        largest = torch.maximum(largest, torch.stack((torch.tensor(loss).abs(), relative[1], share)))
    return Verification(len(reference), *largest.tolist())


def reference_steps(
    config: TrainConfig, tokens: Path, steps: int, device: torch.device
) -> list[dict[str, float]]:
    """Loss and gradient norm of the first steps, trained in this process alone."""
    data, options = config.data, config.optim
    batches = Batches(
        tokens,
        length=data.length,
        batch=data.batch,
        accumulate=data.accumulate,
        seed=config.run.seed,
        device=device,
    )
    model = build(config, World(device=device))
    optimizer = adamw(model, options)
    records = []
    for step in range(steps):
        set_learning_rate(optimizer, options, step)
        loss = backward(model, batches, step)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
        records.append({"loss": loss.item(), "grad_norm": norm.item()})
    return records


def verify(
    config: TrainConfig, tokens: Path, records: Sequence[dict[str, Any]], world: World
) -> Verification | None:
    """Compare a run's records with the reference: on rank 0, with all cores, while the others wait."""
    result = None
    if world.rank == 0:
        threads = torch.get_num_threads()
        torch.set_num_threads(cores())
        first = records[: config.run.verify_steps]
        result = compare(config, first, reference_steps(config, tokens, len(first), world.device))
        torch.set_num_threads(threads)
    world.wait_for_all()
    return result
