"""The gated MLP equals its formula."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedtp.nn import MLP, ModelConfig, MoE
from fusedtp.nn.mlp import GatedMLP, gated
from tests.nn.support import assert_same_function, randn


def act(x: torch.Tensor, name: str) -> torch.Tensor:
    if name == "silu":
        return x / (1 + torch.exp(-x))
    if name == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


names = st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh"])


@given(names, st.integers(0, 5), st.integers(0, 5))
def test_gate_is_its_formula(name: str, tokens: int, width: int) -> None:
    assert_same_function(
        lambda gate, up: gated(gate, up, name),
        lambda gate, up: act(gate, name) * up,
        (randn(tokens, width, seed=1), randn(tokens, width, seed=2)),
        ("gate", "up"),
    )


def test_compiled_formula_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = randn(4, 5, seed=1), randn(4, 5, seed=2)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert_same_function(
        lambda gate, up: gated(gate, up, "silu"),
        lambda gate, up: act(gate, "silu") * up,
        inputs,
        ("gate", "up"),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_activations_keep_their_dtype_and_parameters_theirs(name: str, dtype: str) -> None:
    config = ModelConfig(
        hidden_size=8,
        num_attention_heads=1,
        intermediate_size=12,
        hidden_act=name,
        mlp_bias=True,
        dtype=dtype,
    )  # type: ignore[arg-type]
    mlp = MLP(config)
    mlp(torch.randn(3, 8, dtype=config.compute_dtype)).float().sum().backward()
    assert mlp(torch.randn(3, 8, dtype=config.compute_dtype)).dtype == config.compute_dtype
    for name, parameter in mlp.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32, name


def test_module_is_its_formula() -> None:
    config = ModelConfig(
        hidden_size=6, num_attention_heads=1, intermediate_size=7, param_dtype="float64", mlp_bias=True
    )
    mlp = MLP(config)
    with torch.no_grad():
        for i, parameter in enumerate(mlp.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=i))

    def want(x: torch.Tensor) -> torch.Tensor:
        gate = x @ mlp.gate_proj.weight.T + mlp.gate_proj.bias
        up = x @ mlp.up_proj.weight.T + mlp.up_proj.bias
        return (act(gate, "silu") * up) @ mlp.down_proj.weight.T + mlp.down_proj.bias

    assert_same_function(mlp, want, [randn(4, 6)], "x")


@pytest.mark.parametrize(
    "make",
    [lambda: GatedMLP(4, 6, "relu"), lambda: MoE(4, 6, 2, 1, shared=6, gated=False, act="relu")],
    ids=["alone", "shared expert"],
)
def test_an_activation_that_there_is_not_is_refused(make) -> None:
    with pytest.raises(ValueError, match=r"act of a gated MLP is 'relu'; it must be one of silu, gelu,"):
        make()
