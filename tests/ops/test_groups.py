"""Operations on mesh dimensions, by object and by name, with two groups in turn; and the memory of a group."""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fusedtp
from fusedtp.comm import communicator
from tests.engines import ENGINES, TRITON
from tests.harness import world


def numbers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).float()


def on_both_dimensions(group, engine: str) -> None:
    """A 2 x 2 mesh: this rank's numbers in its row, in its column and in the world differ."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    row, column = divmod(group.rank(), 2)
    w = numbers(5, 4, seed=99)
    for _ in range(3):
        for name, peers in (("tp", (2 * row, 2 * row + 1)), ("dp", (column, column + 2))):
            xs = [numbers(3, 4, seed=p) for p in peers]
            own = xs[peers.index(group.rank())]
            (y,) = fusedtp.all_gather_matmul(own, [w], mesh[name], engine=engine)
            assert torch.equal(y, torch.cat(xs) @ w.T), name
            (again,) = fusedtp.all_gather_matmul(own, [w], communicator(mesh[name]).name, engine=engine)
            assert torch.equal(again, y), f"{name} by name"
            z = fusedtp.matmul_all_reduce(own, w, mesh.get_group(name), engine=engine)
            assert torch.equal(z, sum(xs) @ w.T), name


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_mesh_dimensions_are_groups_of_their_own(engine):
    world(4).run(on_both_dimensions, engine, fresh=True)


def of_plain_and_distributed_weights(group, engine: str) -> None:
    """The same call with plain weights and with DTensors, in turn: each uses this rank's shard, for gradients too."""
    mesh, w = init_device_mesh("cpu", (2,)), group.size()
    calls = {
        "all_gather_matmul": (Shard(0), lambda x, a, b, **how: fusedtp.all_gather_matmul(x, [a], biases=[b], **how)[0]),
        "matmul_reduce_scatter": (Shard(1), lambda x, a, b, **how: fusedtp.matmul_reduce_scatter(x, a, bias=b, **how)),
        "matmul_all_reduce": (Shard(1), lambda x, a, b, **how: fusedtp.matmul_all_reduce(x, a, bias=b, **how)),
    }
    for seed, (name, (placement, call)) in enumerate(calls.items()):
        full, bias = numbers(6, 4, seed=seed), numbers(6, seed=9 + seed)
        found = []
        for distributed in (False, True, False, True):
            of_bias = Shard(0) if placement == Shard(0) else Replicate()
            weight, b = distribute_tensor(full, mesh, [placement]), distribute_tensor(bias, mesh, [of_bias])
            if not distributed:
                weight, b = weight.to_local(), b.to_local()
            weight, b = weight.detach().requires_grad_(), b.detach().requires_grad_()
            x = numbers(4, 4 if placement == Shard(0) else 4 // w, seed=50 + group.rank()).requires_grad_()
            y = call(x, weight, b, group=group, engine=engine)
            y.backward(numbers(*y.shape, seed=70))
            assert all(isinstance(t.grad, DTensor) == distributed for t in (weight, b)), name
            grads = (t.grad.to_local() if distributed else t.grad for t in (weight, b))
            found.append([y.detach(), x.grad, *grads])
        for others in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True)), name


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_weight_may_be_distributed_or_this_rank_s_part(engine):
    world(2).run(of_plain_and_distributed_weights, engine, fresh=True)


def of_weights_that_lie_elsewhere(group) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, w = mesh["tp"], numbers(8, 8, seed=0)
    x = numbers(4, 8, seed=group.rank() % 2)
    own = x.chunk(2, 1)[tp.get_local_rank()]

    def gathers(*placements, on=mesh):
        weight = distribute_tensor(w, on, placements)
        return fusedtp.all_gather_matmul(x, [weight], tp)[0]

    def scatters(*placements, on=mesh):
        return fusedtp.matmul_reduce_scatter(own, distribute_tensor(w, on, placements), tp)

    refused = [
        lambda: gathers(Shard(0), Shard(0)),  # as FSDP shards it
        lambda: gathers(Shard(0), on=mesh["dp"]),
        lambda: gathers(Shard(0), Replicate()),
        lambda: scatters(Shard(0), Shard(1)),
        lambda: scatters(Shard(0), on=tp),
        lambda: gathers(Shard(1), on=tp),
    ]
    for call in refused:
        with pytest.raises(
            ValueError, match=r"a weight or bias of shape \(8, 8\) has placements .*; wanted Shard\([01]\) over"
        ):
            call()
    for on, before in ((tp, ()), (mesh, (Replicate(),))):  # a replica over other dimensions is a valid shard
        want = numbers(4, 8, seed=0), numbers(4, 8, seed=1)
        assert torch.equal(gathers(*before, Shard(0), on=on), torch.cat(want) @ w.chunk(2)[tp.get_local_rank()].T)
        parts = [of.chunk(2, 1)[p] @ w.chunk(2, 1)[p].T for p, of in enumerate(want)]
        assert torch.equal(scatters(*before, Shard(1), on=on), sum(parts).chunk(2)[tp.get_local_rank()])


def test_a_weight_that_is_split_otherwise_is_refused():
    world(4).run(of_weights_that_lie_elsewhere, fresh=True)


def memory_of_layers(group, engine: str, rows: int, k: int, n: int) -> int:
    x = torch.ones(rows, k, requires_grad=True)
    up, down = torch.ones(n, k, requires_grad=True), torch.ones(k, n, requires_grad=True)
    for _ in range(3):
        (h,) = fusedtp.all_gather_matmul(x, [up], group, engine=engine)
        fusedtp.matmul_reduce_scatter(h, down, group, engine=engine).sum().backward()
    return communicator(group).workspace.data.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["chunked", TRITON])
def test_a_group_takes_two_slots_of_its_largest_gathered_or_scattered_tensor(engine):
    """Forward gathers x [T, K] and scatters y [T, K]; backward gathers dy [T, K], x again, and scatters dx [T, K]."""
    rows, k, n, page = 24, 40, 100, 4096
    for size in (2, 3):
        for nbytes in world(size).run(memory_of_layers, engine, rows, k, n, fresh=True):
            assert nbytes <= 2 * (size * rows * k * 4 + page)
