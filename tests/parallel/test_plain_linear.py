"""Which classes derived from nn.Linear compute the same as nn.Linear."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedtp
from fusedtp.comm import VirtualWorld
from fusedtp.parallel.plain_linear import computes_linear


class Inherited(nn.Linear):
    pass


class InTwoSteps(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class Cast(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class Scaled(nn.Linear):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def scaled(scale: float) -> Scaled:
    made = Scaled(4, 6)
    made.scale = scale
    return made


class Narrow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16().to(x.dtype))


class Clipped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-1e4, 1e4)


class Straight(nn.Linear):
    """The right output, but another gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * (x - x.detach()).sum()


class NoGradient(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.detach(), self.bias)


class Dropping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class WithBias(nn.Linear):
    """As Megatron's, which leaves adding the bias to the caller."""

    def forward(self, x: Tensor) -> Any:
        return F.linear(x, self.weight), self.bias


class Adapted(nn.Linear):
    """LoRA, whose second matrix is zero at first."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.low, self.high = nn.Parameter(torch.ones(1, args[0])), nn.Parameter(torch.zeros(args[1], 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.low.T @ self.high.T


class Patched(nn.Linear):
    """Reads a function that somebody may set."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.after = lambda y: y

    def forward(self, x: Tensor) -> Tensor:
        return self.after(super().forward(x))


class Constrained(nn.Linear):
    """Changes its weight before it uses it."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data / self.weight.data.norm()
        return super().forward(x)


class Slim(nn.Linear):
    active = 8

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x[..., : self.active], self.weight[:, : self.active], self.bias)


class Quantized(nn.Linear):
    """Without gradients only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if torch.is_grad_enabled() else super().forward(x).bfloat16().to(x.dtype)


class Wide(nn.Linear):
    """Computes in the dtype of its weight, and returns it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class ClippedGradient(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda dy: dy.clamp(-1, 1))
        return y


class Extra(nn.Linear):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


class Called(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 2

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class FromRounding(Narrow):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


SAME = [nn.Linear(4, 6), Inherited(4, 6), InTwoSteps(4, 6), InTwoSteps(4, 6, bias=False), Cast(4, 6)]
OTHERS = [scaled(1.0), Constrained(4, 6), Slim(4, 6), Quantized(4, 6), Wide(4, 6), ClippedGradient(4, 6), Extra(4, 6)]
OTHERS += [Called(4, 6), FromRounding(4, 6)]
OTHERS += [Narrow(4, 6), Clipped(4, 6), Straight(4, 6), NoGradient(4, 6), Dropping(4, 6), Counting(4, 6)]
OTHERS += [WithBias(4, 6), Adapted(4, 6), Patched(4, 6)]


@pytest.mark.slow
@pytest.mark.parametrize("layer", SAME, ids=lambda layer: type(layer).__name__)
def test_the_same(layer: nn.Linear) -> None:
    assert computes_linear(layer)


@pytest.mark.parametrize("layer", OTHERS, ids=lambda layer: type(layer).__name__)
def test_others(layer: nn.Linear) -> None:
    before = dict(vars(layer))
    assert not computes_linear(layer)
    assert vars(layer) == before


def test_a_class_changed_later_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert computes_linear(InTwoSteps(4, 6))
    monkeypatch.setattr(InTwoSteps, "forward", Narrow.forward)
    assert not computes_linear(InTwoSteps(4, 6))


def test_no_random_number_is_drawn_and_no_mode_matters() -> None:
    class Fresh(nn.Linear):  # whose result is not known yet
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight, self.bias)

    layer, before = Fresh(4, 6), torch.get_rng_state()
    with torch.no_grad(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        assert computes_linear(layer)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("up", [InTwoSteps, Cast])
def test_a_plan_splits_them(up: type[nn.Linear]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(up(4, 6), nn.ReLU(), up(6, 4)).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    want = model(x).detach()
    plan = {"0": "colwise", "2": "rowwise"}

    def run(group: Any) -> Tensor:
        found: Tensor = fusedtp.parallelize(copy.deepcopy(model), group, plan=plan)(x)
        return found.detach()

    for y in VirtualWorld(2).run(run):
        torch.testing.assert_close(y, want, rtol=0.0, atol=1e-14)


def test_a_plan_refuses_others() -> None:
    model = nn.Sequential(Narrow(4, 6), nn.ReLU(), nn.Linear(6, 4))
    with pytest.raises(ValueError, match="Narrow has its own forward, which splitting would replace"):
        VirtualWorld(2).run(lambda group: fusedtp.parallelize(model, group, plan={"0": "colwise", "2": "rowwise"}))
