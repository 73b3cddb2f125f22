"""The dropped pairs are those of the definition, for any split of the tokens over ranks."""

import math
from fractions import Fraction
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusedtp.nn.capacity import capacity_of, keep_capacity
from tests.harness import world
from tests.nn import routing_formulas as formulas
from tests.nn.support import randn

FACTORS = ("0.01", "0.3", "0.5", "1", "1.1", "1.25", "2", "100")


@st.composite
def cases(draw) -> tuple[Tensor, Tensor, int, str, str, tuple[int, ...]]:
    """Ids distinct in a row, some -1; weights, often of few values, so that they tie; rows of every rank.

    All derive from one seed, so they vary independently of each other.
    """
    seed = draw(st.integers(0, 1 << 30))
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    sizes = tuple(random.choice([0, 1, 2, 4, 6]) for _ in range(random.randint(1, 4)))
    experts, tokens = random.randint(1, 6), sum(sizes)
    k = random.randint(1, experts)
    pull = torch.arange(experts) * random.choice([0.0, 0.0, 3.0])  # towards the last experts
    ids = (torch.rand(tokens, experts, generator=generator) + pull).argsort(1, descending=True)[:, :k].int()
    ids[torch.rand(tokens, k, generator=generator) < random.choice([0.0, 0.2])] = -1
    weights = torch.randint(1, 4, (tokens, k), generator=generator) / 4.0
    if random.random() < 0.5:  # or weights that differ by less than 16 bits resolve
        weights = 0.5 + torch.rand(tokens, k, generator=generator) / 4096
    return ids, weights, experts, random.choice(FACTORS), random.choice(["position", "probability"]), sizes


def kept(group, ids, weights, experts: int, factor: str, by: str, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    mine = weights.split(sizes)[group.rank()].clone().requires_grad_()
    known = sizes if by == "probability" else None  # dropping by position does not need them
    got = keep_capacity(ids.split(sizes)[group.rank()], mine, experts, float(factor), by=by, group=group, sizes=known)
    (gradient,) = torch.autograd.grad(got.weights.sum(), mine)
    return got.expert_ids, got.weights.detach(), gradient, got.dropped, got.capacity


@pytest.mark.slow
@settings(max_examples=40)
@given(cases())
def test_dropped_pairs_are_the_definition_s(case):
    ids, weights, experts, factor, by, sizes = case
    outcomes = world(len(sizes)).run(kept, *case)
    gone = formulas.dropped(ids, weights, experts, factor, by)
    want_ids, want_weights, counts = ids.clone(), weights.masked_fill(ids < 0, 0.0), [0] * experts
    for t, slot in gone:
        counts[ids[t, slot]] += 1
        want_ids[t, slot], want_weights[t, slot] = -1, 0.0
    got_ids, got_weights, gradient = (torch.cat([o[i] for o in outcomes]) for i in range(3))
    assert got_ids.dtype == torch.int32 and torch.equal(got_ids, want_ids)
    assert torch.equal(got_weights, want_weights)
    assert torch.equal(gradient, (want_ids >= 0).float())
    assert torch.stack([o[3] for o in outcomes]).sum(0).tolist() == counts
    capacity = math.ceil(Fraction(min(Fraction(factor), experts)) * ids.shape[1] * len(ids) / experts)
    assert [int(o[4]) for o in outcomes] == [capacity] * len(sizes)
    for rank, own in enumerate(torch.arange(len(ids)).split(sizes)):
        mine = [sum(ids[t, s] == e for t, s in gone if t in own.tolist()) for e in range(experts)]
        assert outcomes[rank][3].tolist() == mine


def test_the_order_is_first_choices_first_or_largest_weights_first():
    ids = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0]])
    weights = torch.tensor([[0.5, 0.9], [0.6, 0.8], [0.7, 0.1], [0.5, 0.9]])
    by_position = keep_capacity(ids, weights, 2, 0.5)
    assert by_position.expert_ids.tolist() == [[0, -1], [1, -1], [0, -1], [1, -1]]
    by_weight = keep_capacity(ids, weights, 2, 0.5, by="probability")
    assert by_weight.expert_ids.tolist() == [[-1, 1], [1, 0], [-1, -1], [-1, 0]]
    assert by_weight.dropped.tolist() == [2, 2] and int(by_weight.capacity) == 2


