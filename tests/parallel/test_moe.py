"""With experts split over ranks, a model computes what it computes on one: loss, router losses, all gradients."""

import copy
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import fusedtp
from fusedtp.comm import communicator
from fusedtp.nn import MoEConfig
from fusedtp.nn.experts import Experts
from fusedtp.parallel import foreign_experts
from fusedtp.train.shard import shard
from tests.harness import pool, world
from tests.parallel.support import (
    assert_close,
    assert_same_gradients,
    batch,
    dp_tp_mesh,
    losses,
    make,
    make_pair,
    tp_mesh,
)
from tests.properties.laws import assert_same

SMALL = MoEConfig(num_experts=12, top_k=3, hidden=10, balance_loss=0.3)
CASES = {
    "softmax, normalised": SMALL,
    "sigmoid in groups, shared expert": replace(
        SMALL, score="sigmoid", num_groups=4, top_groups=2, shared=7, scale=2.5, sequence_loss=0.2
    ),
    "shared expert, split": replace(SMALL, shared=9, split_shared=True),
    "first layer dense, z-loss": replace(SMALL, first_dense=1, z_loss=0.1, balance="gshard"),
    "sinkhorn": replace(SMALL, top_k=1, sinkhorn=3, normalize=False),
    "capacity by position": replace(SMALL, capacity=0.8),
    "capacity by probability": replace(SMALL, capacity=1.0, drop="probability"),
    "in rounds of 5 rows": replace(SMALL, max_rows=5, on_overflow="rounds"),
    "in rounds of a third of a share": replace(SMALL, recv_capacity=1 / 3, on_overflow="rounds", capacity=0.8),
    "one expert a rank": replace(SMALL, num_experts=4, top_k=1),
}


def compare(group, batch_size: int, length: int, moe: MoEConfig, options: dict) -> None:
    if moe.num_experts % group.size():
        moe = replace(moe, num_experts=2 * group.size())
    plain, parallel = make_pair(group, options=options, moe=moe)
    ids, labels = batch(batch_size, length)
    want, got = losses((plain, parallel), ids, labels)
    assert_close("loss", got, want)
    assert_same_gradients(parallel, plain)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_loss_and_gradients_equal_the_plain_model(world_size: int, case: str):
    world(world_size).run(compare, 2, 6, CASES[case], {})


@pytest.mark.slow
@pytest.mark.parametrize("batch_size, length", [(1, 7), (1, 2), (1, 1), (0, 5)])
def test_tokens_need_not_divide_and_may_be_fewer_than_ranks(batch_size: int, length: int):
    world(3).run(compare, batch_size, length, SMALL, {})


def sharded(rank: int, moe: MoEConfig) -> None:
    """Two data-parallel by two tensor-parallel ranks, each with half of the batch. FSDP2 averages over them."""
    mesh = dp_tp_mesh()
    plain = make(moe=moe)
    parallel = fusedtp.parallelize(copy.deepcopy(plain), mesh["tp"])
    shard(parallel, mesh["dp"])
    parallel.balance_group, parallel.data_parallel = communicator(dist.group.WORLD).name, 2
    ids, labels = batch(2, 6)
    labels.fill_(3)  # the same number of labels in each half
    half = slice(mesh.get_local_rank("dp"), mesh.get_local_rank("dp") + 1)
    want = plain(ids, labels).loss
    got = parallel(ids[half], labels[half]).loss
    want.backward()
    got.backward()
    total = got.detach().clone()
    dist.all_reduce(total, group=mesh["dp"].get_group())
    assert_close("loss", total / 2, want)
    assert_same_gradients(parallel, plain)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["sigmoid in groups, shared expert", "capacity by position"], ids=str)
def test_data_parallel_ranks_balance_and_bound_the_whole_batch(case: str):
    with pool.World(4) as ranks:
        ranks.run(sharded, replace(CASES[case], z_loss=0.1))


@pytest.mark.parametrize("engine", ["collective", "chunked"])
def test_every_engine(engine: str):
    world(2).run(compare, 2, 5, SMALL, {"engine": engine})


