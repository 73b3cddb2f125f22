"""A router with tokens split over ranks has the losses and gradients of a single process; precision; compiling."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from fusedtp.comm import VirtualWorld
from fusedtp.nn import Router, TokenLayout, balance, init_
from fusedtp.nn.capacity import RULES, keep_capacity
from fusedtp.nn.dropout import dropout_state
from fusedtp.parallel import Replicated
from tests.harness import world
from tests.nn import routing_formulas as formulas
from tests.nn.routing_support import LOSSES, options, router_of, splits
from tests.nn.support import ROUNDINGS, assert_close, assert_within, randn

# -- losses and gradients --------------------------------------------------------------------------------------------


def on_ranks(group, x, weight, bias, spec, split, dy) -> dict[str, Tensor]:
    """This rank's results for its rows, and the gradients of weights . dy + all losses."""
    batch, length, sizes = split
    layout = TokenLayout(batch, length, sizes, group.rank())
    router = router_of(weight, bias, **spec)
    mine = layout.take(x).clone().requires_grad_()
    got = router(mine, layout, group)
    ((got.weights * layout.take(dy)).sum() + sum(got.losses.values())).backward()
    return {
        "ids": got.expert_ids, "weights": got.weights.detach(), "dx": mine.grad, "dweight": router.weight.grad,
        "tokens_per_expert": got.tokens_per_expert, **{k: v.detach() for k, v in got.losses.items()},
    }  # fmt: skip


@pytest.mark.slow
@settings(max_examples=25)
@given(options(), splits(), st.integers(0, 1 << 30), st.sampled_from(["switch", "gshard"]))
def test_losses_and_gradients_are_those_of_one_process(spec, split, seed, kind):
    batch, length, sizes = split
    tokens, hidden, experts = batch * length, 5, spec["num_experts"]
    x, weight = randn(tokens, hidden, seed=seed), randn(experts, hidden, seed=seed + 1)
    bias, dy = randn(experts, seed=seed + 2).float() / 4, randn(tokens, spec["top_k"], seed=seed + 3)
    bias = bias if spec["bias"] else None
    arguments = {**spec, **LOSSES, "balance": kind}
    outcomes = world(len(sizes)).run(on_ranks, x, weight, bias, arguments, split, dy)

    x.requires_grad_(), weight.requires_grad_()
    logits = x @ weight.T
    ids = formulas.choose(logits.detach(), spec, None if bias is None else bias.double())
    assert torch.equal(torch.cat([o["ids"] for o in outcomes]).long(), ids)
    weights = formulas.weights_of(logits, ids, spec)
    loss = (weights * dy).sum()
    if tokens:
        wanted = {
            "balance_loss": formulas.balance_loss(logits, ids, spec["score"], kind),
            "sequence_loss": formulas.sequence_loss(logits, spec["top_k"], spec["score"], batch, length),
            "z_loss": formulas.z_loss(logits),
        }
        for name, value in wanted.items():
            for o in outcomes:
                assert_close(name, o[name], value * LOSSES[name])
            loss = loss + value * LOSSES[name]
    else:
        assert all(o[name] == 0 for o in outcomes for name in LOSSES)
    loss.backward()
    assert_close("weights", torch.cat([o["weights"] for o in outcomes]), weights)
    assert_close("dx", torch.cat([o["dx"] for o in outcomes]), x.grad)
    assert_close("dweight", torch.stack([o["dweight"] for o in outcomes]).sum(0), weight.grad)
    counts = torch.stack([o["tokens_per_expert"] for o in outcomes]).sum(0)
    assert torch.equal(counts, torch.bincount(ids.flatten(), minlength=experts))


def two_by_two(group: object, x: Tensor, weight: Tensor, pairs: list, spec: dict) -> dict[str, Tensor]:
    """Four ranks; each pair splits two of four sequences, and together they form the batch."""
    pair, rank = divmod(group.rank(), 2)  # type: ignore[attr-defined]
    layout = TokenLayout(2, 3, (4, 2), rank)
    mine = layout.take(x[6 * pair : 6 * pair + 6]).clone().requires_grad_()
    router = router_of(weight, **spec)
    losses = router(mine, layout, group, sequence_group=pairs[pair].groups[rank]).losses
    sum(losses.values()).backward()
    return {"dx": mine.grad, "dweight": router.weight.grad, **{k: v.detach() for k, v in losses.items()}}


def test_sequences_may_be_split_over_fewer_ranks_than_the_batch():
    x, weight = randn(12, 5, seed=1), randn(6, 5, seed=2)
    spec = {"num_experts": 6, "top_k": 2, "score": "sigmoid", **LOSSES}
    pairs = [VirtualWorld(2), VirtualWorld(2)]
    outcomes = VirtualWorld(4).run(lambda group: two_by_two(group, x, weight, pairs, spec))
    x.requires_grad_(), weight.requires_grad_()
    logits = x @ weight.T
    ids = formulas.choose(logits.detach(), spec)
    wanted = {
        "balance_loss": formulas.balance_loss(logits, ids, "sigmoid", "switch") * 0.5,
        "sequence_loss": formulas.sequence_loss(logits, 2, "sigmoid", 4, 3) * 0.25,
        "z_loss": formulas.z_loss(logits) * 0.125,
    }
    sum(wanted.values()).backward()
    for name, value in wanted.items():
        for o in outcomes:
            assert_close(name, o[name], value)
    assert_close("dx", torch.cat([o["dx"] for o in outcomes]), x.grad)
    assert_close("dweight", sum(o["dweight"] for o in outcomes), weight.grad)


