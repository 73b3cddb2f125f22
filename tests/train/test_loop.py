"""The loop: a step that failed on the device updates no parameter."""

from dataclasses import dataclass, field

import pytest
import torch

from fusedtp.comm import SignalTimeout
from fusedtp.train import loop, text
from fusedtp.train.build import build
from fusedtp.train.config import parse
from fusedtp.train.data import Batches
from fusedtp.train.metrics import Metrics
from fusedtp.train.world import World


@dataclass(frozen=True)
class FailingWorld(World):
    """A world in which a kernel fails; `failed` lists the steps whose failure the host can see by now."""

    failed: list[int] = field(default_factory=list)

    def check(self) -> None:
        if self.failed:
            raise SignalTimeout(f"step {self.failed[0]}")


class Late:
    """A norm on the device: the failure of its step is seen when the host has waited for it, not before."""

    def __init__(self, failed: list[int], step: int) -> None:
        self.failed, self.step = failed, step

    def item(self) -> float:
        if self.step == 2:
            self.failed.append(self.step)
        return 1.0


def test_a_failed_step_reaches_no_parameter(tmp_path, monkeypatch):
    (tmp_path / "book.txt").write_text("once upon a time " * 200)
    tokens = text.build((tmp_path / "book.txt",), tmp_path / "tokens")
    sizes = "--width 16 --mlp-width 8 --layers 1 --length 16 --batch 2 --steps 5 --warmup 0"
    config = parse(sizes.split())
    world = FailingWorld()
    model = build(config, world)
    seen: list[list[torch.Tensor]] = []

    def norm_of(model: torch.nn.Module, max_norm: float) -> Late:
        seen.append([p.detach().clone() for p in model.parameters()])
        return Late(world.failed, len(seen) - 1)

    monkeypatch.setattr(loop, "clip_grad_norm_", norm_of)
    with pytest.raises(SignalTimeout, match="step 2"):
        loop.train(model, Batches(tokens, length=16, batch=2), config, world, Metrics(config, world))
    assert len(seen) == 3 and not any(map(torch.equal, seen[0], seen[1]))
    assert all(map(torch.equal, seen[2], model.parameters()))
