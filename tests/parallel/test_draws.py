"""Dropout on unequal parts consumes different amounts of randomness per rank; masks of whole tensors still agree.

Ranks with different seeds get an error if they draw for whole tensors.
"""

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
    """After a step: the next random numbers, and gradients of the parameters that every rank holds whole."""
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


@pytest.mark.slow
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
    """Two ranks each draw a [2, 3] mask for their three features, and the generator is not reseeded."""
    torch.manual_seed(1)
    torch.nn.functional.dropout(torch.ones(2, 3), 0.5)
    wanted = torch.rand(3)
    for found, *_ in world(2).run(trained, of_styles, 6, False, False):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def llama(group: Any, attention: float, sequence_parallel: bool) -> nn.Module:
    """Each rank drops attention only in its own heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2)
    model: Any = LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attention_dropout=attention)
    )
    return fusedtp.parallelize(model, tp_mesh(group), sequence_parallel=sequence_parallel)


def t5(group: Any, rate: float, sequence_parallel: bool) -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    sizes: dict[str, Any] = dict(vocab_size=32, d_model=WIDTH, d_kv=2, d_ff=5, num_layers=2, num_heads=4)
    model: Any = T5EncoderModel(T5Config(**sizes, dropout_rate=rate))
    return fusedtp.parallelize(model, tp_mesh(group), sequence_parallel=sequence_parallel)


def mlp(group: Any, rate: float, sequence_parallel: bool) -> nn.Module:
    """Dropout on five features, which two ranks cannot share evenly."""

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.up, self.down = nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.up(self.table(input_ids))
            return self.down(torch.nn.functional.dropout(x, rate, self.training))

    plan = {"up": "colwise", "down": "rowwise"}
    return fusedtp.parallelize(Mlp(), tp_mesh(group), plan=plan, sequence_parallel=sequence_parallel)


def refusals(group: Any, make: Any, rate: float, sequence_parallel: bool) -> list[str]:
    """The error, or "", of a forward in evaluation, two in training, one with equal seeds and one with other seeds."""
    torch.manual_seed(0)
    model, ids, said = make(group, rate, sequence_parallel), torch.arange(8)[None], []
    torch.manual_seed(group.rank())
    for training, seed in ((False, None), (True, None), (True, None), (True, 0), (True, 1 + group.rank())):
        if seed is not None:
            torch.manual_seed(seed)
        try:
            model.train(training)(input_ids=ids)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("make", "rate", "refused"), [(t5, 0.5, True), (t5, 0.0, False), (llama, 0.5, False), (mlp, 0.5, False)]
)
def test_ranks_that_draw_other_numbers_for_the_same_are_told(make, rate, refused, sequence_parallel):
    for said in world(2).run(refusals, make, rate, sequence_parallel):
        assert [bool(each) for each in said] == [False, refused, refused, False, False]
        assert all("torch.manual_seed" in each for each in said if each)
