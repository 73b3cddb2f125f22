"""The cross-entropy kernels in the interpreter: fp64's values for any shape, dtype, layout and vocabulary offset."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.ops import cross_entropy
from tests.interpreting import interpreted
from tests.ops.cross_entropy_laws import exact_law, gradient_law, loss_law, odd_law, stats_law
from tests.ops.pointwise_laws import Draw

pytest.importorskip("triton")

NARROW = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
LAYOUTS = st.sampled_from(["plain", "sliced", "transposed"])
ROWS = ["plain", "sliced"]  # contiguous within a row


@st.composite
def draws(draw, layouts: st.SearchStrategy = LAYOUTS) -> Draw:
    """Widths from none to several steps, some multiples of 16; rows for several programs, several rows a program."""
    width = draw(st.one_of(st.integers(0, 90), st.integers(0, 5).map(lambda n: 16 * n)))
    scale = draw(st.sampled_from([1.0, 30.0]))
    return Draw(draw(NARROW), draw(st.integers(0, 9)), width, draw(layouts), draw(st.integers(0, 99)), scale=scale)


STARTS = st.sampled_from([0, 7, 1 << 17])


@pytest.mark.slow
@settings(max_examples=30)
@given(draws(), STARTS)
def test_statistics(draw, start):
    interpreted(stats_law, draw, start)


@settings(max_examples=30)
@given(draws(), STARTS, st.booleans())
def test_gradient(draw, start, inplace):
    interpreted(gradient_law, draw, start, inplace and draw.layout in ROWS)


@settings(max_examples=20)
@given(draws(), STARTS)
def test_ones_and_zeros_are_exact(draw, start):
    interpreted(exact_law, draw, start)


@pytest.mark.slow
@settings(max_examples=20)
@given(draws(), st.sampled_from([0.05, 1.0]))
def test_infinite_logits_and_nan(draw, share):
    interpreted(odd_law, draw, share)


@pytest.mark.slow
@settings(max_examples=10)
@given(NARROW, st.integers(0, 9), st.integers(1, 40), st.integers(1, 4), st.integers(0, 99))
def test_the_losses_by_these_kernels(dtype, rows, width, piece_rows, seed):
    interpreted(loss_law, Draw(dtype, rows, width, seed=seed), piece_rows)


def test_what_does_not_fit_is_refused():
    logits, labels, row = torch.randn(3, 4), torch.zeros(3, dtype=torch.long), torch.zeros(3)
    for wrong in (logits[0], logits[:2]):
        with pytest.raises(ValueError, match=r"wanted logits \[T, V\]"):
            cross_entropy.stats(wrong, labels, 0)
    with pytest.raises(ValueError, match="int64 labels"):
        cross_entropy.stats(logits, labels.int(), 0)
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        cross_entropy.stats(logits.double(), labels, 0)
    with pytest.raises(ValueError, match=r"wanted scale \[3\] in fp32"):
        cross_entropy.gradient(logits, labels, 0, row, row.double())
    with pytest.raises(ValueError, match="cannot be overwritten"):
        cross_entropy.gradient(torch.randn(4, 3).t(), labels, 0, row, row, inplace=True)
    assert not cross_entropy.serves(logits), "a CPU"
