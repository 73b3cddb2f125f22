"""The training loop: what happens in a step, in the order in which it happens."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedtp.nn import CausalLM
from fusedtp.parallel import clip_grad_norm_
from fusedtp.train.config import TrainConfig
from fusedtp.train.data import Batches
from fusedtp.train.evaluate import validation_loss
from fusedtp.train.experts import ExpertLoad
from fusedtp.train.metrics import Metrics
from fusedtp.train.optim import adamw, set_learning_rate
from fusedtp.train.world import World


def train(model: CausalLM, batches: Batches, config: TrainConfig, world: World, metrics: Metrics) -> None:
    """Train `model` in place for all steps, measuring each of them."""
    options = config.optim
    optimizer = adamw(model, options, fused=True)
    load = ExpertLoad(model, world, config.model.balance_bias)
    for step in range(options.steps):
        rate = set_learning_rate(optimizer, options, step)
        loss = backward(model, batches, step, load)
        norm = clip_grad_norm_(model, options.clip).item()  # returns when all of the step's kernels have run,
        world.check()  # so that one which failed is found before it reaches a parameter
        optimizer.step()
        optimizer.zero_grad()
        metrics.step(step, loss=world.mean(loss), grad_norm=norm, lr=rate, **load.step())
        if (step + 1) % config.run.val_every == 0 or step + 1 == options.steps:
            held_out = batches.validation(config.data.val_batches)
            metrics.validation(step, validation_loss(model, held_out, world))


def backward(model: CausalLM, batches: Batches, step: int, load: ExpertLoad) -> Tensor:
    """Accumulate the gradients of a step, and its experts' load; return its mean loss over this rank's tokens."""
    total = torch.zeros((), device=batches.device)
    for input_ids, labels, place in batches.microbatches(step):
        model.set_dropout(batches.seed, step, place)
        out = model(input_ids, labels)
        load.add(out.routings)
        loss = out.loss / batches.accumulate
        loss.backward()
        total += loss.detach()
    return total
