"""transformers' Conv1D, a linear layer with a weight [in, out]: plans split it as they split an nn.Linear.

In float64 with random values; each sum has at most 80 terms, so relative errors stay far below 1e-12.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import fusedtp
from fusedtp.comm import VirtualWorld
from fusedtp.parallel.foreign_styles import features_of, is_linear
from tests.harness import world
from tests.parallel.support import full_like, tp_mesh, two_backwards

OFF = 1e-12
WIDTH, BATCH, LENGTH = 6, 2, 5


class Mlp(nn.Module):
    """up, then a product of `packed` parts, then down."""

    def __init__(self, features: int, packed: int) -> None:
        super().__init__()
        self.packed = packed
        self.up, self.down = Conv1D(features * packed, WIDTH), Conv1D(WIDTH, features)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.up(x).chunk(self.packed, -1)
        y: Tensor = x + self.down(torch.stack(parts).prod(0).tanh())
        return y


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def made(features: int, packed: int) -> Mlp:
    model = Mlp(features, packed).double()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=i))
    return model


def compared(group: Any, features: int, packed: int, plan: dict[str, str], tokens: bool) -> list[str]:
    model = made(features, packed)
    x = normal(BATCH, LENGTH, WIDTH, seed=8)
    want = two_backwards(copy.deepcopy(model), x)
    faults = []
    for main_grad in (False, True):
        parallel: Any = fusedtp.parallelize(
            copy.deepcopy(model), tp_mesh(group), plan=plan, prove=False, sequence_parallel=tokens
        )
        own, whole = parallel.down.weight.to_local().shape, model.down.weight.shape
        assert own[0] in (whole[0] // 2, whole[0] - whole[0] // 2) and own[1] == whole[1]
        layers = [parallel.get_submodule(name) for name, word in plan.items() if word != "replicate"]
        got = two_backwards(parallel, x, layers if main_grad else ())
        faults += [
            f"{name}, main_grad {main_grad}"
            for name, value in want.items()
            if not float((got[name] - value).abs().max()) <= OFF * max(1.0, float(value.abs().max()))
        ]
    return faults


@pytest.mark.parametrize(
    ("features", "packed", "up", "down"),
    [
        (8, 1, "colwise", "rowwise"),
        (7, 1, "colwise", "rowwise"),
        (8, 2, "packed_colwise", "rowwise"),
        (8, 3, "packed_colwise_3", "rowwise"),
        (8, 1, "packed_colwise", "packed_rowwise"),
        (8, 1, "replicate", "rowwise_split_input"),
    ],
)
@pytest.mark.parametrize("tokens", [True, False], ids=["tokens split", "tokens whole"])
def test_equals_one_device(features: int, packed: int, up: str, down: str, tokens: bool) -> None:
    found = world(2).run(compared, features, packed, {"up": up, "down": down}, tokens)
    assert found == [[], []]


def unrounded(group: Any, word: str) -> None:
    """main_grad [in, out] of a 16-bit weight, against x.T @ dy in fp64."""
    model: Any = nn.Sequential(Conv1D(8, WIDTH).to(torch.bfloat16))
    fusedtp.parallelize(model, tp_mesh(group), plan={"0": word}, prove=False, sequence_parallel=False)
    weight = model[0].weight
    weight.main_grad = torch.zeros_like(weight.to_local(), dtype=torch.float32)
    x, dy = (normal(37, n, seed=n).to(torch.bfloat16) for n in (WIDTH, 8))
    y = model(x)
    (y * (dy if y.shape == dy.shape else dy.chunk(2, 1)[group.rank()])).sum().backward()
    assert weight.grad is None
    off = (full_like(weight.main_grad, weight).double() - x.double().t() @ dy.double()).abs()
    assert (off <= (37 + 4) * 2.0**-24 * (x.double().abs().t() @ dy.double().abs())).all()


@pytest.mark.parametrize("word", ["colwise", "rowwise_split_input"])
def test_main_grad_gets_what_was_not_rounded(word: str) -> None:
    world(2).run(unrounded, word)


def split(group: Any, model: nn.Module, word: str) -> None:
    fusedtp.parallelize(model, group, plan={"up": word}, prove=False)


@pytest.mark.parametrize("word", ["colwise_gather_output", "colwise_of_heads(2, 1, 1)"])
def test_what_needs_rows_of_output_features_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="up: Conv1D is not a linear layer with a weight"):
        VirtualWorld(2).run(lambda group: split(group, made(8, 1), word))


def test_one_with_another_forward_is_not_replaced() -> None:
    model: Any = made(8, 1)
    assert is_linear(model.up) and features_of(model.up) == (WIDTH, 8)
    model.up.forward = lambda x: x
    assert not is_linear(model.up)
    with pytest.raises(ValueError, match="up: its forward was replaced on the instance"):
        VirtualWorld(2).run(lambda group: split(group, model, "colwise"))
