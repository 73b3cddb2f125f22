"""Local matmuls read their operands and nothing beside them."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fusedtp.ops.matmul import matmul, matmul_add, matmul_as, matmul_into


@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(0, 3), st.booleans(),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)  # fmt: skip
@example(21, 7, 28, 1, False, torch.bfloat16)
@example(256, 31, 128, 3, True, torch.bfloat16)
def test_what_stands_beside_an_operand_never_shows(m, k, n, gap, transposed, dtype):
    """Ones, and NaN wherever they end: see Note [Odd K on CPU]. Sums of at most 41 ones are exact."""
    rows, cols = (k, m) if transposed else (m, k)
    x = torch.full((rows + 1, cols + gap), torch.nan, dtype=dtype)[:rows, :cols].fill_(1)
    x = x.t() if transposed else x
    y = torch.full((k + 1, n + gap), torch.nan, dtype=dtype)[:k, :n].fill_(1)
    assert torch.equal(matmul(x, y), torch.full((m, n), float(k), dtype=dtype))
    out = torch.empty(m, n, dtype=dtype)
    matmul_into(out, [x], [y])
    matmul_add(out, x, y)
    assert torch.equal(out, torch.full((m, n), 2.0 * k, dtype=dtype))


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([torch.bfloat16, torch.float16]),
)
@example(32, 37, 5, torch.bfloat16)
def test_a_row_of_nan_stays_a_row(m, k, n, dtype):
    """Dense rows too: nobody's rows stand right behind those of an expert."""
    x = torch.cat([torch.ones(m, k, dtype=dtype), torch.full((2, k), torch.nan, dtype=dtype)])
    y = matmul(x, torch.ones(k, n, dtype=dtype))
    assert torch.equal(y[:m], torch.full((m, n), float(k), dtype=dtype)) and y[m:].isnan().all()


@settings(max_examples=25)
@given(st.integers(0, 2200), st.integers(1, 5), st.sampled_from([torch.bfloat16, torch.float16]))
@example(767, 3, torch.bfloat16)
@example(769, 3, torch.bfloat16)
def test_every_row_of_operands_that_are_widened_in_blocks(m, n, dtype):
    """An odd K is widened on every CPU. Neighbouring rows differ."""
    x = torch.arange(7 * m).remainder(11).view(m, 7).to(dtype)
    y = torch.arange(7 * n).remainder(3).view(7, n).to(dtype)
    want = x.double() @ y.double()  # at most 140
    assert torch.equal(matmul(x, y, torch.ones(n, dtype=dtype)).double(), want + 1)
    assert torch.equal(matmul_as(x, y, torch.float32).double(), want)
    total = torch.ones(m, n)
    matmul_add(total, x, y)
    assert torch.equal(total.double(), want + 1)
