"""`run`, `explore` and `exhaust` from ordinary Python: what they take, give and raise, the same every time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusedtp.sim import (
    DEFAULT,
    Case,
    Fault,
    Mismatch,
    Run,
    Schedule,
    SimulationFault,
    compare,
    exhaust,
    explore,
    run,
    run_schedule,
    symmetric,
)
from fusedtp.sim.explore import schedules, trace
from tests.interpreting import interpreted
from tests.sim import exchange

ROOT = Path(__file__).resolve().parents[2]


def run_ring(sem: str, seed: int, as_list: bool) -> tuple[int, str]:
    """Switches and the rule of the fault, if any, of one `run` of a ring of three."""
    w = 3
    inbox, flags = symmetric("inbox", w, (16,)), symmetric("flags", w, (1,), torch.int32, poisoned=False)

    def arguments(rank: int) -> dict:
        return dict(src=torch.ones(16), inbox=inbox.pointers, flags=flags.pointers, dst=torch.zeros(16), rank=rank, W=w,
                    N=16, SEM=sem, SCOPE="sys", ACQUIRE="acquire", WAIT=True, SHIFT=0)  # fmt: skip

    given = [arguments(rank) for rank in range(w)] if as_list else arguments
    try:
        return run(exchange.ring, 1, given, w, seed=seed, memory=[inbox, flags]), ""
    except SimulationFault as error:
        assert isinstance(error, AssertionError)
        return 0, error.fault.rule


@pytest.mark.parametrize("as_list", [False, True])
def test_run_is_one_schedule_that_its_seed_decides(as_list):
    first = [interpreted(run_ring, "release", seed, as_list) for seed in range(4)]
    assert first == [interpreted(run_ring, "release", seed, as_list) for seed in range(4)]
    assert all(switches > 3 and not rule for switches, rule in first)
    assert len({switches for switches, _ in first}) > 1
    assert interpreted(run_ring, "relaxed", 0, as_list)[1] == "read-write race"


def traces_of(schedule: Schedule) -> list[tuple]:
    return [trace(exchange.ring_run(), schedule)[0] for _ in range(2)]


@pytest.mark.parametrize("strategy", DEFAULT)
def test_a_schedule_is_decided_by_its_seed_down_to_every_access(strategy):
    once, again = interpreted(traces_of, Schedule(strategy, 5, "varying", weak=True, fine=True))
    assert once == again and len(once) > 20


def explore_ring(sem: str, count: int) -> tuple[int, list[int], str]:
    seen: list[int] = []
    outcome = explore(Case("ring", lambda: exchange.ring_run(sem=sem)), count, progress=seen.append)
    if not outcome.passed:
        with pytest.raises(SimulationFault):
            outcome.raise_fault()
    return outcome.schedules, seen, outcome.fault.rule if outcome.fault else ""


def test_explore_runs_all_schedules_of_a_right_kernel_and_stops_at_a_fault():
    assert interpreted(explore_ring, "release", 14) == (14, list(range(1, 15)), "")
    count, seen, rule = interpreted(explore_ring, "relaxed", 14)
    assert rule == "read-write race" and count == len(seen) < 14


def test_schedules_take_every_strategy_with_every_residency_both_weak_and_not():
    made = list(schedules(2 * 4 * len(DEFAULT)))
    assert len({(s.strategy, s.resident, s.weak) for s in made}) == len(made)
    assert [s.seed for s in made] == list(range(len(made)))


def exhaust_ring(sem: str) -> tuple[int, str]:
    outcome = exhaust(Case("ring", lambda: exchange.ring_run(2, sem=sem)), 1)
    return outcome.schedules, outcome.fault.rule if outcome.fault else ""


def test_exhaust_goes_through_all_preemptions_and_finds_a_fault_by_itself():
    count, rule = interpreted(exhaust_ring, "release")
    assert count > 5 and rule == ""
    assert interpreted(exhaust_ring, "relaxed")[1] == "read-write race"


def wrong_values() -> Fault | None:
    """A right ring with a wrong reference: too high by one in rank 2's last six elements."""

    def make() -> Run:
        run = exchange.ring_run()
        dst = [of_rank[0].args["dst"] for of_rank in run.work]
        want = [100.0 * ((r - 1) % 3) + torch.arange(16) for r in range(3)]
        want[2] = want[2] + torch.tensor([0.0] * 10 + [1.0] * 6)
        return Run(run.work, run.memory, lambda: compare("dst", dst, want))

    return explore(Case("ring", make), 4).fault


def test_a_wrong_value_comes_with_its_tensor_index_and_values():
    fault = interpreted(wrong_values)
    assert fault.rule == "wrong value"
    assert fault.mismatch == Mismatch("dst", 2, (10,), wanted="111.0", seen="110.0", count=6)
    assert (fault.wanted, fault.seen) == ("111.0", "110.0")
    differ = "dst of rank 2 [10] and 5 more elements differ from the reference"
    assert fault.message == f"{differ}, the same in every schedule that was tried"


def without_check() -> None:
    run_schedule(exchange.masked_run(5), Schedule(strategy="clever"))


def test_an_unknown_strategy_is_refused_with_those_that_there_are():
    with pytest.raises(Exception, match=r"strategy is 'clever'; it must be one of random"):
        interpreted(without_check)


TEST_FILE = """
from hypothesis import given, settings, strategies as st
from fusedtp.sim import DEFAULT, Schedule, run_schedule
from tests.sim.exchange import ring_run

schedules = st.builds(Schedule, st.sampled_from(DEFAULT), st.integers(0, 99))

@settings(max_examples=20, database=None, derandomize=True, deadline=None)
@given(schedules)
def test_right(schedule):
    run_schedule(ring_run(2), schedule)

@settings(max_examples=20, database=None, derandomize=True, deadline=None)
@given(schedules)
def test_wrong(schedule):
    run_schedule(ring_run(2, sem="relaxed"), schedule)
"""


def plain_pytest(folder: Path) -> str:
    """What pytest prints of the tests in a folder, interpreting, in a process of its own."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": f"{ROOT}:{folder}",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", folder, folder]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=400)
    return done.stdout + done.stderr


def test_hypothesis_draws_and_shrinks_schedules_in_plain_pytest(tmp_path):
    (tmp_path / "test_ring.py").write_text(TEST_FILE)
    printed = plain_pytest(tmp_path)
    assert "1 failed, 1 passed" in printed, printed
    shrunk = re.search(r"test_wrong\(E?schedule=(Schedule\(.*?\))", re.sub(r"\s", "", printed))
    assert shrunk and shrunk[1] == "Schedule('random',0)", printed
