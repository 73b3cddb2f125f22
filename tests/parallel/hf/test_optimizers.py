"""Optimizers on the DTensors of a split model: after some steps its weights are those of one process."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtp
from tests.harness import world
from tests.parallel.support import tp_mesh

from .families import model_of
from .parity import batch, full

# Of the largest weight. Llama's norms compute in fp32, and Adam divides even a tiny gradient by its own size.
OFF = 1e-4


def muon(parameters: Iterable[nn.Parameter]) -> Any:
    """For matrices, as it asks for."""
    return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=1e-2)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Any]] = {
    "AdamW, fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "AdamW, foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True, amsgrad=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
    "LBFGS": lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=4, line_search_fn="strong_wolfe"),
    "Muon": muon,
}


def trained(model: nn.Module, kind: str) -> dict[str, Tensor]:
    """Its weights after three steps on one batch."""
    optimizer = OPTIMIZERS[kind](model.parameters())
    inputs = batch((2, 5))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**inputs).loss
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return {name: full(p).detach() for name, p in model.named_parameters()}


def errors(group: Any) -> dict[str, float]:
    found = {}
    for kind in OPTIMIZERS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "bfloat16", lambda x: x)  # Muon rounds what it multiplies; sums in other orders show
            want = trained(model_of("llama").double(), kind)
            got = trained(fusedtp.parallelize(model_of("llama").double(), tp_mesh(group), prove=False), kind)
        found[kind] = max(float((got[name] - x).abs().max() / x.abs().max()) for name, x in want.items())
    return found


@pytest.mark.slow
def test_weights_are_those_of_one_process():
    for found in world(2).run(errors):
        assert all(error <= OFF for error in found.values()), found
