"""If logits would be too large, a model computes its loss in pieces: same loss and gradients, no logits."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fusedtp.nn import CausalLM
from tests.harness import world
from tests.parallel.support import assert_close, assert_same_gradients, batch, losses, make, make_pair


def refuse(*_: Any) -> None:
    raise AssertionError("the logits of all tokens were asked for")


def compare(group: Any, tokens: tuple[int, int], limit: int, options: dict, changes: dict) -> None:
    plain, parallel = make_pair(group, options=options, max_logits_bytes=limit, **changes)
    plain.config = replace(plain.config, max_logits_bytes=1 << 28)
    parallel.compute_logits = refuse
    ids, labels = batch(*tokens, vocab=plain.config.vocab_size)
    want, got = losses((plain, parallel), ids, labels)
    assert_close("loss", got, want)
    assert_same_gradients(parallel, plain)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"vocab_size": 5, "tie_word_embeddings": True},  # one rank of four holds no part of it
    ],
)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_loss_and_gradients_equal_the_plain_model(world_size: int, changes: dict, sequence_parallel: bool):
    world(world_size).run(compare, (2, 5), 100, {"sequence_parallel": sequence_parallel}, changes)


def test_tokens_fewer_than_ranks():
    world(4).run(compare, (1, 3), 1, {}, {})


def test_one_process():
    ids, labels = batch(2, 5)
    plain, pieces = make(), make(max_logits_bytes=100)
    pieces.compute_logits = refuse
    want, got = losses((plain, pieces), ids, labels)
    assert_close("loss", got, want)
    for (name, mine), theirs in zip(pieces.named_parameters(), plain.parameters(), strict=True):
        assert_close(f"gradient of {name}", mine.grad, theirs.grad)


@pytest.mark.parametrize("ask", [{"return_logits": True}, {}])
def test_logits_that_are_asked_for_are_there(ask: dict):
    model: CausalLM = make(max_logits_bytes=1)
    ids, labels = batch(2, 5)
    out = model(ids, labels if ask else None, **ask)
    assert out.logits is not None and torch.equal(out.logits, make()(ids).logits)