def same_bits(group, seed: int, act: str, dtype: torch.dtype, options: dict) -> list[torch.Tensor]:
    """Experts on exact inputs: the output, and the gradients of x, weights and this rank's experts."""
    size, rank = group.size(), group.rank()
    tokens, dim, num_experts, k = 13, 5, 12, 3
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape, most=1: torch.randint(-most, most + 1, shape, generator=generator).to(dtype)  # noqa: E731
    experts = Experts(dim, 4, num_experts, act=act, gated=False, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(draw(*parameter.shape))
    x, dy = draw(tokens, dim), draw(tokens, dim)
    ids = torch.rand(tokens, num_experts, generator=generator).argsort(1)[:, :k]
    weights = 2.0 ** torch.randint(-1, 2, (tokens, k), generator=generator)
    sizes = [tokens - 2 * (size - 1), *[2] * (size - 1)]
    here = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    fusedtp.parallelize(experts, tp_mesh(group), plan={"": fusedtp.FusedExperts(sizes=sizes)})
    x, weights = x[here].requires_grad_(), weights[here].requires_grad_()
    y = experts(x, ids[here], weights)
    y.backward(dy[here])
    own = [p.grad.to_local() for p in experts.parameters()]
    return [y.detach(), x.grad, weights.grad, *own]


@pytest.mark.parametrize("act", ["none", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_split_of_experts_gives_the_same_bits(act: str, dtype: torch.dtype):
    """Integers and powers of two: no sum rounds, even in bf16 (at most 5 * 4 * 3 multiples of a half, below 2**8)."""
    by_ranks = [world(size).run(same_bits, 3, act, dtype, {}) for size in (1, 2, 3, 4)]
    want = [torch.cat(parts) for parts in zip(*by_ranks[0], strict=True)]
    for size, ranks in zip((2, 3, 4), by_ranks[1:], strict=True):
        for name, whole, parts in zip(
            ("y", "dx", "dweights", "dup", "ddown"), want, zip(*ranks, strict=True), strict=True
        ):
            assert_same(f"{name} of {size} ranks", torch.cat(parts), whole)


def test_neither_rounds_nor_fp8_change_bits_of_small_integers():
    options = dict(max_rows=7, on_overflow="rounds", comm_dtype="fp8")
    (want,) = world(1).run(same_bits, 3, "relu", torch.float32, {})
    ranks = world(2).run(same_bits, 3, "relu", torch.float32, options)
    for name, whole, parts in zip(("y", "dx", "dweights", "dup", "ddown"), want, zip(*ranks, strict=True), strict=True):
        assert_same(name, torch.cat(parts), whole)


def with_room(group, rows: int) -> None:
    """With room for only `rows` rows at a time, foreign experts give the same result as all at once. Exact integers."""
    communicator(group)  # registers the group's name
    g = torch.Generator().manual_seed(group.rank())
    draw = lambda *shape: torch.randint(-2, 3, shape, generator=g).float()  # noqa: E731
    x, ids, own = draw(4, 3), torch.rand(4, 4, generator=g).argsort(1)[:, :2], draw(2, 3, 3)
    seen: list[int] = []

    def experts(rows: torch.Tensor, numbers: torch.Tensor, ones: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        weights = torch.cat([own, torch.full((1, 3, 3), torch.nan)])[numbers[:, 0]]
        return torch.where(numbers < 2, torch.einsum("rk,rkn->rn", rows, weights) * ones, 0)

    found = []
    for room in (None, rows):
        leaf = x.clone().requires_grad_()
        with patch.object(foreign_experts, "usual_room", lambda *_: room):  # noqa: B023
            y = foreign_experts.exchanged(leaf, ids, torch.ones(4, 2), experts, 2, 2, group.group_name, (4, 4))
        (dx,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
        found.append((y.detach(), dx))
    assert max(seen[1:]) <= rows and len(seen) > 2, seen
    for one, several in zip(*found, strict=True):
        assert_same(f"rank {group.rank()}", several, one)


def test_experts_of_others_come_in_rounds_too():
    world(2).run(with_room, 3)
