"""Links that are held: whatever the schedule, bookings do not overlap, and all that crosses is booked once."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl

from fusedtp.checks.cases import held_case
from fusedtp.checks.dense import SimulatedWorld
from fusedtp.comm.device_view import peers_of
from fusedtp.kernels import signals
from fusedtp.sim import (
    Fault,
    Launch,
    Mismatch,
    Run,
    Schedule,
    SimulationFault,
    compare,
    explore,
    machine,
    run_schedule,
)  # fmt: skip
from tests.mutants.trial_cases import calls
from tests.mutants.trials import OPERATIONS
from tests.sim.support import interpreted

PROGRAMS, TIMES, COLS, NS_OF_BYTE = 3, 4, 5, 2
LINK_BYTES = signals.LINK_BYTES.value


@triton.jit
def booking(peers, dues, TIMES: tl.constexpr, COLS: tl.constexpr):
    """Each program books TIMES times, every time another number of rows."""
    pid = tl.program_id(0)
    for i in range(TIMES):
        tl.store(dues + pid * TIMES + i, signals.book_link(peers, pid * TIMES + i, COLS, tl.float16))


def _took(number: int) -> int:
    return number * COLS * 2 * NS_OF_BYTE


def booking_run() -> Run:
    world = SimulatedWorld(1, 16, 4, link=1_000_000 * NS_OF_BYTE)
    dues = torch.full((PROGRAMS * TIMES,), -1, dtype=torch.int64)
    peers = peers_of(world.view(0), 0, 1, 7, "host")

    def check() -> list[Mismatch]:
        """Simulated time stands still: one booking begins where another ends, from 0 on; no rows take no time."""
        begins = [due - _took(i) for i, due in enumerate(dues.tolist())]
        order = sorted(range(1, len(begins)), key=begins.__getitem__)
        ends = [0, *accumulate(map(_took, order))]
        got = torch.tensor([begins[0], *(begins[i] for i in order)])
        booked = [got, world.failures.tensors[0][LINK_BYTES]]
        return compare(
            "booked", booked, [torch.tensor([0, *ends[:-1]]), torch.tensor(ends[-1] // NS_OF_BYTE)]
        )

    launch = Launch(booking, PROGRAMS, dict(peers=peers, dues=dues, TIMES=TIMES, COLS=COLS))
    return Run([[launch]], world.memory, check)


def wrong_bookings(torn: bool) -> int:
    """Schedules with a wrong result; torn: bookings that are not atomic."""

    def load_and_store(peers, word, n):
        before = tl.load(peers.failure + word, volatile=True)
        tl.store(peers.failure + word, before + n)
        return before

    wrong = 0
    with patch.object(signals, "added", load_and_store if torn else signals.added):
        for seed in range(12):
            try:
                run_schedule(booking_run(), Schedule("random", seed, fine=True), detect=not torn)
            except SimulationFault as error:
                assert error.fault.mismatch is not None, error.fault
                wrong += 1
    return wrong


def test_programs_of_a_rank_share_its_link_under_any_schedule():
    assert interpreted(wrong_bookings, False) == 0
    assert interpreted(wrong_bookings, True) > 0


@triton.jit
def travelling(peers, COLS: tl.constexpr):
    """Each program sends as many rows as its number says, and one more."""
    due = signals.book_link(peers, tl.program_id(0) + 1, COLS, tl.float16)
    signals.leave_link(peers, due)


class Sleeping:
    """A clock that only sleep moves on."""

    def __init__(self) -> None:
        self.now = 0

    def monotonic_ns(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 1


def time_of_travel(stays: bool) -> int:
    """Nanoseconds that pass until all programs have left their link."""
    world, clock = SimulatedWorld(1, 16, 4, link=1_000_000 * NS_OF_BYTE), Sleeping()
    launch = Launch(travelling, PROGRAMS, dict(peers=peers_of(world.view(0), 0, 1, 7, "host"), COLS=COLS))
    leave = signals.leave_link if stays else lambda peers, due: None
    with patch.object(machine, "FROZEN", clock), patch.object(signals, "leave_link", leave):
        run_schedule(Run([[launch]], world.memory, list), Schedule("random", 3))
    return clock.now


def test_programs_stay_until_the_link_has_carried_all():
    assert interpreted(time_of_travel, True) >= sum(_took(i + 1) for i in range(PROGRAMS))
    assert interpreted(time_of_travel, False) == 0


def carried(operation: str, broken: bool = False) -> Fault | None:
    """What exploring finds where each rank's link is held; broken: own rows are booked too."""
    made = [replace(call, programs=(2, 2)) for call in calls(operation)]
    everywhere = (lambda peers, rank, rows: rows) if broken else signals.remote_rows
    with patch.object(signals, "remote_rows", everywhere):
        return explore(held_case(operation, made, seed=3), 2, shrink=False).fault


@pytest.mark.parametrize("operation", OPERATIONS.values())
def test_all_that_crosses_is_booked_once(operation):
    assert interpreted(carried, operation, timeout=300) is None


@pytest.mark.parametrize("operation", ["moe_combine", "matmul_reduce_scatter"])
def test_own_rows_that_are_booked_are_found(operation):
    fault = interpreted(carried, operation, True, timeout=300)
    assert fault is not None and fault.mismatch is not None and fault.mismatch.name == "bytes carried"
