"""Elementwise kernels in the interpreter: values and gradients of fp64 for any shape, dtype and layout."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.nn.rope import rotate_pair
from fusedtp.ops import pointwise
from tests.interpreting import interpreted
from tests.ops.pointwise_laws import USES, Draw, geglu_law, rms_norm_law, rope_law, swiglu_law

pytest.importorskip("triton")

NARROW = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
LAYOUTS = st.sampled_from(["plain", "sliced", "transposed"])


@st.composite
def draws(draw, rows: int = 40, width: int = 70, **fields: st.SearchStrategy) -> Draw:
    return Draw(
        draw(NARROW), draw(st.integers(0, rows)), draw(st.integers(1, width)), draw(LAYOUTS), draw(st.integers(0, 99)),
        **{name: draw(values) for name, values in fields.items()},
    )  # fmt: skip


@pytest.mark.slow
@settings(max_examples=40)
@given(draws(), NARROW, st.sampled_from(USES))
def test_rms_norm_and_other_uses_of_its_input(draw, weight_dtype, use):
    interpreted(rms_norm_law, draw, weight_dtype, use)


def unused_law(dtype: torch.dtype) -> None:
    x, weight = torch.ones(3, 16, dtype=dtype, requires_grad=True), torch.ones(16)
    _, same = pointwise.rms_norm_and_input(x, weight, 1e-5)
    same.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_an_input_whose_norm_is_not_used():
    interpreted(unused_law, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [2048, 3000])
def test_rms_norm_of_wide_rows_several_a_program(dtype, width):
    interpreted(rms_norm_law, Draw(dtype, 15, width), torch.float32, "added")


@pytest.mark.slow
@pytest.mark.parametrize("dtype, width", [(torch.float32, 8193), (torch.bfloat16, 16400)])
@pytest.mark.parametrize("use", USES)
def test_rms_norm_of_rows_that_no_program_holds(dtype, width, use):
    interpreted(rms_norm_law, Draw(dtype, 4, width, "sliced"), torch.float32, use)


@settings(max_examples=40)
@given(draws(rows=60, width=90, scale=st.sampled_from([1.0, 30.0])))
def test_swiglu(draw):
    interpreted(swiglu_law, draw)


@settings(max_examples=15)
@given(
    draws(rows=60, width=90, scale=st.sampled_from([1.0, 30.0])),
    st.sampled_from(["gelu", "gelu_pytorch_tanh"]),
)
def test_geglu(draw, act):
    interpreted(geglu_law, draw, act)


def test_an_activation_that_no_kernel_has_is_refused():
    with pytest.raises(ValueError, match="gelu_pytorch_tanh, not 'relu'"):
        pointwise.gated(torch.ones(2), torch.ones(2), "relu")


@pytest.mark.slow
@settings(max_examples=40)
@given(
    draws(rows=9, width=12, batch=st.integers(1, 3), heads=st.tuples(st.integers(1, 5), st.integers(1, 5))),
    st.booleans(),
)
def test_rotary_embedding_of_queries_and_keys(draw, shared_positions):
    interpreted(rope_law, draw, shared_positions)


def test_kernels_serve_tensors_of_one_gpu(monkeypatch):
    """A launch only sees addresses: operands on another device would be read as if they were on this one."""
    monkeypatch.setattr(pointwise, "runs_kernels", lambda device: True)

    def on(device, dtype=torch.float32):
        return SimpleNamespace(device=torch.device(device), dtype=dtype)

    assert pointwise.serves(on("cuda:0"), on("cuda:0", torch.bfloat16))
    for other in (on("cpu"), on("cuda:1"), on("cuda:0", torch.float64)):
        assert not pointwise.serves(on("cuda:0"), other)


def test_a_rotation_asks_for_its_tables_too(monkeypatch):
    asked = []
    monkeypatch.setattr(pointwise, "serves", lambda *tensors: asked.extend(map(id, tensors)))
    q, k, cos, sin = (
        torch.ones(1, 3, 2, 4),
        torch.ones(1, 3, 1, 4),
        torch.ones(1, 3, 1, 2),
        torch.ones(1, 3, 1, 2),
    )
    rotate_pair(q, k, cos, sin)
    assert asked == [id(each) for each in (q, k, cos, sin)]
