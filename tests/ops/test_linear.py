"""Matmuls of one device under the interpreter: every epilogue, dtype, layout and path to the operands."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fusedtp.ops.launch.config import Machine
from fusedtp.ops.launch.operands import local_config, with_tile
from fusedtp.ops.linear import gated_linear, linear, quantize_rows, scaled_gated_matmul, scaled_matmul
from fusedtp.ops.pointwise import ACTIVATIONS
from tests.ops import linear_laws as laws
from tests.ops.linear_laws import LAYOUTS, Draw
from tests.sim.support import interpreted

pytest.importorskip("triton")

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


@st.composite
def draws(draw, layouts=LAYOUTS) -> Draw:
    return Draw(
        draw(DTYPES), draw(st.integers(0, 35)), draw(st.integers(0, 35)), draw(st.integers(0, 60)),
        draw(st.sampled_from(layouts)), draw(st.booleans()), draw(st.integers(1, 4)), draw(st.booleans()),
        draw(st.integers(0, 99)),
    )  # fmt: skip


@settings(max_examples=30)
@given(draws(), st.booleans(), st.booleans(), st.sampled_from([None, 0.5, 2.0]))
@example(Draw(torch.bfloat16, 33, 20, 40, "plain", True, 1, True), True, True, 0.5)
@example(Draw(torch.float16, 33, 20, 40, "plain", True, 3), True, True, 2.0)
@example(Draw(torch.bfloat16, 20, 20, 40, "misaligned", True), True, True, None)
@example(Draw(torch.float32, 20, 20, 0, "plain", True, 2), True, True, 0.5)
def test_matmul_with_scale_bias_and_residual(draw, biased, added, scale):
    interpreted(laws.matmul_law, draw, biased, added, scale)


@settings(max_examples=20)
@given(draws(), st.sampled_from(ACTIVATIONS), st.booleans(), st.booleans())
@example(Draw(torch.bfloat16, 33, 20, 40, "plain", True), "silu", True, True)
@example(Draw(torch.float16, 33, 20, 40, "plain", True, 3), "gelu", True, True)
@example(Draw(torch.float32, 20, 20, 0), "gelu_pytorch_tanh", True, False)
@example(Draw(torch.float32, 20, 18, 30, seed=1), "silu", True, True)
def test_gated_matmul(draw, activation, biased, keep):
    interpreted(laws.gated_law, draw, activation, biased, keep)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_to_the_last_bits(activation):
    interpreted(laws.activation_law, activation)


@settings(max_examples=10)
@given(draws(("plain", "transposed")), st.booleans(), DTYPES, st.booleans())
def test_fp8_with_scales_of_rows_and_of_tensors(draw, by_row, out, added):
    interpreted(laws.fp8_law, draw, by_row, out, added)


@settings(max_examples=10)
@given(
    draws(("plain", "transposed")),
    st.sampled_from(ACTIVATIONS),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    DTYPES,
)
@example(Draw(torch.float32, 33, 20, 48, "plain", True), "silu", (True, True, True), torch.float32)
@example(Draw(torch.float32, 33, 20, 48, "plain", True, 3), "gelu", (True, True, True), torch.float32)
@example(Draw(torch.float32, 18, 20, 40, "plain", True, 2), "gelu", (False, False, False), torch.float32)
def test_gated_fp8_with_scales_of_rows_and_of_tensors(draw, activation, scaled, out):
    interpreted(laws.gated_fp8_law, draw, activation, scaled, out)


def test_every_fp8_is_decoded():
    interpreted(laws.every_fp8_law)


def test_an_fp8_without_units_is_widened_and_says_so():
    said = interpreted(laws.widened_fp8_law)
    assert len(said) == 2
    assert all("multiplies no torch.float8_e4m3fnuz: widened to bfloat16" in each for each in said)


@settings(max_examples=8)
@given(draws(("plain",)), st.sampled_from(["", *ACTIVATIONS]))
def test_gradients(draw, gated):
    interpreted(laws.gradient_law, draw, gated)


@pytest.mark.parametrize("which", ["rows", "columns"])
def test_operands_of_which_32_bits_cannot_count_the_elements(which):
    interpreted(laws.far_law, which)


def test_a_result_of_which_32_bits_cannot_count_the_elements():
    interpreted(laws.far_result_law)


def test_tma_is_taken_where_operands_allow_it():
    interpreted(laws.path_law)


H100, B200 = Machine("cuda", 132, 227 * 1024, capability=90), Machine("cuda", 148, 227 * 1024, capability=100)


def test_k_is_split_for_few_rows_alone():
    """As many parts as fill the machine, none of them short, by shapes and machine alone."""

    def splits(m: int, n: int, k: int, machine: Machine = H100) -> int:
        return local_config(machine, torch.bfloat16, "ieee", m, n, k).splits

    assert splits(8192, 8192, 8192) == splits(4096, 1024, 8192) == 1
    assert splits(16, 1024, 8192) == 132 // 8
    assert splits(16, 1024, 512) == 2 and splits(16, 1024, 256) == 1, "a part has four blocks of K"
    assert splits(16, 128, 2**20) == 32
    assert splits(0, 1024, 8192) == splits(16, 0, 8192) > 0 and splits(16, 1024, 0) == 1


def test_a_tuned_tile_keeps_tma_and_splits_k_by_its_own_size():
    default = local_config(H100, torch.bfloat16, "ieee", 8192, 8192, 8192)
    found = dict(block_m=64, block_n=256, block_k=64, num_warps=4, num_stages=4)
    config = with_tile(default, found, H100, 64, 1024, 8192)
    assert {name: getattr(config, name) for name in found} == found
    assert config.tma and config.halves and config.splits == 32
    assert with_tile(default, {}, H100, 64, 1024, 8192) is default
    config = with_tile(default, found | dict(tma=0, halves=1, splits=3), H100, 64, 1024, 8192)
    assert (config.tma, config.halves, config.splits) == (False, True, 3) and config.tma is False


@pytest.mark.parametrize("machine", [H100, B200])
@pytest.mark.parametrize("dtype, precision", [(torch.float32, "tf32"), (torch.float8_e4m3fn, "ieee")])
def test_a_block_of_k_is_128_bytes(machine, dtype, precision):
    config = local_config(machine, dtype, precision, 8192, 8192, 8192)
    assert config.block_k * dtype.itemsize == 128 and config.tma
    assert config.specialized == (machine is B200)
    assert not local_config(machine, torch.float32, "ieee", 8192, 8192, 8192).tma


def test_quantized_rows_are_near_and_their_largest_is_the_largest_fp8():
    x = torch.randn(9, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 9)[:, None]
    x[4] = 0
    q, scale = quantize_rows(x)
    assert q.dtype == torch.float8_e4m3fn and scale.shape == (9, 1) and scale.dtype == torch.float32
    assert (q.float().abs().amax(1) == 448)[x.any(1)].all() and not q[4].float().any()
    near = (q.float() * scale - x).abs() <= torch.maximum(x.abs() * 2**-4, scale * 2**-9)
    assert near.all()
    assert quantize_rows(x[:, :0])[1].shape == (9, 1) and quantize_rows(x[:0])[0].shape == (0, 40)
    x[0, 0] = torch.inf
    assert quantize_rows(x)[0][0].float().isnan().any()


X, W = torch.ones(4, 8), torch.ones(6, 8)
X8, W8, ONE = X.to(torch.float8_e4m3fn), W.to(torch.float8_e4m3fn), torch.ones(1)
FAULTS = [
    (lambda: linear(X, W.t()), "weight (8, 6)"),
    (lambda: linear(X, W, torch.ones(5)), "bias (5,)"),
    (lambda: linear(X, W, residual=torch.ones(4, 5)), "residual (4, 5)"),
    (lambda: linear(X, W, precision="tf64"), "'tf64'"),
    (lambda: gated_linear(X, W, W[:4]), "up (4, 8)"),
    (lambda: gated_linear(X, W, W, activation="relu"), "'relu'"),
    (lambda: gated_linear(X, W, W, up_bias=ONE), "up_bias (1,)"),
    (lambda: scaled_matmul(X, W8, ONE, ONE), "x torch.float32"),
    (lambda: scaled_matmul(X8, W8, ONE, torch.ones(6)), "w_scale (6,)"),
    (lambda: scaled_matmul(X8, W8, ONE.half(), ONE), "x_scale (1,) torch.float16"),
    (lambda: scaled_matmul(X8, W8, ONE, ONE, torch.ones(6)), "bias torch.float32"),
    (lambda: scaled_matmul(X8, W8, ONE, ONE, out_dtype=torch.float64), "out_dtype torch.float64"),
    (lambda: scaled_matmul(X8, W8, ONE, ONE, residual=torch.ones(4, 5).bfloat16()), "residual (4, 5)"),
    (lambda: scaled_matmul(X8[0], W8, ONE, ONE), "x (8,)"),
    (lambda: scaled_gated_matmul(X8, W8, W, ONE, ONE, ONE), "up torch.float32"),
    (lambda: scaled_gated_matmul(X8, W8, W8[:4], ONE, ONE, ONE), "up (4, 8)"),
    (lambda: scaled_gated_matmul(X8, W8, W8, ONE, ONE, torch.ones(6)), "up_scale (6,)"),
    (lambda: scaled_gated_matmul(X8, W8, W8, ONE, ONE, ONE, activation="tanh"), "'tanh'"),
    (lambda: scaled_gated_matmul(X8, W8, W8, ONE, ONE, ONE, up_bias=torch.ones(6)), "up_bias torch.float32"),
    (lambda: quantize_rows(X, torch.float16), "torch.float16"),
]


@pytest.mark.parametrize("call, said", FAULTS, ids=[said for _, said in FAULTS])
def test_bad_input_says_what_was_given(call, said):
    with pytest.raises(ValueError) as raised:
        call()
    assert said in str(raised.value)


def wrong_dtypes() -> list[str]:
    said = []
    for x, w, bias in ((X.double(), W.double(), None), (X, W.half(), None), (X, W, torch.ones(6).half())):
        with pytest.raises(ValueError) as raised:
            linear(x, w, bias)
        said.append(str(raised.value))
    return said


def test_wrong_dtypes_say_so():
    said = interpreted(wrong_dtypes)
    assert "float64" in said[0] and "float16" in said[1] and "float16" in said[2]
