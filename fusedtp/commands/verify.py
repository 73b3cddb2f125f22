"""--verify: repeat the first steps in one plain process, and compare the run with them.

The reference is the same class, never parallelized: no process group, no fused operation, torch's AdamW and
torch's clipping, on the same parameters (seed, name) and batches (seed, step).

Note [What rounding may cause]
The two runs compute the same sums in different orders, and training amplifies the difference. By how much depends on
the model, the learning rate and the step, so it is measured. The reference runs a second time, shaken: before every
step, each parameter is multiplied by 1 + d or 1 - d at random. d is the unit roundoff u of the working precision (half
a unit in the last place, the largest change by rounding), but at least 2^-23, since parameters are fp32 and change by
whole units. A rounded matmul equals an exact one with slightly changed weights, so this run differs from the reference
only in its roundings. If s(t) is its difference from the reference, the parallel run may differ from the reference in
step t by

    u + sqrt(n k) v + 4 max(s(0), ..., s(t))        relative, for the loss and for the gradient's norm

n = 2 (8 layers + 4) operations in forward and backward sum up to k = max(tokens, widths) terms in fp32, with unit
roundoff v = 2^-24. If these roundings are independent, they add up like a random walk. They are present in step 0 too,
where s may be zero. The factor 4 allows for s being a single sample, and for the rounding of activations and partial
sums.

A step with a bound above LARGEST proves nothing. It and all later steps are not compared, and the verdict says so. The
bound depends only on the two reference runs, so an error of the parallel run cannot cause this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fusedtp.commands.build import build, foreign_sizes
from fusedtp.environment import cores
from fusedtp.train.config import BlockOptions, TrainConfig
from fusedtp.train.data import Batches
from fusedtp.train.loop import (
    ExpertLoad,
    adamw,
    backward,
    for_batch,
    learning_rate,
    loss_scale_of,
    set_learning_rate,
)
from fusedtp.train.mesh import World
from fusedtp.train.shard import DTYPES

ROUNDOFF = {name: torch.finfo(dtype).eps / 2 for name, dtype in DTYPES.items()}
SHAKE = {dtype: max(unit, torch.finfo(torch.float32).eps) for dtype, unit in ROUNDOFF.items()}
SPREAD, LARGEST = 4.0, 0.05
QUANTITIES = ("loss", "grad_norm")
Numbers = dict[str, float]  # the quantities of a step


class VerificationFailed(RuntimeError):
    """The parallel run differs from the run of one process."""


@dataclass(frozen=True)
class Verification:
    """The largest differences over the compared steps.

    steps, of                  number of steps compared, and requested
    max_loss_difference        absolute, in nats per `unit`, a byte or a token
    max_grad_norm_difference   relative
    share_of_bound             the largest difference, relative to the bound of its step
    """

    steps: int
    of: int
    max_loss_difference: float
    max_grad_norm_difference: float
    share_of_bound: float
    unit: str = "token"

    @property
    def passed(self) -> bool:
        """Whether steps were compared and rounding explains all differences; a NaN fails."""
        return self.steps > 0 and self.share_of_bound <= 1

    def in_words(self) -> str:
        if not self.steps:
            return f"NOT COMPARED: rounding alone may cause more than {LARGEST:.0%} even in the first step"
        verdict = "equal" if self.passed else "NOT EQUAL"
        if self.steps < self.of:
            verdict += f" in {self.steps} of {self.of} steps (after them rounding may cause over {LARGEST:.0%})"
        return (
            f"{verdict}: loss differs by at most {self.max_loss_difference:.1e} nats/{self.unit}, gradient norm by "
            f"{self.max_grad_norm_difference:.1e} (relative), {self.share_of_bound:.1%} of what rounding may cause"
        )


def coarsest(config: TrainConfig) -> str:
    """The dtype with the largest roundoff between the loss and a parameter."""
    met = (config.run.dtype, config.parallel.param_dtype, config.parallel.reduce_dtype)
    return max(met, key=lambda name: ROUNDOFF[name])


def rounding(config: TrainConfig) -> float:
    """Relative difference that the roundings of a single step explain, regardless of earlier steps."""
    model, data = config.model, config.data
    layers, width = model.layers, max(model.width, model.mlp_width)
    if config.foreign.model is not None:
        layers, width, _ = foreign_sizes(config)
    operations = 2 * (8 * layers + 4)
    terms = max(data.batch * data.length, width)
    return ROUNDOFF[coarsest(config)] + (operations * terms) ** 0.5 * ROUNDOFF["fp32"]


def differences(ours: Sequence[dict[str, Any]], reference: Sequence[Numbers]) -> Tensor:
    """|ours / reference - 1| of every step and quantity, fp64 [steps, 2]; 0 if both overflowed."""
    mine, theirs = (
        torch.tensor([[_number(record[name]) for name in QUANTITIES] for record in records], dtype=torch.float64)
        for records in (ours, reference)
    )
    both_overflow = mine.isinf() & theirs.isinf()
    return (mine / theirs - 1).abs().masked_fill(both_overflow, 0.0)


def _number(value: float | None) -> float:
    """A number from metrics.jsonl, where null stands for a value that is not finite."""
    return math.inf if value is None else value


def bounds(config: TrainConfig, reference: Sequence[Numbers], shaken: Sequence[Numbers]) -> Tensor:
    """The bound of every step, fp64 [compared steps, 2]; see Note [What rounding may cause]."""
    bound = rounding(config) + SPREAD * differences(shaken, reference).cummax(0).values
    fine = (bound <= LARGEST).all(1)
    return bound[: int(fine.cumprod(0).sum())]


def compare(
    config: TrainConfig,
    ours: Sequence[dict[str, Any]],
    reference: Sequence[Numbers],
    shaken: Sequence[Numbers],
) -> Verification:
    """Compare the records of a run with those of one process, step by step."""
    assert len(ours) == len(reference) == len(shaken)
    bound = bounds(config, reference, shaken)
    steps = len(bound)
    if not steps:
        return Verification(0, len(reference), 0.0, 0.0, 0.0, config.data.unit)
    found = differences(ours[:steps], reference[:steps])
    losses = found[:, 0] * torch.tensor([abs(record["loss"]) for record in reference[:steps]])
    loss, norm, share = torch.stack((losses.max(), found[:, 1].max(), (found / bound).max())).tolist()
    return Verification(steps, len(reference), loss, norm, share, config.data.unit)


def reference_steps(
    config: TrainConfig,
    tokens: Path,
    steps: int,
    device: torch.device,
    shaken: bool = False,
    follow: Sequence[dict[str, Any]] = (),
) -> list[Numbers]:
    """Loss and gradient norm of the first steps, trained in this process alone.

    shaken   change every parameter by a rounding before every step
    follow   the run's records. With fp16, use its loss scales and skip the steps that it skipped: gradients just below
             the largest number may overflow in another order of summation
    """
    data, options, scale = config.data, for_batch(config.optim, config.data.batch), loss_scale_of(config)
    batches = Batches(
        tokens,
        length=data.length,
        batch=data.batch,
        accumulate=data.accumulate,
        seed=config.run.seed,
        device=device,
        documents=data.documents,
    )
    model = build(replace(config, blocks=BlockOptions()), World(device=device))
    optimizer = adamw(model, options)
    load = ExpertLoad(model, World(device=device), config.model.balance_bias)
    generator = torch.Generator(device).manual_seed(config.run.seed)
    records = []
    for step in range(steps):
        if shaken:
            shake_(model, SHAKE[coarsest(config)], generator)
        set_learning_rate(optimizer, learning_rate(options, step))
        followed = follow[step] if step < len(follow) else {}
        scale.value = followed.get("loss_scale", scale.value)
        loss = backward(model, batches, step, load, config.run.seed, scale=scale.value)
        scale.unscale_(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip, float(options.clip_norm))
        asked = norm.item() if not followed or math.isfinite(_number(followed["grad_norm"])) else math.inf
        taken = scale.takes(asked)
        if taken:
            optimizer.step()
        optimizer.zero_grad()
        load.step(taken)
        records.append({"loss": loss.item(), "grad_norm": norm.item() if taken else math.inf})
    return records


@torch.no_grad()
def shake_(model: nn.Module, relative: float, generator: torch.Generator) -> None:
    """Multiply every parameter by 1 + relative or 1 - relative, at random."""
    for parameter in model.parameters():
        signs = torch.randint(0, 2, parameter.shape, generator=generator, device=parameter.device) * 2 - 1
        parameter.mul_(1.0 + relative * signs)


def verify(config: TrainConfig, tokens: Path, records: Sequence[dict[str, Any]], world: World) -> Verification | None:
    """Compare a run's records with the reference on rank 0, with all cores, while the other ranks wait."""
    result = None
    if world.rank == 0:
        threads = torch.get_num_threads()
        torch.set_num_threads(cores())
        first = records[: config.run.verify_steps]
        reference, shaken = (
            reference_steps(config, tokens, len(first), world.device, shaken, first) for shaken in (False, True)
        )
        result = compare(config, first, reference, shaken)
        torch.set_num_threads(threads)
    world.wait_for_all()
    return result
