"""Matmuls with one expert's number of rows: rounding up the rows and working in stretches do not change the results."""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fusedtp
from fusedtp.ops import cpu
from fusedtp.ops.moe import combine, grouped
from tests.properties.laws import assert_same

COUNTS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 100)), min_size=1, max_size=5)


@given(st.integers(1, 1 << 20))
def test_rows_are_rounded_to_few_numbers(n):
    """At most a sixteenth more, or up to a multiple of 32; at most 16 sizes between consecutive powers of two."""
    most = cpu.rounded(n)
    assert n <= most < n + max(32, n / 16 + 1)
    octave = {cpu.rounded(m) for m in range(1 << n.bit_length(), (2 << n.bit_length()) + 1, 1 + n // 50)}
    assert len(octave) <= 17


def whole(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=20)
@given(counts=COUNTS, past=st.integers(0, 70), seed=st.integers(0, 2**31))
def test_rounding_does_not_show(dtype, counts, past, seed):
    """Products and gradients use each expert's own rows; NaN in one expert's rows, or past all rows, stays there."""
    offsets = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    x, dy = (whole(int(offsets[-1]) + past, n, seed=seed, dtype=dtype) for n in (5, 4))
    for t in (x, dy):
        t[int(offsets[-1]) :] = float("nan")
    ill = seed % len(counts)
    x[int(offsets[ill]) : int(offsets[ill + 1])] = float("nan")
    x.requires_grad_()
    gates, ups = (whole(len(counts), 4, 5, seed=seed + i, dtype=dtype).requires_grad_() for i in (1, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "compiles", lambda x: True)
        y = fusedtp.grouped_matmul(x, gates, offsets)
        dx, dw = torch.autograd.grad(y, [x, gates], dy)
        hidden = fusedtp.grouped_gated(x, gates, ups, offsets)
        dx_gated, *_ = torch.autograd.grad(hidden, [x, gates, ups], dy)
        with torch.no_grad():
            alone = fusedtp.grouped_gated(x, gates, ups, offsets)
            made = grouped.matmul_by_expert([x.detach()], [gates], offsets)
            pieces = {first: y.clone() for first, y in made}
    for e, (begin, end) in enumerate(pairwise(offsets.tolist())):
        rows, w = x[begin:end].detach(), gates[e].detach()
        products = [rows @ each[e].detach().t() for each in (gates, ups)]
        assert_same(f"y of {e}", y[begin:end].detach(), products[0])
        if end > begin:
            assert_same(f"y of {e} alone", pieces[begin], products[0])
        assert_same(f"gated of {e}", hidden[begin:end].detach(), cpu.gated(*products, "silu"))
        assert_same(f"gated of {e} alone", alone[begin:end], cpu.gated(*products, "silu"))
        assert_same(f"dx of {e}", dx[begin:end], dy[begin:end] @ w)
        assert_same(f"dw of {e}", dw[e], dy[begin:end].t() @ rows if end > begin else torch.zeros_like(w))
        assert e == ill or not dx_gated[begin:end].isnan().any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@given(st.integers(0, 9), st.integers(1, 8), st.integers(0, 70), st.booleans(), st.integers(0, 2**31))
def test_choices_are_summed_in_their_order(dtype, tokens, k, width, weighed, seed):
    """Sums are in fp32 (fp64), for any cache size, and rounded at the end. A product may enter its sum unrounded."""
    g = torch.Generator().manual_seed(seed)
    parts = torch.randn(tokens * k, width, generator=g).to(dtype)
    places = torch.randperm(tokens * k, generator=g).view(tokens, k)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights = torch.rand(tokens, k, generator=g).to(wide) if weighed else None
    want, off = torch.zeros(tokens, width, dtype=wide), torch.zeros(tokens, width, dtype=torch.float64)
    for j in range(k):
        part = parts[places[:, j]].to(wide)
        part = part if weights is None else part * weights[:, j : j + 1]
        want, off = want + part, off + part.double().abs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_BLOCK_BYTES", 3 * 70 * 4)
        got = combine.weighted_sum(parts, places, weights)
    if not weighed:
        assert_same("sum", got, want.to(dtype))
        return
    # each product rounded or not, sums that differ by those roundings, and the last rounding to dtype: half a step,
    # which does not shrink further below the smallest normal number
    to, bound = torch.finfo(dtype), off * 2 * k * torch.finfo(wide).eps
    if dtype != wide:
        bound += to.eps / 2 * (off + bound).clamp(min=to.smallest_normal)
    assert got.dtype == dtype and ((got.double() - want.double()).abs() <= bound).all()


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_gate_in_stretches(act, dtype, monkeypatch):
    """The gate and its gradients equal torch's on whole tensors in fp64, for any cache size."""
    monkeypatch.setattr(cpu, "_BLOCK_BYTES", 3 * 7 * 8)
    g, u, dy = (3 * torch.randn(10, 7, dtype=torch.float64).to(dtype) for _ in range(3))
    wide_g, wide_u = (t.to(torch.float64, copy=True).requires_grad_() for t in (g, u))
    how = "tanh" if act.endswith("tanh") else "none"
    value = torch.nn.functional.silu(wide_g) if act == "silu" else None
    if value is None:
        value = torch.nn.functional.gelu(wide_g, approximate=how)
    want = value * wide_u
    want_g, want_u = torch.autograd.grad(want, [wide_g, wide_u], dy.double())
    dg, du = torch.empty_like(g), torch.empty_like(u)
    cpu.gated_backward(dy, g, u, act, dg, du)
    # fp64: 16 roundings of terms up to 100; bf16: one rounding of the result, fp32's earlier ones are negligible
    rtol, atol = (1e-13, 1e-12) if dtype == torch.float64 else (2**-8, 1e-4)
    for got, wanted in ((cpu.gated(g, u, act), want), (dg, want_g), (du, want_u)):
        torch.testing.assert_close(got.double(), wanted.detach(), rtol=rtol, atol=atol)
