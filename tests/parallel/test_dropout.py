"""Hidden dropout is the same at any world size. Attention dropout is not, but has the right rate on every rank."""

from typing import Any

import pytest
import torch

from fusedtp.nn import Attention, ModelConfig, TokenLayout
from fusedtp.parallel import parallelize
from tests.harness import world
from tests.parallel.support import assert_close, assert_same_gradients, batch, losses, make_pair, tp_mesh


def compare_dropout(group, kind: str, options: dict) -> None:
    plain, parallel = make_pair(group, options=options, **{kind: 0.3})
    ids, labels = batch(2, 5)
    for step in range(2):
        for model in (plain, parallel):
            model.set_dropout(5, step, 11)
        want, got = losses((plain, parallel), ids, labels)
        assert_close(f"loss of step {step}", got, want)
    assert_same_gradients(parallel, plain)
    assert plain.eval()(ids, labels).loss.item() != want.item()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["residual_dropout", "embedding_dropout"])
@pytest.mark.parametrize("world_size, sequence_parallel", [(2, True), (3, True), (4, True), (2, False)])
def test_hidden_dropout_is_the_same_at_any_world_size(world_size: int, sequence_parallel: bool, kind: str):
    world(world_size).run(compare_dropout, kind, {"sequence_parallel": sequence_parallel})


def attention_that_counts(group: Any, rate: float) -> Attention:
    """Heads that output the kept share of each query's attention: every key has weight 1 / S, and values are 1."""
    config = ModelConfig(
        hidden_size=8, num_attention_heads=4, num_key_value_heads=4, head_dim=2, attention_bias=True,
        attention_output_bias=False, is_causal=False, attention_dropout=rate, dtype="float64", param_dtype="float64",
    )  # fmt: skip
    attention = Attention(config)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.zero_()
        attention.v_proj.bias.fill_(1.0)
        attention.o_proj.weight.copy_(torch.eye(8))
    return parallelize(attention, tp_mesh(group), sequence_parallel=False)


def kept_shares(group: Any, rate: float, apart: int) -> torch.Tensor:
    """[64 x 16 queries, 4 heads] of a training pass; the rank's generator has seed 3 + rank * apart."""
    torch.manual_seed(3 + apart * group.rank())
    attention = attention_that_counts(group, rate)
    x, layout = torch.ones(64 * 16, 8, dtype=torch.float64), TokenLayout(64, 16)
    kept = attention(x, layout).detach()
    assert torch.equal(kept[:, ::2], kept[:, 1::2]), "both features of a head see the same weights"
    assert_close("in evaluation", attention.eval()(x, layout), torch.ones_like(kept))
    return kept[:, ::2].clone()


@pytest.mark.parametrize("world_size", [2, 4])
def test_attention_dropout_drops_with_its_rate(world_size: int):
    rate = 0.25
    first, *others = world(world_size).run(kept_shares, rate, 1)
    assert all(torch.equal(first, other) for other in others), "an all-reduce gave ranks different sums"
    dropped = 16 * (1 - first * (1 - rate))  # out of 16 keys per query
    torch.testing.assert_close(dropped, dropped.round())
    deviation = (16 * rate * (1 - rate)) ** 0.5
    for head in dropped.T:
        assert abs(head.mean().item() - 16 * rate) < 5 * deviation / head.numel() ** 0.5
        assert 0.8 < head.std().item() / deviation < 1.2
    alike = [(i, j) for i in range(4) for j in range(i) if torch.equal(first[:, i], first[:, j])]
    assert alike == []


def test_ranks_that_are_seeded_alike_drop_the_same_weights():
    """Shows why ranks need different seeds: one rank of two holds heads 0 and 1, the other heads 2 and 3."""
    kept, _ = world(2).run(kept_shares, 0.25, 0)
    assert torch.equal(kept[:, :2], kept[:, 2:])


def test_no_attention_is_dropped_at_rate_zero():
    for kept in world(2).run(kept_shares, 0.0, 1):
        assert_close("kept", kept, torch.ones_like(kept))
