"""Code that indexes the weight of a split embedding gets whole rows, with their gradients."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtp
from tests.harness import world

from .support import tp_mesh


class Reader(nn.Module):
    """Reads the first and the last row of the table besides looking ids up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(10, 8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(self.table(ids))))
        return torch.where((ids == 3)[..., None], self.table.weight[0, :], y) * self.table.weight[-1]


def compared(group: Any, length: int) -> None:
    torch.manual_seed(0)
    plain = Reader()
    plan = {"table": "embedding_rowwise", "up": "colwise", "down": "rowwise"}
    split = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group), plan=plan)
    ids = torch.tensor([[3, 1, 9, 0], [2, 3, 9, 9]])[:, :length]
    want, got = (model(ids) for model in (plain, split))
    torch.testing.assert_close(got, want)
    for each in (want, got):
        each.square().sum().backward()
    for (name, parameter), other in zip(split.named_parameters(), plain.parameters(), strict=True):
        gradient: Any = parameter.grad
        torch.testing.assert_close(gradient.full_tensor(), other.grad, msg=lambda m, n=name: f"{n}: {m}")
        parameter.grad, parameter.main_grad = None, torch.zeros_like(parameter)
    split(ids).square().sum().backward()
    for (name, parameter), other in zip(split.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad is None
        torch.testing.assert_close(parameter.main_grad.full_tensor(), other.grad, msg=lambda m, n=name: f"{n}: {m}")
    with pytest.raises(IndexError):
        split(ids + 10)
    torch.testing.assert_close(split(ids), want)


@pytest.mark.parametrize("length", [1, 4])  # tokens are whole, or split
@pytest.mark.parametrize("world_size", [2, 3])
def test_rows(world_size: int, length: int):
    world(world_size).run(compared, length)
