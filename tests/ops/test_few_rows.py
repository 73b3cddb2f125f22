"""Sums over ranks at the limit between two kernels: both give the formula's bits, each where the size asks for it."""

import pytest
import torch

import fusedtp
from fusedtp.comm import communicator
from fusedtp.comm.launching import Launch
from tests.harness import world

W, K = 3, 20
LIMITS = [("float32", 528, 64), ("bfloat16", 528, 256), ("bfloat16", 1035, 64)]  # dtype, N, most rows that are few
KERNELS = {  # of y [T, N] where few rows are multiplied together, and where not
    "matmul_reduce_scatter": ("few_rows_kernel", "matmul_reduce_scatter_kernel"),
    "matmul_all_reduce": ("few_rows_kernel", "two_shot_kernel"),
}


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def summed(group, operation: str, total: int, n: int, dtype: str) -> tuple[bool, set[str]]:
    """Whether the call gives what one device does, and the kernels that calls of this group were prepared for."""
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
    launches = [each for plan in communicator(group).plans.values() for each in plan.launches.values()]
    return torch.equal(got, want), {each.kernel.__name__ for each in launches if isinstance(each, Launch)}


@pytest.mark.parametrize("dtype, n, most", LIMITS)
@pytest.mark.parametrize("operation", KERNELS)
def test_the_kernel_changes_with_the_rows_and_the_result_does_not(operation, dtype, n, most):
    pytest.importorskip("triton")
    for total, kernel in zip((most, most + 1), KERNELS[operation], strict=True):
        for right, kernels in world(W).run(summed, operation, total, n, dtype, fresh=True):
            assert right and kernels == {kernel}, (total, kernels)
