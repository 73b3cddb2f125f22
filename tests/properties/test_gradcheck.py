"""fp64 gradcheck of the whole world as one function.

Every rank passes the same full tensors, so all ranks perturb the same element in lockstep; the function takes this
rank's part, runs the operation, and gathers the results of all ranks.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function, gradcheck

import fusedtp
from tests.harness import world


class _Enter(Function):
    """A replicated tensor of which each rank uses a part: gradients are summed over ranks."""

    @staticmethod
    def forward(ctx, t: Tensor, group) -> Tensor:
        ctx.group = group
        return t.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Leave(Function):
    """This rank's rows -> all ranks' rows; the gradient is the same on all ranks, and each keeps its own part."""

    @staticmethod
    def forward(ctx, t: Tensor, group) -> Tensor:
        parts: list = [None] * group.size()
        dist.all_gather_object(parts, t.detach(), group=group)
        ctx.rows = slice(*(sum(len(p) for p in parts[: group.rank() + end]) for end in (0, 1)))
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient[ctx.rows].clone(), None


def check_gather(group, engine: str, sizes: tuple[int, ...], keep: bool) -> None:
    def everything(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
        x, w, v, b = (_Enter.apply(t, group) for t in (x, w, v, b))
        r = group.rank()
        y, z = fusedtp.all_gather_matmul(
            x.split(sizes)[r],
            [w[r], v[r]],
            group,
            biases=[b[r], None],
            sizes=sizes,
            engine=engine,
            keep_gathered=keep,
        )
        return _Leave.apply(torch.cat([y, z], 1).t(), group)

    n = len(sizes)
    assert gradcheck(everything, _inputs((sum(sizes), 2), (n, 3, 2), (n, 1, 2), (n, 3)))


def check_scatter(group, engine: str, sizes: tuple[int, ...], keep: bool) -> None:
    def everything(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        x, w, b = (_Enter.apply(t, group) for t in (x, w, b))
        r = group.rank()
        y = fusedtp.matmul_reduce_scatter(x[r], w[r], group, bias=b, sizes=sizes, engine=engine)
        return _Leave.apply(y, group)

    n = len(sizes)
    assert gradcheck(everything, _inputs((n, sum(sizes), 2), (n, 3, 2), (3,)))


def check_reduce(group, engine: str, sizes: tuple[int, ...], keep: bool) -> None:
    def everything(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        x, w = (_Enter.apply(t, group) for t in (x, w))
        r = group.rank()
        return fusedtp.matmul_all_reduce(x[r], w[r], group, bias=b, engine=engine)

    n = len(sizes)
    assert gradcheck(everything, _inputs((n, sum(sizes), 2), (n, 3, 2), (3,)))


def _inputs(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1), (1, 0, 2)], ids=str)
@pytest.mark.parametrize("engine", ["collective", "chunked"])
@pytest.mark.parametrize("check", [check_gather, check_scatter, check_reduce])
def test_gradients_of_the_whole_world(check, engine, sizes):
    world(len(sizes)).run(check, engine, sizes, False)


@pytest.mark.slow
def test_gradients_when_the_gathered_rows_are_kept():
    world(2).run(check_gather, "chunked", (2, 1), True)


def check_gather_without_reduction(group) -> None:
    from fusedtp.ops import column_backward
    from fusedtp.ops.operation import OPERATIONS

    def own_rows_only(spec, x, dys, weights, dtype):
        dx = sum(dy @ w for dy, w in zip(dys, weights, strict=True))
        return [dx.split(spec.sizes)[spec.rank].clone(), *OPERATIONS["all_gather_wgrad"](spec, x, dys, dtype)]

    true, column_backward.op = column_backward.op, own_rows_only
    try:
        check_gather(group, "chunked", (2, 1), False)
    finally:
        column_backward.op = true


@pytest.mark.slow
def test_an_input_gradient_that_is_not_summed_over_ranks_is_seen():
    for outcome in world(2).outcomes(check_gather_without_reduction):
        assert outcome.is_a("GradcheckError"), outcome
