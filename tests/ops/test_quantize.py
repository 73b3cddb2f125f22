"""The quantization kernels in the interpreter."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.ops.fp8 import E4M3, FORMATS, largest_of, pack, quantize, row_bytes, unpack
from tests.interpreting import interpreted
from tests.ops.quantize_laws import (
    DTYPES,
    Draw,
    blocks_law,
    every_value_law,
    given_law,
    largest_law,
    rows_law,
)

pytest.importorskip("triton")
KINDS = st.sampled_from(FORMATS)


@st.composite
def draws(draw, rows: int = 20, k: int = 90) -> Draw:
    return Draw(
        draw(st.sampled_from(DTYPES)), draw(st.integers(0, rows)), draw(st.integers(0, k)), draw(st.booleans()),
        draw(st.sampled_from([0, 3, 20])), draw(st.sampled_from([0.0, 0.05, 0.5])), draw(st.integers(0, 2**31)),
    )  # fmt: skip


@settings(max_examples=40)
@given(draws(), KINDS)
def test_rows(draw, kind):
    interpreted(rows_law, draw, kind)


@settings(max_examples=30)
@given(draws(), KINDS, st.integers(-30, 30))
def test_a_scale_that_is_given(draw, kind, exponent):
    interpreted(given_law, draw, kind, exponent)


@settings(max_examples=20)
@given(draws())
def test_the_largest_magnitude(draw):
    interpreted(largest_law, draw)


@pytest.mark.slow
@settings(max_examples=30)
@given(draws(), st.sampled_from([4, 124, 128, 132, 1020, 1024, 1100]))
def test_rows_to_experts(draw, k):
    interpreted(blocks_law, replace(draw, k=k))


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_that_no_program_holds(transposed):
    draw = Draw(torch.bfloat16, 3, 9000, transposed)
    interpreted(rows_law, draw, E4M3)
    interpreted(given_law, draw, E4M3, 2)
    interpreted(largest_law, draw)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_value_and_what_lies_between(kind):
    interpreted(every_value_law, kind)


@given(KINDS, st.integers(0, 5), st.integers(0, 40))
def test_what_was_packed_is_packed_without_a_copy(kind, rows, k):
    """For the kernel's own output layout; not if values and scales only look like it."""
    packed = pack(*quantize(torch.randn(rows, k), kind))
    values, scale = unpack(packed, k, kind)
    again = pack(values, scale)
    assert torch.equal(again, packed) and (rows < 2 or again.data_ptr() == packed.data_ptr())
    elsewhere = unpack(pack(values, 2 * scale), k, kind)[1]
    for other in (scale.clone(), elsewhere, scale[:1].expand(rows, 1) if rows else scale):
        made = pack(values, other)
        assert torch.equal(made.view(torch.uint8)[:, :k], packed[:, :k])
        assert torch.equal(unpack(made, k, kind)[1], other)
    assert row_bytes(k) == packed.shape[1] and largest_of(torch.ones(2, 2), False).item() == 1
