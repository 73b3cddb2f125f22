"""Holding copies to a rate: the arithmetic, against a device that is simulated, and the refusals."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedtp.bench import link
from fusedtp.bench import rank as ranks
from fusedtp.bench.options import Options, plan_of
from fusedtp.bench.rows import Row
from fusedtp.bench.sample import Spread
from fusedtp.bench.suites import experts
from fusedtp.bench.ways import link_of
from fusedtp.comm import streams
from fusedtp.ops import shards
from fusedtp.ops.engines import has_triton
from tests.harness import world

RATES = st.floats(1e9, 400e9)


@given(st.floats(0.1, 1000), st.integers(1, 64), st.floats(1, 10_000))
def test_ranks_may_copy_half_of_what_the_device_copies(rate: float, ranks: int, device: float) -> None:
    if 2 * rate * ranks > device:
        with pytest.raises(ValueError, match="more than half"):
            link.check_total(rate, ranks, device)
    else:
        link.check_total(rate, ranks, device)


def test_a_node_of_eight_on_a_gpu_that_copies_2000_gbps_is_within_half() -> None:
    link.check_total(450 / 8, 8, 2000)
    with pytest.raises(ValueError, match=r"at most 125\.0 GB/s a rank"):
        link.check_total(126, 8, 2000)


@given(RATES)
def test_a_piece_is_a_power_of_two_and_takes_no_longer_than_a_waiting_kernel_bears(rate: float) -> None:
    piece, (low, high) = link.piece_bytes(rate), link.PIECE_BYTES
    assert piece & (piece - 1) == 0 and low <= piece <= high
    assert piece == low or piece / rate <= link.PIECE_SECONDS
    assert piece == high or 2 * piece / rate > link.PIECE_SECONDS


@given(RATES, st.floats(1.0, 50.0))
def test_a_piece_and_its_spin_take_as_long_as_the_rate_says(rate: float, faster: float) -> None:
    piece = link.piece_bytes(rate)
    spin = link.spin_seconds(piece, rate, faster * rate)
    assert spin >= 0 and piece / (faster * rate) + spin == pytest.approx(piece / rate)


def test_a_rate_that_copies_do_not_reach_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        link.spin_seconds(1 << 20, 10e9, 5e9)


@given(RATES, st.floats(1.5, 50.0), st.floats(0, 10e-6), st.floats(0.5, 1.5))
def test_calibration_finds_the_rate_on_a_device_with_overheads(
    rate: float, faster: float, launch: float, clock: float
) -> None:
    """Each piece costs a launch more, and the spin's clock is off: the rate is held, or it is refused."""

    def device(piece: int, spin: float) -> float:
        return piece / (piece / (faster * rate) + launch + clock * spin)

    piece = link.piece_bytes(rate)
    if device(piece, 0.0) < 0.98 * rate:  # overheads alone are slower than the link
        with pytest.raises(ValueError, match="corrections"):
            link.calibrate(rate, faster * rate, device)
        return
    found, spin, held = link.calibrate(rate, faster * rate, device)
    assert found == piece and held == pytest.approx(rate, rel=0.02) and held == device(piece, spin)


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 20])
def test_a_paced_copy_copies_all(piece: int) -> None:
    source = torch.arange(7 * 13, dtype=torch.int32).reshape(7, 13)
    out = torch.zeros_like(source)
    link.paced_copy(out, source, piece, 0)
    assert torch.equal(out, source)


def test_copies_are_paced_only_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    spins: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", spins.append)
    source, out = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    with link.paced(30, 10):
        streams.carry(out, source)
    assert torch.equal(out, source) and spins == [10] * 4
    streams.carry(out.zero_(), source)
    assert torch.equal(out, source) and len(spins) == 4


def test_the_copy_stream_carries_what_a_link_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a GPU, with streams that do nothing."""
    carried: list[int] = []
    monkeypatch.setattr(streams, "carry", lambda out, source: carried.append(source.numel()))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    copies = shards.CopyStream.__new__(shards.CopyStream)
    copies.stream = mock.MagicMock()
    copies.fetch(torch.ones(5))
    assert carried == [5]


def test_kernels_may_be_slower_than_their_link_but_not_faster() -> None:
    for held in (1.0, 50e9, 51e9):
        link.check_kernels(held, 50e9)
    with pytest.raises(ValueError, match=r"held to 50\.0 GB/s, they moved 52\.0"):
        link.check_kernels(52e9, 50e9)


def _push(group: Any) -> float:
    rank = ranks.Rank(plan_of(Options(device="cpu", world="processes", smoke=True)), group)
    with mock.patch.object(ranks, "PUSHED", (32, 64)):
        return ranks._hold_kernels(rank, 1e5)


@pytest.mark.skipif(not has_triton(), reason="needs triton")
def test_what_kernels_reach_is_measured_and_no_more_than_the_rate() -> None:
    for gbps in world(2).run(_push, timeout=300):
        assert 0 < gbps <= 1e-4


@pytest.mark.parametrize(
    ("name", "gbps"),
    [
        ("communication alone: ours", 5.0),
        ("fusedtp chunked", 5.0),
        ("fusedtp triton-copy", 5.0),
        ("fusedtp triton", 4.0),
        ("fusedtp triton, one by one", 4.0),
    ],
)
def test_a_row_says_what_its_link_reached(name: str, gbps: float) -> None:
    rank = mock.MagicMock(link=link.Held(5.0, 4.0), notes={name: "late"})
    assert link_of(rank, name) == {"link_gbps": gbps, "note": "late"}
    rank.link = None
    assert link_of(rank, name) == {"note": "late"}


def test_a_row_that_nothing_holds_says_so() -> None:
    rank = mock.MagicMock(link=link.Held(5.0, None), notes={})
    for name in ("fusedtp collective", "fusedtp triton"):
        found = link_of(rank, name)
        assert "link_gbps" not in found and "not held" in found["note"]
    assert link_of(rank, "matmul alone") == {"note": ""}


def test_a_layer_with_overlap_stands_beside_the_one_without() -> None:
    def made(engine: str, seconds: float | None) -> Row:
        spread = None if seconds is None else Spread.of([seconds] * 2)
        return Row("moe", {}, "bfloat16", engine, "virtual", 8, seconds=spread)

    rows = [
        made("fusedtp triton", 2.0),
        made("fusedtp triton, one by one", 3.0),
        made("fusedtp collective", None),
    ]
    first, *others = experts.with_gain(rows)
    assert first.gain == 1.5 and Row.from_dict(first.as_dict()) == first
    assert others == rows[1:] and all(row.gain is None for row in others)
