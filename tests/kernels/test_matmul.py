"""The matmul without communication, and the rounding that the interpreter does not do for us."""

import pytest

SMALL = dict(block_m=16, block_n=16, block_k=16, group=2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
def test_plain_matmul_equals_the_formula(worlds, dtype, layout):
    shapes = [(37, 40, 50), (16, 32, 16), (1, 0, 5), (20, 0, 9), (0, 3, 4)]
    for m, k, n in shapes:
        worlds.check(
            1,
            *[
                dict(op="matmul", sizes=(m,), k=k, widths=(n,), dtype=dtype, layout=layout, biased=b, config=c)
                for b, c in [((0,), SMALL), ((), None)]
            ],
        )


def test_bf16_is_rounded_to_nearest_even_and_nan_stays_nan(worlds):
    worlds.check(1, dict(op="narrow", sizes=(0,)))