def replicated(group, x: Tensor, weight: Tensor, sizes: tuple[int, ...]) -> Tensor:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    router = router_of(weight, num_experts=len(weight), top_k=2, **LOSSES)
    parallelize_module(router, mesh, Replicated())
    layout = TokenLayout(1, len(x), sizes, group.rank())
    got = router(layout.take(x), layout, group)
    (got.weights[:, 0].sum() + sum(got.losses.values())).backward()
    return router.weight.grad.full_tensor()


def test_a_replicated_router_has_the_whole_gradient_on_every_rank():
    x, weight = randn(5, 4, seed=1), randn(6, 4, seed=2)
    router = router_of(weight, num_experts=6, top_k=2, **LOSSES)
    got = router(x, TokenLayout(1, 5))
    (got.weights[:, 0].sum() + sum(got.losses.values())).backward()
    for gradient in world(3).run(replicated, x, weight, (3, 0, 2)):
        assert_close("dweight", gradient, router.weight.grad)


def test_gradcheck():
    spec = {"num_experts": 6, "top_k": 2, "score": "sigmoid", "normalize": True, **LOSSES}
    x, weight = randn(6, 4, seed=1).requires_grad_(), randn(6, 4, seed=2).requires_grad_()
    router, layout = Router(4, **spec), TokenLayout(2, 3)

    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        got = torch.func.functional_call(router, {"weight": weight}, (x, layout))
        return got.weights, *got.losses.values()

    assert torch.autograd.gradcheck(function, (x, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_arithmetic_is_fp32_at_least_and_gradients_are_rounded_once(dtype):
    x, weight, dy = randn(8, 32, seed=1).to(dtype), randn(16, 32, seed=2).to(dtype), randn(8, 3, seed=3)
    router = router_of(weight, num_experts=16, top_k=3, z_loss=1.0)
    mine = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
        got = router(mine)
    wide = torch.promote_types(dtype, torch.float32)
    assert got.weights.dtype == wide == got.losses["z_loss"].dtype
    ((got.weights * dy.to(wide)).sum() + got.losses["z_loss"]).backward()
    xs, ws = x.double().requires_grad_(), weight.double().requires_grad_()
    logits = xs @ ws.T
    weights = formulas.weights_of(logits, got.expert_ids.long(), {})
    ((weights * dy.to(wide)).sum() + formulas.z_loss(logits)).backward()
    assert torch.equal(got.expert_ids.long(), formulas.choose(logits.detach(), {"top_k": 3}))
    assert_close("weights", got.weights, weights)
    for name, a, b in (("dx", mine.grad, xs.grad), ("dweight", router.weight.grad, ws.grad)):
        assert a.dtype == dtype
        lost = ROUNDINGS * torch.finfo(wide).eps * b.abs().max()
        assert_within(name, a, b, lost.expand(b.shape))


def test_16_bit_x_is_kept_for_the_backward_as_it_came():
    """An fp32 copy of x would cost four more bytes per element, in every layer."""
    saved = []
    x = randn(9, 32).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        Router(32, 6, 2)(x)
    assert {t.dtype for t in saved if t.shape == x.shape} == {torch.bfloat16}


def compiled_rank(group, x: Tensor, sizes: tuple[int, ...]) -> None:
    router = Router(x.shape[1], 8, 2, score="sigmoid", num_groups=4, top_groups=2, bias=True, **LOSSES)
    init_(router, 1)
    layout = TokenLayout(1, len(x), sizes, group.rank())
    results = []
    for function in (router, torch.compile(router, fullgraph=True, backend="aot_eager")):
        mine = layout.take(x).clone().requires_grad_()
        router.weight.grad = None
        got = function(mine, layout, group)
        (got.weights.sum() + sum(got.losses.values())).backward()
        results.append(
            (
                got.expert_ids.float(),
                got.weights.detach(),
                *got.losses.values(),
                mine.grad,
                router.weight.grad,
            )
        )
    for eager, compiled in zip(*results, strict=True):
        assert_close("compiled", compiled, eager)


class Waits(TorchDispatchMode):
    """Records every operation on which the host would wait for a GPU, or learn a shape from data."""

    NAMES = ("_local_scalar_dense", "nonzero", "bincount", "masked_select", "_unique", "unique_dim", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put") and any(t is not None and t.dtype == torch.bool for t in args[1])
        if name in self.NAMES or by_mask:
            self.seen.add(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("spec", [
    {"score": "sigmoid", "normalize": True, "num_groups": 4, "top_groups": 2, "bias": True, "top_k": 2, **LOSSES},
    {"sinkhorn": 3, "top_k": 1, "balance": "gshard", "jitter": 0.1, **LOSSES},
])  # fmt: skip
def test_the_host_waits_for_nothing(spec):
    def rank_main(group) -> set[str]:
        router, x = Router(4, 8, **spec), randn(3, 4, seed=group.rank()).float().requires_grad_()
        layout = TokenLayout(1, 6, (3, 3), group.rank(), dropout=dropout_state(1, 2))
        with Waits() as waits:
            got = router(x, layout, group)
            (got.weights.sum() + sum(got.losses.values())).backward()
            if router.bias is not None:
                balance.update_bias_(router.bias, got.tokens_per_expert, 0.001, group)
            for by in RULES:
                keep_capacity(got.expert_ids, got.weights, 8, 1.25, by=by, group=group)
        return waits.seen

    assert VirtualWorld(2).run(rank_main) == [set(), set()]
    with Waits() as waits:
        torch.ones(2)[torch.tensor([True, False])].sum().item()
    assert waits.seen == {"index", "_local_scalar_dense"}  # it detects them


@pytest.mark.slow
def test_compiled_it_is_the_same():
    world(2).run(compiled_rank, randn(5, 4, seed=1).float(), (3, 2), timeout=120)
