"""Losses, bias and sinkhorn equal their papers' formulas; test_router*.py test them with split tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusedtp.nn import TokenLayout, balance
from tests.harness import world
from tests.nn import routing_formulas as formulas
from tests.nn.support import assert_close, randn

shapes = st.tuples(st.integers(0, 8), st.integers(1, 6))


@pytest.mark.slow
@given(st.lists(st.integers(-2, 6)), st.integers(0, 6).map(lambda n: n + 1))
def test_counts_are_those_of_each_index_and_negative_ones_count_for_nothing(indices, size):
    indices = [i for i in indices if i < size]
    got = balance.count(torch.tensor(indices, dtype=torch.int32), size)
    assert got.dtype == torch.int64 and got.tolist() == [indices.count(i) for i in range(size)]


def test_max_violation_is_its_definition():
    counts = torch.tensor([[4, 0, 2, 2], [3, 3, 3, 3], [0, 0, 0, 0], [8, 0, 0, 0]])
    assert balance.max_violation(counts).tolist() == [1.0, 0.0, 0.0, 3.0]


def sums_of(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.tensor(float(len(logits)), dtype=torch.float64)
    return balance.count(ids, logits.shape[1]).double(), logits.softmax(1).sum(0), tokens


@settings(max_examples=40)
@given(st.integers(1, 8), st.integers(1, 6), st.data())
def test_losses_are_the_papers_formulas(tokens, experts, data):
    k, seed = data.draw(st.integers(1, experts)), data.draw(st.integers(0, 1 << 30))
    logits = randn(tokens, experts, seed=seed)
    ids = formulas.choose(logits, {"top_k": k})
    got = balance.switch_loss(*sums_of(logits, ids), k)
    assert_close("switch", got, formulas.balance_loss(logits, ids, "softmax", "switch"))
    got = balance.gshard_loss(*sums_of(logits, ids[:, :1]))
    assert_close("gshard", got, formulas.balance_loss(logits, ids, "softmax", "gshard"))
    assert_close("z", balance.log_z_squares(logits) / tokens, formulas.z_loss(logits))
    layout = TokenLayout(1, tokens)
    got = balance.sequence_loss(logits.softmax(1), ids, layout)
    assert_close("sequence", got, formulas.sequence_loss(logits, k, "softmax", 1, tokens))


def test_balanced_choices_cost_one_and_one_expert_for_all_costs_e():
    even, one = torch.eye(4).repeat(2, 1).double() * 40, torch.eye(4).double()[[2] * 8] * 40
    for logits, want in ((even, 1.0), (one, 4.0)):
        ids = logits.argmax(1, keepdim=True)
        assert_close("switch", balance.switch_loss(*sums_of(logits, ids), 1), torch.tensor(want))
        assert_close("gshard", balance.gshard_loss(*sums_of(logits, ids)) * 16, torch.tensor(want))


# -- bias ------------------------------------------------------------------------------------------------------------


def biased(group, counts: Tensor, bias: Tensor, rate: float) -> Tensor:
    return balance.update_bias_(bias.clone(), counts[group.rank()], rate, group)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(0, 1 << 30))
def test_bias_moves_by_the_sign_of_what_is_missing_on_all_ranks(size, layers, experts, seed):
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 4, (size, layers, experts), generator=generator)
    bias = torch.randint(-4, 5, (layers, experts), generator=generator) / 8.0
    got = world(size).run(biased, counts, bias, 0.25)
    for layer in range(layers):
        total = counts[:, layer].sum(0).tolist()
        mean = sum(total) / experts
        want = [b + 0.25 * ((c < mean) - (c > mean)) for b, c in zip(bias[layer].tolist(), total, strict=True)]
        for rank in range(size):
            assert got[rank][layer].tolist() == want


def test_the_bias_brings_a_skewed_router_into_balance():
    logits, bias = randn(512, 8, seed=1) + torch.linspace(-2, 2, 8), torch.zeros(8)
    violations = []
    for _ in range(200):
        ids = formulas.scores_of(logits, "sigmoid").add(bias).topk(2).indices
        counts = balance.count(ids, 8)
        violations.append(balance.max_violation(counts).item())
        balance.update_bias_(bias, counts, 0.01)
    assert violations[0] > 1.0 and max(violations[-20:]) < 0.2


@pytest.mark.parametrize(
    "counts, rate", [(torch.zeros(3), 0.1), (torch.zeros(4), -0.1), (torch.zeros(4), float("nan"))]
)
def test_a_wrong_update_raises(counts, rate):
    with pytest.raises(ValueError, match="one shape and a rate"):
        balance.update_bias_(torch.zeros(4), counts, rate)


# -- sinkhorn --------------------------------------------------------------------------------------------------------


def planned(group, logits: Tensor, sizes: tuple[int, ...], iterations: int) -> Tensor:
    return balance.sinkhorn(logits.split(sizes)[group.rank()], iterations, group)


@settings(max_examples=15)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(1, 5), st.integers(0, 1 << 30))
def test_sinkhorn_scales_rows_and_columns_of_all_ranks(sizes, experts, seed):
    logits = randn(sum(sizes), experts, seed=seed) * 3
    got = torch.cat(world(len(sizes)).run(planned, logits, tuple(sizes), 5))
    assert_close("plan", got.exp(), formulas.sinkhorn(logits, 5))


@pytest.mark.slow
@settings(max_examples=30)
@given(shapes, st.integers(0, 1 << 30))
def test_sinkhorn_sums_converge(shape, seed):
    plan = balance.sinkhorn(randn(*shape, seed=seed), 200).exp()
    tokens, experts = shape
    assert_close("columns", plan.sum(0), torch.full((experts,), tokens / experts, dtype=torch.float64))
    assert (plan.sum(1) - 1).abs().max().item() < 1e-6 if tokens else True


def test_sinkhorn_neither_overflows_nor_vanishes():
    logits = torch.tensor([[500.0, -500.0], [500.0, -400.0], [300.0, 0.0], [0.0, 0.0]])
    plan = balance.sinkhorn(logits, 300)
    assert plan.isfinite().all() and plan.argmax(1).tolist() == [0, 0, 1, 1]
