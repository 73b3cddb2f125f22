"""Kernels as users write and launch them, run as Triton compiles them: right ones pass, wrong ones are found."""

from __future__ import annotations

import gc
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from fusedtp.checks.workers import case_of, names_of
from fusedtp.limits import OutOfTime, time_limit
from fusedtp.sim import (
    Await,
    Case,
    Copy,
    Fault,
    Outcome,
    Run,
    Schedule,
    Signal,
    SimulationFault,
    UnsupportedKernel,
    compare,
    explore,
)
from fusedtp.sim.explore import schedules
from fusedtp.sim.report import report
from fusedtp.sim.testing import assert_no_finding
from tests.sim.ptx import gluon_cases
from tests.sim.ptx import user_cases as cases

BOTH = ("sm_80", "sm_90")


def tried(make: Callable[[], Run], count: int = 4, target: str = "sm_90", seconds: float | None = None) -> Outcome:
    chosen = list(schedules(count, target=target))
    return explore(Case("user", make), chosen, seconds=seconds)


def fault_of(make: Callable[[], Run], **options: Any) -> Fault:
    outcome = tried(make, **options)
    assert outcome.fault is not None
    return outcome.fault


RIGHT: dict[str, tuple[Callable[[], Run], int]] = {
    "three axes, a nested function": (cases.case_three_axes, 1),
    "bf16 sums": (cases.case_sums_in_bf16, 1),
    "bf16 dot": (cases.case_dot_in_bf16, 1),
    "dot into fp16": (cases.case_products_in_fp16, 1),
    "exchange of fp32": (cases.case_exchange_of_fp32, 2),
    "atomic add of bf16": (cases.case_atomic_add_of_bf16, 2),
    "an assertion that holds": (cases.case_assertion_holds, 1),
    "ranks without work": (cases.case_ranks_without_work, 6),
    "relaxed polls": (lambda: cases.message(cases.by_relaxed_polls), 12),
    "volatile polls": (lambda: cases.message(cases.by_volatile_polls), 12),
    "bounded polls": (lambda: cases.message(cases.by_bounded_polls), 12),
    "inline PTX": (lambda: cases.message(cases.by_inline_ptx), 12),
    "noinline": (lambda: cases.message(cases.by_noinline), 12),
    "Gluon": (lambda: cases.message(gluon_cases.by_gluon), 12),
    "putmem_signal": (lambda: cases.shmem(cases.puts), 6),
    "getmem": (lambda: cases.shmem(cases.gets), 6),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels_pass(name: str) -> None:
    make, count = RIGHT[name]
    outcome = tried(make, count)
    assert outcome.fault is None, report(outcome.fault)
    assert outcome.schedules == count


def test_an_acquire_whose_value_nothing_uses() -> None:
    """Triton 3.7 removes it from the compiled code, 3.9 does not; other versions are not tested."""
    fault = tried(lambda: cases.message(cases.by_unused_acquire), 12).fault
    removed = {"3.7": True, "3.9": False}.get(triton.__version__[:3])
    assert removed is None or removed == (fault is not None)
    assert fault is None or "does not acquire what it saw" in fault.cause


@pytest.mark.parametrize("target", BOTH)
def test_descriptors(target: str) -> None:
    """TMA copies on sm_90; addresses computed from the descriptor on sm_80."""
    assert tried(cases.case_descriptors, 2, target).passed


# -- launches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [32, 29])
def test_autotune_and_heuristics_choose_as_in_a_launch(n: int) -> None:
    """Each config in turn, all right; they determine the grid and EVEN."""
    outcome = tried(lambda: cases.case_tuned(n), 6)
    assert outcome.fault is None, report(outcome.fault)


def test_a_config_that_is_wrong_is_found_and_named() -> None:
    """The schedule's seed chooses the config, so its replay has the same one."""
    seen = []
    for seed in range(2):
        outcome = explore(Case("one", cases.case_wrong_in_one_config), [Schedule("random", seed, target="sm_80")])
        seen.append(outcome.fault)
    assert seen[0] is None and seen[1] is not None and seen[1].rule == "wrong value"
    named = explore(Case("named", lambda: cases.case_tuned(config=2)), [Schedule("random", 0, target="sm_80")])
    assert named.passed


REFUSED = {
    "no axes": (cases.case_no_axes, r"the grid of 'three_axes' has 0 dimensions: \(\); it must have 1 to 3"),
    "four axes": (cases.case_four_axes, r"has 4 dimensions: \(1, 1, 1, 1\)"),
    "a grid of words": (cases.case_grid_of_words, r"is \('many',\); it must be 1 to 3 integers"),
    "unknown argument": (cases.case_unknown_argument, r"'three_axes' has no argument L; it has out, K"),
    "missing argument": (cases.case_missing_argument, r"'three_axes' is launched without K"),
    "a plain function": (cases.case_plain_function, r"'undecorated' is a plain function: decorate it with triton.jit"),
    "does not compile": (cases.case_does_not_compile, r"(?s)does not compile for sm_90: .*only halves"),
    "unknown opcode": (cases.case_unknown_opcode, r"(?s)not know `dp4a.s32.s32`.*user_cases.py:\d+ in unknown"),
    "extern call": (cases.case_extern_call, r"(?s)a call of their_put; pass replace= to give a device"),
    "empty world": (cases.case_empty_world, r"the run has no ranks"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_in_words(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        tried(make, 1)


# -- faults ------------------------------------------------------------------------------------------------------------


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(open(cases.__file__).read().splitlines(), 1) if text in line)


def lines(fault: Fault) -> set[int]:
    return {each.site.line for each in fault.accesses} | {each.site.line for each in fault.waits}


def test_an_assertion_that_fails_is_a_fault_with_its_words() -> None:
    fault = fault_of(cases.case_assertion_fails, count=1)
    assert fault.rule == "assertion" and "device_assert: must be positive" in fault.message
    line = line_of('tl.device_assert(got > 0, "must')
    assert lines(fault) <= {line, line + 1}


def test_a_false_assumption_can_be_checked() -> None:
    """It changes nothing here; as an assertion it fails."""
    assert tried(cases.case_false_assumption, 1).passed
    fault = fault_of(lambda: cases.case_false_assumption({tl.assume: tl.device_assert}), count=1)
    assert fault.rule == "assertion"
    (access,) = fault.accesses
    assert access.launch == "assumes" and access.program == 0
    assert line_of("tl.assume(pid > 0)") <= access.site.kernel_line <= line_of("tl.assume(pid > 0)") + 1


def test_an_address_outside_all_memory_is_out_of_bounds() -> None:
    fault = fault_of(cases.case_address_outside_all_memory, count=1)
    line = line_of("tl.load(address.to")
    assert fault.rule == "out of bounds" and lines(fault) == {line}


def test_a_wrong_value_of_every_schedule_is_told_without_an_interleaving() -> None:
    fault = fault_of(cases.case_wrong_in_every_schedule)
    assert fault.rule == "wrong value" and "the same in every schedule" in fault.message
    assert "interleaving" not in report(fault)


def test_a_missing_acquire_is_found() -> None:
    fault = fault_of(lambda: cases.message(cases.without_acquire), count=30)
    assert fault.rule in ("wrong value", "never written", "read-write race")


@pytest.mark.parametrize("kernel", [cases.by_noinline, gluon_cases.by_gluon])
def test_a_missing_release_is_found(kernel: Any) -> None:
    fault = fault_of(lambda: cases.message(kernel, {"SEM": "relaxed"}), count=12)
    assert fault.rule == "read-write race" and "does not release what came before it" in fault.cause


def test_a_wait_on_plain_loads_is_none() -> None:
    """Triton 3.9 removes the loop, because nothing uses the loaded value."""
    fault = fault_of(lambda: cases.message(cases.by_plain_polls), count=30)
    assert fault.rule in ("wrong value", "never written", "read-write race")


def test_a_put_without_order_is_found() -> None:
    """The signal is sent separately: the data may arrive later."""
    fault = fault_of(lambda: cases.shmem(cases.puts, signal=False), count=30)
    assert fault.rule in ("wrong value", "never written", "read-write race")


# -- nothing hangs -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.ENDLESS)
def test_a_loop_without_end_ends_with_the_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the schedule itself and in the search for a shorter one, even if no step limit is reached."""
    monkeypatch.setattr("fusedtp.sim.ptx.program.MOST_INSTRUCTIONS", 1 << 60)
    monkeypatch.setattr("fusedtp.sim.ptx.machine.MOST_TURNS", 1 << 60)
    monkeypatch.setattr(sys.modules["fusedtp.sim.explore"], "SHRINK_SECONDS", 0.5)
    for seconds in (1.5, 15):  # compiling is a part of them, and on a busy machine may take all
        begin = time.monotonic()
        outcome = tried(lambda: cases.endless(name), seconds=seconds)
        assert time.monotonic() - begin < seconds + 20
        if outcome.late != "before its kernels ran":
            break
    assert not outcome.passed
    if outcome.fault is None:
        assert f"in {name}" in outcome.late


@pytest.mark.slow
def test_a_fault_keeps_its_interleaving_where_the_search_for_a_shorter_one_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["fusedtp.sim.explore"], "SHRINK_SCHEDULES", 1 << 20)
    monkeypatch.setattr(sys.modules["fusedtp.sim.explore"], "SHRINK_SECONDS", 8.0)
    fault = fault_of(lambda: cases.shmem(cases.puts, signal=False), count=30)
    assert fault.trace


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_limit_holds_where_its_first_interrupt_is_lost() -> None:
    """Python drops exceptions raised in a callback of its garbage collector."""
    begin = time.monotonic()
    gc.callbacks.append(lambda phase, info: time.sleep(0.2))
    try:
        with pytest.raises(OutOfTime), time_limit(0.1):
            gc.collect()
            while time.monotonic() < begin + 10:
                pass
    finally:
        gc.callbacks.pop()


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.ENDLESS)
def test_a_loop_without_end_reaches_the_step_limit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusedtp.sim.ptx.program.MOST_INSTRUCTIONS", 20_000)
    monkeypatch.setattr("fusedtp.sim.ptx.machine.MOST_TURNS", 2_000)
    monkeypatch.setattr(sys.modules["fusedtp.sim.explore"], "SHRINK_SECONDS", 0.5)
    fault = fault_of(lambda: cases.endless(name), seconds=20)
    assert fault.rule == "no progress"
    assert "user_cases.py" in str(fault)


@pytest.mark.slow
def test_who_counts_while_it_waits_for_nobody_is_in_a_deadlock() -> None:
    fault = fault_of(lambda: cases.endless("polls_and_counts"), count=1)
    assert fault.rule == "deadlock" and fault.waits[0].tensor == "flag of rank 0"


# -- in a test ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_entry_for_tests_raises_what_the_command_would_print() -> None:
    assert_no_finding(cases.case_three_axes, schedules=1)
    with pytest.raises(SimulationFault, match=r"(?s)assertion: .*must be positive.*Replay"):
        assert_no_finding(cases.case_assertion_fails, schedules=1)
    with pytest.raises(KeyError, match="mine"):
        assert_no_finding(cases.case_raises)
    with pytest.raises(KeyError, match="my reference"):
        assert_no_finding(cases.case_reference_raises, schedules=1)
    with pytest.raises(UnsupportedKernel, match="plain function"):
        assert_no_finding(cases.case_plain_function)
    for seconds in (4, 40):  # compiling is a part of them
        with pytest.raises(AssertionError, match=rf"no schedule ended in {seconds} s; the first stopped at ") as told:
            assert_no_finding(cases.case_polls_and_stores, seconds=seconds, targets="sm_80")
        if "before its kernels ran" not in str(told.value):
            break
    assert "polls_and_stores" in str(told.value)


def test_a_finding_in_a_test_gives_a_command_that_finds_its_case() -> None:
    with pytest.raises(SimulationFault) as told:
        assert_no_finding(cases.case_assertion_fails, schedules=1, targets="sm_90")
    command = next(line for line in str(told.value).splitlines() if "fusedtp check" in line)
    name = shlex.split(command)[2]
    assert names_of(name) == [name] and case_of(name).name == name

    with pytest.raises(SimulationFault) as told:
        assert_no_finding(partial(cases.case_assertion_fails), schedules=1, targets="sm_90")
    assert "fusedtp check" not in str(told.value) and "run_schedule(" in str(told.value)


@pytest.mark.parametrize(
    ("by", "value", "ends", "goes_on"),
    [
        (">=", 3, (3, 4, 3 + (1 << 30)), (2, -5)),
        (">=", (1 << 31) - 1, (-(1 << 31),), (5,)),  # the flag has gone round
        ("==", 3, (3,), (2, 4)),
        ("!=", 3, (2, 4), (3,)),
        ("&", 6, (2, 4, 7), (0, 1, 8)),
        ("nor", -2, (0, 2), (1, 3)),
    ],
)
def test_streams_wait_by_any_comparison(by: str, value: int, ends: tuple[int, ...], goes_on: tuple[int, ...]) -> None:
    wait = Await(torch.zeros(1, dtype=torch.int32), value, by=by)
    assert all(wait.over(seen) for seen in ends) and not any(wait.over(seen) for seen in goes_on)


@pytest.mark.slow
def test_a_wait_that_is_over_lets_the_stream_go_on() -> None:
    """With ==, a flag that is set and reset. A value that never comes is a deadlock that names the flag."""

    def waiting(value: int) -> Run:
        flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1)
        work = [Signal(flag, 5), Await(flag, value, "1", "=="), Copy(out, torch.ones(1), stream="1")]
        return Run([work], (), lambda: compare("out", [out], [torch.ones(1)]))

    assert tried(lambda: waiting(5), 6).passed
    assert fault_of(lambda: waiting(4), count=1).rule == "deadlock"
