"""The bounds of support.py itself: in unit roundoffs of each dtype, and never as large as the values."""

import pytest
import torch

from tests.nn.support import ROUNDINGS, assert_close, roundings_of

UNITS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24, torch.float64: 2**-53}


@pytest.mark.parametrize("dtype", UNITS)
def test_a_sum_of_l_terms_may_lose_l_plus_two_unit_roundoffs(dtype: torch.dtype) -> None:
    """u is the largest relative error of a rounding: 1 + u is halfway to the next number and rounds to even, to 1."""
    one, unit = torch.ones((), dtype=dtype), UNITS[dtype]
    assert one + unit == 1 and one + 2 * unit == 1 + 2 * unit
    assert roundings_of(1, 30) * torch.finfo(dtype).eps == 32 * unit
    assert ROUNDINGS * torch.finfo(dtype).eps == 16 * 32 * unit


def test_a_bound_as_large_as_the_values_is_refused() -> None:
    """16 operations of 30 terms, all in bf16, allow any error: zeros would pass for ones."""
    with pytest.raises(AssertionError, match="no value could be off by more than allowed"):
        assert_close("y", torch.zeros(3).bfloat16(), torch.ones(3))
