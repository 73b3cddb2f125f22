"""Gradients of a whole model against those of one process."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tests.nn.support import roundings_of


def assert_gradients(got: Mapping[str, Tensor], want: Mapping[str, Tensor], layers: int) -> None:
    """Each gradient of `got` within what a model of so many layers may lose of the largest entry of the wanted one.

    A layer has up to 8 operations forward and as many backward, of about 32 terms (the models here are that wide);
    see Note [Roundings]. For 4 layers in fp32 that is 1.3e-4 of a parameter's largest gradient.
    """
    over = []
    for name, gradient in got.items():
        wanted = want[name].detach().double()
        error = (gradient.detach().double() - wanted).abs().max().item()
        bound = roundings_of(16 * layers, 32) * torch.finfo(gradient.dtype).eps * wanted.abs().max().item()
        if not error <= bound:
            over.append(f"{name}: off by {error:.3e}, allowed {bound:.3e}")
    assert not over, "\n".join(over)
