"""Local matmuls read their operands and nothing around them in memory."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fusedtp.ops.matmul import matmul, matmul_add, matmul_as, matmul_into


@given(
    st.integers(1, 40), st.integers(1, 140), st.integers(1, 40), st.integers(0, 3), st.booleans(),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)  # fmt: skip
@example(21, 7, 28, 1, False, torch.bfloat16)
@example(31, 34, 16, 3, False, torch.bfloat16)
@example(40, 126, 33, 1, False, torch.bfloat16)
@example(256, 31, 128, 3, True, torch.bfloat16)
@example(1, 31, 128, 3, True, torch.bfloat16)
def test_what_stands_beside_an_operand_never_shows(m, k, n, gap, transposed, dtype):
    """Ones, with NaN past their ends: see Note [Steps of K on CPU]. All sums are exact in 16 bits."""
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
    st.integers(1, 140),
    st.integers(1, 40),
    st.sampled_from([torch.bfloat16, torch.float16]),
)
@example(32, 37, 5, torch.bfloat16)
@example(33, 34, 16, torch.bfloat16)
def test_a_row_of_nan_stays_a_row(m, k, n, dtype):
    """For dense rows too: unused rows directly follow those of an expert."""
    x = torch.cat([torch.ones(m, k, dtype=dtype), torch.full((2, k), torch.nan, dtype=dtype)])
    y = matmul(x, torch.ones(k, n, dtype=dtype))
    assert torch.equal(y[:m], torch.full((m, n), float(k), dtype=dtype)) and y[m:].isnan().all()


class Behind(TorchDispatchMode):
    """Records the number of zeros behind each row of every 16-bit matmul's left operand."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            x = args[-2]
            m, k = x.shape
            gap = x.stride(0) - k if k and x.stride(1) == 1 else 0
            assert not gap or not x.as_strided((m, gap), (x.stride(0), 1), x.storage_offset() + k).any()
            self.seen.append(gap)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("k", "zeros"), [(0, 0), (1, 31), (32, 0), (33, 31), (64, 0), (100, 28)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_zeros_stand_behind_rows_that_end_within_a_step(dtype, k, zeros, monkeypatch):
    """As on a CPU with 16-bit instructions, whatever this CPU has; a transposed left operand is read in place."""
    monkeypatch.setattr("fusedtp.ops.matmul._is_native", lambda dtype: True)
    x, weight = torch.ones(5, k, dtype=dtype), torch.ones(3, k, dtype=dtype)
    by_rows, by_columns = torch.ones(k, 5, dtype=dtype).t(), torch.ones(k, 3, dtype=dtype)
    with Behind() as behind:
        for y in (weight.t(), by_columns):
            for bias in (None, torch.zeros(3, dtype=dtype)):
                assert (matmul(x, y, bias) == k).all()
            matmul_add(torch.zeros(5, 3, dtype=dtype), x, y)
            matmul_into(torch.empty(5, 3, dtype=dtype), [x, x], [y, y])
    assert behind.seen == [zeros] * 10
    with Behind() as behind:
        assert (matmul(by_rows, by_columns) == k).all()
    assert behind.seen == [0]


@pytest.mark.parametrize("native", [False, True])
@settings(max_examples=25)
@given(m=st.integers(0, 2200), n=st.integers(1, 5), dtype=st.sampled_from([torch.bfloat16, torch.float16]))
@example(m=767, n=3, dtype=torch.bfloat16)
@example(m=769, n=3, dtype=torch.bfloat16)
def test_every_row_of_operands_that_are_widened_in_blocks_and_of_others(native, m, n, dtype):
    """As on a CPU with and without 16-bit instructions. Neighbouring rows differ."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusedtp.ops.matmul._is_native", lambda dtype: native)
        every_row(m, n, dtype)


def every_row(m, n, dtype):
    x = torch.arange(7 * m).remainder(11).view(m, 7).to(dtype)
    y = torch.arange(7 * n).remainder(3).view(7, n).to(dtype)
    want = x.double() @ y.double()  # at most 140
    assert torch.equal(matmul(x, y, torch.ones(n, dtype=dtype)).double(), want + 1)
    assert torch.equal(matmul_as(x, y, torch.float32).double(), want)
    total = torch.ones(m, n)
    matmul_add(total, x, y)
    assert torch.equal(total.double(), want + 1)
