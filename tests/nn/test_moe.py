"""The mixture of experts on one process equals a loop over tokens and choices."""

import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fusedtp
from fusedtp.comm import VirtualWorld
from fusedtp.nn import CausalLM, ModelConfig, MoE, MoEConfig, TokenLayout, init_
from fusedtp.nn.experts import Experts
from fusedtp.nn.layout import Collected

ACTS = {
    "none": lambda x: x,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def by_loop(experts: Experts, x, ids, weights):
    """Token by token, choice by choice."""
    out = [x[t] * 0 for t in range(x.shape[0])]
    for t in range(x.shape[0]):
        for j in range(ids.shape[1]):
            e = int(ids[t, j])
            if e < 0:
                continue
            first = experts.up_proj if experts.gate_proj is None else experts.gate_proj
            hidden = ACTS[experts.act](x[t] @ first[e].T)
            if experts.gate_proj is not None:
                hidden = hidden * (x[t] @ experts.up_proj[e].T)
            out[t] = out[t] + weights[t, j] * (hidden @ experts.down_proj[e].T)
    return torch.stack(out) if out else x * 0


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.integers(0, 9), st.integers(1, 6), st.integers(1, 7), st.integers(1, 6), st.integers(1, 4),
    st.booleans(), st.sampled_from(list(ACTS)), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 2**32),
)  # fmt: skip
def test_experts_equal_the_loop(tokens, dim, hidden, num_experts, top_k, gated, act, dropped, seed):
    """fp64, so only the order of sums differs: 1e-12 for entries of about one."""
    top_k, act = min(top_k, num_experts), "silu" if gated and act in ("none", "relu") else act
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    experts = Experts(dim, hidden, num_experts, act=act, gated=gated, dtype=torch.float64)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(draw(*parameter.shape))
    ids = draw(tokens, num_experts).argsort(1)[:, :top_k]
    ids = torch.where(torch.rand(tokens, top_k, generator=generator) < dropped, -1, ids)
    results = []
    for compute in (experts, lambda *given: by_loop(experts, *given)):
        x, weights = draw(tokens, dim).requires_grad_(), draw(tokens, top_k).requires_grad_()
        generator.manual_seed(seed + 1)
        with torch.no_grad():
            x.copy_(draw(tokens, dim))
            weights.copy_(draw(tokens, top_k))
        experts.zero_grad()
        y = compute(x, ids, weights)
        (y * torch.arange(y.numel(), dtype=y.dtype).view_as(y).cos()).sum().backward()
        grads = [t.grad if t.grad is not None else torch.zeros_like(t) for t in (x, weights, *experts.parameters())]
        results.append([y.detach(), *(g.clone() for g in grads)])
    for got, want in zip(*results, strict=True):
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(5,), (4, 0, 3), (1, 1), (0, 0)])
@pytest.mark.parametrize("recv_capacity", [0.125, 0.5, 1.0, 1.625])
@pytest.mark.parametrize("top_k", [1, 3])
def test_capacity_is_rounded_up_to_whole_rows(sizes, recv_capacity, top_k):
    """The capacity of a rank is ceil(recv_capacity T k / W) rows, but at least one, and the same on every rank."""
    tokens, ranks = sum(sizes), len(sizes)
    want = max(1, math.ceil(Fraction(recv_capacity) * tokens * top_k / ranks))

    def bound_of(group) -> int:
        rank = group.rank()
        experts = Experts(4, 3, 6, recv_capacity=recv_capacity, on_overflow="rounds")
        fusedtp.parallelize(experts, group, plan={"": fusedtp.FusedExperts(sizes=sizes)})
        ids = torch.arange(top_k).expand(sizes[rank], top_k)
        experts(torch.ones(sizes[rank], 4), ids, torch.ones(sizes[rank], top_k))
        return experts.used.bound

    assert VirtualWorld(ranks).run(bound_of) == [want] * ranks


def test_rows_that_fill_the_rounded_room_do_not_overflow():
    """Three rows with a capacity of 0.9 of three, which rounds up to three."""
    experts = Experts(4, 3, 2, recv_capacity=0.9)
    x, ids = torch.ones(3, 4), torch.zeros(3, 1, dtype=torch.int64)
    assert experts(x, ids, torch.ones(3, 1)).shape == (3, 4)
    experts.recv_capacity = 0.6
    with pytest.raises(ValueError, match=r"3 rows go to .* which has room for 2 by recv_capacity = 0\.6$"):
        experts(x, ids, torch.ones(3, 1))
    experts.recv_capacity, experts.max_rows = None, 2
    with pytest.raises(ValueError, match=r"3 rows go to .* which has room for max_rows = 2$"):
        experts(x, ids, torch.ones(3, 1))


