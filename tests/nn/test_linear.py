"""Linear layers: any dtype of activations over any dtype of parameters, and several on one input."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fusedtp.nn import Linear, project
from fusedtp.nn.linear import linear
from tests.nn.support import assert_sums, randn


@given(st.integers(0, 600), st.integers(1, 9), st.integers(1, 9), st.booleans(), st.sampled_from("bhfd"))
def test_linear_rounds_once(tokens: int, k: int, n: int, bias: bool, kind: str) -> None:
    dtype = {"b": torch.bfloat16, "h": torch.float16, "f": torch.float32, "d": torch.float64}[kind]
    inputs = [randn(tokens, k, seed=1), randn(n, k, seed=2), randn(n, seed=3)][: 2 + bias]
    mine = [x.to(dtype).requires_grad_() for x in inputs]
    theirs = [x.to(dtype).double().requires_grad_() for x in inputs]
    y, want = linear(*mine), F.linear(*theirs)
    assert y.dtype == dtype
    dy = randn(tokens, n, seed=4).to(dtype)
    y.backward(dy)
    want.backward(dy.double())
    absolute = [x.detach().abs().requires_grad_() for x in theirs]
    sizes = F.linear(*absolute)
    sizes.backward(dy.double().abs())
    assert_sums("y", y, want.detach(), sizes.detach(), k + bias)
    for name, terms, a, b, size in zip(
        ("x", "weight", "bias"), (n, tokens, tokens), mine, theirs, absolute, strict=False
    ):
        assert a.grad is not None and b.grad is not None and size.grad is not None and a.grad.dtype == dtype
        assert_sums(f"d{name}", a.grad, b.grad, size.grad, terms)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_parameters_are_cast_to_the_activations(dtype: torch.dtype) -> None:
    layer = Linear(4, 3, bias=True)
    y = layer(torch.randn(2, 5, 4, dtype=dtype))
    y.float().sum().backward()
    assert y.dtype == dtype and y.shape == (2, 5, 3)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


def test_project_is_each_linear() -> None:
    x, layers = torch.randn(6, 4), [Linear(4, 3), Linear(4, 5, bias=True)]
    for got, layer in zip(project(x, layers), layers, strict=True):
        assert torch.equal(got, layer(x))


def test_a_parallel_object_takes_over() -> None:
    """The hooks of hooks.py, called with what they are said to be called with."""

    class Recorder:
        def project(self, *arguments: object) -> str:
            return ("project", *arguments)  # type: ignore[return-value]

        def linear(self, *arguments: object) -> str:
            return ("linear", *arguments)  # type: ignore[return-value]

    x, layers = torch.randn(6, 4), [Linear(4, 3), Linear(4, 5)]
    layers[0].parallel = Recorder()
    assert project(x, layers, None) == ("project", x, layers, None, None)
    assert layers[0](x) == ("linear", x, layers[0], None)
