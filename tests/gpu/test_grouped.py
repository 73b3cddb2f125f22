"""Grouped matmuls with compiled kernels, and with torch's grouped_mm: the laws of tests/ops/grouped_laws.py."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fusedtp
from fusedtp.ops.pointwise import ACTIVATIONS
from tests.ops import grouped_laws as laws
from tests.ops.grouped_laws import LAYOUTS, Draw

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@st.composite
def draws(draw, engine="triton", dtypes=DTYPES, widths=(16, 37, 48)) -> Draw:
    """Sums of 60 integers are exact in bf16, so there are few rows; tiles have 16 to 64 rows.

    The compiler specializes kernels on sizes (divisible by 16, equal to one), so few sizes are drawn.
    """
    e = draw(st.integers(2, 64))
    total = draw(st.integers(0, 60))
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, total), min_size=e - 1, max_size=e - 1)))
    else:  # all rows to one expert
        first = draw(st.integers(0, e - 1))
        cuts = [0] * first + [total] * (e - 1 - first)
    sizes = tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))
    width, spare = st.sampled_from(widths), -total % 16 + draw(st.sampled_from([0, 96]))
    return Draw(
        draw(st.sampled_from(dtypes)), sizes, draw(width), draw(width), spare, draw(st.sampled_from(LAYOUTS)), engine,
        draw(st.sampled_from(ACTIVATIONS)), draw(st.integers(0, 99)), "cuda",
    )  # fmt: skip


@settings(max_examples=10, deadline=None)
@given(draws(), st.booleans())
@example(Draw(torch.bfloat16, (60,), 37, 48, 4, "halves", "triton", device="cuda"), True)
@example(Draw(torch.float16, (0, 0), 16, 16, 0, "plain", "triton", device="cuda"), True)
def test_matmul_and_all_gradients(draw, biased):
    laws.matmul_law(draw, biased)


@settings(max_examples=8, deadline=None)
@given(draws())
def test_gated_matmul_and_all_gradients(draw):
    laws.gated_law(draw)


@settings(max_examples=25, deadline=None)
@given(draws("chunked", (torch.bfloat16,), widths=(8, 16, 24, 40, 56)))
def test_grouped_mm_and_all_gradients(draw):
    laws.matmul_law(draw, False)
    laws.vendor_law(draw, True)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations(act):
    laws.activation_law(Draw(torch.float32, (3000, 0, 40), 33, 1, 2, "plain", "triton", act, device="cuda"))


BF16 = torch.bfloat16
LARGE = [
    (BF16, (700, 0, 300, 5), 1000, 520), (BF16, (4096,), 256, 512), (BF16, tuple(range(64)), 384, 1024),
    (BF16, (33,) * 5, 1001, 77), (torch.float16, (4096, 0), 256, 512), (torch.float32, (700, 0, 300, 5), 1000, 520),
]  # fmt: skip


@pytest.mark.parametrize("dtype, sizes, n, k", LARGE)
def test_random_numbers_stay_within_their_roundings(dtype, sizes, n, k):
    laws.bounds_law(Draw(dtype, sizes, n, k, 100, "plain", "triton", device="cuda"))


@pytest.mark.parametrize("engine", ["triton", "chunked"])
def test_a_repeated_run_gives_the_same_bits(engine):
    laws.repeat_law(Draw(torch.bfloat16, (700, 0, 300, 24), 1024, 512, 100, "plain", engine, device="cuda"))


def test_a_main_grad_takes_what_16_bits_would_round():
    laws.main_grad_law(Draw(torch.bfloat16, (300, 0, 29), 200, 30, 3, "plain", "triton", device="cuda"))


def test_rows_that_are_used_twice():
    laws.composed_law(Draw(torch.float32, (5, 0, 7), 9, 6, 3, "plain", "triton", device="cuda"))


def test_offsets_that_leave_the_rows_reach_no_memory_outside():
    laws.reach_law(Draw(torch.float32, (7, 9, 4), 6, 5, 0, "plain", "triton", device="cuda"))


@pytest.mark.parametrize("engine", ["triton", "chunked"])
def test_nothing_waits_for_the_gpu(engine):
    """No call copies to the host or synchronizes, forward or backward."""
    draw = Draw(torch.bfloat16, (40, 0, 24), 64, 32, 8, "plain", engine, device="cuda")
    offsets, x, down = draw.offsets, draw.rows(32), draw.weights(32, 64)
    gate, up = draw.weights(64, 32), draw.weights(64, 32, seed=2)

    def experts() -> None:
        leaves = [t.detach().requires_grad_() for t in (x, gate, up, down)]
        h = fusedtp.grouped_gated(*leaves[:3], offsets, engine=engine)
        fusedtp.grouped_matmul(h, leaves[3], offsets, engine=engine).backward(x)

    experts()  # compiles and loads the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        experts()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_replays_with_other_offsets():
    """The device reads the distribution of rows: a captured call works for any offsets."""
    draw = Draw(torch.bfloat16, (40, 0, 24), 48, 32, 8, "plain", "triton", device="cuda")
    x, w, offsets = draw.rows(32), draw.weights(48, 32), draw.offsets
    x[draw.used :] = 1
    fusedtp.grouped_matmul(x, w, offsets)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fusedtp.grouped_matmul(x, w, offsets)
    for sizes in ((72, 0, 0), (0, 1, 70), (40, 0, 24)):
        other = Draw(torch.bfloat16, sizes, 48, 32, 72 - sum(sizes), device="cuda")
        offsets.copy_(other.offsets)
        graph.replay()
        laws.check("y", y[: other.used], laws.wanted_matmul(other, x, w))


def test_what_grouped_mm_does_not_take_is_refused_and_a_loop_would_wait():
    draw = Draw(torch.float32, (4, 4), 8, 8, device="cuda")
    with pytest.raises(ValueError, match="uses torch's grouped_mm"):
        fusedtp.grouped_matmul(draw.rows(8), draw.weights(8, 8), draw.offsets, engine="chunked")
