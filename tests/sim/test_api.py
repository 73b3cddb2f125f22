"""`run`, `explore` and `exhaust` from ordinary Python: arguments, results and exceptions, the same every time."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpretedFunction

from fusedtp.sim import (
    DEFAULT,
    Case,
    Fault,
    Launch,
    Mismatch,
    Run,
    Schedule,
    SimulationFault,
    UnsupportedKernel,
    compare,
    exhaust,
    explore,
    run,
    run_schedule,
    symmetric,
)
from fusedtp.sim.explore import schedules, trace
from tests.sim import exchange


def run_ring(sem: str, seed: int, as_list: bool) -> tuple[int, str]:
    """Number of switches and the rule of the fault, if any, of one `run` of a ring of three."""
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
    first = [run_ring("release", seed, as_list) for seed in range(4)]
    assert first == [run_ring("release", seed, as_list) for seed in range(4)]
    assert all(switches > 3 and not rule for switches, rule in first)
    assert len({switches for switches, _ in first}) > 1
    assert run_ring("relaxed", 0, as_list)[1] == "read-write race"


def traces_of(schedule: Schedule) -> list[tuple]:
    return [trace(exchange.ring_run(), schedule)[0] for _ in range(2)]


@pytest.mark.parametrize("strategy", DEFAULT)
def test_a_schedule_is_decided_by_its_seed_down_to_every_access(strategy):
    once, again = traces_of(Schedule(strategy, 5, "varying", weak=True, fine=True))
    assert once == again and len(once) > 20


def explore_ring(sem: str, count: int) -> tuple[int, list[int], str]:
    seen: list[int] = []
    outcome = explore(Case("ring", lambda: exchange.ring_run(sem=sem)), count, progress=seen.append)
    if not outcome.passed:
        with pytest.raises(SimulationFault):
            outcome.raise_fault()
    return outcome.schedules, seen, outcome.fault.rule if outcome.fault else ""


def test_explore_runs_all_schedules_of_a_right_kernel_and_stops_at_a_fault():
    assert explore_ring("release", 14) == (14, list(range(1, 15)), "")
    count, seen, rule = explore_ring("relaxed", 14)
    assert rule == "read-write race" and count == len(seen) < 14


def test_schedules_take_every_strategy_with_every_residency_weak_or_not_by_warp_or_not():
    made = list(schedules(12 * 4 * len(DEFAULT)))
    kinds = {(s.strategy, s.resident, s.weak, s.fine) for s in made}
    assert len(kinds) == 4 * len(DEFAULT) * 2 * 2
    assert sum(s.weak for s in made) == 3 / 4 * len(made) and sum(s.fine for s in made) == len(made) / 3
    assert [s.seed for s in made] == list(range(len(made)))


def exhaust_ring(sem: str) -> tuple[int, str]:
    outcome = exhaust(Case("ring", lambda: exchange.ring_run(2, sem=sem)), 1)
    return outcome.schedules, outcome.fault.rule if outcome.fault else ""


def test_exhaust_goes_through_all_preemptions_and_finds_a_fault_by_itself():
    count, rule = exhaust_ring("release")
    assert count > 5 and rule == ""
    assert exhaust_ring("relaxed")[1] == "read-write race"


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
    fault = wrong_values()
    assert fault.rule == "wrong value"
    assert fault.mismatch == Mismatch("dst", 2, (10,), wanted="111.0", seen="110.0", count=6)
    assert (fault.mismatch.wanted, fault.mismatch.seen) == ("111.0", "110.0")
    differ = "dst of rank 2 [10] and 5 more elements differ from the reference"
    assert fault.message == f"{differ}, the same in every schedule that was tried"


drawn = st.builds(Schedule, st.sampled_from(DEFAULT), st.integers(0, 99))


@settings(max_examples=20, database=None, derandomize=True)
@given(drawn)
def test_hypothesis_draws_schedules_that_a_right_kernel_passes(schedule):
    run_schedule(exchange.ring_run(2), schedule)


@settings(max_examples=20, database=None, derandomize=True, phases=[Phase.generate, Phase.shrink])
@given(drawn)
def relaxed(schedule):
    run_schedule(exchange.ring_run(2, sem="relaxed"), schedule)


def test_hypothesis_shrinks_schedules():
    with pytest.raises(SimulationFault) as raised:
        relaxed()
    (shown,) = [note for note in raised.value.__notes__ if "schedule=" in note]
    assert re.search(r"schedule=(Schedule\(.*?\))", re.sub(r"\s", "", shown))[1] == "Schedule('random',0)"


def test_interpreted_kernels_are_refused_with_what_to_do():
    words = "'kernel' was decorated for Triton's interpreter, .* unset TRITON_INTERPRET before triton is imported"
    with pytest.raises(UnsupportedKernel, match=words):
        run_schedule(Run([[Launch(InterpretedFunction(kernel), 1, {})]]), Schedule())


def kernel():
    pass


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (dict(strategy="clever"), "strategy is 'clever'; it must be one of random"),
        (dict(target="sm_70"), "target is 'sm_70'; it must be one of sm_80, sm_90"),
        (dict(resident=0), "resident is 0; it must be None, 'varying' or at least 1"),
        (dict(resident="some"), "resident is 'some'; it must be None"),
    ],
)
def test_a_schedule_that_there_is_not_is_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        Schedule(**wrong)
