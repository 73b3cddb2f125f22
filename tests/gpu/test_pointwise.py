"""The elementwise kernels compiled: the laws of tests/ops/test_pointwise.py, at real model sizes too."""

import pytest
import torch

from tests.ops.cross_entropy_laws import exact_law, gradient_law, loss_law, odd_law, stats_law
from tests.ops.pointwise_laws import USES, Draw, geglu_law, rms_norm_law, rope_law, swiglu_law

pytestmark = pytest.mark.gpu
WIDE = [(700, 16384), (9, 8193), (5, 40000)]  # rows too long for one program
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# each dtype and each layout compiles anew: all layouts with one dtype, and all dtypes with one layout
LAYOUTS = [(dtype, "plain") for dtype in DTYPES] + [
    (torch.bfloat16, "sliced"),
    (torch.bfloat16, "transposed"),
]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("shape", [(1000, 64), (333, 1000), (2000, 4096), (65, 8192), (3, 1), (0, 128), *WIDE])
@pytest.mark.parametrize("dtype, layout", LAYOUTS)
def test_rms_norm(dtype, shape, use, layout):
    rms_norm_law(Draw(dtype, *shape, layout, device="cuda"), torch.float32, use)


@pytest.mark.parametrize("shape", [(1000, 64), (333, 1001), (2048, 14336), (0, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype, shape):
    swiglu_law(Draw(dtype, *shape, device="cuda", scale=3.0))


@pytest.mark.parametrize("act", ["gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("shape", [(333, 1001), (2048, 14336)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_geglu(dtype, shape, act):
    geglu_law(Draw(dtype, *shape, device="cuda", scale=3.0), act)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("heads, half", [((32, 8), 64), ((5, 3), 40), ((128, 1), 32)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding(dtype, heads, half, shared):
    rope_law(Draw(dtype, 200, half, device="cuda", heads=heads, batch=2), shared)


# aligned rows of several steps, rows of odd length, several rows per program, no rows, no columns
LOGITS = [(70, 128256), (130, 50257), (5, 262147), (1000, 256), (513, 7), (0, 40), (6, 0)]


@pytest.mark.parametrize("shape", LOGITS)
@pytest.mark.parametrize("dtype, layout", LAYOUTS[:4])
def test_cross_entropy(dtype, shape, layout):
    draw = Draw(dtype, *shape, layout, device="cuda", scale=3.0)
    stats_law(draw, 1000)
    for inplace in (False, True):
        gradient_law(draw, 1000, inplace)
    exact_law(draw, 0)


@pytest.mark.parametrize("shape", [(40, 50257), (40, 16384)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy_of_infinite_logits_and_nan(dtype, shape):
    for share in (1e-5, 1.0):
        odd_law(Draw(dtype, *shape, device="cuda"), share)


@pytest.mark.parametrize("width", [1000, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_losses(dtype, width):
    loss_law(Draw(dtype, 300, width, device="cuda", scale=0.3), 128)
