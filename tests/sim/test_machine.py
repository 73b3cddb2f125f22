"""Schedules of small kernels: correct ones pass all of them, each fault is found by its rule and named."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.checks.workers import case_of
from fusedtp.sim import (
    Case,
    Fault,
    Launch,
    Run,
    Schedule,
    SimulationFault,
    exhaust,
    explore,
    run_schedule,
    symmetric,
)
from fusedtp.sim.explore import compiler_for
from fusedtp.sim.explore import schedules as schedules_of
from fusedtp.sim.ptx import TARGETS
from tests.sim import exchange

pytestmark = pytest.mark.usefixtures("impatient")


def fault_of(maker: str, options: dict, schedule: Schedule) -> Fault | None:
    try:
        run_schedule(getattr(exchange, maker)(**options), schedule)
    except SimulationFault as error:
        return error.fault
    return None


def found(maker: str, target: str = "sm_90", **options) -> Fault | None:
    """The fault that exploring finds."""
    case = Case(maker, lambda: getattr(exchange, maker)(**options))
    return explore(case, schedules_of(48, target=target)).fault


@pytest.mark.slow
@settings(max_examples=50)
@given(exchange.schedules(*TARGETS), st.integers(1, 5))
def test_a_correct_exchange_passes_every_schedule(schedule, world_size):
    assert fault_of("ring_run", {"world_size": world_size}, schedule) is None


@pytest.mark.slow
@settings(max_examples=20)
@given(exchange.schedules(*TARGETS))
@pytest.mark.parametrize("maker", ["streams_run", "launches_run", "barrier_run", "masked_run", "lock_run"])
def test_correct_streams_barriers_masks_and_locks_pass(maker, schedule):
    options = {"masked_run": {"n": 5}, "lock_run": {"scope": "gpu", "ranks": 1}}.get(maker, {})
    if maker == "barrier_run":  # wants all of its programs alive
        schedule = Schedule(schedule.strategy, schedule.seed, None, schedule.weak, schedule.fine)
    assert fault_of(maker, options, schedule) is None


@pytest.mark.parametrize(
    "change", [{"sem": "relaxed"}, {"acquire": "relaxed"}, {"scope": "gpu"}, {"scope": "cta"}], ids=str
)
def test_a_weakened_signal_is_a_race_of_the_data(change):
    fault = found("ring_run", **change)
    if change.get("scope"):
        assert fault.rule == "scope" and all("flags" in a.tensor for a in fault.accesses)
        return
    store, load = fault.accesses
    assert fault.rule == "read-write race"
    assert store.what == "store" and load.what == "load" and store.rank == (load.rank - 1) % 3
    assert load.tensor == f"inbox of rank {load.rank}" and (load.first, load.last) == ((0,), (15,))
    assert store.site.function == load.site.function == "ring" and store.site.line < load.site.line


def test_a_missing_wait_is_found():
    fault = found("ring_run", wait=False)
    assert fault.rule in ("read-write race", "never written") and "inbox" in fault.accesses[-1].tensor


def test_symmetric_tensors_keep_their_distance():
    """An access past the end of one does not land in another."""
    tensors = [t for dtype in (torch.int8, torch.float32) for t in symmetric("inbox", 4, (3,), dtype).tensors]
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    assert all(begin - end >= 1 << 16 for (_, end), (begin, _) in pairwise(spans))


@pytest.mark.parametrize("shift", [1, 16, 1000, -1000])
def test_a_store_past_the_end_is_named_with_its_distance(shift):
    fault = found("ring_run", shift=shift)
    assert fault.rule == "out of bounds"
    assert ("past the end of inbox" if shift > 0 else "bytes before inbox") in fault.message


def test_a_fault_in_a_helper_of_a_kernel_keeps_its_rule_and_its_lines():
    fault = found("helper_run", i=4)
    assert fault.rule == "out of bounds" and fault.accesses[0].site.function == "store_at"
    site = fault.accesses[0].site
    assert site.kernel_line > site.line if tells_calls() else site.kernel_line == site.line


def tells_calls() -> bool:
    """Whether the compiled line table contains calls: Triton 3.6's and 3.7's have only the helper's line."""
    return any("inlined_at" in text for text, *_ in compiler_for("sm_90")._made.values())


@triton.jit
def stores_by_another_file(x):
    exchange.store_at(x, 4)


def site_words(folder: str) -> tuple[Fault, str]:
    """The fault of a store past the end, and the words for its site in this folder."""
    run = Run([[Launch(stores_by_another_file, 1, dict(x=torch.zeros(4)))]])
    before = os.getcwd()
    with pytest.raises(SimulationFault) as raised:
        run_schedule(run, Schedule())
    try:
        os.chdir(folder)
        return raised.value.fault, str(raised.value.fault.accesses[0].site)
    finally:
        os.chdir(before)


def test_the_same_text_in_two_files_is_named_by_its_own(tmp_path):
    """Even though Triton's cache takes the second kernel for the first."""
    for name in ("one.py", "two.py"):
        path = tmp_path / name
        path.write_text(
            "import torch, triton\nimport triton.language as tl\nfrom fusedtp.sim import Launch, Run\n"
            "@triton.jit\ndef kernel(x):\n    tl.store(x + 1, 1.0)\n"
            "def case_past(): return Run([[Launch(kernel, 1, dict(x=torch.zeros(1)))]], (), lambda: ())\n"
        )
        with pytest.raises(SimulationFault) as raised:
            run_schedule(case_of(f"{path}::case_past").make(), Schedule())
        assert raised.value.fault.accesses[0].site.file == str(path)


def line_with(file: Path, text: str) -> int:
    return 1 + next(i for i, line in enumerate(file.read_text().splitlines()) if text in line)


