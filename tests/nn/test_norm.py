"""RMSNorm equals its formula."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fusedtp.nn import RMSNorm
from fusedtp.nn.norm import add_norm, norm_of, rms_norm
from tests.nn import formulas
from tests.nn.support import assert_close, assert_same_function, randn


@given(st.lists(st.integers(0, 5), max_size=3), st.integers(1, 9), st.sampled_from([1e-5, 0.1]))
def test_norm_is_its_formula(shape: list[int], hidden: int, eps: float) -> None:
    assert_same_function(
        lambda x, w: rms_norm(x, w, eps),
        lambda x, w: formulas.rms_norm(x, w, eps),
        (randn(*shape, hidden, seed=1), randn(hidden, seed=2)),
        ("x", "weight"),
    )


def test_gradcheck() -> None:
    x, w = randn(4, 5, seed=1).requires_grad_(), randn(5, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (x, w))


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_is_rounded_once(dtype: torch.dtype, compiling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    x, w = torch.randn(64, 32).to(dtype), torch.randn(32)
    got = rms_norm(x, w, 1e-5)
    assert got.dtype == dtype
    assert_close("y", got, formulas.rms_norm(x.double(), w.double(), 1e-5), roundings=0.51)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_odd_values_come_out_as_torch_gives_them(odd: float) -> None:
    x, w = torch.randn(3, 4), torch.randn(4)
    x[1, 2] = odd
    assert torch.equal(rms_norm(x, w, 1e-5).isnan(), F.rms_norm(x, (4,), w, 1e-5).isnan())


def test_a_strided_input_needs_no_copy_by_the_caller() -> None:
    wide = torch.randn(6, 10)
    norm = RMSNorm(4)
    assert torch.equal(norm(wide[:, 3:7]), norm(wide[:, 3:7].contiguous()))


def test_a_norm_with_a_forward_of_its_own_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where kernels would replace a plain norm, with and without the preceding sum."""

    class Doubled(RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    monkeypatch.setattr("fusedtp.ops.pointwise.serves", lambda *tensors: True)
    for name in ("rms_norm", "rms_norm_and_input", "add_rms_norm"):
        monkeypatch.setattr(f"fusedtp.ops.pointwise.{name}", lambda x, *others: (x, x))
    monkeypatch.setattr("fusedtp.nn.norm.rms_norm", lambda x, weight, eps: x + 1)
    x, norm = torch.randn(3, 4), Doubled(4)
    assert torch.equal(norm_of(x, norm)[0], 2 * (x + 1))
    assert torch.equal(add_norm(x, x, norm)[0], 2 * (2 * x + 1))
    assert torch.equal(norm_of(x, RMSNorm(4))[0], x)


def test_activations_may_be_wider_than_the_weight() -> None:
    norm, x = RMSNorm(6), torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(6))
    y = norm(x)
    y.backward(dy := torch.randn(3, 6, dtype=torch.float64))
    wide = norm.weight.detach().double().requires_grad_()
    again = x.detach().requires_grad_()
    torch.nn.functional.rms_norm(again, (6,), wide, norm.eps).backward(dy)
    torch.testing.assert_close(x.grad, again.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norm.weight.grad, wide.grad.float())
