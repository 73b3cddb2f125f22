"""Tiles and masks of a timed run against numpy: an affine address or a box of bounds is a compact form of one."""

from __future__ import annotations

import operator

import numpy as np
import pytest
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from fusedtp.sim import UnsupportedKernel
from fusedtp.sim.timed.masks import Mask
from fusedtp.sim.timed.scalars import converted, quotient, remainder
from fusedtp.sim.timed.values import Tile

numbers = st.integers(-40, 40)
COMPARISONS = ["lt", "le", "gt", "ge", "eq", "ne"]


@st.composite
def tiles(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> Tile:
    shape = draw(st.sampled_from([(4,), (1, 4), (3, 1), (3, 4)])) if shape is None else shape
    steps = tuple(draw(st.integers(-3, 5)) if n > 1 else 0 for n in shape)
    tile = Tile(shape, tl.int32, draw(numbers), steps)
    return Tile(shape, tl.int32, data=tile.dense()) if draw(st.booleans()) else tile


@given(tiles(), tiles(), st.sampled_from([operator.add, operator.sub, operator.mul]), numbers)
def test_arithmetic_is_that_of_arrays(a: Tile, b: Tile, function, n: int) -> None:  # type: ignore[no-untyped-def]
    for got, want in (
        (function(a, b), function(a.dense(), b.dense())), (function(a, n), function(a.dense(), n)),
        (function(n, a), function(n, a.dense())),
    ):  # fmt: skip
        assert got.shape == want.shape and (got.dense() == want).all()


@given(tiles(), st.sampled_from(COMPARISONS), numbers)
def test_comparisons_are_those_of_arrays(a: Tile, name: str, n: int) -> None:
    got, want = getattr(a, f"__{name}__")(n), getattr(operator, name)(a.dense(), n)
    assert got.shape == want.shape and (got.dense() == want).all()
    assert got.count(got.shape) == want.sum()


@given(tiles(), tiles(), st.sampled_from(COMPARISONS))
def test_comparisons_of_two_are_those_of_arrays(a: Tile, b: Tile, name: str) -> None:
    got, want = getattr(a, f"__{name}__")(b), getattr(operator, name)(a.dense(), b.dense())
    assert got.shape == want.shape and (got.dense() == want).all()


@given(tiles((3, 1)), tiles((1, 4)), numbers, numbers, st.booleans())
def test_masks_meet_as_arrays_do(a: Tile, b: Tile, m: int, n: int, both: bool) -> None:
    function = operator.and_ if both else operator.or_
    got = function(a < m, b >= n)
    want = function(a.dense() < m, b.dense() >= n)
    assert got.shape == want.shape and (got.dense() == want).all() and got.count((3, 4)) == want.sum()
    assert (a < m).count((3, 4)) == 4 * (a.dense() < m).sum()


@given(st.integers(-50, 50), st.integers(-9, 9).filter(bool))
def test_division_goes_towards_zero(a: int, b: int) -> None:
    want = int(a / b)
    assert quotient(a, b) == want and remainder(a, b) == a - want * b
    block = Tile((1,), tl.int32, a, (0,))
    assert quotient(block, b).dense().item() == want and remainder(block, b).dense().item() == a - want * b


def test_a_step_of_a_pointer_is_one_element() -> None:
    pointer = Tile((), tl.pointer_type(tl.bfloat16), 1000)
    at = pointer + 3 * Tile((4,), tl.int32, 0, (1,))[None, :]
    assert at.dense().tolist() == [[1000, 1006, 1012, 1018]]
    assert (2 + pointer).dense().item() == 1004


def test_values_that_were_left_out_decide_nothing() -> None:
    unknown = Tile((), tl.float32, known=False)
    for use in (lambda: bool(unknown > 0), lambda: bool(unknown), lambda: (unknown + 1).dense()):
        with pytest.raises(UnsupportedKernel, match="depends on"):
            use()
    assert Mask((4,), None, known=False).count((4,)) == 4


@given(st.integers(-(2**63), 2**63 - 1))
def test_an_integer_that_becomes_a_narrower_one_wraps(n: int) -> None:
    """Like the word of an arrival, whose lower half is the epoch."""
    want = int(np.int64(n).astype(np.int32))
    assert converted(n, tl.int32) == want and converted(n, tl.int64) == n
    tile = Tile((1,), tl.int64, data=np.array([n]))
    assert converted(tile, tl.int32).dense().tolist() == [want]
    assert converted(tile, tl.int64).dense().tolist() == [n]
