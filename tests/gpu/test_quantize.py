"""The quantization kernels compiled: the laws of tests/ops/test_quantize.py, at real model sizes too."""

import pytest
import torch

from fusedtp.ops.fp8 import E4M3, FORMATS
from fusedtp.ops.launch.plain import multiplies
from tests.ops.quantize_laws import (
    DTYPES,
    Draw,
    blocks_law,
    every_value_law,
    given_law,
    largest_law,
    rows_law,
)

SHAPES = [(1000, 64), (333, 1000), (300, 4096), (17, 14336), (65, 33), (3, 0), (0, 64)]


@pytest.fixture(autouse=True)
def on_a_gpu_with_fp8() -> None:
    if not multiplies(E4M3, torch.device("cuda")):
        pytest.skip("this GPU multiplies no fp8")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_and_a_scale_that_is_given(dtype, transposed):
    for i, shape in enumerate(SHAPES):
        draw = Draw(dtype, *shape, transposed, seed=i, device="cuda")
        rows_law(draw, FORMATS[i % 2])
        given_law(draw, FORMATS[(i + 1) % 2], 3)
        largest_law(draw)
        if draw.k and draw.k % 4 == 0:
            blocks_law(draw)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_value_and_what_lies_between(kind):
    every_value_law(kind, "cuda")
