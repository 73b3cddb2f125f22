"""The loop: a step that failed on the device updates no parameter; the validation loss is that of all ranks' text."""

from dataclasses import dataclass, field

import pytest
import torch

from fusedtp.comm import SignalTimeout
from fusedtp.nn import CausalLM, ModelConfig
from fusedtp.nn.init import init_
from fusedtp.train import loop, text
from fusedtp.train.build import build
from fusedtp.train.config import parse
from fusedtp.train.data import Batches, Microbatch
from fusedtp.train.evaluate import validation_loss
from fusedtp.train.metrics import Metrics
from fusedtp.train.world import World, meshes
from tests.harness import pool


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

    def norm_of(model: torch.nn.Module, max_norm: float, kind: float) -> Late:
        seen.append([p.detach().clone() for p in model.parameters()])
        return Late(world.failed, len(seen) - 1)

    monkeypatch.setattr(loop, "clip_grad_norm_", norm_of)
    with pytest.raises(SignalTimeout, match="step 2"):
        loop.Trainer(
            model, Batches(tokens, length=16, batch=2), config, world, Metrics(config, world)
        ).train()
    assert len(seen) == 3 and not any(map(torch.equal, seen[0], seen[1]))
    assert all(map(torch.equal, seen[2], model.parameters()))


def small_model(dropout: float) -> CausalLM:
    config = ModelConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        residual_dropout=dropout, embedding_dropout=dropout,
    )  # fmt: skip
    return init_(CausalLM(config), 0, std=0.3)


def drawn_batches(rank: int) -> list[Microbatch]:
    generator = torch.Generator().manual_seed(rank)
    return [Microbatch(*torch.randint(0, 11, (2, 2, 5), generator=generator), 0, 10) for _ in range(3)]


def test_validation_drops_nothing_and_training_goes_on():
    with_dropout, without = small_model(0.5), small_model(0.0)
    with_dropout.set_dropout(0, 0)
    batches = drawn_batches(0)
    assert validation_loss(with_dropout, batches, World()) == validation_loss(without, batches, World())
    assert all(module.training for module in with_dropout.modules())


def validate(group) -> tuple[float, float]:
    """The validation loss in a world of two data-parallel ranks, and that of this rank's batches alone."""
    mesh, flat = meshes("cpu", 2, 1, 1)
    world = World(2, rank=group.rank(), mesh=mesh, flat=flat)
    model, batches = small_model(0.0), drawn_batches(group.rank())
    return validation_loss(model, batches, world), validation_loss(model, batches, World())


def test_the_validation_loss_is_the_mean_over_the_data_parallel_ranks():
    with pool.World(2) as ranks:
        (first, alone_0), (second, alone_1) = ranks.run(validate)
    assert alone_0 != alone_1
    rounded = torch.tensor([alone_0, alone_1]).sum().item() / 2  # the sum in fp32, as it is reduced
    assert first == second == rounded
