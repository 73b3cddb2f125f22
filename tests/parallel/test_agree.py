"""Ranks that infer plans each for themselves must find the same one, or all say why not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtp
from tests.harness import PerRank, world
from tests.parallel.support import tp_mesh


class Mlp(nn.Module):
    """Splits well on rank 0. `fault` is what another rank's code does: raise, or mix features between the layers."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "raise":
            raise RuntimeError("no such kernel here")
        h = torch.relu(self.up(x))
        return self.down(h * h.mean(-1, keepdim=True) if self.fault == "mix" else h)


class Pair(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.first, self.second = Mlp(""), Mlp(fault)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def split(group: Any, kind: type[nn.Module], fault: str, message: str) -> None:
    torch.manual_seed(0)
    model = kind(fault if group.rank() else "")
    with pytest.raises(ValueError, match=message):
        fusedtp.parallelize(model, tp_mesh(group))
    assert not any(hasattr(module, "parallel") for module in model.modules())


DIFFERENT = r"ranks found different plans: second\.up \(rank 0: 'colwise', rank 1: 'whole'\); second\.down"


@pytest.mark.parametrize(
    ("kind", "fault", "messages"),
    [
        (Pair, "mix", [DIFFERENT] * 2),
        (
            Mlp,
            "raise",
            ["rank 1 found no plan: ValueError: Mlp cannot be", "^Mlp cannot be parallelized over 2"],
        ),
    ],
)
def test_ranks_that_find_different_plans(kind: type[nn.Module], fault: str, messages: list[str]):
    world(2).run(split, kind, fault, PerRank(messages), timeout=30)
