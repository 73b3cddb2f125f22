"""--verify: the first steps again in one plain process, and how far the run is from them.

The reference is the same class, never parallelized: no process group, no fused operation, torch's AdamW and
torch's clipping, on the same parameters (seed, name) and batches (seed, step).

Note [What rounding may cause]
Both runs compute the same sums in another order, and training carries the difference on: how far, depends on the
model, the learning rate and the step. So it is measured. The reference runs a second time, shaken: before every step
each parameter is multiplied by 1 + d or 1 - d at random, d being the unit roundoff u of the working precision (half a
unit in the last place, the most that a rounding changes), but at least 2^-23, since parameters are fp32 and move by
whole units. A matmul that rounds is an exact one of slightly changed weights, so this is a run with other roundings and
nothing else different. With s(t) its difference from the reference, the parallel run may differ from the reference in
step t by

    u + sqrt(n k) v + 4 max(s(0), ..., s(t))        relative, for the loss and for the gradient's norm

n = 2 (8 layers + 4) operations forward and backward sum up to k = max(tokens, widths) terms in fp32, with unit
roundoff v = 2^-24; taken as independent, these roundings add as a random walk does, and they are there in step 0 too,
where s may come out as nothing. The factor 4 pays for s being one draw, and for activations and partial sums that are
rounded too.

A step whose bound is above LARGEST proves nothing and is not compared, nor are those after it, and the verdict says
so. That depends on the two reference runs alone: no fault of the parallel run can make it come about.
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
Numbers = dict[str, float]  # of a step: its quantities


class VerificationFailed(RuntimeError):
    """The parallel run is not the run of one process."""


@dataclass(frozen=True)
class Verification:
    """The largest differences over the compared steps.

    steps, of                  steps that were compared, and that were asked for
    max_loss_difference        absolute, nats/byte
    max_grad_norm_difference   relative
    share_of_bound             the largest difference as a share of what rounding may cause in its step
    """

    steps: int
    of: int
    max_loss_difference: float
    max_grad_norm_difference: float
    share_of_bound: float

    @property
    def passed(self) -> bool:
        """Whether steps were compared and rounding explains all differences; it does not explain a NaN."""
        return self.steps > 0 and self.share_of_bound <= 1

    def in_words(self) -> str:
        if not self.steps:
            return f"NOT COMPARED: in the first step already, rounding alone may cause more than {LARGEST:.0%}"
        verdict = "equal" if self.passed else "NOT EQUAL"
        if self.steps < self.of:
            verdict += f" in {self.steps} of {self.of} steps (after them rounding may cause over {LARGEST:.0%})"
        return (
            f"{verdict}: loss differs by at most {self.max_loss_difference:.1e}, gradient norm by "
            f"{self.max_grad_norm_difference:.1e}, {self.share_of_bound:.1%} of what rounding may cause"
        )


def coarsest(config: TrainConfig) -> str:
    """The dtype with the largest roundoff that a number meets between the loss and a parameter."""
    met = (config.run.dtype, config.parallel.param_dtype, config.parallel.reduce_dtype)
    return max(met, key=lambda name: ROUNDOFF[name])


def rounding(config: TrainConfig) -> float:
    """Relative difference that the roundings of one step explain, whatever the steps before it did."""
    model, data = config.model, config.data
    layers, width = model.layers, max(model.width, model.mlp_width)
    if config.foreign.model is not None:
        layers, width, _ = foreign_sizes(config)
    operations = 2 * (8 * layers + 4)
    terms = max(data.batch * data.length, width)
    return ROUNDOFF[coarsest(config)] + (operations * terms) ** 0.5 * ROUNDOFF["fp32"]


def differences(ours: Sequence[dict[str, Any]], reference: Sequence[Numbers]) -> Tensor:
    """|our / their - 1| of every step and quantity, fp64 [steps, 2]."""
    mine, theirs = (
        torch.tensor([[_number(record[name]) for name in QUANTITIES] for record in records], dtype=torch.float64)
        for records in (ours, reference)
    )
    both_overflow = mine.isinf() & theirs.isinf()
    return (mine / theirs - 1).abs().masked_fill(both_overflow, 0.0)


def _number(value: float | None) -> float:
    """As it was before metrics.jsonl, which has null for what is not finite."""
    return math.inf if value is None else value


def bounds(config: TrainConfig, reference: Sequence[Numbers], shaken: Sequence[Numbers]) -> Tensor:
    """What rounding may cause in every step, fp64 [compared steps, 2]; see Note [What rounding may cause]."""
    bound = rounding(config) + SPREAD * differences(shaken, reference).cummax(0).values
    fine = (bound <= LARGEST).all(1)
    return bound[: int(fine.cumprod(0).sum())]


def compare(
    config: TrainConfig,
    ours: Sequence[dict[str, Any]],
    reference: Sequence[Numbers],
    shaken: Sequence[Numbers],
) -> Verification:
    """Differences between the records of a run and those of one process, step by step."""
    assert len(ours) == len(reference) == len(shaken)
    bound = bounds(config, reference, shaken)
    steps = len(bound)
    if not steps:
        return Verification(0, len(reference), 0.0, 0.0, 0.0)
    found = differences(ours[:steps], reference[:steps])
    losses = found[:, 0] * torch.tensor([abs(record["loss"]) for record in reference[:steps]])
    largest = torch.stack((losses.max(), found[:, 1].max(), (found / bound).max()))
    return Verification(steps, len(reference), *largest.tolist())


def reference_steps(
    config: TrainConfig,
    tokens: Path,
    steps: int,
    device: torch.device,
    shaken: bool = False,
    follow: Sequence[dict[str, Any]] = (),
) -> list[Numbers]:
    """Loss and gradient norm of the first steps, trained in this process alone.

    shaken   change every parameter by what a rounding may change, before every step
    follow   the run's records. With fp16 its loss scales are taken over and the steps that it left out are left out:
             gradients just below the largest number may overflow in another order of summation
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
        load.step()
        records.append({"loss": loss.item(), "grad_norm": norm.item() if taken else math.inf})
    return records


@torch.no_grad()
def shake_(model: nn.Module, relative: float, generator: torch.Generator) -> None:
    """Multiply every parameter by 1 + relative or 1 - relative, at random."""
    for parameter in model.parameters():
        signs = torch.randint(0, 2, parameter.shape, generator=generator, device=parameter.device) * 2 - 1
        parameter.mul_(1.0 + relative * signs)


def verify(config: TrainConfig, tokens: Path, records: Sequence[dict[str, Any]], world: World) -> Verification | None:
    """Compare a run's records with the reference: on rank 0, with all cores, while the others wait."""
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
