"""A layer with a capacity drops what the definition drops from the whole batch, for any split of tokens and experts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fusedtp
from fusedtp.comm import VirtualWorld
from fusedtp.nn import MoE, MoEConfig, TokenLayout
from fusedtp.nn.layout import Collected
from fusedtp.nn.router import Routing
from tests.nn import routing_formulas as formulas
from tests.parallel.support import SMALL, make
from tests.properties.laws import assert_same

NUM, DIM = 12, 4
RULES = ("position", "probability")


def made(k: int, capacity: float | None, drop: str, seed: int) -> MoE:
    """A layer fixed by the seed; routing depends on the first coordinate, so that some experts are in demand."""
    moe = MoE(DIM, 3, NUM, k, capacity=capacity, drop=drop, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        moe.router.weight[:, 0] = torch.linspace(-1, 1, NUM)
    return moe


def tokens_of(count: int, seed: int) -> Tensor:
    x = torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    x[:, 0] = x[:, 0].abs()
    return x


def routed(moe: MoE, x: Tensor, sizes: tuple[int, ...]) -> tuple[list[Tensor], list[Routing]]:
    """Every rank's (y, dx), for the sum of y's entries, and its router's decision; experts are split as well."""

    def body(group):
        own = made(moe.router.top_k, moe.capacity, moe.drop, 0)
        own.load_state_dict(moe.state_dict())
        fusedtp.parallelize(own, group)
        rank, layout = group.rank(), TokenLayout(1, len(x), sizes, group.rank(), routings=Collected())
        leaf = x[sum(sizes[:rank]) : sum(sizes[: rank + 1])].clone().requires_grad_()
        y = own(leaf, layout)
        y.sum().backward()
        return torch.stack([y.detach(), leaf.grad]), layout.routings.found[0]

    ranks = VirtualWorld(len(sizes)).run(body)
    return [each for each, _ in ranks], [routing for _, routing in ranks]


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=4).map(tuple), st.integers(1, 4),
    st.sampled_from(["0.01", "0.3", "0.7", "1", "1.5", "12"]), st.sampled_from(RULES), st.integers(0, 2**20),
)  # fmt: skip
def test_the_dropped_choices_are_those_of_the_definition(sizes, k, factor, drop, seed):
    """For the whole batch and any split; a token that lost all choices gets zero, and its gradient is zero."""
    x = tokens_of(sum(sizes), seed)
    moe = made(k, float(factor), drop, seed)
    free = moe.router(x)
    gone = formulas.dropped(free.expert_ids, free.weights.detach(), NUM, factor, drop)
    want, counts = free.expert_ids.clone(), torch.zeros(NUM, dtype=torch.int64)
    for t, slot in gone:
        want[t, slot] = -1
        counts[free.expert_ids[t, slot]] += 1
    results, routings = routed(moe, x, sizes)
    assert_same("ids", torch.cat([routing.expert_ids for routing in routings]), want)
    assert_same("dropped", torch.stack([routing.dropped for routing in routings]).sum(0), counts)
    y, dx = torch.cat(results, 1)
    alone = (want < 0).all(1)
    assert_same("y of tokens without a choice", y[alone], torch.zeros_like(y[alone]))
    assert_same("dx of tokens without a choice", dx[alone], torch.zeros_like(dx[alone]))
    assert (y[~alone] != 0).any(1).all() and (dx[~alone] != 0).any(1).all()


@pytest.mark.parametrize("drop", RULES)
def test_any_split_of_tokens_and_experts_gives_the_same_output(drop: str):
    """A token's remaining choices use the same experts: the same fp64 sums in the same order."""
    x, moe = tokens_of(24, 3), made(3, 0.3, drop, 3)
    (whole,), (routing,) = routed(moe, x, (24,))
    assert 0 < int(routing.dropped.sum()) < 24 * 3 and (routing.expert_ids < 0).all(1).any()
    for sizes in ((5, 19), (0, 24), (8, 8, 8), (9, 0, 15), (1, 2, 20, 1)):
        results, _routings = routed(moe, x, sizes)
        torch.testing.assert_close(torch.cat(results, 1), whole, rtol=1e-12, atol=1e-12)


class Nothing(torch.nn.Module):
    def forward(self, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        return torch.zeros_like(x)


@pytest.mark.parametrize("drop", RULES)
def test_a_block_leaves_a_token_without_a_choice_as_attention_made_it(drop: str):
    """Only the residual path, bit for bit."""
    block = make(moe=MoEConfig(num_experts=NUM, top_k=2, hidden=3, capacity=0.5, drop=drop)).layers[0]
    x = torch.randn(24, SMALL["hidden_size"], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    layout = TokenLayout(1, 24, routings=Collected())
    out = block(x, layout)
    alone = (layout.routings.found[0].expert_ids < 0).all(1)
    block.mlp = Nothing()
    attended = block(x, layout)
    assert 0 < int(alone.sum()) < 24
    assert torch.equal(out[alone], attended[alone]) and (out[~alone] != attended[~alone]).any(1).all()
