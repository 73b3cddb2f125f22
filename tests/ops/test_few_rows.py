"""At the row limits between the few-rows kernels and the others: either kernel gives the formula's bits."""

import pytest
import torch

import fusedtp
from fusedtp.comm import communicator
from fusedtp.comm.launching import Launch
from fusedtp.ops.all_gather_matmul import come_together
from fusedtp.ops.rows import Rows
from tests.harness import world

W, K = 3, 20
LIMITS = [("float32", 528, 64), ("bfloat16", 528, 256), ("bfloat16", 1035, 64)]  # dtype, N, largest T for few rows
KERNELS = {  # for y [T, N]: the kernel for few rows, and the one for more
    "matmul_reduce_scatter": ("few_rows_kernel", "matmul_reduce_scatter_kernel"),
    "matmul_all_reduce": ("few_rows_kernel", "two_shot_kernel"),
}
GATHERS = {
    "all_gather_matmul": ("few_rows_gather_kernel", "all_gather_matmul_kernel"),
    "all_gather_gated_matmul": ("few_rows_gated_kernel", "all_gather_gated_matmul_kernel"),
    "scaled_all_gather_matmul": ("few_rows_gather_kernel", "all_gather_matmul_kernel"),
}


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def kernels(group) -> set[str]:
    """The kernels that calls of this group were prepared for."""
    comm = communicator(group)
    plans = [*comm.plans.values(), *(call.plan for call in comm.kinds.values())]
    launches = [each for plan in plans for each in plan.launches.values()]
    return {each.kernel.__name__ for each in launches if isinstance(each, Launch)}


def summed(group, operation: str, total: int, n: int, dtype: str) -> tuple[bool, set[str]]:
    """Whether the call equals the single-device result, and the kernels it used."""
    of, rank = getattr(torch, dtype), group.rank()
    x, w, bias = numbers(total, W * K, seed=0).to(of), numbers(n, W * K, seed=1).to(of), numbers(n, seed=2).to(of)
    want = (x.double() @ w.double().T + bias.double()).to(of)
    own = [each.split(K, 1)[rank].contiguous() for each in (x, w)]
    if operation == "matmul_reduce_scatter":
        sizes = (total // 2, 0, total - total // 2)
        got = fusedtp.matmul_reduce_scatter(*own, group, bias=bias, sizes=sizes, engine="triton")
        want = want.split(sizes)[rank]
    else:
        got = fusedtp.matmul_all_reduce(*own, group, bias=bias, engine="triton")
    return torch.equal(got, want), kernels(group)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, n, most", LIMITS)
@pytest.mark.parametrize("operation", KERNELS)
def test_the_kernel_of_a_sum_changes_with_the_rows_and_the_result_does_not(operation, dtype, n, most):
    pytest.importorskip("triton")
    for total, kernel in zip((most, most + 1), KERNELS[operation], strict=True):
        for right, used in world(W).run(summed, operation, total, n, dtype, fresh=True):
            assert right and used == {kernel}, (total, used)


def gathered(group, operation: str, total: int, dtype: str) -> tuple[bool, set[str]]:
    """The same for a gather; a gated one up to its dtype's rounding and that of 1 + erf in fp32, which may cancel."""
    of, sizes, n = getattr(torch, dtype), (total // 2, 0, total - total // 2), 17 + group.rank()
    x, w, v = numbers(total, K, seed=0).to(of), numbers(n, K, seed=1).to(of), numbers(n, K, seed=2).to(of)
    mine, (want, up) = x.split(sizes)[group.rank()], (x.double() @ each.double().T for each in (w, v))
    how = dict(sizes=sizes, engine="triton")
    if operation == "scaled_all_gather_matmul":
        one = torch.ones(1)
        got = fusedtp.scaled_all_gather_matmul(mine, one, [w], [one], group, **how)[0]
        return torch.equal(got.double(), want), kernels(group)
    if operation == "all_gather_matmul":
        got = fusedtp.all_gather_matmul(mine, [w], group, **how)[0]
        return torch.equal(got, want.to(of)), kernels(group)
    got = fusedtp.all_gather_gated_matmul(mine, [w, v], group, act="gelu", **how)[0]
    right, eps = torch.nn.functional.gelu(want) * up, torch.finfo(torch.float32).eps
    near = (got.double() - right).abs() <= torch.finfo(of).eps * right.abs() + eps * (want * up).abs()
    return bool(near.all()), kernels(group)


@pytest.mark.slow
@pytest.mark.parametrize(
    "operation, dtype, most",
    [
        ("all_gather_matmul", "float32", 128),
        ("all_gather_matmul", "bfloat16", 256),
        ("all_gather_gated_matmul", "float32", 128),
        ("all_gather_gated_matmul", "bfloat16", 256),
        ("scaled_all_gather_matmul", "float8_e4m3fn", 256),
    ],
)
def test_the_kernel_of_a_gather_changes_with_the_rows_and_the_result_does_not(operation, dtype, most):
    pytest.importorskip("triton")
    for total, kernel in zip((most, most + 1), GATHERS[operation], strict=True):
        for right, used in world(W).run(gathered, operation, total, dtype, fresh=True):
            assert right and used == {kernel}, (total, used)


@pytest.mark.parametrize("ranks, rows", [(2, 256), (3, 256), (4, 512), (8, 512)])
def test_more_ranks_bring_more_rows_together(ranks, rows):
    for dtype, most in ((torch.bfloat16, rows), (torch.float8_e4m3fn, rows), (torch.float32, rows // 2)):
        assert come_together(Rows((0,) * (ranks - 1) + (most,)), dtype)
        assert not come_together(Rows((1,) * (ranks - 1) + (most,)), dtype)
