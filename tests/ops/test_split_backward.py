"""Laws: a backward split into an input pass and a weight pass communicates no more than a single backward, and each
pass uses dy as it is at that time.

torch's zero-bubble pipeline schedules run backward in these two passes; Note [One autograd path] in ops/operation.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from fusedtp import VirtualWorld, all_gather_matmul, matmul_reduce_scatter
from fusedtp.comm import communicator
from fusedtp.ops.engines import calls


def _mlp(x: Tensor, up: Tensor, gate: Tensor, down: Tensor, group: object) -> Tensor:
    a, b = all_gather_matmul(x, [up, gate], group)
    return matmul_reduce_scatter(a * b, down, group)


def _operands(rank: int) -> tuple[Tensor, list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(rank)
    shapes = (5, 4), (5, 4), (4, 5)
    weights = [nn.Parameter(torch.randint(-2, 3, s, generator=generator).float()) for s in shapes]
    return torch.randint(-2, 3, (3, 4), generator=generator).float().requires_grad_(), weights


def _both_ways(group: object) -> dict[str, object]:
    comm = communicator(group)
    x, weights = _operands(comm.rank)
    _mlp(x, *weights, group).sum().backward()
    whole = [t.grad.clone() for t in (x, *weights)]
    for t in (x, *weights):
        t.grad = None
    y = _mlp(x, *weights, group)
    comm.engine_calls.clear()
    (dx,), groups = stage_backward_input([y], [torch.ones_like(y)], [x], iter(weights))
    input_calls = calls(comm)
    comm.engine_calls.clear()
    stage_backward_weight(iter(weights), groups)
    return {
        "equal": [torch.equal(a, b) for a, b in zip((dx, *(w.grad for w in weights)), whole, strict=True)],
        "input": {name: sum(n.values()) for name, n in input_calls.items()},
        "weight": {name: sum(n.values()) for name, n in calls(comm).items()},
    }


def test_each_pass_communicates_once_and_gradients_are_those_of_a_whole_backward():
    for seen in VirtualWorld(3).run(_both_ways):
        assert seen["equal"] == [True] * 4
        assert seen["input"] == {"all_gather_matmul": 1, "matmul_reduce_scatter": 1}
        assert seen["weight"] == {"all_gather_wgrad": 1}  # the row-parallel wgrad is local


def _dw_of_a_changed_dy(group: object) -> list[bool]:
    """Whether dw of a weight pass is right, with dy unchanged since the input pass and with dy changed in place."""
    comm = communicator(group)
    generator = torch.Generator().manual_seed(comm.rank)
    x = torch.randint(-2, 3, (3 * comm.world_size, 4), generator=generator).float().requires_grad_()
    w = torch.randint(-2, 3, (5, 4), generator=generator).float().requires_grad_()
    dys = [torch.full((3, 5), rank + 1.0) for rank in range(comm.world_size)]
    y = matmul_reduce_scatter(x, w, group)
    found = []
    for factor in (1, 3):
        dy = dys[comm.rank].clone()
        torch.autograd.grad(y, x, dy, retain_graph=True)
        dy.mul_(factor)
        (dw,) = torch.autograd.grad(y, w, dy, retain_graph=True)
        found.append(torch.equal(dw, factor * torch.cat(dys).t() @ x.detach()))
    return found


def test_a_dy_changed_between_the_passes_counts_as_it_is_in_the_weight_pass():
    """Small integers, so no sum rounds."""
    assert VirtualWorld(3).run(_dw_of_a_changed_dy) == [[True, True]] * 3
