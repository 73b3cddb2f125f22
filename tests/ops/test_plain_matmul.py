"""The single-device matmul in the interpreter: every dtype, layout and path to the operands, and fp8."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fusedtp.ops.launch import matmul, scaled_matmul
from fusedtp.ops.launch.config import Machine
from fusedtp.ops.launch.operands import local_config, with_tile
from tests.interpreting import interpreted
from tests.ops import plain_matmul_laws as laws
from tests.ops.plain_matmul_laws import LAYOUTS, Draw

pytest.importorskip("triton")

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


@st.composite
def draws(draw, layouts=LAYOUTS) -> Draw:
    return Draw(
        draw(DTYPES), draw(st.integers(0, 35)), draw(st.integers(0, 35)), draw(st.integers(0, 60)),
        draw(st.sampled_from(layouts)), draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 99)),
    )  # fmt: skip


@settings(max_examples=30)
@given(draws(), st.booleans())
@example(Draw(torch.bfloat16, 33, 20, 40, "plain", True, True), True)
@example(Draw(torch.float16, 33, 20, 40, "plain", True), True)
@example(Draw(torch.bfloat16, 20, 20, 40, "misaligned", True), True)
@example(Draw(torch.float32, 20, 20, 0, "plain", True), True)
def test_matmul_with_bias(draw, biased):
    interpreted(laws.matmul_law, draw, biased)


@settings(max_examples=10)
@given(draws(("plain", "transposed")), st.booleans(), DTYPES, st.booleans())
@example(Draw(torch.float32, 33, 20, 48, "plain", True, True), True, torch.float16, True)
def test_fp8_with_scales_of_rows_and_of_tensors(draw, by_row, out, biased):
    interpreted(laws.fp8_law, draw, by_row, out, biased)


@settings(max_examples=5)
@given(draws(("plain",)))
@example(Draw(torch.float32, 33, 20, 48, tma=True))
@example(Draw(torch.float32, 18, 35, 41))
def test_quantized_rows_are_multiplied_as_what_they_stand_for(draw):
    interpreted(laws.quantized_law, draw)


def test_every_fp8_is_decoded():
    interpreted(laws.every_fp8_law)


@pytest.mark.parametrize("which", ["rows", "columns"])
def test_operands_of_which_32_bits_cannot_count_the_elements(which):
    interpreted(laws.far_law, which)


def test_a_result_of_which_32_bits_cannot_count_the_elements():
    interpreted(laws.far_result_law)


def test_tma_is_taken_where_operands_allow_it():
    interpreted(laws.path_law)


H100, B200 = Machine("cuda", 132, 227 * 1024, capability=90), Machine("cuda", 148, 227 * 1024, capability=100)


def test_a_tuned_tile_keeps_tma_and_ends_by_halves_where_it_is_wide():
    default = local_config(H100, torch.bfloat16, "ieee", 8192, 8192)
    found = dict(block_m=64, block_n=256, block_k=64, num_warps=4, num_stages=4)
    config = with_tile(default, found)
    assert {name: getattr(config, name) for name in found} == found
    assert config.tma and config.halves and not with_tile(default, found | dict(block_n=128)).halves
    assert with_tile(default, {}) is default
    config = with_tile(default, found | dict(tma=0, halves=1))
    assert (config.tma, config.halves) == (False, True) and config.tma is False


@pytest.mark.parametrize("machine", [H100, B200])
@pytest.mark.parametrize("dtype, precision", [(torch.float32, "tf32"), (torch.float8_e4m3fn, "ieee")])
def test_a_block_of_k_is_128_bytes(machine, dtype, precision):
    config = local_config(machine, dtype, precision, 8192, 8192)
    assert config.block_k * dtype.itemsize == 128 and config.tma
    assert config.specialized == (machine is B200)
    assert not local_config(machine, torch.float32, "ieee", 8192, 8192).tma


X, W = torch.ones(4, 8), torch.ones(6, 8)
X8, W8, ONE = X.to(torch.float8_e4m3fn), W.to(torch.float8_e4m3fn), torch.ones(1)
FAULTS = [
    (lambda: scaled_matmul(X, W8, ONE, ONE), "x torch.float32"),
    (lambda: scaled_matmul(X8, W, ONE, ONE), "weight torch.float32"),
    (lambda: scaled_matmul(X8, W8, ONE, torch.ones(6)), "w_scale (6,)"),
    (lambda: scaled_matmul(X8, W8, ONE.half(), ONE), "x_scale (1,) torch.float16"),
    (lambda: scaled_matmul(X8, W8, ONE, ONE, torch.ones(6)), "bias (6,) torch.float32"),
    (lambda: scaled_matmul(X8, W8, ONE, ONE, torch.ones(5).bfloat16()), "bias (5,)"),
    (lambda: scaled_matmul(X8, W8, ONE, ONE, dtype=torch.float64), "dtype torch.float64"),
    (lambda: scaled_matmul(X8[0], W8, ONE, ONE), "x (8,)"),
    (lambda: scaled_matmul(X8, W8.t(), ONE, ONE), "weight (8, 6)"),
    (lambda: scaled_matmul(X8, W8, ONE, ONE.to("meta")), "several devices"),
]


@pytest.mark.parametrize("call, said", FAULTS, ids=[said for _, said in FAULTS])
def test_bad_input_says_what_was_given(call, said):
    with pytest.raises(ValueError) as raised:
        call()
    assert said in str(raised.value)


def refused() -> list[str]:
    """With Triton: mismatched dtypes, and an fp8 format that the device cannot multiply."""
    said = []
    for x, w, bias in ((X.double(), W.double(), None), (X, W.half(), None), (X, W, torch.ones(6).half())):
        with pytest.raises(ValueError) as raised:
            matmul(x, w, bias)
        said.append(str(raised.value))
    other = X.to(torch.float8_e4m3fnuz)
    with pytest.raises(ValueError) as raised:
        scaled_matmul(other, other, ONE, ONE)
    return [*said, str(raised.value)]


def test_wrong_dtypes_say_so():
    said = interpreted(refused)
    assert "float64" in said[0] and "float16" in said[1] and "float16" in said[2]
    assert "cpu cannot multiply torch.float8_e4m3fnuz" in said[3]
