"""Whether a linear layer's forward is that of nn.Linear, so that a split linear layer may take its place.

Some models derive a class from nn.Linear and write the same forward again: Falcon adds the bias in a second step,
Whisper casts the weight to the dtype of its input. Others do more: quantize, mask, constrain the weight. So a forward
is accepted only if its code reads nothing but what such a rewriting needs (READS), and if it computes the same as
nn.Linear: values and gradients, in several dtypes, on small layers.
"""

from __future__ import annotations

from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

# A forward that reads other names may depend on shapes, devices, modes or settings, which no small layer shows.
READS = {"weight", "bias", "forward", "super", "dtype", "to", "t", "T", "mT"}
READS |= {"torch", "Tensor", "nn", "functional", "F", "linear", "matmul", "addmm"}
K, N, SHAPES, SIZES = 5, 3, ((5,), (4, 5), (2, 1, 5), (0, 5)), (1e-6, 1.0, 1e6)
# dtype of the input and of the weight; where they differ, nn.Linear raises and a split layer casts the weight.
DTYPES = (
    (torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float64), (torch.float64, torch.float32), (torch.bfloat16, torch.float32),
)  # fmt: skip
# A sum of K products and a bias is off by no more than a few roundings of its terms.
ROUNDINGS = 2 * (K + 2)

# What a class may not change beside its forward.
OTHERS = ("__call__", "_call_impl", "__getattr__", "__getattribute__", "weight", "bias")


def computes_linear(module: nn.Linear) -> bool:
    """Whether the forward of its class returns x W^T + b and does nothing else."""
    kind: Any = type(module)
    if kind.forward is nn.Linear.forward:
        return True
    more = set(module._parameters) - {"weight", "bias"} or module._buffers or module._modules
    return not more and _computes(kind, _forwards(kind), module.bias is not None)


def _forwards(kind: type) -> tuple[Any, ...]:
    """All that runs in a call, unless it is nn.Linear's: a part of the key below, since classes may be patched."""
    derived = kind.__mro__[: kind.__mro__.index(nn.Linear)]
    return tuple(vars(each)[name] for each in derived for name in ("forward", *OTHERS) if name in vars(each))


@cache
def _computes(kind: Any, forwards: tuple[Any, ...], bias: bool) -> bool:
    if not all(isinstance(each, FunctionType) and _is_simple(each.__code__) for each in forwards):
        return False
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        return all(
            _agrees(kind, bias, shape, size, dtypes, trains)
            for shape in SHAPES
            for size in SIZES
            for dtypes in DTYPES
            for trains in (True, False)
        )


def _is_simple(code: CodeType) -> bool:
    """Whether it is a forward(self, x) that reads only known names."""
    takes = code.co_name == "forward" and (code.co_argcount, code.co_kwonlyargcount, code.co_flags & 0x0C) == (2, 0, 0)
    inner = any(isinstance(each, CodeType) for each in code.co_consts)
    return takes and not inner and set(code.co_freevars) <= {"__class__"} and READS.issuperset(code.co_names)


def _agrees(
    kind: Any, bias: bool, shape: tuple[int, ...], size: float, dtypes: tuple[torch.dtype, torch.dtype], trains: bool
) -> bool:
    of_input, of_weight = dtypes
    derived = kind.__new__(kind)
    vars(derived).update(vars(_linear(bias, of_weight)))
    derived.train(trains)
    before, kept = dict(vars(derived)), [(p, p._version) for p in derived.parameters()]
    x = _random(shape, 2).mul(size).to(of_input).requires_grad_()
    dy = _random((*shape[:-1], N), 3).mul(size).to(of_input)
    try:
        y = derived(x)
        found = (y, *torch.autograd.grad(y, [x, *derived.parameters()], dy))
    except Exception:  # as nn.Linear does, if the dtypes differ
        return of_input != of_weight
    cast = [p.detach().to(of_input).requires_grad_() for p in derived.parameters()]
    want = F.linear(x, *cast)
    wanted = (want, *torch.autograd.grad(want, [x, *cast], dy))
    same = vars(derived) == before and [(p, p._version) for p in derived.parameters()] == kept
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)  # gradients of the weight are rounded to its dtype
    return same and y.dtype == of_input and all(_near(a, b, eps) for a, b in zip(found, wanted, strict=True))


def _near(got: Tensor, want: Tensor, eps: float) -> bool:
    if type(got) is not Tensor or got.shape != want.shape:
        return False
    if not want.numel():
        return True
    off = (got.detach().double() - want.detach().double()).abs().max()
    return bool(off <= ROUNDINGS * eps * want.detach().double().abs().max())


def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    """In float64; with magnitudes from a hundredth to a hundred, which clipping and rounding show."""
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randn((2, *shape), dtype=torch.float64, generator=generator, device="cpu")
    return drawn[0] * 10 ** drawn[1].clamp(-2, 2)


def _linear(bias: bool, dtype: torch.dtype) -> nn.Linear:
    """A small layer with random weights, made without drawing from torch's own generator."""
    made: nn.Linear = skip_init(nn.Linear, K, N, bias, device="cpu", dtype=dtype)
    with torch.no_grad():
        for i, parameter in enumerate(made.parameters()):
            parameter.copy_(_random(tuple(parameter.shape), 4 + i))
    return made
