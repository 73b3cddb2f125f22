"""Whether a linear layer's forward is that of nn.Linear, so that a split linear layer may take its place.

Some models derive a class from nn.Linear and write the same forward again: Falcon adds the bias in a second step,
Whisper casts the weight to the dtype of its input. Others do more (quantize, scale, drop). Reading such code proves
nothing, so a class's forward runs beside nn.Linear's, on small inputs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

SETTINGS = (int, float, str, bool, type(None))
# Inputs of nn.Linear(K, N) are [..., K]. Large and small values show clipping, scaling and rounding.
K, N, SHAPES, SIZES = 5, 3, ((5,), (4, 5), (2, 1, 5), (0, 5)), (1e-6, 1.0, 1e6)
# In float64 a sum of K products is off by no more than K + 1 roundings of its terms.
OFF = 1e-14
ATTRIBUTES = frozenset(vars(nn.Linear(1, 1)))


def computes_linear(module: nn.Linear) -> bool:
    """Whether the forward of its class returns x W^T + b and changes nothing."""
    kind: Any = type(module)
    if kind.forward is nn.Linear.forward:
        return True
    parameters = set(module._parameters) - {"weight", "bias"}
    more = {name: x for name, x in vars(module).items() if name not in ATTRIBUTES}
    if parameters or module._buffers or module._modules or not all(type(x) in SETTINGS for x in more.values()):
        return False
    return _computes(kind, kind.forward, tuple(sorted(more.items())), module.bias is not None)


@cache
def _computes(kind: type[nn.Linear], forward: Any, settings: tuple[tuple[str, Any], ...], bias: bool) -> bool:
    """The same for a class with this forward, whose instances have these attributes beside those of nn.Linear."""
    try:
        cases = [(shape, size, mode) for shape in SHAPES for size in SIZES for mode in (True, False)]
        return all(_agrees(kind, dict(settings), bias, *case) for case in cases)
    except Exception:  # its code may raise anything on a layer that its constructor did not make
        return False


def _agrees(
    kind: type[nn.Linear], settings: dict[str, Any], bias: bool, shape: tuple[int, ...], size: float, trains: bool
) -> bool:
    plain = _linear(bias).train(trains)
    derived = kind.__new__(kind)
    vars(derived).update(vars(plain) | settings)
    before = dict(vars(derived))
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * size
    (got, mine), (want, theirs) = (_run(layer, x) for layer in (derived, plain))
    if type(got) is not Tensor or got.shape != want.shape or got.dtype != want.dtype:
        return False
    scale = OFF * (float(x.abs().max()) if x.numel() else 0.0) + OFF
    near = all(torch.allclose(a, b, rtol=0.0, atol=K * scale) for a, b in zip((got, *mine), (want, *theirs)))
    return near and vars(derived) == before


def _run(layer: nn.Linear, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output, and gradients of input, weight and bias."""
    x = x.clone().requires_grad_()
    y = layer(x)
    parameters = [p for p in (layer.weight, layer.bias) if p is not None]
    return y.detach(), torch.autograd.grad((y * y.detach().sign()).sum(), [x, *parameters])


def _linear(bias: bool) -> nn.Linear:
    """A small layer with random weights."""
    made = nn.Linear(K, N, bias, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    return made
