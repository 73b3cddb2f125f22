"""No operand of a linear layer is copied or concatenated on its way to a fused kernel, forward or backward."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import fusedtp
from tests.harness import world

COPYING = ("aten::cat", "aten::clone", "aten::copy_", "aten::constant_pad_nd", "aten::stack")
ROWS, K, WIDTHS = 6, 32, (16, 48, 16)


@contextmanager
def copies() -> Iterator[list[str]]:
    """Names and shapes of copies, including those inside custom operations, which dispatch modes do not see."""
    found: list[str] = []
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        yield found
    for event in seen.events() or ():
        # the interpreter copies whole storages, which are one-dimensional
        if event.name in COPYING and (event.name != "aten::copy_" or len(event.input_shapes[0]) > 1):
            found.append(f"{event.name} {event.input_shapes}")


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def gradients(group, kind: str) -> tuple[list[str], bool]:
    """The copies of a forward and a backward pass, and whether dx equals the formula."""
    r, w = group.rank(), group.size()
    mine = slice(r * ROWS, (r + 1) * ROWS)
    if kind == "column":
        weights = [[numbers(n, K, seed=10 * q + i) for i, n in enumerate(WIDTHS)] for q in range(w)]
        x, own = numbers(ROWS, K, seed=0), [each.requires_grad_() for each in weights[r]]
        factors = [[numbers(w * ROWS, n, seed=50 * q + i) for i, n in enumerate(WIDTHS)] for q in range(w)]
        want = sum(f @ v.detach() for of, at in zip(factors, weights, strict=True) for f, v in zip(of, at, strict=True))
        want = want[mine]
    else:
        x, own = numbers(w * ROWS, K, seed=r), [numbers(WIDTHS[0], K, seed=9 + r).requires_grad_()]
        factors = [[numbers(ROWS, WIDTHS[0], seed=50 + q)] for q in range(w)]
        want = torch.cat([of[0] for of in factors]) @ own[0].detach()
    x.requires_grad_()
    with copies() as found:
        if kind == "column":
            ys = fusedtp.all_gather_matmul(x, own, group, engine="triton")
        else:
            ys = [fusedtp.matmul_reduce_scatter(x, own[0], group, engine="triton")]
        torch.autograd.backward(ys, factors[r])
    assert all(each.grad is not None for each in own)
    return found, torch.equal(x.grad, want)


@pytest.mark.parametrize("kind", ["column", "row"])
def test_nothing_is_copied_on_the_way_to_a_kernel(kind):
    pytest.importorskip("triton")
    for found, right in world(2).run(gradients, kind):
        assert right and not found


def test_a_copy_would_be_seen():
    with copies() as found:
        torch.cat([torch.ones(2, 3), torch.ones(2, 3)])
        torch.ones(3, 2).t().contiguous()
        torch.ones(3, 2).t()
    assert [each.split()[0] for each in found] == ["aten::cat", "aten::clone", "aten::copy_"]
