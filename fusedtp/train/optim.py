"""The optimizer and its schedule: AdamW, linear warm-up, then a decay.

    lr(step) = lr * (step + 1) / warmup                 step < warmup
    lr(step) = lr * (m + (1 - m) * g(f))                f = (step - begin) / (steps - 1 - begin), at least 0

    cosine   g = (1 + cos(pi f)) / 2     begin = warmup
    linear   g = 1 - f                   begin = warmup
    wsd      g = 1 - f                   begin = the last decay_share of the steps (Hu et al. 2024, MiniCPM, section 4)

with m = min_lr, so that step `warmup` has the highest rate and the last step m times it. `for_batch` has scaled lr to
the batch before: linearly (Goyal et al. 2017, section 2.1) or by its square root (Malladi et al. 2022, section 4).

Note [Loss scale]
fp16 has 5 bits of exponent: gradients below 6e-8 vanish. So the loss is multiplied before backward. Scaled gradients
may overflow instead, which shows: the norm is then not finite, the step is left out on every rank, since all have the
same norm, and the scale is halved. It is doubled after `window` steps without overflow (Micikevicius et al. 2018, Mixed
Precision Training, section 3.2). Start from a power of two, and scaling rounds nothing that stays in range.

The loss is scaled through what its sum is divided by, num_labels / scale: so every part of it is, those of routers too,
on whichever pipeline stage they are.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fusedtp.train.config import OptimOptions, TrainConfig


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


# -- fp16's loss scale -------------------------------------------------------------------------------------------------

SMALLEST = 2.0**-24  # below it, no overflow explains that gradients are not finite


class LossScale:
    """What the loss is multiplied by. value: now; good: steps since it last changed; skipped: steps left out so far."""

    def __init__(self, value: float = 1.0, window: int | None = None) -> None:
        """window: None keeps the value for good, and leaves no step out."""
        self.value, self.window, self.good, self.skipped = value, window, 0, 0

    def unscale_(self, model: nn.Module) -> None:
        """Divide a model's gradients by the scale."""
        if self.value == 1:
            return
        found = [p.grad for p in model.parameters() if p.grad is not None]
        local = [g._local_tensor if isinstance(g, DTensor) else g for g in found]
        torch._foreach_mul_(local, 1 / self.value)

    def takes(self, norm: float) -> bool:
        """Whether a step whose gradients have this norm is to be taken; sets the scale of the next one.

        Raises OverflowError if no scale makes the gradients finite.
        """
        if self.window is None:
            return True
        if not math.isfinite(norm):
            self.value, self.good, self.skipped = self.value / 2, 0, self.skipped + 1
            if self.value < SMALLEST:
                raise OverflowError(
                    f"the gradients are not finite, not even with a loss scale of {2 * self.value}: it is not fp16 "
                    "that overflows"
                )
            return False
        self.good += 1
        if self.good == self.window:
            self.value, self.good = self.value * 2, 0
        return True

    @property
    def numbers(self) -> dict[str, float]:
        """What a step's record says of it."""
        return {} if self.window is None else {"loss_scale": self.value}

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good": self.good, "skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.window is not None:
            self.value, self.good = float(state_dict["value"]), int(state_dict["good"])
            self.skipped = int(state_dict["skipped"])


def loss_scale_of(config: TrainConfig) -> LossScale:
    """Dynamic for fp16, 1 for all others."""
    if config.run.dtype != "fp16":
        return LossScale()
    return LossScale(config.optim.loss_scale, config.optim.loss_scale_window)
