"""The elementwise kernels compiled: the laws of tests/ops/test_pointwise.py, at sizes of real models too."""

import pytest
import torch

from tests.ops.pointwise_laws import Draw, rms_norm_law, rope_law, swiglu_law

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("layout", ["plain", "sliced", "transposed"])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("shape", [(1000, 64), (333, 1000), (2000, 4096), (65, 8192), (3, 1), (0, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype, shape, added, layout):
    rms_norm_law(Draw(dtype, *shape, layout, device="cuda"), torch.float32, added)


@pytest.mark.parametrize("shape", [(1000, 64), (333, 1001), (2048, 14336), (0, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype, shape):
    swiglu_law(Draw(dtype, *shape, device="cuda", scale=3.0))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("heads, half", [((32, 8), 64), ((5, 3), 40), ((128, 1), 32)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding(dtype, heads, half, shared):
    rope_law(Draw(dtype, 200, half, device="cuda", heads=heads, batch=2), shared)
