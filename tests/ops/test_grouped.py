"""Grouped matmuls: the vendor's matmul on CPU, and the kernels in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fusedtp
from fusedtp.ops.launch import Config
from fusedtp.ops.launch.config import Machine
from fusedtp.ops.launch.operands import group_operands
from fusedtp.ops.moe import grouped as engines
from fusedtp.ops.operation import LocalOperation
from fusedtp.ops.pointwise import ACTIVATIONS
from tests.interpreting import interpreted
from tests.ops import grouped_laws as laws
from tests.ops.grouped_laws import LAYOUTS, Draw

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SKEWS = ("ragged", "empty", "one", "none")


@st.composite
def draws(draw, engine="chunked", experts=64, rows=60, width=40, dtypes=(*DTYPES, torch.float64)) -> Draw:
    """Up to 60 rows in total: sums of 60 integers are exact in bf16."""
    e = draw(st.integers(1, experts))
    skew = draw(st.sampled_from(SKEWS))
    total = 0 if skew == "none" else draw(st.integers(0, rows))
    if skew == "one":
        sizes = [0] * e
        sizes[draw(st.integers(0, e - 1))] = total
    else:
        cuts = sorted(draw(st.lists(st.integers(0, total), min_size=e - 1, max_size=e - 1)))
        if skew == "empty":  # every second expert has no row
            cuts[::2] = cuts[1::2] + cuts[len(cuts) - len(cuts) % 2 :] if cuts else []
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
    return Draw(
        draw(st.sampled_from(dtypes)), tuple(sizes), draw(st.integers(0, width)), draw(st.integers(1, width)),
        draw(st.sampled_from([0, 1, 17])), draw(st.sampled_from(LAYOUTS)), engine,
        draw(st.sampled_from(ACTIVATIONS)), draw(st.integers(0, 99)),
    )  # fmt: skip


triton = pytest.mark.skipif(not fusedtp.ops.engines.has_triton(), reason="needs triton")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MANY = tuple([1, 0, 2] * 21 + [5])


@settings(max_examples=60)
@given(draws(), st.booleans())
@example(Draw(BF16, (60,), 33, 40, 3, "halves"), True)
def test_matmul_and_all_gradients(draw, biased):
    laws.matmul_law(draw, biased)


@settings(max_examples=40)
@given(draws(dtypes=DTYPES))
@example(Draw(FP16, (0, 60, 0), 33, 40, 3, "transposed", act="gelu"))
def test_gated_matmul_and_all_gradients(draw):
    laws.gated_law(draw)


@pytest.mark.slow
@triton
@settings(max_examples=6)
@given(draws("triton", experts=6, dtypes=DTYPES), st.booleans())
@example(Draw(BF16, (0, 60, 0), 33, 40, 3, "halves", "triton"), True)
@example(Draw(FP32, MANY, 5, 3, 2, "plain", "triton"), True)
@example(Draw(FP16, (0, 0), 20, 3, 9, "plain", "triton"), True)
@example(Draw(FP16, (0,), 20, 3, 0, "plain", "triton"), True)
def test_matmul_and_all_gradients_by_the_kernels(draw, biased):
    interpreted(laws.matmul_law, draw, biased)


@triton
@settings(max_examples=6)
@given(draws("triton", experts=6, dtypes=DTYPES))
@example(Draw(BF16, (9, 0, 20, 0, 1), 33, 40, 3, "transposed", "triton", "gelu"))
def test_gated_matmul_and_all_gradients_by_the_kernels(draw):
    interpreted(laws.gated_law, draw)


@pytest.mark.slow
@triton
@settings(max_examples=4)
@given(draws("triton", experts=5, dtypes=DTYPES), st.booleans(), st.integers(1, 3))
@example(Draw(BF16, (33, 0, 17, 1, 0), 33, 37, 3, "plain", "triton"), True, 2)
@example(Draw(FP32, (0, 20, 0, 31), 48, 32, 0, "strided", "triton"), False, 1)
def test_small_tiles(draw, halves, group):
    interpreted(laws.tiles_law, draw, Config(16, 16, 16, group=group, halves=halves))


@pytest.mark.slow
@triton
@settings(max_examples=6)
@given(
    draws("triton", experts=5, dtypes=(FP16, BF16)), st.sampled_from([8, 24, 48]), st.sampled_from([16, 32, 80]),
    st.sampled_from(["plain", "transposed"]), st.booleans(),
)  # fmt: skip
@example(Draw(BF16, (33, 0, 17, 1, 0), 0, 0, 3, "", "triton"), 24, 80, "plain", True)
@example(Draw(FP16, (0, 20, 0, 31), 0, 0, 0, "", "triton"), 48, 32, "transposed", False)
@example(Draw(BF16, (60,), 0, 0, 0, "", "triton"), 24, 24, "transposed", False)  # K is not a multiple of the block
@example(Draw(FP16, (0,), 0, 0, 1, "", "triton"), 8, 16, "transposed", False)
def test_small_tiles_by_tma(draw, n, k, layout, halves):
    drawn = replace(draw, n=n, k=k, layout=layout)
    config = Config(16, 16, 16, group=2, halves=halves, tma=True)
    w = drawn.weights(n, k)
    taken = group_operands(config, [drawn.rows(k)], [w])
    whole, rows = layout == "plain" or k % 16 == 0, drawn.used + drawn.spare
    by_rows = rows == 1 or (rows > 0 and layout == "plain")  # a single row has the same layout either way
    assert (taken["TMA"], taken["X_TMA"]) == (whole, whole and by_rows)
    assert taken["ACROSS"] == (whole and layout == "transposed")
    interpreted(laws.tiles_law, drawn, config)


ENGINES = ["chunked", pytest.param("triton", marks=triton)]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations(act, dtype):
    laws.activation_law(Draw(dtype, (30, 0, 40), 3, 1, 2, act=act))


@triton
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_of_the_kernels(act):
    interpreted(laws.activation_law, Draw(FP32, (30, 0, 40), 3, 1, 2, "plain", "triton", act))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_random_numbers_stay_within_their_roundings(dtype, engine):
    interpreted(laws.bounds_law, Draw(dtype, (70, 0, 33), 21, 150, 4, "plain", engine))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_repeated_run_gives_the_same_bits(engine):
    interpreted(laws.repeat_law, Draw(BF16, (21, 0, 40), 21, 70, 5, "plain", engine))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_main_grad_takes_what_16_bits_would_round(engine):
    interpreted(laws.main_grad_law, Draw(BF16, (30, 0, 29), 9, 20, 3, "plain", engine))


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_that_are_used_twice(engine):
    interpreted(laws.composed_law, Draw(FP32, (5, 0, 7), 9, 6, 3, "plain", engine))


@triton
def test_offsets_that_leave_the_rows_reach_no_memory_outside():
    interpreted(laws.reach_law, Draw(FP32, (7, 9, 4), 6, 5, 0, "plain", "triton"))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_formulas_of_grouped_mm(layout, biased):
    """From torch 2.13 on, grouped_mm also takes CPU tensors, as a loop."""
    for sizes in ((5, 0, 9), (0, 0), (16,)):
        try:
            laws.vendor_law(Draw(BF16, sizes, 16, 24, 2, layout), biased)
        except (RuntimeError, NotImplementedError) as error:
            if torch.__version__ < "2.13":
                pytest.skip(f"grouped_mm of CPU tensors: {error}")
            raise


def test_gradients_of_empty_experts_are_zeros_whatever_grouped_mm_leaves_there(monkeypatch):
    draw = Draw(BF16, (0, 5, 0), 16, 24)
    left = torch.full((3, 16, 24), torch.nan, dtype=BF16)

    def grouped_mm(a, b, offs):
        left[1] = a[:, :5] @ b[:5]
        return left

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", grouped_mm)
    dy, x = draw.rows(16, seed=3), draw.rows(24)
    laws.check("dw", engines._vendor_wgrad(dy, x, draw.offsets), laws.wanted_wgrad(draw, dy, x))


@pytest.mark.slow
def test_opcheck():
    laws.opcheck_law("chunked")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_compiled_experts_equal_eager_ones(engine):
    interpreted(laws.compiled_law, engine)


@pytest.mark.slow
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_gradcheck(act):
    draw = Draw(torch.float64, (2, 0, 3), 3, 2, act=act)
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 2), (3, 3, 2), (3, 3, 2), (3, 4, 3), (3, 4))
    leaves = [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]

    def experts(x, gate, up, down, bias):
        h = fusedtp.grouped_gated(x, gate, up, draw.offsets, act=act)
        return fusedtp.grouped_matmul(h, down, draw.offsets, bias=bias)

    assert torch.autograd.gradcheck(experts, leaves)
    x, gate, up, down, bias = leaves
    parts = [laws.dense(x[a], gate[e], up[e], act) @ down[e].t() + bias[e] for e, a in enumerate(draw.experts())]
    torch.testing.assert_close(experts(*leaves), torch.cat(parts), rtol=1e-12, atol=1e-12)


def test_each_gradient_is_computed_only_where_it_is_wanted(monkeypatch):
    """A pass for the inputs alone runs no wgrad, and vice versa."""
    draw = Draw(FP32, (2, 0, 3), 4, 3, 1)
    x, gate, up = (t.requires_grad_() for t in (draw.rows(3), draw.weights(4, 3), draw.weights(4, 3, seed=2)))
    y = fusedtp.grouped_gated(x, gate, up, draw.offsets) + fusedtp.grouped_matmul(x, gate, draw.offsets)
    ran: list[str] = []
    run = LocalOperation.run
    monkeypatch.setattr(LocalOperation, "run", lambda op, *a: (ran.append(op.name), run(op, *a))[1])
    dy = torch.ones_like(y)
    torch.autograd.grad(y, x, dy, retain_graph=True)
    assert sorted(ran) == ["grouped_gated_backward", "grouped_matmul", "grouped_matmul"]
    ran.clear()
    both = torch.autograd.grad(y, (gate, up), dy, retain_graph=True)
    assert sorted(ran) == ["grouped_wgrad"] * 2  # one joint call for gate and up, from what the first pass kept
    ran.clear()
    (one,) = torch.autograd.grad(y, up, dy)
    assert sorted(ran) == ["grouped_gated_backward", "grouped_wgrad"]
    assert torch.equal(one, both[1])


def test_a_frozen_weight_takes_nothing_from_the_other():
    draw = Draw(FP32, (2, 0, 3), 4, 3, 1)
    x, gate, up = (
        draw.rows(3),
        draw.weights(4, 3).requires_grad_(),
        draw.weights(4, 3, seed=2).requires_grad_(),
    )
    y = fusedtp.grouped_gated(x, gate, up, draw.offsets)
    dy = torch.ones_like(y)
    dgate, dup = torch.autograd.grad(y, (gate, up), dy)
    assert not torch.equal(dgate, dup)
    for frozen, left, want in (((gate.detach(), up), up, dup), ((gate, up.detach()), gate, dgate)):
        y = fusedtp.grouped_gated(x, *frozen, draw.offsets)
        assert torch.equal(torch.autograd.grad(y, left, dy)[0], want)


def test_autocast_does_to_operands_what_it_does_to_a_linear_layer():
    draw = Draw(FP32, (2, 3), 4, 3)
    w = draw.weights(4, 3).requires_grad_()
    with torch.autocast("cpu", BF16):
        y = fusedtp.grouped_matmul(draw.rows(3), w, draw.offsets)
        z = fusedtp.grouped_gated(draw.rows(3), w, w, draw.offsets)
    (y.sum() + z.sum()).backward()
    assert [y.dtype, z.dtype, w.grad.dtype] == [BF16, BF16, FP32]


def test_double_backward_raises():
    draw = Draw(FP32, (2, 3), 4, 3)
    x = draw.rows(3).requires_grad_()
    y = fusedtp.grouped_matmul(x, draw.weights(4, 3), draw.offsets)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


H100 = Machine("cuda", 132, 227 * 1024, capability=90)


def test_tiles_are_no_taller_than_experts_have_rows():
    def config(rows: int, groups: int) -> Config:
        return engines.group_config(H100, BF16, "ieee", rows, groups, 4096)

    assert (config(8192, 8).block_m, config(8192, 8).block_n) == (128, 256)
    assert config(8192, 128).block_m == 64 and config(128, 8).block_m == 16
    assert all(c.tma and not c.specialized for c in (config(8192, 8), config(16, 8), config(0, 8)))


X, W = torch.ones(6, 3), torch.ones(2, 4, 3)
OFFSETS = torch.tensor([0, 2, 5], dtype=torch.int32)


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


matmul, gated = fusedtp.grouped_matmul, fusedtp.grouped_gated
FAULTS = [
    (lambda: matmul(X, W.mT, OFFSETS), "weights (2, 3, 4)"),
    (lambda: matmul(X[0], W, OFFSETS), "rows (3,)"),
    (lambda: matmul(X, W[0], OFFSETS), "weights (4, 3)"),
    (lambda: matmul(X, W[:0], offsets(0)), "at least one expert"),
    (lambda: matmul(X, W, OFFSETS.long()), "torch.int64"),
    (lambda: matmul(X, W, OFFSETS[1:]), "offsets (2,)"),
    (lambda: matmul(X, W, OFFSETS.to("meta")), "offsets on meta"),
    (lambda: matmul(X, W.half(), OFFSETS), "weights torch.float16"),
    (lambda: matmul(X.int(), W.int(), OFFSETS), "rows are torch.int32"),
    (lambda: matmul(X, W, OFFSETS, bias=torch.ones(2, 3)), "bias (2, 3)"),
    (lambda: matmul(X, W, OFFSETS, bias=torch.ones(2, 4).half()), "bias torch.float16"),
    (lambda: matmul(X, W, OFFSETS, engine="collective"), "engine is 'collective'"),
    (lambda: matmul(X, W, offsets(1, 2, 5)), "offsets[0] is 1"),
    (lambda: matmul(X, W, offsets(0, 5, 2)), "offsets[2] is 2, less than offsets[1], 5"),
    (lambda: matmul(X, W, offsets(0, 2, 7)), "offsets[2] is 7, but there are only 6 rows"),
    (lambda: gated(X, W, W, offsets(0, 2, 7)), "offsets[2] is 7"),
    (lambda: gated(X, W, W[:, :3], OFFSETS), "up (2, 3, 3)"),
    (lambda: gated(X, W, W, OFFSETS, act="relu"), "'relu'"),
    (lambda: matmul(X.double(), W.double(), OFFSETS, engine="triton"), "not torch.float64"),
    (lambda: matmul(X, W, OFFSETS, engine="triton"), "TRITON_INTERPRET=1"),
]


@pytest.mark.parametrize("call, said", FAULTS, ids=[said for _, said in FAULTS])
def test_bad_input_says_what_was_given(call, said):
    if "engine 'triton'" in said and not fusedtp.ops.engines.has_triton():
        pytest.skip("needs triton")
    with pytest.raises(ValueError) as raised:
        call()
    assert said in str(raised.value)


def test_grouped_mm_says_what_it_does_not_take():
    for x, w in ((X, W), (X.bfloat16(), W.bfloat16())):
        with pytest.raises(ValueError, match=r"grouped_mm.*multiples of 8.*use 'triton'"):
            engines._vendor_matmul([x], [w], OFFSETS, None)


@pytest.mark.parametrize("layout", laws.LAYOUTS)
def test_rows_for_grouped_mm_are_whole_and_aligned(layout):
    """On a GPU, other rows fail, some permanently."""
    x = laws.laid_out(torch.arange(16.0 * 24).view(16, 24).bfloat16(), layout)
    rows = laws.engines._whole_rows(x)
    assert torch.equal(rows, x) and rows.stride(1) == 1
    assert rows.data_ptr() % 16 == 0 and rows.stride(0) % laws.engines.ALIGNED == 0
