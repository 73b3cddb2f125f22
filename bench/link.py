"""Holding what virtual ranks send to a rate, so that one GPU's memory passes for a link.

    virtual rank's copy stream    | piece | spin .... | piece | spin .... |        piece / (copy + spin) = rate held
    virtual rank's kernels        books, stores, spins until the link is done      all programs of a rank together

One GPU copies between its ranks at the speed of its memory, many times that of a link, and each of its W ranks has
1/W of the processors: a node whose links carry R is imitated by R / W a rank. The copy stream moves pieces of limited
size, each followed by a spin on the device, whose length is corrected until the measured rate of all ranks at once is
the wanted one. What was held is measured and reported, never assumed. Copies of all ranks together may use half of the
measured copy bandwidth, the rest is left to the matmuls; more is refused.

The spin counts the processors' clock. Under load that clock falls, and copies beside matmuls are then slower than the
rate that was held when nothing else ran, never faster: what is hidden is understated.

Rows that kernels store at a peer from inside, or fetch from one, are held by the kernels themselves, to the rate that
was asked for: Note [A held link] in kernels/signals.py. They tell the time by a clock of nanoseconds, which no load
slows. What they reach is measured by a gather whose matmul is next to nothing, from the bytes that the kernels counted;
more than the rate is refused. A rank's copies and its kernels' rows are held each by itself: engines use one or the
other. In both a link has one direction, what a rank sends or what it fetches. What comes in meanwhile is not held.

Not measured on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedtp.comm import streams

from .options import Refused

PIECE_SECONDS = (
    100e-6  # a piece at most: a shard comes as a stream, and the host can enqueue pieces faster than that
)
PIECE_BYTES = (64 << 10, 8 << 20)
SHARE = 0.5  # of the measured copy bandwidth
ROUNDS = 6  # of calibration


@dataclass(frozen=True)
class Held:
    """GB/s that a rank's sending reached under the hold, while all ranks did nothing else; None of kernels not here."""

    copies: float
    kernels: float | None


def check_total(link_gbps: float, ranks: int, copy_gbps: float) -> None:
    """Raise Refused, a ValueError, where `ranks` copies at `link_gbps` take more than half of what the device can copy.

    copy_gbps   bytes copied per second (each is read and written once), in GB/s
    """
    total, most = link_gbps * ranks, SHARE * copy_gbps
    if total > most:
        raise Refused(
            f"{ranks} ranks at {link_gbps:g} GB/s copy {total:g} GB/s; the device copies {copy_gbps:.0f} GB/s, and "
            f"more than half of that ({most:.0f}) would slow the matmuls down: at most {most / ranks:.1f} GB/s a rank"
        )


def check_kernels(held: float, rate: float, within: float = 0.02) -> None:
    """Raise Refused where kernels moved `held` bytes/s over a link that was to be held to `rate`. Less is no fault."""
    if held > (1 + within) * rate:
        raise Refused(f"wanted kernels held to {rate / 1e9:.1f} GB/s, they moved {held / 1e9:.1f}")


def piece_bytes(rate: float) -> int:
    """Bytes of a piece at `rate` bytes/s: a power of two that takes at most PIECE_SECONDS, within PIECE_BYTES."""
    low, high = PIECE_BYTES
    size = low
    while 2 * size <= min(high, rate * PIECE_SECONDS):
        size *= 2
    return size


def spin_seconds(piece: int, rate: float, copy_rate: float) -> float:
    """How long to spin after a piece that by itself is copied at `copy_rate`, so that pieces come at `rate`.

    Raises Refused for a rate that the copy itself does not reach.
    """
    if rate > copy_rate:
        raise Refused(f"cannot hold copies to {rate / 1e9:.1f} GB/s: they reach {copy_rate / 1e9:.1f} GB/s")
    return piece / rate - piece / copy_rate


def corrected(spin: float, piece: int, rate: float, held: float) -> float:
    """The next spin, after pieces with this one came at `held` bytes/s; never negative."""
    return max(0.0, spin + piece / rate - piece / held)


def calibrate(
    rate: float, copy_rate: float, held_with: Callable[[int, float], float], within: float = 0.02
) -> tuple[int, float, float]:
    """(piece, spin, rate held): correct the spin until `held_with(piece, spin)` is within a share of `rate`.

    held_with   measures bytes/s of one rank while all copy; the same answer on all ranks
    Raises Refused where ROUNDS corrections do not get there: the rate is then not one that this device can hold.
    """
    piece = piece_bytes(rate)
    spin = spin_seconds(piece, rate, copy_rate)
    held = held_with(piece, spin)
    for _ in range(ROUNDS):
        if abs(held / rate - 1) <= within:
            return piece, spin, held
        spin = corrected(spin, piece, rate, held)
        held = held_with(piece, spin)
    if abs(held / rate - 1) <= within:
        return piece, spin, held
    raise Refused(f"wanted copies at {rate / 1e9:.1f} GB/s, held {held / 1e9:.1f} after {ROUNDS} corrections")


def paced_copy(out: Tensor, source: Tensor, piece: int, cycles: int) -> None:
    """out = source on the current stream, in pieces of so many bytes, each followed by a spin of so many cycles."""
    flat_out, flat_in = out.view(-1), source.reshape(-1)
    step = max(1, piece // max(1, source.element_size()))
    for begin in range(0, flat_in.numel(), step):
        flat_out[begin : begin + step].copy_(flat_in[begin : begin + step], non_blocking=True)
        if cycles:
            torch.cuda._sleep(cycles)


@contextmanager
def paced(piece: int, cycles: int) -> Iterator[None]:
    """Every copy between ranks that is enqueued in here, by any thread, is paced."""
    usual = streams.carry
    streams.carry = lambda out, source: paced_copy(out, source, piece, cycles)
    try:
        yield
    finally:
        streams.carry = usual
