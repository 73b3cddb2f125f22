"""Inputs that fit no fast path: empty sizes, odd addresses, odd strides. The result is still right."""

import pytest

OPS = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_gather_wgrad"]
SMALL = dict(block_m=16, block_n=16, block_k=16, group=2, send_programs=2, other_programs=3, chunk=2)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_no_rows_and_no_columns(worlds, op):
    """T = 0, K = 0, N = 0 and all of them; K = 0 leaves the bias. Rank 1 sends by copies where there are any."""
    some = dict(op=op, biased=(0,), keep=True, copied=(1,), in_one=False, config=SMALL)
    nothing = [dict(sizes=(0, 0)), dict(sizes=(5, 20), k=0), dict(sizes=(5, 20), widths=(0,))]
    last = dict(sizes=(0, 0), k=0, widths=(0,), config=None)
    worlds.check(2, *[{**some, **each} for each in (*nothing, last, dict(sizes=(5, 20)))])


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_addresses_and_strides_that_vectors_cannot_take(worlds, op):
    """x, weights and gradients that start off a multiple of 16 bytes, with odd strides and strides of 0."""
    case = dict(op=op, sizes=(20, 13), k=48, widths=(24, 17), biased=(0,), config=SMALL)
    odd = [dict(layout="offset", copied=(0,)), dict(layout="expanded", in_one=True), dict(layout="strided")]
    worlds.check(2, *[{**case, **each} for each in odd], {**case, "layout": "offset", "dtype": "bfloat16"})


@pytest.mark.parametrize("op", OPS)
def test_rows_past_two_to_the_31_elements(worlds, op):
    """x, weights and gradients with rows beyond the range of 32-bit offsets."""
    case = dict(op=op, layout="far", sizes=(11, 9), k=20, widths=(18,), config=SMALL)
    worlds.check(2, case, {**case, "copied": (0,), "in_one": True})
