"""The suite of the output head on several ranks: its baseline, its reference and its memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.testing import assert_close

from fusedtp.bench import errors
from fusedtp.bench import rank as ranks
from fusedtp.bench.options import Options, plan_of
from fusedtp.bench.rivals import ByHand
from fusedtp.bench.rows import Row
from fusedtp.bench.suites import model as suite
from fusedtp.ops.rows import Rows, split
from tests.harness import world

T, K, V = 12, 16, 37


def compared(group: Any) -> None:
    """Compare the unfused way (loss and gradients) and the fp64 reference with one device's formula in fp64."""
    w_of, x_of = split(V, group.size()), T // group.size()
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, K, dtype=torch.float64, generator=generator).requires_grad_() for n in (T, V))
    labels = torch.randint(V, (T,), generator=generator)
    want = F.cross_entropy(x @ w.t(), labels)
    dx, dw = torch.autograd.grad(3 * want, [x, w])
    start, rank = sum(w_of[: group.rank()]), group.rank()
    rows, columns = slice(rank * x_of, (rank + 1) * x_of), slice(start, start + w_of[rank])
    mine = [t.detach()[part].float().requires_grad_() for t, part in ((x, rows), (w, columns))]
    loss = suite._unfused(ByHand(group), start)(*mine, labels)
    found = torch.autograd.grad(3 * loss, mine)
    bound = 3 * (K + V) * 2.0**-24  # for logits of size sqrt(K), and the sums over them
    for got, exact in zip((loss, *found), (want, dx[rows], dw[columns])):
        assert_close(got.double(), exact.detach(), rtol=bound, atol=bound)
    plan = plan_of(Options(smoke=True, device="cpu", world="processes", tp="2"))
    exactly = [t.detach()[part] for t, part in ((x, rows), (w, columns))]
    reference = suite.exact(ranks.Rank(plan, group), Rows(split(T, 2)), start, *exactly, labels)
    assert_close(reference, want.detach(), rtol=1e-12, atol=0.0)


def test_the_unfused_way_and_the_reference_are_one_devices_formula() -> None:
    world(2).run(compared)


def measured(group: Any) -> list[Row]:
    plan = plan_of(Options(smoke=True, device="cpu", world="processes", tp="2", minutes=0.0))
    rank = ranks.Rank(plan, group, roofs={"float32": 1.0})
    (case,) = (case for case in suite.loss_cases(plan, 2) if case.dtype == "float32")
    return suite.measure_loss(rank, case)


def test_rows_of_several_ranks() -> None:
    """Flops count the whole vocabulary, both ways are correct, and the baseline holds all its logits in fp32."""
    rows = {row.engine: row for row in world(2).run(measured)[0]}
    assert rows.keys() == {"gloo + torch", "fusedtp"}
    for row in rows.values():
        assert row.flops == 6 * 64 * 64 * 509 and row.seconds is not None and row.ranks == 2
        assert 0 <= (row.error_share or 0.0) <= 1
        assert row.peak_bytes is not None and row.peak_bytes > 255 * 64 * 4  # dw alone
    assert (rows["gloo + torch"].peak_bytes or 0) > 64 * 255 * 4 + 255 * 64 * 4


def test_the_peak_is_of_what_is_held_at_once() -> None:
    def way() -> None:
        for _ in range(3):
            torch.empty(1 << 20, dtype=torch.uint8)
        a = torch.empty(3 << 20, dtype=torch.uint8)
        b = torch.empty(2 << 20, dtype=torch.uint8)
        del a, b

    plan = plan_of(Options(smoke=True, device="cpu", tp="1"))
    assert 5 << 20 <= (errors.peak_bytes(ranks.Rank(plan), way) or 0) < 6 << 20
