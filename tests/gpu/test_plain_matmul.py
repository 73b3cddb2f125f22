"""The single-device matmul compiled: the laws of tests/ops/test_plain_matmul.py, with the tiles it chooses itself."""

import pytest
import torch

from fusedtp.ops.launch.plain import multiplies
from tests.ops.plain_matmul_laws import Draw, fp8_law, matmul_law, quantized_law

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LAYOUTS = [
    "transposed",
    "strided",
    "misaligned",
    "gap",
    "expanded",
]  # by pointer, because TMA does not support all of them
MANY, FEW, LARGE = (300, 264, 200), (16, 256, 4096), (2304, 4096, 192)  # LARGE fills the GPU


def chosen(dtype: torch.dtype, shape: tuple[int, int, int], layout: str = "plain") -> Draw:
    return Draw(dtype, *shape, layout=layout, device="cuda", chosen=True)


@pytest.mark.parametrize("shape", [MANY, FEW, LARGE, (129, 77, 33), (0, 40, 16), (5, 16, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul(dtype, shape):
    matmul_law(chosen(dtype, shape), True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matmul_of_operands_in_any_layout(layout):
    matmul_law(chosen(torch.bfloat16, MANY, layout), False)


@pytest.mark.parametrize("shape", [MANY, FEW, LARGE])
def test_fp8(shape):
    if not multiplies(torch.float8_e4m3fn, torch.device("cuda")):
        pytest.skip("this GPU multiplies no fp8")
    fp8_law(chosen(torch.bfloat16, shape), shape == MANY, torch.bfloat16, shape != FEW)
    quantized_law(chosen(torch.bfloat16, shape))