@given(
    st.integers(1, 8),
    st.integers(0, 10**6),
    st.integers(1, 300),
    st.sampled_from([*FACTORS, "1.05", "1.001"]),
)
def test_capacity_is_exact_for_decimal_factors(top_k, tokens, experts, factor):
    want = math.ceil(min(Fraction(factor), experts) * top_k * tokens / experts)
    assert capacity_of(float(factor), top_k, tokens, experts) == want
    assert int(capacity_of(float(factor), top_k, torch.tensor(tokens), experts)) == want


def test_floats_would_say_111():
    assert math.ceil(1.1 * 2 * 100 / 2) == 111 and capacity_of(1.1, 2, 100, 2) == 110
    assert capacity_of(1e-9, 1, 10, 2) == 1 and capacity_of(1 / 3, 1, 9, 3) == 1 and capacity_of(1.0, 1, 0, 3) == 0


def test_by_probability_nan_comes_first_and_shows():
    ids, weights = torch.zeros(3, 1, dtype=torch.int32), torch.tensor([[0.5], [torch.nan], [0.25]])
    got = keep_capacity(torch.cat([ids, ids + 1]), torch.cat([weights, weights]), 2, 0.5, by="probability")
    assert got.expert_ids.flatten().tolist() == [0, 0, -1, 1, 1, -1] and got.weights[1].isnan()


def test_fp64_and_bf16_weights_stay_so():
    ids = torch.tensor([[0], [0], [0], [1]])
    for dtype in (torch.float64, torch.bfloat16):
        got = keep_capacity(ids, torch.tensor([[0.25], [0.75], [0.5], [0.5]], dtype=dtype), 2, 1.0, by="probability")
        assert got.weights.dtype == dtype and got.weights.flatten().tolist() == [0.0, 0.75, 0.5, 0.5]


def large_ids(group) -> list[int]:
    """Each expert gets one pair from each rank and keeps both, unless ids are rounded and collide."""
    ids, weights = torch.arange(255, 265).reshape(5, 2), torch.ones(5, 2).bfloat16()
    return keep_capacity(ids, weights, 400, 40.0, by="probability", group=group).expert_ids.tolist()


def test_ids_that_16_bits_cannot_hold_travel_with_16_bit_weights():
    assert world(2).run(large_ids) == [torch.arange(255, 265).reshape(5, 2).tolist()] * 2


def kept_by_compiled(group, ids: Tensor, weights: Tensor) -> None:
    part = slice(3 * group.rank(), 3 * group.rank() + 3)
    for by in ("position", "probability"):

        def function(i: Tensor, w: Tensor, by: str = by):
            return keep_capacity(i, w, 4, 0.5, by=by, group=group)

        for a, b in zip(function(ids[part], weights[part]),
                        torch.compile(function, fullgraph=True, backend="aot_eager")(ids[part], weights[part]),
                        strict=True):  # fmt: skip
            assert torch.equal(a, b)


@pytest.mark.slow
def test_compiled_it_is_the_same():
    ids = randn(6, 4, seed=1).argsort(1)[:, :2]
    world(2).run(kept_by_compiled, ids, randn(6, 2, seed=2), timeout=120)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"factor": 0.0}, "capacity factor is 0.0"),
        ({"factor": float("nan")}, "capacity factor is nan"),
        ({"by": "luck"}, "by is 'luck'"),
        ({"expert_ids": torch.zeros(3, 2)}, "wanted integer expert_ids"),
        ({"weights": torch.zeros(4, 2)}, "one shape"),
        ({"sizes": (2,)}, r"sizes is \[2\], wanted 1 row counts, 3 for this rank"),
    ],
)
def test_bad_arguments_raise(change, words):
    arguments = {"expert_ids": torch.zeros(3, 2, dtype=torch.int32), "weights": torch.zeros(3, 2),
                 "num_experts": 4, "factor": 1.0, **change}  # fmt: skip
    with pytest.raises(ValueError, match=words):
        keep_capacity(**arguments)


def disagreeing(group) -> str:
    ids = torch.zeros(2 + group.rank(), 1, dtype=torch.int32)
    try:
        keep_capacity(ids, ids.float(), 4, 1.0, by="probability", group=group)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_that_disagree_on_rows_are_named():
    outcomes = world(2).run(disagreeing)
    assert all(o.startswith("SignatureMismatch") and "sizes" in o for o in outcomes), outcomes
