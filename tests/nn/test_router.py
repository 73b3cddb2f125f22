"""The router's choice and its training options equal the papers' formulas, token by token; bad arguments."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusedtp.nn import Router, TokenLayout, init_
from fusedtp.nn.dropout import dropout_state
from tests.harness import world
from tests.nn import routing_formulas as formulas
from tests.nn.routing_support import LOSSES, options, routed, router_of, splits
from tests.nn.support import assert_close, randn

# -- the choice ------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(options(), st.sampled_from([0, 5]), st.integers(0, 1 << 30))
def test_experts_and_weights_are_the_definition_with_ties(spec, tokens, seed):
    """Integer logits with few values tie nearly always; so does a bias with few values."""
    generator = torch.Generator().manual_seed(seed)
    experts = spec["num_experts"]
    logits = torch.randint(-2, 3, (tokens, experts), generator=generator).double()
    logits[::2] += torch.rand(logits[::2].shape, generator=generator)
    bias = torch.randint(-1, 2, (experts,), generator=generator) / 8.0 if spec["bias"] else None
    got = routed(logits, bias, **spec)
    ids = formulas.choose(logits, spec, bias)
    assert got.expert_ids.dtype == torch.int32 and torch.equal(got.expert_ids.long(), ids)
    assert_close("weights", got.weights, formulas.weights_of(logits, ids, spec))
    assert got.tokens_per_expert.tolist() == torch.bincount(ids.flatten(), minlength=experts).tolist()
    p = formulas.scores_of(logits, spec["score"])
    mean = (p / p.sum(1, keepdim=True)).sum(0) / max(tokens, 1)
    assert got.mean_probability.dtype == torch.float32
    assert_close("mean probability", got.mean_probability, mean)
    load = torch.bincount(ids.flatten(), minlength=experts).double()
    violation = (load.max() - load.mean()) / load.mean() if tokens else torch.zeros(())
    assert_close("MaxVio", got.max_violation, violation)


@settings(max_examples=25)
@given(st.integers(3, 4), st.integers(1, 3), st.sampled_from(["top2", "max"]), st.data())
def test_ties_between_groups_go_to_the_lower_id_too(groups, each, group_score, data):
    top_groups = data.draw(st.integers(2, groups - 1))
    spec = {"num_experts": groups * each, "top_k": data.draw(st.integers(1, top_groups * each)),
            "num_groups": groups, "top_groups": top_groups, "group_score": group_score}  # fmt: skip
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    logits = torch.randint(0, 2, (8, groups * each), generator=generator).double()
    assert torch.equal(routed(logits, **spec).expert_ids.long(), formulas.choose(logits, spec))


@settings(max_examples=20)
@given(options(), st.integers(0, 1 << 30))
def test_relabelling_experts_permutes_the_choice(spec, seed):
    """Whole groups are permuted, and so are the experts inside them."""
    random = Random(seed)
    groups, each = spec["num_groups"], spec["num_experts"] // spec["num_groups"]
    order = [g * each + i for g in random.sample(range(groups), groups) for i in random.sample(range(each), each)]
    logits, bias = randn(5, spec["num_experts"], seed=seed), randn(spec["num_experts"], seed=seed + 1)
    there = (bias, bias[order]) if spec["bias"] else (None, None)
    plain, moved = routed(logits, there[0], **spec), routed(logits[:, order], there[1], **spec)
    assert torch.equal(torch.tensor(order)[moved.expert_ids.long()], plain.expert_ids.long())
    assert_close("weights", moved.weights, plain.weights)
    assert torch.equal(moved.tokens_per_expert, plain.tokens_per_expert[order])


@pytest.mark.parametrize("odd", [float("nan"), -float("nan"), float("inf"), -float("inf"), 1e30])
@given(options(), st.integers(0, 1 << 30))
@settings(max_examples=10)
def test_odd_logits_give_distinct_ids_in_range_and_nan_shows(odd, spec, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, spec["num_experts"], generator=generator)
    logits[:3][torch.rand(3, spec["num_experts"], generator=generator) < 0.5] = odd
    logits[0] = odd
    router = Router(1, **spec)
    router._logits = lambda x, layout: logits  # type: ignore[method-assign]
    got = router(torch.zeros(6, 1))
    for row in got.expert_ids.tolist():
        assert len(set(row)) == spec["top_k"] and all(0 <= i < spec["num_experts"] for i in row)
    assert got.weights[3:].isfinite().all()
    if odd != odd:
        assert got.weights[:3].isnan().any(1).tolist() == logits[:3].isnan().any(1).tolist()
        assert not got.weights[0].isfinite().any()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_nan_changes_no_other_token_s_expert_by_sinkhorn_and_shows(score):
    logits = randn(6, 3, seed=4)
    odd, zero = logits.clone(), logits.clone()
    odd[2, 1], zero[2] = torch.nan, 0.0
    router = Router(1, 3, 1, score=score, sinkhorn=9)
    router._logits = lambda x, layout: x  # type: ignore[method-assign]
    router._check = lambda *_: None  # type: ignore[method-assign]
    got, want = router(odd), router(zero)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(got.expert_ids[others], want.expert_ids[others])
    assert got.weights.isnan().flatten().tolist() == [False, False, True, False, False, False]


def test_masked_groups_stay_closed_whatever_the_keys_are():
    """A bias of -inf must not make an expert of a closed group equal to one of an open group."""
    bias = torch.tensor([0.0, 0.0, -torch.inf, 0.0, 1.0, -torch.inf])
    got = routed(torch.zeros(2, 6), bias, num_experts=6, top_k=2, num_groups=3, top_groups=1, bias=True,
                 group_score="max")  # fmt: skip
    assert got.expert_ids.tolist() == [[4, 5]] * 2


def test_weights_of_saturated_sigmoids_are_normalised_without_nan():
    logits = torch.tensor([[-200.0, -201.0, -300.0], [200.0, 200.0, -200.0]], requires_grad=True)
    got = routed(logits, num_experts=3, top_k=2, score="sigmoid", normalize=True)
    want = torch.tensor([[1.0, torch.tensor(-1.0).exp()], [0.5, 0.5]])
    assert_close("weights", got.weights, (want / want.sum(1, keepdim=True)).double())
    got.weights[:, 0].sum().backward()
    assert logits.grad.isfinite().all() and logits.grad[0].any()


# -- options of training ---------------------------------------------------------------------------------------------


def sinkhorn_rank(group, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    router = router_of(torch.eye(x.shape[1]).double(), num_experts=x.shape[1], top_k=1, sinkhorn=12)
    return router(x.split(sizes)[group.rank()], group=group).expert_ids


@pytest.mark.slow
@settings(max_examples=10)
@given(splits(), st.integers(1, 5), st.integers(0, 1 << 30))
def test_sinkhorn_chooses_in_training_by_the_plan_of_all_ranks(split, experts, seed):
    batch, length, sizes = split
    x = randn(batch * length, experts, seed=seed) * 2
    got = torch.cat(world(len(sizes)).run(sinkhorn_rank, x, sizes))
    assert torch.equal(got[:, 0].long(), formulas.sinkhorn(x, 12).argmax(1))
    router = router_of(torch.eye(experts).double(), num_experts=experts, top_k=1, sinkhorn=12).eval()
    assert torch.equal(router(x).expert_ids[:, 0].long(), x.argmax(1))


@settings(max_examples=10)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=4), st.integers(0, 9))
def test_jitter_is_within_its_range_and_the_same_for_any_split(sizes, step):
    total, state = sum(sizes), dropout_state(3, step, 5)
    router, x = router_of(randn(6, 4, seed=1), num_experts=6, top_k=2, jitter=0.25, layer=3), randn(total, 4)
    whole = router(x, TokenLayout(1, total, dropout=state))
    for rank, part in enumerate(x.split(sizes)):
        mine = router(part, TokenLayout(1, total, tuple(sizes), rank, dropout=state))
        rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        assert torch.equal(mine.expert_ids, whole.expert_ids[rows])
        assert_close("weights", mine.weights, whole.weights[rows])
    noise = router_of(torch.eye(6), num_experts=6, top_k=1, jitter=0.25)
    factors = noise._logits(torch.ones(200, 6), TokenLayout(1, 200, dropout=state))
    assert 0.75 <= factors.min() < 0.77 and 1.23 < factors.max() <= 1.25
    assert abs(factors.mean() - 1) < 5 * 0.25 / (3 * factors.numel()) ** 0.5
    other = router_of(torch.eye(6), num_experts=6, top_k=1, jitter=0.25, layer=1)
    assert not torch.equal(other._logits(torch.ones(200, 6), TokenLayout(1, 200, dropout=state)), factors)
    assert torch.equal(noise.eval()._logits(torch.ones(2, 6), None), torch.ones(2, 6))


def test_evaluation_has_no_jitter_although_a_dropout_state_is_set():
    weight, x = randn(6, 4, seed=1), randn(9, 4)
    layout = TokenLayout(1, 9, dropout=dropout_state(3, 1))
    plain = router_of(weight, num_experts=6, top_k=2)(x, layout)
    jittered = router_of(weight, num_experts=6, top_k=2, jitter=0.25)
    assert not torch.equal(jittered(x, layout).weights, plain.weights)
    evaluated = jittered.eval()(x, layout)
    assert torch.equal(evaluated.expert_ids, plain.expert_ids)
    assert torch.equal(evaluated.weights, plain.weights)


def test_evaluation_makes_no_losses():
    router = Router(4, 6, 2, **LOSSES).eval()
    assert router(torch.randn(3, 4)).losses == {}


def test_the_bias_stays_fp32_moves_and_leaves_meta_as_zeros():
    router = Router(4, 6, 2, bias=True, device="meta").to_empty(device="cpu")
    assert torch.equal(router.bias, torch.zeros(6))
    router.bias.fill_(0.001)
    assert router.to(torch.bfloat16).weight.dtype == torch.bfloat16
    assert router.bias.dtype == torch.float32 and torch.equal(router.bias, torch.full((6,), 0.001))
    again = Router(4, 6, 2, bias=True)
    again.load_state_dict(router.state_dict())
    assert torch.equal(again.bias, router.bias)


def test_init_gives_the_same_router():
    a, b = (
        init_(Router(4, 6, 2), seed=3),
        init_(Router(4, 6, 2, device="meta").to_empty(device="cpu"), seed=3),
    )
    assert torch.equal(a.weight, b.weight) and a.weight.shape == (6, 4)


# -- bad input -------------------------------------------------------------------------------------------------------


def test_all_faults_are_reported_together():
    with pytest.raises(ValueError) as error:
        Router(0, 6, 7, score="tanh", num_groups=4, top_groups=5, group_score="mean", jitter=-0.1, scale=0.0,
               z_loss=-1.0, balance="even", sinkhorn=2, bias=True, score_after_topk=True)  # fmt: skip
    for words in (
        "dim is 0", "top_k is 7, must be at most", "score is 'tanh'", "num_groups is 4, must be", "top_groups is 5",
        "group_score is 'mean'", "jitter is -0.1", "scale is 0.0", "z_loss is -1.0", "balance is 'even'",
        "must be 1 with sinkhorn", "takes no bias", "does not work with score_after_topk",
    ):  # fmt: skip
        assert words in str(error.value), words
    with pytest.raises(ValueError, match="top_groups is 2, with 2 experts each: fewer experts than top_k 5"):
        Router(4, 8, 5, num_groups=4, top_groups=2)


def test_what_does_not_fit_raises():
    layout = TokenLayout(2, 3)
    for spec, x, where, words in (
        ({}, torch.zeros(6, 3), layout, r"wanted x \[T, 4\]"),
        ({}, torch.zeros(6, 4, dtype=torch.int64), layout, "of floats"),
        ({}, torch.zeros(5, 4), layout, "x has 5 rows, the layout 6"),
        ({"sequence_loss": 1.0}, torch.zeros(6, 4), None, "sequence_loss needs a TokenLayout"),
        ({"sequence_loss": 1.0}, torch.zeros(4, 4), TokenLayout(2, 3, (4, 2)), "needs the layout's ranks"),
        ({"jitter": 0.1}, torch.zeros(6, 4), layout, "set_dropout"),
    ):
        with pytest.raises(ValueError, match=words):
            Router(4, 8, 2, **spec)(x, where)


def wrong_on_one(group) -> str:
    router = Router(4, 8, 2, z_loss=1.0)
    try:
        router(torch.zeros(3, 4 - (group.rank() == 1)), group=group)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_with_a_wrong_input_is_named_and_nobody_waits():
    first, second = world(2).run(wrong_on_one)
    assert "PeerFailed: rank 1" in first and "ValueError: rank 1: wanted x [T, 4]" in second
