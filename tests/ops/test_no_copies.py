"""No operand of a linear layer is copied on its way to a fused kernel, forward or backward, nor joined to another."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fusedtp
from tests.harness import world

COPYING = ("cat", "clone", "copy_", "_to_copy", "constant_pad_nd", "stack")
ROWS, K, WIDTHS = 6, 32, (16, 48, 16)


class Copies(TorchDispatchMode):
    """Names and shapes of what is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in COPYING and isinstance(made, Tensor) and made.numel() > 1:
            self.found.append(f"{name} {list(made.shape)}")
        return made


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def gradients(group, kind: str) -> tuple[list[str], bool]:
    """What was copied in a forward and a backward pass; whether dx is that of the formula."""
    r, w = group.rank(), group.size()
    mine = slice(r * ROWS, (r + 1) * ROWS)
    if kind == "column":
        weights = [[numbers(n, K, seed=10 * q + i) for i, n in enumerate(WIDTHS)] for q in range(w)]
        x, own = numbers(ROWS, K, seed=0), [each.requires_grad_() for each in weights[r]]
        factors = [[numbers(w * ROWS, n, seed=50 * q + i) for i, n in enumerate(WIDTHS)] for q in range(w)]
        want = sum(
            f @ v.detach()
            for of, at in zip(factors, weights, strict=True)
            for f, v in zip(of, at, strict=True)
        )
        want = want[mine]
    else:
        x, own = numbers(w * ROWS, K, seed=r), [numbers(WIDTHS[0], K, seed=9 + r).requires_grad_()]
        factors = [[numbers(ROWS, WIDTHS[0], seed=50 + q)] for q in range(w)]
        want = torch.cat([of[0] for of in factors]) @ own[0].detach()
    x.requires_grad_()
    with Copies() as copies:
        if kind == "column":
            ys = fusedtp.all_gather_matmul(x, own, group, engine="triton")
        else:
            ys = [fusedtp.matmul_reduce_scatter(x, own[0], group, engine="triton")]
        torch.autograd.backward(ys, factors[r])
    assert all(each.grad is not None for each in own)
    return copies.found, torch.equal(x.grad, want)


@pytest.mark.parametrize("kind", ["column", "row"])
def test_nothing_is_copied_on_the_way_to_a_kernel(kind):
    pytest.importorskip("triton")
    for found, right in world(2).run(gradients, kind):
        assert right and not found


def test_a_copy_would_be_seen():
    with Copies() as copies:
        torch.cat([torch.ones(2, 3), torch.ones(2, 3)])
        torch.ones(3, 2).t().contiguous()
        torch.ones(3, 2).t()
    assert copies.found == ["cat [4, 3]", "clone [2, 3]"]
