"""Dropout between split layers, of which ranks draw unequally often: what is drawn for whole tensors stays alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import fusedtp
from tests.harness import world
from tests.parallel.support import tp_mesh

WIDTH = 8


def of_styles(group: Any, features: int, sequence_parallel: bool) -> nn.Module:
    block = nn.Sequential(nn.Linear(WIDTH, features), nn.Dropout(0.5), nn.Linear(features, WIDTH))
    options = dict(sequence_parallel=sequence_parallel)
    plan = {"0": fusedtp.FusedColwise(**options), "2": fusedtp.FusedRowwise(**options)}
    return parallelize_module(block, tp_mesh(group), plan)


def of_transformers(group: Any, features: int, sequence_parallel: bool) -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    sizes: dict[str, Any] = dict(vocab_size=32, d_model=WIDTH, d_kv=2, d_ff=features, num_layers=2, num_heads=4)
    model: Any = T5EncoderModel(T5Config(**sizes, dropout_rate=0.5))
    return fusedtp.parallelize(model, tp_mesh(group), sequence_parallel=sequence_parallel)


def trained(group: Any, make: Any, features: int, sequence_parallel: bool, recompute: bool) -> Any:
    """After a step: the next random number, and gradients of what every rank holds."""
    torch.manual_seed(0)
    model = make(group, features, sequence_parallel).train()
    torch.manual_seed(1)
    if make is of_transformers:
        call, x = (lambda ids: model(input_ids=ids).last_hidden_state), torch.arange(8)[None]
        if recompute:
            model.gradient_checkpointing_enable(dict(use_reentrant=False))
    else:
        x = torch.ones(2, WIDTH, requires_grad=True)
        call = (lambda x: checkpoint(model, x, use_reentrant=False)) if recompute else model
    y = call(x)
    (y * torch.arange(1.0, WIDTH + 1)).sum().backward()
    whole = [p.grad.to_local() for p in model.parameters() if p.placements[0].is_replicate()]
    after = torch.rand(3)
    with torch.no_grad():
        again = call(x)
    return after, whole, [] if sequence_parallel and make is of_styles else again.sum(), torch.rand(3)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("make", "ranks", "features"),
    [(of_styles, 2, 5), (of_styles, 4, 5), (of_transformers, 2, 5), (of_transformers, 4, 10)],
)
def test_ranks_of_unequal_parts_draw_alike_afterwards(make, ranks, features, sequence_parallel, recompute):
    first, *others = world(ranks).run(trained, make, features, sequence_parallel, recompute)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def test_equal_parts_leave_the_generator_alone():
    """Two ranks of three features each draw a mask of [2, 3], and nothing is seeded anew."""
    torch.manual_seed(1)
    torch.nn.functional.dropout(torch.ones(2, 3), 0.5)
    wanted = torch.rand(3)
    for found, *_ in world(2).run(trained, of_styles, 6, False, False):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
