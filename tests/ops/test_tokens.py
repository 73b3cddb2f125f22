"""Movers of token rows: forward and backward are each other's transpose, for any rows a rank, also none."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusedtp.ops import tokens
from tests.harness import world


def numbers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-5, 6, shape, generator=generator).float()


def all_movers(group, sizes: tuple[int, ...], tail: tuple[int, ...]) -> None:
    r, total = group.rank(), sum(sizes)
    begin = sum(sizes[:r])
    own = slice(begin, begin + sizes[r])
    shards = [numbers(n, *tail, seed=p) for p, n in enumerate(sizes)]
    fulls = [
        numbers(total, *tail, seed=10 + p) for p in range(len(sizes))
    ]  # rank p's partial, or its gradient
    whole, summed = torch.cat(shards), torch.stack(fulls).sum(0)

    def check(name: str, function, given: Tensor, gradient: Tensor, y: Tensor, dx: Tensor) -> None:
        x = given.clone().requires_grad_()
        got = function(x)
        assert torch.equal(got, y), name
        assert torch.equal(torch.autograd.grad(got, x, gradient)[0], dx), f"gradient of {name}"

    gather, scatter = tokens.gather_tokens, tokens.scatter_tokens
    check("gather, sum", lambda x: gather(x, group, sizes), shards[r], fulls[r], whole, summed[own])
    check(
        "gather, slice", lambda x: gather(x, group, sizes, grad="slice"), shards[r], whole, whole, shards[r]
    )
    check("scatter", lambda x: scatter(x, group, sizes), whole, summed[own], shards[r], summed)
    reduce_scatter = tokens.reduce_scatter_tokens
    check(
        "reduce_scatter", lambda x: reduce_scatter(x, group, sizes), fulls[r], shards[r], summed[own], whole
    )
    check("copy", lambda x: tokens.copy_to_group(x, group), whole, fulls[r], whole, summed)
    check("all_reduce", lambda x: tokens.all_reduce_sum(x, group), fulls[r], whole, summed, whole)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.sampled_from([(3,), (1,), (2, 2), (), (0,)]))
def test_movers_and_their_transposes(sizes, tail):
    world(len(sizes)).run(all_movers, tuple(sizes), tail)


def scalar(group) -> None:
    x = torch.tensor(float(group.rank() + 1), requires_grad=True)
    y = tokens.all_reduce_sum(x, group)
    y.backward()
    assert y.shape == () and y.item() == 6 and x.grad == 1
    z = tokens.copy_to_group(x, group)
    (dx,) = torch.autograd.grad(z, x)
    assert z.shape == () and dx.item() == 3


def test_scalars_are_summed_too():
    world(3).run(scalar)


def unknown_grad(group) -> str:
    with pytest.raises(ValueError) as raised:
        tokens.gather_tokens(torch.ones(1, 1), group, (1,), grad="mean")
    return str(raised.value)


def test_an_unknown_grad_is_refused():
    assert "mean" in world(1).run(unknown_grad)[0]
