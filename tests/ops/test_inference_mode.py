"""A group that runs under torch.inference_mode, first, between training steps or when it grows, still trains after."""

import pytest
import torch
from torch import Tensor

import fusedtp
from fusedtp.comm import communicator
from fusedtp.ops.engines import BY_COPY
from fusedtp.ops.operation import OPERATIONS, Spec
from fusedtp.ops.tokens import gather_tokens, reduce_scatter_tokens
from tests.engines import ENGINES
from tests.harness import world


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def every_operation(group, engine: str, rows: int) -> Tensor:
    """All operations give exact values, and exact gradients where there are any; results are equal on all ranks."""
    r, w = group.rank(), group.size()
    x = numbers(w * rows, 8, seed=rows)
    own = x[r * rows : (r + 1) * rows].clone().requires_grad_()
    weight = numbers(8, 8, seed=1).requires_grad_()
    for each in (BY_COPY, engine) if engine == "triton" else (engine,):
        y = fusedtp.all_gather_matmul(own, [weight], group, engine=each)[0]
        assert torch.equal(y, x @ weight.T)
    z = fusedtp.matmul_reduce_scatter(y, weight, group, engine=engine)
    assert torch.equal(z, w * (y @ weight.T)[r * rows : (r + 1) * rows])
    total = fusedtp.matmul_all_reduce(y, weight, group, engine=engine)
    assert torch.equal(total, w * (y @ weight.T))
    assert torch.equal(gather_tokens(own, group, (rows,) * w), x)
    assert torch.equal(reduce_scatter_tokens(x, group, (rows,) * w), w * own)
    if not torch.is_inference_mode_enabled():
        z.sum().backward()
        ones = torch.ones(w * rows, 8)
        assert torch.equal(own.grad, w * (ones @ weight @ weight)[:rows])
    return z.detach()


def inference_first(group, engine: str) -> None:
    with torch.inference_mode():
        every_operation(group, engine, 3)
    every_operation(group, engine, 3)  # in memory that was allocated under inference_mode
    every_operation(group, engine, 200)


def inference_grows(group, engine: str) -> None:
    every_operation(group, engine, 3)
    before = communicator(group).workspace.slot_bytes
    with torch.inference_mode():
        every_operation(group, engine, 200)
    assert communicator(group).workspace.slot_bytes > before
    every_operation(group, engine, 200)
    with torch.inference_mode():
        every_operation(group, engine, 3)
    every_operation(group, engine, 3)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("story", [inference_first, inference_grows])
def test_a_group_trains_after_inference(story, engine):
    world(2).run(story, engine, fresh=True)


def gathers_by_copy(group) -> None:
    """Copies write slots and peers' flags through tensors, while kernels write to addresses."""
    comm, w = communicator(group), group.size()
    weight = numbers(8, 8, seed=1)
    for inference, rows in ((True, 3), (False, 3), (True, 200), (False, 200)):
        x = numbers(w * rows, 8, seed=rows)
        spec = Spec(comm.name, comm.rank, (rows,) * w, engine=BY_COPY)
        with torch.inference_mode(inference):
            y, _ = OPERATIONS["all_gather_matmul"](spec, x[comm.rank * rows :][:rows], [weight], [None], True)
        assert torch.equal(y, x @ weight.T), (inference, rows)
        comm.world.barrier()  # peers may still read
        comm.workspace.poison()
        comm.world.barrier()


def test_copies_beside_a_kernel_write_after_inference():
    pytest.importorskip("triton")
    world(2).run(gathers_by_copy, fresh=True)


def fails_after_inference(group) -> str:
    """A failed call resets what kernels recorded; the group, first used under inference_mode, stays usable."""
    x, w = torch.ones(2, 3), torch.ones(4, 3)

    def gather(num_weights: int) -> Tensor:
        return fusedtp.all_gather_matmul(x, [w] * num_weights, group, engine="chunked")[0]

    with torch.inference_mode():
        gather(1)
    with pytest.raises(fusedtp.SignatureMismatch) as told:
        gather(1 + group.rank())
    assert torch.equal(gather(1), torch.full((4, 4), 3.0))
    return str(told.value)


def test_a_call_that_fails_after_inference_leaves_the_group_usable():
    for message in world(2).run(fails_after_inference, fresh=True):
        assert "weights is" in message


def experts(group) -> None:
    w = group.size()

    def layer(x: Tensor) -> Tensor:
        ids = torch.arange(x.shape[0])[:, None] % (2 * w)
        rows, _, handle = fusedtp.moe_dispatch(x, ids, torch.ones(x.shape[0], 1), 2 * w, group)
        return fusedtp.moe_combine(2 * rows, handle)

    x = numbers(6, 4, seed=group.rank())
    with torch.inference_mode():
        assert torch.equal(layer(x), 2 * x)
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.sum().backward()
    assert torch.equal(y, 2 * x) and torch.equal(leaf.grad, torch.full_like(x, 2.0))


def test_experts_train_after_inference():
    world(2).run(experts, fresh=True)
