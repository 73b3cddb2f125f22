"""What a trial compares: branches, training mode, large inputs, buffers, attributes and outputs of every kind."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtp
from fusedtp.parallel.infer import infer


class Deciding(nn.Module):
    """decide(x, h) -> which branch to take; ranks may hold only a part of the hidden h."""

    def __init__(self, decide) -> None:
        super().__init__()
        self.up, self.down, self.decide = nn.Linear(24, 40), nn.Linear(40, 24), decide

    def forward(self, x):
        h = self.up(x)
        return self.down(h.relu() if self.decide(x, h) else h.sin())


@pytest.mark.slow
@pytest.mark.parametrize(
    "decide",
    [
        lambda x, h: h.mean() > 0.05,
        lambda x, h: (h > 9).any(),
        lambda x, h: float(h.abs().max()) > 9,
        lambda x, h: torch.isnan(h[..., 0]).any() or h.std().item() > 9,
        lambda x, h: h.detach().mean() > 0.05,
        lambda x, h: h.argmax().item() % 2,
        lambda x, h: torch.no_grad()(torch.mean)(h) > 0.05,
    ],
)
def test_code_that_decides_by_a_part_of_an_activation_stays_whole(decide):
    """Whichever branch the trial takes: with other inputs, ranks may take different branches."""
    model = Deciding(decide)
    with pytest.raises(ValueError, match="branches on values of an activation that is split over ranks"):
        fusedtp.VirtualWorld(2).run(lambda group: fusedtp.parallelize(copy.deepcopy(model), group))


@pytest.mark.slow
@pytest.mark.parametrize(
    "decide",
    [
        lambda x, h: x.mean() > 0.05,
        lambda x, h: torch.isnan(x).any(),
        lambda x, h: x.detach().std().item() > 1,
        lambda x, h: h.shape[0] > 1 and h.dtype == torch.float32,
    ],
)
def test_code_that_decides_by_what_all_ranks_have_is_split(decide):
    model = Deciding(decide)
    fusedtp.VirtualWorld(2).run(lambda group: fusedtp.parallelize(copy.deepcopy(model), group))


class Hidden(nn.Module):
    """An MLP that applies `change` to its hidden features."""

    amax: Tensor

    def __init__(self, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.change, self.dropout = nn.Linear(24, 40), nn.Linear(40, 24), change, 0.5
        self.register_buffer("amax", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Any:
        return self.down(self.change(self, self.up(x)))


def clipped(mlp: Hidden, h: Tensor) -> Tensor:
    return h * (60 / h.norm(dim=-1, keepdim=True)).clamp(max=1)


def normalized_in_training(mlp: Hidden, h: Tensor) -> Tensor:
    return nn.functional.normalize(h, dim=-1) if mlp.training else h


def normalized_and_dropped_in_training(mlp: Hidden, h: Tensor) -> Tensor:
    return nn.functional.dropout(normalized_in_training(mlp, h), mlp.dropout, mlp.training)


def observed(mlp: Hidden, h: Tensor) -> Tensor:
    with torch.no_grad():
        mlp.amax.copy_(torch.maximum(mlp.amax, h.abs().max()))
    return h


def normalized_and_marked(mlp: Any, h: Tensor) -> Tensor:
    """What is stored says nothing: other numbers each time in training, and one that is none."""
    mlp.marks = (h.sum() * torch.rand(()) if mlp.training else h.sum() * 0, torch.tensor(torch.nan))
    return normalized_in_training(mlp, h)


def averaged(mlp: Any, h: Tensor) -> Tensor:
    mlp.loss = h.mean()
    return h


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (clipped, "large inputs"),
        (normalized_in_training, "training mode"),
        (normalized_and_dropped_in_training, "training mode"),
        (observed, "amax is off"),
        (normalized_and_marked, "training mode"),
        (averaged, "the attribute loss is off"),
    ],
)
def test_what_only_training_large_inputs_or_buffers_show(change: Callable[[Any, Tensor], Tensor], why: str):
    found = infer(Hidden(change), 2)
    assert not found.plan and why in found.whole["up"], found


def dropped(mlp: Hidden, h: Tensor) -> Tensor:
    return nn.functional.dropout(h, mlp.dropout, mlp.training)


def drawn(mlp: Hidden, h: Tensor) -> Tensor:
    return h * torch.rand(h.shape[:-1]).unsqueeze(-1) if mlp.training else h


def remembered(mlp: Any, h: Tensor) -> Tensor:
    """A table made by the first call, a count, statistics, a view of a weight: nothing has a gradient but the view."""
    if not hasattr(mlp, "table"):
        mlp.table, mlp.calls, mlp.largest = torch.arange(3.0), torch.zeros(()), 0.0
    mlp.calls = mlp.calls + 1
    mlp.largest = 0.9 * mlp.largest + 0.1 * h.detach().abs().max()
    mlp.flat = mlp.down.weight.view(-1)
    return h


@pytest.mark.parametrize("change", [dropped, drawn, remembered])
def test_what_training_draws_does_not_hinder(change: Callable[[Any, Tensor], Tensor]):
    assert infer(Hidden(change), 2).plan == {"up": "colwise", "down": "rowwise"}


def kept(mlp: Any, h: Tensor) -> Tensor:
    mlp.last = h.sin()
    return mlp.last


def test_a_module_that_keeps_an_activation_is_copied():
    model = Hidden(kept)
    for _ in range(2):  # the second call sees a model that has run
        assert infer(model, 2).plan == {"up": "colwise", "down": "rowwise"}
        model(torch.ones(2, 24))


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class InDataclass(Hidden):
    def forward(self, x: Tensor) -> Output:
        return Output(super().forward(x))


class Plain:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class InObject(Hidden):
    def forward(self, x: Tensor) -> Plain:
        return Plain(super().forward(x))


class InWords(Hidden):
    def forward(self, x: Tensor) -> str:
        return str(super().forward(x))


class Empty(Hidden):
    def __init__(self, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(change)
        self.nothing = nn.Parameter(torch.zeros(0, 24))


@pytest.mark.slow
def test_outputs_and_parameters_of_unusual_kinds():
    split = {"up": "colwise", "down": "rowwise"}
    assert infer(InDataclass(kept), 2) == infer(InObject(kept), 2) == (split, {})
    assert infer(Empty(kept), 2).plan == split
    found = infer(InWords(kept), 2)
    assert not found.plan and "a str without floating-point tensors" in found.whole["up"]


def test_a_model_whose_units_run_and_whose_output_does_not_compare():
    found = infer(nn.Sequential(OrderedDict(mlp=Hidden(dropped), end=Words())), 2)
    assert found.plan == {"mlp.up": "colwise", "mlp.down": "rowwise"} and "proved alone" in found.whole[""]


class Words(nn.Module):
    def forward(self, x: Tensor) -> str:
        return str(x)


class Zeroing(torch.autograd.Function):
    """Identity, but with a zero gradient for the first half of the features."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        half = gradient.shape[-1] // 2
        return torch.cat([torch.zeros_like(gradient[..., :half]), gradient[..., half:]], -1)


class Penalized(nn.Module):
    """A second output depends on the hidden features. Ranks agree on its value but not on its gradient."""

    def __init__(self, store: bool) -> None:
        super().__init__()
        self.up, self.down, self.store = nn.Linear(24, 40), nn.Linear(40, 24), store

    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        y, penalty = self.down(h), self.down(Zeroing.apply(h))
        if not self.store:
            return y, penalty
        self.penalties = [penalty]
        return y


@pytest.mark.parametrize("store", [False, True])
def test_gradients_of_all_outputs_and_attributes_are_compared(store: bool):
    found = infer(Penalized(store), 2)
    assert not found.plan and "gradient" in found.whole["up"]
