"""Shared by the tests of fusedtp.nn.

Note [Roundings] With u the unit roundoff, half of eps, an operation that sums L terms has an error of at most (L + 2) u
relative to the sum of their absolute values, which in these tests is about as large as the largest entry, or one. The
errors of consecutive operations add up. Where a formula amplifies errors (exp, large angles), its test says by how
much.

No sum is accumulated in 16 bits, so ROUNDINGS does not apply there: 256 eps of bf16 are 2, more than the values
themselves. A test in 16 bits derives its own bound, from sums in fp32 and one rounding of each result; see assert_sums.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def roundings_of(operations: int, terms: int) -> float:
    """The error bound for `operations` sums of `terms` terms each, as a multiple of eps; see Note [Roundings]."""
    return operations * (terms + 2) / 2


# A module has up to 8 operations forward and as many backward, of up to 30 terms.
ROUNDINGS = roundings_of(16, 30)


def assert_close(name: str, got: Tensor, want: Tensor, roundings: float = ROUNDINGS) -> None:
    """Within `roundings` eps of the largest entry of `want`, in got's dtype."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, wanted {tuple(want.shape)}"
    assert torch.equal(got.isnan(), want.isnan()), f"{name}: nan in other places than wanted"
    if got.numel():
        assert roundings * torch.finfo(got.dtype).eps < 0.5, f"{name}: no value could be off by more than allowed"
        error = (got.detach().double() - want.detach().double()).abs().max().item()
        bound = roundings * torch.finfo(got.dtype).eps * max(1.0, want.detach().abs().max().item())
        assert error <= bound, f"{name}: off by {error:.3e}, allowed {bound:.3e}"


def assert_sums(name: str, got: Tensor, want: Tensor, absolute: Tensor, terms: int) -> None:
    """`got` within the error of sums of `terms` terms, accumulated in fp32 (in fp64 if that is its dtype).

    want       the exact sums
    absolute   the same sums of absolute values
    """
    accumulated = torch.finfo(torch.promote_types(got.dtype, torch.float32)).eps
    assert_within(name, got, want, roundings_of(1, terms) * accumulated * absolute)


def assert_within(name: str, got: Tensor, want: Tensor, lost: Tensor) -> None:
    """`got` within `lost` of the exact `want`, entry by entry, plus one rounding to its dtype."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, wanted {tuple(want.shape)}"
    last = torch.finfo(got.dtype)
    bound = lost + last.eps / 2 * (want.abs() + lost) + last.tiny * last.eps
    over = (got.detach().cpu().double() - want).abs() - bound
    assert (over <= 0).all(), f"{name}: off by {over.max():.3e} more than allowed"


def assert_same_function(
    got: Callable[..., Tensor],
    want: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    names: Sequence[str],
    roundings: float = ROUNDINGS,
) -> None:
    """Equal values and, for one random output gradient, equal gradients of all inputs."""
    mine = [x.detach().clone().requires_grad_() for x in inputs]
    theirs = [x.detach().clone().requires_grad_() for x in inputs]
    y, wanted = got(*mine), want(*theirs)
    assert_close("y", y, wanted, roundings)
    dy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(7))
    y.backward(dy)
    wanted.backward(dy)
    for name, a, b in zip(names, mine, theirs, strict=True):
        zeros = torch.zeros_like(a)
        assert_close(f"d{name}", zeros if a.grad is None else a.grad, zeros if b.grad is None else b.grad, roundings)


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Random fp64 numbers, fixed by the seed."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