def test_a_fault_in_a_helper_of_another_file_names_both_files_relative_to_the_current_folder():
    helper, kernel = Path(exchange.__file__), Path(__file__)
    inner, outer = line_with(helper, "tl.store(x + i"), line_with(kernel, "exchange.store_at(x, 4)")
    fault, words = site_words(str(helper.parents[1]))
    site = fault.accesses[0].site
    calls = tells_calls()
    place = (str(kernel), outer) if calls else (str(helper), inner)
    assert (site.file, site.line, site.kernel_place) == (str(helper), inner, place)

    def said(helper: object, kernel: object) -> str:
        return f"{helper}:{inner} in store_at" + (f", called at {kernel}:{outer}" if calls else "")

    assert words == said("sim/exchange.py", "sim/test_machine.py")
    _, words = site_words("/")
    assert words == said(str(helper)[1:], str(kernel)[1:])
    _, words = site_words(str(Path(__file__).parents[2] / "docs"))
    assert words == said(helper, kernel)


def test_a_table_of_addresses_is_told_from_the_memory_of_its_name():
    fault = found("table_run")
    assert fault.rule == "read-write race"
    assert {access.tensor for access in fault.accesses} == {"inbox (table of inbox) of rank 0"}
    fault = found("ring_run", shift=1)
    assert re.search(r"past the end of inbox of rank \d$", fault.message)


def test_loads_and_stores_by_descriptors_are_accesses():
    assert found("descriptor_run", "sm_80", peer=0) is None
    fault = found("descriptor_run", "sm_80", peer=1)
    assert fault.rule == "read-write race"
    assert {a.what for a in fault.accesses} == {"load", "store"}
    assert {a.tensor for a in fault.accesses} == {"y of rank 0"}


@pytest.mark.parametrize("n", [6, 8])
def test_lanes_beyond_the_tensor_are_accesses_unless_masked(n):
    assert found("masked_run", n=n).rule == "out of bounds"


def test_a_wait_that_nobody_answers_is_a_deadlock_that_names_the_flag():
    fault = found("unanswered_run")
    (wait,) = fault.waits
    assert fault.rule == "deadlock" and (wait.rank, wait.index, wait.seen) == (1, (2,), "1")
    assert wait.tensor == "flags of rank 1" and "rank 0, signal" in wait.last_writer


def test_programs_that_wait_for_ones_that_cannot_start_are_a_deadlock():
    assert fault_of("barrier_run", {}, Schedule(resident=3)) is None
    fault = fault_of("barrier_run", {}, Schedule(resident=2))
    assert fault.rule == "deadlock" and "1 programs of rank 0 (at most 2 resident)" in fault.message


@pytest.mark.parametrize("options", [{"second": "copies"}, {"awaited": False}], ids=str)
def test_streams_are_ordered_only_within_and_by_flags(options):
    fault = found("streams_run", **options)
    assert fault.rule == "read-write race" and any("copy" in a.what for a in fault.accesses)


def test_launches_are_ordered_on_one_stream_only():
    assert found("launches_run", second="other").rule == "read-write race"


def test_a_memory_that_the_run_does_not_name_is_pointed_out():
    """Not for an access that overshoots by a few bytes."""
    run = exchange.ring_run(2)
    fault = explore(Case("ring", lambda: replace(run, memory=())), 1).fault
    assert fault.rule == "out of bounds" and re.search(r"in no memory of the run: Run\(memory=", fault.message)
    assert "in no memory" not in found("ring_run", shift=1).message


def test_the_cause_of_a_race_of_two_launches_is_not_in_one_program():
    """Both accesses are by program 0 of the same kernel."""
    fault = found("launches_run", second="other", n=1)
    assert fault.rule == "read-write race" and fault.cause.startswith(
        "the accesses are in launches on different streams"
    )


@pytest.mark.slow
def test_a_lock_of_device_scope_does_not_hold_across_devices():
    assert found("lock_run", scope="sys", ranks=3) is None
    assert found("lock_run", scope="gpu", ranks=3).rule == "scope"


@pytest.mark.slow
@settings(max_examples=15)
@given(exchange.schedules(*TARGETS))
def test_a_schedule_is_decided_by_its_seed(schedule):
    first, again = (fault_of("ring_run", {"sem": "relaxed"}, schedule) for _ in range(2))
    assert first == again


def replayed() -> tuple[Fault, Fault]:
    case = Case("ring", lambda: exchange.ring_run(acquire="relaxed"))
    fault = explore(case, 60).fault
    again = fault_of("ring_run", {"acquire": "relaxed"}, Schedule(fault.strategy, fault.seed, None))
    return fault, again


def test_the_reported_seed_replays_the_fault_and_the_trace_is_kept():
    fault, again = replayed()
    assert fault.name == again.name and fault.switches == again.switches
    assert [m.what for m in fault.trace].count("starts") >= 2


def exhausted(options: dict, preemptions: int) -> tuple[int, str | None]:
    outcome = exhaust(Case("ring", lambda: exchange.ring_run(2, **options)), preemptions)
    return outcome.schedules, outcome.fault and outcome.fault.rule


def test_every_schedule_of_a_small_case():
    none, one = (exhausted({}, preemptions) for preemptions in (0, 1))
    assert none[1] is one[1] is None and 2 <= none[0] < one[0]
    assert exhausted({"wait": False}, 1)[1] is not None


def test_every_schedule_of_a_small_case_but_for_those_beyond_a_limit():
    case = Case("ring", lambda: exchange.ring_run(2))
    count = exhaust(case, 1).schedules
    assert [exhaust(case, 1, limit=limit).left > 0 for limit in (1, count - 1, count)] == [True, True, False]
