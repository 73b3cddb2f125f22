"""Experts have no order: renumbering them, in everything that is indexed by expert, changes nothing.

Outputs and gradients of experts on exact inputs are equal bit for bit; those of a whole layer, whose scores round,
differ no more than sums in another order do.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fusedtp
from fusedtp.comm import VirtualWorld
from fusedtp.nn import MoE, TokenLayout
from fusedtp.nn.experts import Experts
from fusedtp.nn.layout import Collected
from tests.properties.laws import assert_same

NUM, DIM, HIDDEN = 12, 5, 4  # 1, 2, 3 and 4 ranks divide the experts


def whole(generator: torch.Generator, dtype: torch.dtype, *shape: int, most: int = 1) -> Tensor:
    return torch.randint(-most, most + 1, shape, generator=generator).to(dtype)


def fill(module: torch.nn.Module, generator: torch.Generator, order: Tensor) -> None:
    """Fill with small integers, drawn expert by expert and then permuted."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(whole(generator, parameter.dtype, *parameter.shape)[order])


def gradients(module: torch.nn.Module, parts: list[dict[str, Tensor]], order: Tensor) -> dict[str, Tensor]:
    """Full gradients of the parameters indexed by expert, joined from the ranks' parts, in the order drawn."""
    found = {}
    for name, parameter in module.named_parameters():
        each = [part[name] for part in parts]
        full = torch.cat(each) if each[0].shape != parameter.shape else each[0]
        if not name.startswith("shared"):
            found[name] = full[order.argsort()]
    return found


def split(tokens: int, size: int, seed: int) -> tuple[int, ...]:
    owners = torch.randint(0, size, (tokens,), generator=torch.Generator().manual_seed(seed))
    return tuple(torch.bincount(owners, minlength=size).tolist())


def experts_law(size: int, tokens: int, k: int, act: str, dtype: torch.dtype, dropped: float, seed: int) -> None:
    sizes, results = split(tokens, size, seed), []
    for order in (torch.arange(NUM), torch.randperm(NUM, generator=torch.Generator().manual_seed(seed))):
        generator = torch.Generator().manual_seed(seed)
        experts = Experts(DIM, HIDDEN, NUM, act=act, gated=False, dtype=dtype)
        fill(experts, generator, order)
        x, dy = (whole(generator, dtype, tokens, DIM) for _ in range(2))
        ids = torch.rand(tokens, NUM, generator=generator).argsort(1)[:, :k]
        weights = 2.0 ** torch.randint(-1, 2, (tokens, k), generator=generator)
        ids = order.argsort()[ids].masked_fill(torch.rand(tokens, k, generator=generator) < dropped, -1)
        own = {name: p.detach().clone() for name, p in experts.named_parameters()}

        def body(group, own=own, x=x, dy=dy, ids=ids, weights=weights):
            twin = Experts(DIM, HIDDEN, NUM, act=act, gated=False, dtype=dtype)
            twin.load_state_dict(own)
            fusedtp.parallelize(twin, group, plan={"": fusedtp.FusedExperts(sizes=sizes)})
            here = slice(sum(sizes[: group.rank()]), sum(sizes[: group.rank() + 1]))
            leaves = [t[here].clone().requires_grad_() for t in (x, weights)]
            y = twin(leaves[0], ids[here], leaves[1])
            y.backward(dy[here])
            return [y.detach(), *(t.grad for t in leaves)], {n: p.grad for n, p in twin.named_parameters()}

        ranks = VirtualWorld(size).run(body)
        tensors = [torch.cat(parts) for parts in zip(*(of for of, _ in ranks), strict=True)]
        named = dict(zip(("y", "dx", "dweights"), tensors, strict=True))
        results.append(named | gradients(experts, [of for _, of in ranks], order))
    for name, want in results[0].items():
        assert_same(name, results[1][name], want)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.integers(1, 4), st.integers(0, 10), st.integers(1, 5), st.sampled_from(["none", "relu"]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(0, 2**32),
)  # fmt: skip
def test_experts_by_other_numbers_give_the_same_bits(size, tokens, k, act, dtype, dropped, seed):
    """Each sum has at most 5 * 4 products of integers and powers of two: none rounds, not even in bf16."""
    experts_law(size, tokens, k, act, dtype, dropped, seed)


ROUTERS = {
    "softmax": dict(balance_loss=0.5, z_loss=0.1),
    "softmax, normalised": dict(normalize=True, sequence_loss=0.2, capacity=0.7),
    "of the chosen": dict(score_after_topk=True, balance_loss=0.5, capacity=0.7, drop="probability"),
    "sigmoid with a bias": dict(score="sigmoid", normalize=True, bias=True, sequence_loss=0.3, shared=3),
    "groups": dict(score="sigmoid", num_groups=4, top_groups=2, scale=2.0, gated=False, act="relu"),
}


def other_order(groups: int, generator: torch.Generator) -> Tensor:
    """A permutation of the experts that keeps each group together."""
    members = torch.arange(NUM).view(groups, -1)[torch.randperm(groups, generator=generator)]
    return torch.cat([of[torch.randperm(len(of), generator=generator)] for of in members])


def layer_law(size: int, options: dict, seed: int) -> None:
    tokens, k, sizes = 10, 3, split(10, size, seed)
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    make = lambda: MoE(DIM, HIDDEN, NUM, k, dtype=torch.float64, **options)  # noqa: E731
    state = {name: t.copy_(draw(*t.shape)) for name, t in make().state_dict().items()}
    x, dy, results = draw(tokens, DIM), draw(tokens, DIM), []
    for order in (torch.arange(NUM), other_order(options.get("num_groups", 1), generator)):
        own = {name: t if name.startswith("shared") else t[order] for name, t in state.items()}

        def body(group, own=own):
            moe, rank = make(), group.rank()
            moe.load_state_dict(own)
            fusedtp.parallelize(moe, group)
            here = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
            leaf = x[here].clone().requires_grad_()
            layout = TokenLayout(2, tokens // 2, sizes, rank, routings=Collected())
            y = moe(leaf, layout)
            (routing,) = layout.routings.found
            losses = sum(routing.losses.values()) + 0.0 * y.sum()
            ((y * dy[here]).sum() + losses).backward()
            grads = {n: p.grad for n, p in moe.named_parameters()}
            dropped = torch.zeros(NUM) if routing.dropped is None else routing.dropped
            return [y.detach(), leaf.grad], grads, losses.detach(), dropped

        ranks = VirtualWorld(size).run(body)
        y, dx = (torch.cat(of) for of in zip(*(rank[0] for rank in ranks), strict=True))
        dropped = sum(rank[3] for rank in ranks)[order.argsort()]
        assert dropped.any() == ("capacity" in options)
        named = {"y": y, "dx": dx, "loss": ranks[0][2], "dropped": dropped}
        results.append(named | gradients(make(), [rank[1] for rank in ranks], order))
    for name, want in results[0].items():
        torch.testing.assert_close(results[1][name], want, rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("options", ROUTERS)
@pytest.mark.parametrize("size", [1, 3])
def test_a_layer_whose_experts_have_other_numbers_is_the_same(size: int, options: str):
    """Random fp64, so that no tie is near: 1e-11 is far above the error of its sums of a few hundred terms."""
    for seed in range(2):
        layer_law(size, ROUTERS[options], seed)
