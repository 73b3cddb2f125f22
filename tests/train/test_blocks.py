"""Compiled and recomputed blocks in the trainer give the gradients of plain blocks."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fusedtp.commands.build import build
from fusedtp.train.config import BlockOptions, TrainConfig, parse
from fusedtp.train.data import Batches
from fusedtp.train.loop import ExpertLoad, backward
from fusedtp.train.mesh import World
from tests.train.support import assert_gradients

SIZES = "--width 16 --heads 4 --kv-heads 2 --mlp-width 10 --layers 2 --length 16 --batch 4 --dropout 0.1"


def step(config: TrainConfig, tokens: Path) -> tuple[float, dict[str, torch.Tensor], int]:
    """Loss and gradients of a step, and the number of elements that its forward saved for backward."""
    kept: list[Any] = []
    model = build(config, World())
    batches = Batches(tokens, length=16, batch=4)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        loss = backward(model, batches, 0, ExpertLoad(model, World(), 0.0), 0)
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}, sum(kept)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "--memory-budget 0 --compile-backend aot_eager_decomp_partition"])
def test_compiled_blocks_give_the_gradients_of_plain_ones(tokens: Path, options: str):
    config = parse(f"{SIZES} --compile --compile-backend aot_eager {options}".split())
    loss, gradients, all_kept = step(replace(config, blocks=BlockOptions()), tokens)
    torch._dynamo.reset()
    compile_, made = torch.compile, []
    with patch.object(torch, "compile", lambda *args, **more: made.append(args) or compile_(*args, **more)):
        got = step(config, tokens)
    torch._dynamo.reset()
    assert len(made) == 2, "a layer by itself"
    assert got[0] == pytest.approx(loss, rel=1e-5)
    assert_gradients(got[1], gradients, layers=2)
    assert not options or got[2] < all_kept / 2, "a budget of 0 keeps little more than what layers take"
