"""Bad input raises an error with rank and value, and leaves the group usable; nothing hangs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusedtp
from tests.harness import PerRank, WorldError, world

GOOD = dict(
    tokens=3,
    experts=4,
    ids=((0, 1), (1, 2), (3, 0)),
    weights=0.5,
    width=4,
    dtype=torch.float32,
    max_rows=None,
    weights_sum=None,
)


def exchange(group, changes: dict, engine: str) -> list[int]:
    """One dispatch and combine with these changes, then a correct one."""
    found = None
    for case in (GOOD | changes, GOOD):
        ids = torch.tensor(case["ids"])
        x = torch.ones(case["tokens"], case["width"], dtype=case["dtype"])
        weights = torch.full(ids.shape, case["weights"])
        try:
            bounds = dict(max_rows=case["max_rows"], weights_sum=case["weights_sum"])
            rows, offsets, handle = fusedtp.moe_dispatch(
                x, ids, weights, case["experts"], group, engine=engine, **bounds
            )
            fusedtp.moe_combine(rows, handle)
        except Exception as error:
            found = error
    assert torch.equal(offsets.diff(), torch.tensor([4, 4] if group.rank() == 0 else [2, 2], dtype=torch.int32))
    if found is not None:
        raise found
    return offsets.tolist()


ALIKE = {  # every rank passes the same
    "ids past the end": (
        dict(ids=((0, 1), (1, 4), (3, 0))),
        r"rank \d: expert_ids\[1, 1\] is 4; there are 4 experts",
    ),
    "ids below -1": (dict(ids=((0, 1), (1, 2), (-2, 0))), r"rank \d: expert_ids\[2, 0\] is -2"),
    "twice": (dict(ids=((0, 1), (2, 2), (3, 0))), r"rank \d: token 1 chose expert 2 twice: \[2, 2\]"),
    "nan": (dict(weights=float("nan")), r"rank \d: weights\[0, 0\] is nan"),
    "indivisible": (dict(experts=5), r"rank \d: num_experts is 5; it must be a positive multiple of the 2 ranks"),
    "too many choices": (
        dict(experts=2, ids=((0, 1, -1),) * 3),
        r"rank \d: expert_ids has 3 choices per token",
    ),
    "ids of other tokens": (
        dict(ids=((0, 1),)),
        r"rank \d: expert_ids has shape \(1, 2\); wanted \[3, k >= 1\]",
    ),
    "no room": (
        dict(max_rows=7),
        r"rank \d: 8 rows go to the experts of rank 0, which has room for max_rows = 7",
    ),
    "negative room": (dict(max_rows=-1), r"rank \d: max_rows is -1"),
    "weights of another sum": (
        dict(weights_sum=2.5),
        r"rank \d: the weights of token 0 sum to 1, wanted 2.5",
    ),
    "integers": (dict(dtype=torch.int64), r"rank \d: x is torch.int64"),
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["chunked", "collective"])
@pytest.mark.parametrize("name", ALIKE)
def test_what_does_not_fit_raises_on_every_rank(name, engine):
    changes, words = ALIKE[name]
    with pytest.raises(WorldError, match=words) as raised:
        world(2).run(exchange, changes, engine)
    assert str(raised.value).count("ValueError: rank") >= 2


DIFFER = {
    "experts": (dict(experts=8), "num_experts is 4 on rank 0 and 8 on rank 1"),
    "top_k": (dict(ids=((0,), (1,), (2,))), "top_k is 2 on rank 0 and 1 on rank 1"),
    "room": (dict(max_rows=12), "max_rows is None on rank 0 and 12 on rank 1"),
    "width": (dict(width=5), "features is 4 on rank 0 and 5 on rank 1"),
    "dtype": (dict(dtype=torch.float64), "dtype is torch.float32 on rank 0 and torch.float64 on rank 1"),
    "tokens": (dict(tokens=2, ids=((0, 1), (1, 2))), r"sizes is \[3, 3\] on rank 0 and \[2, 2\] on rank 1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFER)
def test_ranks_that_disagree_are_told_how(name):
    changes, words = DIFFER[name]
    with pytest.raises(WorldError, match=words):
        world(2).run(exchange, PerRank([{}, changes]), "chunked")


def test_a_fault_of_one_rank_fails_its_peer_too():
    with pytest.raises(WorldError) as raised:
        world(2).run(exchange, PerRank([{}, dict(weights=float("inf"))]), "chunked")
    assert "rank 1: weights[0, 0] is inf" in str(raised.value)
    assert "PeerFailed: rank 1 raised before it began" in str(raised.value)


def test_outputs_of_another_number_of_rows_are_refused():
    x, ids = torch.ones(3, 4), torch.tensor(GOOD["ids"])
    rows, _, handle = fusedtp.moe_dispatch(x, ids, torch.ones(3, 2), 4, None)
    with pytest.raises(ValueError, match=r"y has shape \(5, 4\); wanted \[6, N\]"):
        fusedtp.moe_combine(rows[:5], handle)


def test_engines_that_there_are_not_are_refused():
    x, ids = torch.ones(3, 4), torch.tensor(GOOD["ids"])
    with pytest.raises(ValueError, match="engine is 'nccl'; it must be one of"):
        fusedtp.moe_dispatch(x, ids, torch.ones(3, 2), 4, None, engine="nccl")


@settings(max_examples=60)
@given(
    st.integers(1, 8), st.integers(1, 9), st.sampled_from([1.0, 2.5, 16.0]), st.integers(0, 2**32),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)  # fmt: skip
def test_only_more_than_roundings_makes_another_sum(k, tokens, scale, seed, dtype):
    """Normalized weights pass, even if choices were dropped; a weight that is off by more than rounding does not."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, 8, generator=g).argsort(1)[:, :k]
    weights = scale * (3 * torch.randn(tokens, k, generator=g).to(dtype)).softmax(1)
    x, at = torch.zeros(tokens, 1), int(torch.randint(tokens, (1,), generator=g))
    fusedtp.moe_dispatch(x, ids, weights, 8, None, weights_sum=scale)
    ids[at, 0] = -1
    wrong = weights.clone()
    wrong[at] *= 2
    fusedtp.moe_dispatch(x, ids, wrong, 8, None, weights_sum=scale)
    wrong = weights.clone()
    where = (at + 1) % tokens
    wrong[where, 0] += scale * (1 if dtype == torch.bfloat16 else 1e-4)
    if tokens > 1:
        with pytest.raises(ValueError, match=f"rank 0: the weights of token {where} sum to"):
            fusedtp.moe_dispatch(x, ids, wrong, 8, None, weights_sum=scale)
