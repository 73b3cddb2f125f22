"""Whole experts, parts, copies, or experts across data-parallel ranks: the split model always equals the plain one."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

import fusedtp
from fusedtp.comm import PeerFailed, VirtualGroup, communicator
from fusedtp.nn import MoEConfig
from fusedtp.nn.experts import Experts
from fusedtp.parallel.expert_parallel import ExpertSplit, Shares
from fusedtp.train.mesh import meshes
from fusedtp.train.shard import shard
from tests.harness import pool, world
from tests.parallel.support import (
    assert_close,
    assert_same_gradients,
    batch,
    beside,
    full,
    losses,
    make,
    make_pair,
    tp_mesh,
)
from tests.properties.laws import assert_same

SMALL = MoEConfig(num_experts=4, top_k=3, hidden=10, balance_loss=0.3, sequence_loss=0.2, shared=8)


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 5),
    st.integers(1, 4), st.integers(0, 2**32),
)  # fmt: skip
def test_the_finer_mixture_is_the_same_one(blocks, replicas, parts, each, tokens, k, seed):
    """Each choice becomes one choice per part of one copy, on the ranks that hold them. Dropped ones stay dropped."""
    experts, shares = blocks * each, Shares(blocks, replicas, parts)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :k].to(torch.int32)
    ids = ids.where(torch.rand(ids.shape, generator=generator) > 0.2, -1)
    weights = torch.rand(ids.shape, generator=generator)
    fine, fine_weights, count = shares.choices(ids, weights, experts)
    assert count == experts * replicas * parts and fine.dtype == ids.dtype
    for t in range(tokens):
        for j in range(ids.shape[1]):
            for q in range(parts):
                got, e = int(fine[t, j * parts + q]), int(ids[t, j])
                rank = (e // each * replicas + t % replicas) * parts + q
                assert got == (-1 if e < 0 else rank * each + e % each)
                assert fine_weights[t, j * parts + q] == weights[t, j]


def same_bits(group, seed: int, experts: int, split: ExpertSplit, sequence_parallel: bool) -> list:
    """Experts on exact inputs: the output, the gradients of x and weights, and the full gradients of the experts."""
    size, rank = group.size(), group.rank()
    tokens, dim, k = 13, 5, min(3, experts)
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randint(-1, 2, shape, generator=generator).float()  # noqa: E731
    module = Experts(dim, 6, experts, act="none", gated=False)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(draw(*parameter.shape))
    x, dy = draw(tokens, dim), draw(tokens, dim)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :k]
    weights = 2.0 ** torch.randint(-1, 2, (tokens, k), generator=generator)
    sizes = [tokens - 2 * (size - 1), *[2] * (size - 1)] if sequence_parallel else [tokens]
    at = rank if sequence_parallel else 0
    here = slice(sum(sizes[:at]), sum(sizes[: at + 1]))
    style = fusedtp.FusedExperts(
        sizes=sizes if sequence_parallel else None, split=split, sequence_parallel=sequence_parallel
    )
    mesh = group if isinstance(group, VirtualGroup) else tp_mesh(group)
    fusedtp.parallelize(module, mesh, plan={"": style})
    x, weights = x[here].requires_grad_(), weights[here].requires_grad_()
    y = module(x, ids[here], weights)
    y.backward(dy[here])
    return [y.detach(), x.grad, weights.grad, *(full(p.grad) for p in module.parameters())]


SPLITS = [
    (2, 6, ExpertSplit(tensor_parallel=2)),
    (4, 6, ExpertSplit(tensor_parallel=2)),
    (3, 7, ExpertSplit(tensor_parallel=3)),
    (2, 6, ExpertSplit(replicas=2)),
    (4, 6, ExpertSplit(replicas=2)),
    (4, 2, ExpertSplit()),
    (4, 1, ExpertSplit()),
    (4, 1, ExpertSplit(tensor_parallel=2)),
    (4, 3, ExpertSplit(tensor_parallel=2, replicas=2)),
    (4, 8, ExpertSplit(nodes=2)),
    (4, 4, ExpertSplit(nodes=4)),
    (2, 4, ExpertSplit(nodes=2)),
    (4, 6, ExpertSplit(nodes=2, tensor_parallel=2)),
    (4, 2, ExpertSplit(nodes=2)),
]


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("size, experts, split", SPLITS, ids=str)
def test_any_sharing_gives_the_bits_of_one_process(size, experts, split, sequence_parallel):
    """All numbers are integers and powers of two, so no sum rounds: at most 5 * 6 * 3 terms, multiples of a half."""
    alone = world(1).run(same_bits, 3, experts, ExpertSplit(), True)[0]
    ranks = world(size).run(same_bits, 3, experts, split, sequence_parallel)
    for i, name in enumerate(("y", "dx", "dweights", "dup", "ddown")):
        parts = [rank[i] for rank in ranks]
        if i < 3 and sequence_parallel:
            parts = [torch.cat(parts)]
        for part in parts:
            assert_same(name, part, alone[i])


def compare(group, moe: MoEConfig, split: ExpertSplit, options: dict) -> None:
    plain, parallel = make_pair(group, options={"experts": split, **options}, moe=moe)
    ids, labels = batch(2, 6)
    want, got = losses((plain, parallel), ids, labels)
    assert_close("loss", got, want)
    assert_same_gradients(parallel, plain)
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    assert_close("norm", fusedtp.clip_grad_norm_(parallel, 0.01), norm)
    assert_same_gradients(parallel, plain)


WAYS = {
    "parts": ExpertSplit(tensor_parallel=4),
    "experts and parts": ExpertSplit(tensor_parallel=2),
    "copies": ExpertSplit(replicas=2),
    "copies and parts": ExpertSplit(tensor_parallel=2, replicas=2),
    "in two stages": ExpertSplit(nodes=2),
    "parts, in two stages": ExpertSplit(tensor_parallel=2, nodes=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_models_equal_the_plain_one(way: str, sequence_parallel: bool):
    world(4).run(compare, SMALL, WAYS[way], {"sequence_parallel": sequence_parallel})


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
def test_whole_experts_without_sequence_parallelism(world_size: int, sequence_parallel: bool):
    moe = replace(SMALL, num_experts=6, capacity=0.9)
    world(world_size).run(compare, moe, ExpertSplit(), {"sequence_parallel": sequence_parallel})


def accumulated(group, split: ExpertSplit) -> None:
    plain, parallel = make_pair(group, options={"experts": split}, moe=SMALL)
    for parameter in parallel.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    losses((plain, parallel), *batch(2, 6))
    wanted = dict(plain.named_parameters())
    for name, parameter in parallel.named_parameters():
        assert parameter.grad is None
        assert_close(f"main_grad of {name}", parameter.main_grad, wanted[name].grad)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["copies", "experts and parts"], ids=str)
def test_main_grad(way: str):
    world(4).run(accumulated, WAYS[way])


def across(rank: int, dp: int, tp: int, ep: int, moe: MoEConfig, split: dict, options: dict, rows: int = 2) -> None:
    """dp x tp ranks with experts over ep of them: loss, gradients, norm and three AdamW steps equal the plain model's.

    rows   number of rows of five tokens per data-parallel rank
    """
    mesh, flat = meshes("cpu", dp, tp, ep)
    dp_mesh, outer = (flat["dp"], mesh["outer"]) if flat else (mesh["dp"], None)
    plain = make(moe=moe)
    parallel = fusedtp.parallelize(
        copy.deepcopy(plain), mesh["tp"], experts=ExpertSplit(flat.get("ep"), **split), **options
    )
    shard(parallel, dp_mesh, outer)
    everyone = dist.group.WORLD if options.get("sequence_parallel", True) else dp_mesh.get_group()
    parallel.balance_group, parallel.data_parallel = communicator(everyone).name, dp
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1.0, fused=True) for m in (plain, parallel)]
    for step in range(3):
        ids, labels = batch(rows * dp, 5, seed=step)
        labels.fill_(3)  # the same number of labels on every rank
        first = rows * dp_mesh.get_local_rank()
        own = slice(first, first + rows)
        want, got = plain(ids, labels).loss, parallel(ids[own], labels[own]).loss
        want.backward()
        got.backward()
        total = got.detach().clone()
        dist.all_reduce(total, group=dp_mesh.get_group())
        assert_close("loss", total / dp, want)
        assert_same_gradients(parallel, plain)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert_close("norm", fusedtp.clip_grad_norm_(parallel, 0.1), norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    wanted = dict(plain.named_parameters())
    for name, parameter in parallel.named_parameters():
        assert_close(name, parameter, wanted[name])
    state = {name: full(p).detach().clone() for name, p in parallel.named_parameters()}
    parallel.load_state_dict(state, strict=False)
    for name, parameter in parallel.named_parameters():
        assert_same(f"{name}, loaded", *beside(parameter, state[name]))


ACROSS = {
    "EP = W": (2, 2, 4, {}),
    "EP = TP": (2, 2, 2, {}),
    "EP = DP, tensor parallelism of one": (4, 1, 4, {}),
    "EP in DP, tensor parallelism of one": (4, 1, 2, {}),
    "parts across data-parallel ranks": (2, 2, 4, {"tensor_parallel": 2}),
    "copies across data-parallel ranks": (2, 2, 4, {"replicas": 2}),
    "across data-parallel ranks, in two stages": (2, 2, 4, {"nodes": 2}),
    "parts, sharded": (2, 2, 2, {"tensor_parallel": 2}),
    "no experts shared": (4, 1, 1, {}),
}


@pytest.fixture(scope="module")
def four():
    """Four ranks, whose tests create their own meshes."""
    with pool.World(4) as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.parametrize("case", ACROSS, ids=str)
def test_experts_across_data_parallel_ranks(case: str, four):
    dp, tp, ep, split = ACROSS[case]
    four.run(across, dp, tp, ep, replace(SMALL, capacity=1.5), split, {})


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_uneven_tokens_with_experts_across_data_parallel_ranks(nodes: int, four):
    """Each data-parallel rank has five tokens: three on one tensor-parallel rank and two on the other."""
    four.run(across, 2, 2, 4, replace(SMALL, capacity=1.5), {"nodes": nodes}, {}, 1)


@pytest.mark.slow
def test_experts_across_data_parallel_ranks_without_sequence_parallelism(four):
    four.run(across, 2, 2, 4, SMALL, {}, {"sequence_parallel": False})


def refuse(group) -> list[str]:
    found = []
    for experts, hidden, split in (
        (7, 10, ExpertSplit()),
        (4, 10, ExpertSplit(tensor_parallel=3)),
        (4, 10, ExpertSplit(replicas=3)),
        (4, 1, ExpertSplit(tensor_parallel=2)),
        (4, 10, ExpertSplit(nodes=3)),
        (4, 10, ExpertSplit(DeviceMesh("cpu", [1, 0]))),
    ):
        with pytest.raises(ValueError) as raised:
            make_pair(group, options={"experts": split}, moe=replace(SMALL, num_experts=experts, hidden=hidden))
        found.append(str(raised.value))
    return found


def test_what_cannot_be_shared_is_refused_before_anything_changes():
    with pool.World(2) as ranks:
        for uneven, parts, copies, narrow, nodes, order in ranks.run(refuse_):
            assert "7 experts cannot be divided evenly among 2 ranks; " in uneven
            assert "use ExpertSplit(tensor_parallel=2)" in uneven
            assert "tensor_parallel is 3, must be a divisor of 2 ranks" in parts
            assert "replicas is 3, must be a divisor of 2 (ranks / tensor_parallel)" in copies
            assert "hidden is 1, too small for 2 ranks: one would get no features" in narrow
            assert "nodes is 3, must be a divisor of 2 ranks" in nodes
            assert "ranks [0, 1] must be one of the blocks of 2 consecutive ranks in the experts' mesh [1, 0]" in order


def test_groups_that_do_not_lie_whole_in_the_mesh_of_experts_are_refused():
    def mesh(*ranks: int) -> DeviceMesh:
        return DeviceMesh("cpu", list(ranks), _init_backend=False, _rank=0)

    whole = ExpertSplit(mesh(0, 1, 2, 3, 4, 5))
    for ranks in ((0, 1), (2, 3), (4, 5), (0, 1, 2), (3, 4, 5)):
        whole.check(mesh(*ranks))
    for ranks in ((1, 2), (3, 4), (1, 2, 3), (0, 2), (5, 6)):
        with pytest.raises(ValueError, match="must be one of the blocks") as raised:
            whole.check(mesh(*ranks))
        assert f"the model's ranks {list(ranks)} " in str(raised.value)


def choose_one_too_many(group, split: ExpertSplit) -> str:
    module, ids = Experts(3, 4, 6, gated=False, act="none"), torch.tensor([[0], [5 + (group.rank() == 1)]])
    fusedtp.parallelize(module, tp_mesh(group), plan={"": fusedtp.FusedExperts(split=split)})
    with pytest.raises((ValueError, PeerFailed)) as raised:
        module(torch.ones(2, 3), ids, torch.ones(2, 1))
    return str(raised.value)


@pytest.mark.parametrize("split", [ExpertSplit(), ExpertSplit(tensor_parallel=2), ExpertSplit(replicas=2)], ids=str)
def test_an_expert_that_there_is_not_is_named_as_it_was_chosen(split):
    first, second = world(2).run(choose_one_too_many, split)
    assert second == "rank 1: expert_ids[1, 0] is 6; there are 6 experts"
    assert "rank 1" in first


def refuse_(rank: int) -> list[str]:
    return refuse(dist.group.WORLD)
