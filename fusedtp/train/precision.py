"""fp16's loss scale: the loss is multiplied before backward, so that small gradients do not round to nothing.

fp16 has 5 bits of exponent: gradients below 6e-8 vanish. Scaled ones may overflow instead, which shows: the norm is
then not finite, the step is left out on every rank, since all have the same norm, and the scale is halved. It is
doubled after `window` steps without overflow (Micikevicius et al. 2018, Mixed Precision Training, section 3.2). Start
from a power of two, and scaling rounds nothing that stays in range.

The loss is scaled through what its sum is divided by, num_labels / scale: so every part of it is, those of routers too,
on whichever pipeline stage they are.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fusedtp.train.config import TrainConfig

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
