"""fp8 numbers with scales: the bounds of Note [Scales that are powers of two], and rows packed for sending."""

from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusedtp.ops import fp8
from fusedtp.ops.fp8 import E4M3, E5M2, FORMATS

RELATIVE = {E4M3: 2.0**-4, E5M2: 2.0**-3}
SMALL = {E4M3: 2.0**-17, E5M2: 2.0**-31}  # as a share of the largest magnitude
KINDS = st.sampled_from(FORMATS)


def numbers(seed: int, rows: int, k: int) -> Tensor:
    """Magnitudes from 2**-70 to 2**70, with some rows of zeros."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=g) * 2.0 ** torch.randint(-40, 41, (rows, 1), generator=g)
    x *= 2.0 ** torch.randint(-30, 31, (rows, k), generator=g)
    return x * (torch.rand(rows, 1, generator=g) > 0.1)


@settings(max_examples=100)
@given(KINDS, st.booleans(), st.integers(0, 2**31), st.integers(0, 5), st.integers(0, 40))
def test_each_number_is_within_its_bound(kind, by_row, seed, rows, k):
    x = numbers(seed, rows, k)
    values, scale = fp8.quantize(x, kind, by_row=by_row)
    assert values.dtype == kind and values.shape == x.shape and scale.shape == ((rows, 1) if by_row else (1, 1))
    assert (scale.frexp().mantissa == 0.5).all()  # powers of two
    if x.numel() == 0:
        return
    largest = (x.abs().amax(1, keepdim=True) if by_row else x.abs().amax().view(1, 1)).double()
    assert (largest / scale <= torch.finfo(kind).max).all()
    small = (largest == 0) | (2 * largest / scale > torch.finfo(kind).max)
    assert small.all()  # no smaller power of two would fit
    off = (values.double() * scale - x.double()).abs()
    bound = torch.maximum(RELATIVE[kind] * x.double().abs(), SMALL[kind] * largest)
    assert (off <= bound).all()


@settings(max_examples=50)
@given(KINDS, st.integers(0, 2**31))
def test_a_row_in_parts_is_quantized_as_the_whole_but_for_small_numbers(kind, seed):
    x = numbers(seed, 4, 24)
    (whole, scale), (part, of_part) = fp8.quantize(x, kind), fp8.quantize(x[:, :7], kind)
    meant, by_parts = whole[:, :7].double() * scale, part.double() * of_part
    normal = x[:, :7].abs() >= scale * torch.finfo(kind).smallest_normal
    assert torch.equal(meant[normal], by_parts[normal])


@given(KINDS)
def test_all_bits_come_back(kind):
    """Every fp8 value, times a scale of its row, survives the round trip; bf16 holds it."""
    bits = torch.arange(256, dtype=torch.uint8).view(kind).view(16, 16)
    scale = 2.0 ** torch.arange(-8, 8).view(16, 1)
    meant = bits.float() * scale
    values, made = fp8.quantize(meant, kind)
    for dtype in (torch.float32, torch.bfloat16):
        again = fp8.dequantize(values, made, dtype)
        # the row's largest magnitude limits how small a number may be
        near = meant.abs() >= made * torch.finfo(kind).smallest_normal
        assert torch.equal(again[near].double(), meant[near].double())
        assert torch.equal(again.isnan(), meant.isnan() | (meant.isinf() & (kind == E4M3)))


def test_what_is_not_finite_leaves_its_row_alone():
    x = torch.tensor([[1.0, torch.inf, torch.nan, -3.0], [torch.nan] * 4, [-torch.inf] * 4, [0.0] * 4])
    for kind in FORMATS:
        values, scale = fp8.quantize(x, kind)
        meant = values.float() * scale
        infinite = torch.nan if kind == E4M3 else torch.inf
        want = torch.tensor([[1.0, infinite, torch.nan, -3.0], [torch.nan] * 4, [-infinite] * 4, [0.0] * 4])
        assert torch.equal(meant.isnan(), want.isnan())
        assert torch.equal(meant.nan_to_num(), want.nan_to_num())


def test_what_a_scale_does_not_hold_becomes_the_largest():
    x = torch.tensor([[1e6, -1e6, 1.0]])
    for kind in FORMATS:
        largest = torch.finfo(kind).max
        assert fp8.values_of(x, torch.ones(1, 1), kind).float().tolist() == [[largest, -largest, 1.0]]


@settings(max_examples=50)
@given(KINDS, st.booleans(), st.integers(0, 5), st.integers(0, 40))
def test_packed_rows_come_back(kind, by_row, rows, k):
    values = (torch.arange(rows * k) % 256).to(torch.uint8).view(rows, k).view(kind)
    scale = torch.arange(1.0, rows + 1).view(-1, 1) if by_row else torch.tensor(3.5)
    packed = fp8.pack(values, scale)
    assert packed.dtype == torch.uint8 and packed.shape == (rows, fp8.row_bytes(k)) and fp8.row_bytes(k) % 16 == 0
    again, scales = fp8.unpack(packed, k, kind)
    assert torch.equal(again.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(scales, scale.expand(rows, 1))


def test_a_row_takes_half_the_bytes_of_16_bits():
    assert fp8.row_bytes(4096) == 4096 + 16 and fp8.row_bytes(17) == 48


def of_vendor(x_kind: torch.dtype, w_kind: torch.dtype, by_row: bool, dtype: torch.dtype) -> bool:
    return fp8.vendor_is_right(torch.device("cpu"), x_kind, w_kind, by_row, dtype)


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kinds", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
def test_the_vendors_product_is_asked_whether_it_is_right(kinds, dtype, by_row):
    """The check passes on a CPU, and fails if the product is wrong or the operands are not supported."""
    assert of_vendor(*kinds, by_row, dtype)
    real = torch._scaled_mm

    def as_if_contiguous(x: Tensor, *more: Tensor, **how: torch.dtype) -> Tensor:
        return real(x.as_strided(x.shape, (x.shape[1], 1)), *more, **how)

    def as_if_twice(x: Tensor, w: Tensor, a: Tensor, b: Tensor, **how: torch.dtype) -> Tensor:
        return real(x, w, a, 2 * b, **how)

    for wrong in (as_if_contiguous, as_if_twice):
        with patch.object(torch, "_scaled_mm", wrong):
            assert not of_vendor(*kinds, by_row, dtype)
    for error in (RuntimeError, ValueError, NotImplementedError):
        with patch.object(torch, "_scaled_mm", Mock(side_effect=error)):
            assert not of_vendor(*kinds, by_row, dtype)
