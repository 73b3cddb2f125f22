"""What the eager autograd nodes guarantee beyond one plain backward."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from fusedtp import VirtualWorld, all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter


def _two_backwards(group: object) -> None:
    torch.manual_seed(group.rank())
    x, w = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    y = matmul_reduce_scatter(x, w, group)
    torch.autograd.grad(y, x, torch.full_like(y, 100.0), retain_graph=True)
    (dw,) = torch.autograd.grad(y, w, torch.ones_like(y), retain_graph=True)
    _, want = torch.autograd.grad(y, (x, w), torch.ones_like(y))
    assert torch.equal(dw, want)


def test_a_weight_gradient_never_uses_the_gather_of_another_backward_pass():
    VirtualWorld(2).run(_two_backwards)


def _under_autocast(engine: str, group: object) -> list[torch.dtype]:
    x, w = torch.randn(4, 3), torch.randn(5, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        (y,) = all_gather_matmul(x, [w], group, engine=engine)
        z = matmul_all_reduce(x, w, group, engine=engine)
    (y.sum() + z.sum()).backward()
    return [y.dtype, z.dtype, w.grad.dtype]


@pytest.mark.parametrize("engine", ["chunked", "collective"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_autocast_does_to_operands_what_it_does_to_a_linear_layer(engine, world_size):
    for seen in VirtualWorld(world_size).run(lambda group: _under_autocast(engine, group)):
        assert seen == [torch.bfloat16, torch.bfloat16, torch.float32]


def _frozen(group: object) -> None:
    x, w, frozen = torch.randn(4, 3), torch.randn(5, 3, requires_grad=True), torch.randn(5, 3)
    w.main_grad, frozen.main_grad = torch.zeros(5, 3), torch.zeros(5, 3)
    a, b = all_gather_matmul(x, [w, frozen], group)
    (a.sum() + b.sum()).backward()
    assert w.grad is None and w.main_grad.abs().sum() > 0
    assert frozen.main_grad.abs().sum() == 0


def test_the_main_grad_of_a_frozen_weight_stays_as_it_is():
    VirtualWorld(2).run(_frozen)


def test_a_virtual_world_and_its_workspaces_go_with_their_last_user():
    world = VirtualWorld(2)
    world.run(_frozen)
    gone = weakref.ref(world)
    del world
    gc.collect()
    assert gone() is None
