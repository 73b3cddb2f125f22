"""The optimizer and its schedule: AdamW, linear warm-up, then a decay.

    lr(step) = lr * (step + 1) / warmup                 step < warmup
    lr(step) = lr * (m + (1 - m) * g(f))                f = (step - begin) / (steps - 1 - begin), at least 0

    cosine   g = (1 + cos(pi f)) / 2     begin = warmup
    linear   g = 1 - f                   begin = warmup
    wsd      g = 1 - f                   begin = the last decay_share of the steps (Hu et al. 2024, MiniCPM, section 4)

with m = min_lr, so that step `warmup` has the highest rate and the last step m times it. `for_batch` has scaled lr to
the batch before: linearly (Goyal et al. 2017, section 2.1) or by its square root (Malladi et al. 2022, section 4).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fusedtp.train.options import OptimOptions


def for_batch(options: OptimOptions, batch: int) -> OptimOptions:
    """The options for steps of so many sequences: the learning rate follows batch_rule."""
    times = batch / options.base_batch
    factor = {"none": 1.0, "linear": times, "sqrt": math.sqrt(times)}[options.batch_rule]
    return replace(options, lr=options.lr * factor)


def learning_rate(options: OptimOptions, step: int) -> float:
    """Learning rate of a step, counted from 0."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    begin, last = options.warmup, options.steps - 1
    if options.decay == "wsd":
        begin = max(begin, last - round(options.decay_share * options.steps))
    share = min(1.0, max(0, step - begin) / max(1, last - begin))
    left = (1 + math.cos(math.pi * share)) / 2 if options.decay == "cosine" else 1 - share
    return options.lr * (options.min_lr + (1 - options.min_lr) * left)


def adamw(model: nn.Module, options: OptimOptions, **implementation: Any) -> torch.optim.AdamW:
    """AdamW over a model's parameters; `implementation` takes torch's foreach= or fused=.

    Matrices decay, vectors (norm weights, biases) do not.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        **implementation,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give it to every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
