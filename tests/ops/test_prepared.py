"""Prepared launches: operands with equal shapes but other strides, addresses, biases or dtypes never share one."""

from itertools import product

import pytest
import torch
from torch import Tensor

import fusedtp
from fusedtp.comm import communicator
from fusedtp.ops.all_gather_matmul import op as gather_op
from tests.harness import world
from tests.properties.cases import arrange

ROWS, K, N = 6, 8, 16
LAYOUTS = ("contiguous", "transposed", "sliced", "expanded")


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def all_layouts(group, operation: str) -> None:
    """The same call with every pair of layouts, twice, so that the second round uses what the first prepared."""
    r, w = group.rank(), group.size()
    own = slice(r * ROWS, (r + 1) * ROWS)
    for turn, (of_x, of_w) in enumerate(2 * list(product(LAYOUTS, repeat=2))):
        height = ROWS if operation.startswith("all_gather") else w * ROWS
        x = arrange(numbers(1 if of_x == "expanded" else height, K, seed=turn), (height, K), of_x)
        weight = arrange(numbers(1 if of_w == "expanded" else N, K, seed=99 + turn), (N, K), of_w)
        bias = numbers(2 * N, seed=turn)[:: 2 if turn % 3 else 1][:N] if turn % 2 else None  # strided or contiguous
        zero = torch.zeros(N) if bias is None else bias
        where = f"turn {turn}: x {of_x}, weight {of_w}"
        if operation == "all_gather_matmul":
            (y,) = fusedtp.all_gather_matmul(x, [weight], group, biases=[bias], engine="triton")
            want = torch.cat([x] * w) @ weight.T + zero
        elif operation == "all_gather_wgrad":
            dy = arrange(numbers(1 if of_w == "expanded" else w * ROWS, N, seed=turn), (w * ROWS, N), of_w)
            (y,) = fusedtp.all_gather_wgrad(x, [dy], group, engine="triton")
            want = dy.T @ torch.cat([x] * w)
        elif operation == "matmul_reduce_scatter":
            y = fusedtp.matmul_reduce_scatter(x, weight, group, bias=bias, engine="triton")
            want = (w * (x @ weight.T) + zero)[own]
        else:
            y = fusedtp.matmul_all_reduce(x, weight, group, bias=bias, engine="triton")
            want = w * (x @ weight.T) + zero
        assert torch.equal(y, want), where


@pytest.mark.slow
@pytest.mark.parametrize(
    "operation", ["all_gather_matmul", "all_gather_wgrad", "matmul_reduce_scatter", "matmul_all_reduce"]
)
def test_each_layout_has_a_launch_of_its_own(operation):
    pytest.importorskip("triton")
    world(2).run(all_layouts, operation)


def tensors_within(value: object) -> int:
    """The tensors that a prepared launch keeps alive, other than the group's own."""
    if isinstance(value, Tensor):
        return 1
    if isinstance(value, dict):
        return sum(tensors_within(each) for each in value.values())
    return sum(map(tensors_within, value)) if isinstance(value, (tuple, list)) else 0


def kept_alive(group) -> list[int]:
    comm = communicator(group)
    comm.kinds.clear()
    x, weight, bias = numbers(ROWS, K, seed=0), numbers(N, K, seed=1), numbers(N, seed=2)
    fusedtp.all_gather_matmul(x, [weight], group, biases=[bias], engine="triton")
    (plan,) = (call.plan for (op, *_), call in comm.kinds.items() if op is gather_op)
    launches = [launch for key, launch in plan.launches.items() if key != "peers"]
    return [tensors_within(launch.args) for launch in launches]


def test_a_prepared_launch_keeps_no_tensor():
    pytest.importorskip("triton")
    assert world(2).run(kept_alive) == [[0]] * 2