def test_a_layer_is_router_experts_and_the_shared_expert():
    moe = init_(MoE(6, 5, 4, 2, shared=3, normalize=True, balance_loss=0.5), 0, std=0.5)
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    layout = TokenLayout(1, 7, routings=Collected())
    y = moe(x, layout)
    (routing,) = layout.routings.found
    want = by_loop(moe.experts, x, routing.expert_ids, routing.weights) + moe.shared(x)
    assert torch.allclose(y, want, rtol=1e-5, atol=1e-6)
    assert torch.equal(moe(x), y), "without a layout nothing is collected, and nothing else changes"
    assert set(routing.losses) == {"balance_loss"}


def test_a_router_that_normalises_is_held_to_its_sum():
    moe = init_(MoE(6, 5, 4, 2, normalize=True, scale=2.5), 0, std=0.5)
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    moe(x)
    moe.router.scale = 2.0
    with pytest.raises(ValueError, match=r"weights of token 0 sum to (2|2\.00000\d+|1\.99999\d+), wanted 2.5"):
        moe(x)
    assert MoE(6, 5, 4, 2).experts.weights_sum is None


def test_the_model_adds_the_routers_losses_once_a_step():
    """Each of two microbatches, given the step's label count, adds half of the router losses it adds on its own."""
    config = ModelConfig(
        vocab_size=13, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        moe=MoEConfig(num_experts=4, top_k=2, hidden=6, first_dense=1, balance_loss=1.0, z_loss=0.1),
        dtype="float64", param_dtype="float64",
    )  # fmt: skip
    model = init_(CausalLM(config), 0, std=0.5)
    assert [type(layer.mlp).__name__ for layer in model.layers] == ["MLP", "MoE"]
    ids = torch.randint(0, 13, (2, 5), generator=torch.Generator().manual_seed(0))
    whole = model(ids, ids).loss
    model.eval()
    assert model(ids, ids).loss < whole, "no router loss in evaluation"
    model.train()
    parts = [model(ids[i : i + 1], ids[i : i + 1], num_labels=10).loss for i in range(2)]
    plain = [model.eval()(ids[i : i + 1], ids[i : i + 1], num_labels=10).loss for i in range(2)]
    model.train()
    alone = [model(ids[i : i + 1], ids[i : i + 1]).loss for i in range(2)]
    own = [model.eval()(ids[i : i + 1], ids[i : i + 1]).loss for i in range(2)]
    for part, dense, full, rest in zip(parts, plain, alone, own, strict=True):
        assert torch.allclose(part - dense, (full - rest) / 2, rtol=1e-12)


def test_the_router_loss_of_a_microbatch_is_weighed_by_the_labels_that_count():
    """2 and 5 of 7 labels: adding and removing the router loss rounds twice, weighting it a few times more."""
    config = ModelConfig(
        vocab_size=13, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        moe=MoEConfig(num_experts=4, top_k=2, hidden=6, balance_loss=1.0, z_loss=0.1),
        dtype="float64", param_dtype="float64",
    )  # fmt: skip
    model = init_(CausalLM(config), 0, std=0.5)
    ids = torch.randint(0, 13, (2, 5), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 1:4] = -100
    for row, count in enumerate((2, 5)):
        one = slice(row, row + 1)
        out = model.train()(ids[one], labels[one], num_labels=7)
        tokens_alone = model.eval()(ids[one], labels[one], num_labels=7).loss
        router_losses = sum(sum(routing.losses.values()) for routing in out.routings)
        error = (out.loss - tokens_alone - router_losses * count / 7).abs()
        assert error <= 8 * torch.finfo(torch.float64).eps * out.loss


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(on_overflow="drop"), "on_overflow is 'drop', must be one of error, rounds"),
        (dict(on_overflow="rounds"), "on_overflow is 'rounds', which needs max_rows or recv_capacity"),
        (dict(on_overflow="rounds", max_rows=0), "max_rows is 0, must be at least 1"),
        (dict(max_rows=-1), "max_rows is -1, must be at least 0"),
        (dict(max_rows=1, recv_capacity=1.0), "max_rows is 1 and recv_capacity is 1.0: give one of them"),
        (dict(comm_dtype="fp4"), "comm_dtype is 'fp4', must be one of '', 'fp8'"),
        (dict(recv_capacity=0.0), "recv_capacity is 0.0, must be positive"),
        (dict(act="relu"), "act of gated experts is 'relu'"),
        (dict(gated=False, act="tanh"), "act of ungated experts is 'tanh'"),
        (dict(hidden=0), "hidden 0 and num_experts 4 must be at least 1"),
    ],
)
def test_experts_that_there_are_not_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        Experts(**{**dict(dim=4, hidden=4, num_experts=4), **given})


def test_all_faults_of_a_configuration_are_named_together():
    with pytest.raises(
        ValueError,
        match=r"moe: shared is -1.*moe: recv_capacity is -1.*moe: hidden is 0.*moe: Router: top_k is 9",
    ):
        ModelConfig(moe=MoEConfig(top_k=9, hidden=0, shared=-1, recv_capacity=-1))
