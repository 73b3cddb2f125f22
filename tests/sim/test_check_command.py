"""`fusedtp check` as users see it: exit codes, the table, reports that replay, every schedule run once."""

from __future__ import annotations

import itertools
import re
import shlex
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusedtp.checks.command import CheckOptions, _parts, lint, main, run_case
from fusedtp.checks.workers import Found, Part
from fusedtp.cli import main as fusedtp
from fusedtp.lint import TARGETS, CompileCase
from fusedtp.sim import Fault, Schedule
from fusedtp.sim.ptx import TARGETS as TARGETS_RUN

CASES = """
from fusedtp.sim import Case
from tests.sim.exchange import *

def case_right(world_size=2): return ring_run(world_size)
def case_relaxed(world_size=2): return ring_run(world_size, sem="relaxed")
def case_unanswered(): return unanswered_run()
def case_raises():
    def check(): raise KeyError("mine")
    return Run(masked_run(5).work, (), check)
object_case = Case("named otherwise", lambda: masked_run(5))
"""


@pytest.fixture
def file(tmp_path, monkeypatch) -> str:
    """A file in the current folder, with a name short enough for one line of the table."""
    (tmp_path / "mine.py").write_text(CASES)
    monkeypatch.chdir(tmp_path)
    return "mine.py"


def check(capsys, *words: Any) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command with one worker."""
    code = main([*map(str, words), "--workers", "1"])
    out, err = capsys.readouterr()
    return code, out, err


def row(out: str, case: str) -> list[str]:
    (line,) = [line for line in out.splitlines() if case in line and line.startswith("│")]
    return [cell.strip() for cell in line.strip("│").split("│")]


@pytest.mark.slow
def test_a_file_is_checked_case_by_case_and_faults_are_reported(file, capsys, tmp_path):
    page = tmp_path / "timeline.html"
    code, out, _ = check(capsys, file, "--schedules", 8, "--timeline", page)
    assert code == 1
    results = {name: row(out, name) for name in ("right", "relaxed", "unanswered", "raises", "object_case")}
    assert [cells[-1] for cells in results.values()] == ["ok", "read-write race", "deadlock", "raised", "ok"]
    assert results["right"][1:3] == ["2", "8"] and results["object_case"][1:3] == ["1", "8"]
    assert "::case_relaxed (sm_90) on 2 ranks" in out and "::case_unanswered (sm_90) on 2 ranks" in out
    assert "::case_right (sm_90) on" not in out
    assert 'raise KeyError("mine")' in out and "Traceback (most recent call last)" in out
    assert "case_relaxed on 2 ranks" in page.read_text()

    commands = [line.strip() for line in out.splitlines() if line.strip().startswith("fusedtp check")]
    assert len(commands) == 3
    relaxed = next(command for command in commands if "relaxed" in command)
    code, again, _ = check(capsys, *shlex.split(relaxed)[2:])

    def found(text: str) -> str:
        return text[text.index("read-write race: ") : text.index("The shortest interleaving")]

    assert code == 1 and found(again) == found(out) and relaxed in again


@pytest.mark.slow
def test_several_world_sizes_of_a_right_case_end_with_zero(file, capsys):
    code, out, _ = check(capsys, f"{file}::case_right", "--world-size", 2, 3, "--schedules", 6)
    assert code == 0
    rows = [line.split("│") for line in out.splitlines() if "case_right" in line]
    assert [cells[2].strip() for cells in rows] == ["2", "3"] and "Replay" not in out


@pytest.mark.slow
def test_exhaust_goes_through_small_cases_and_is_replayed_by_itself(file, capsys):
    words = (f"{file}::case_relaxed", "--exhaust", 1, "--resident", "all", "--weak", "no")
    code, out, _ = check(capsys, *words)
    assert code == 1 and "read-write race" in row(out, "case_relaxed")[-1]
    assert f"fusedtp check {file}::case_relaxed --exhaust 1 --target sm_90" in out


@pytest.mark.slow
def test_exhaust_says_that_its_limit_left_schedules_out(file, capsys):
    """It found nothing, but did not check everything."""
    words = (f"{file}::case_right", "--exhaust", 1, "--resident", "all", "--weak", "no", "--world-size", 2)
    code, out, _ = check(capsys, *words, "--schedules", 3)
    assert code == 2 and row(out, "case_right")[-1] == "not all"
    assert re.search(r"stopped at the limit of --schedules; at least \d+ more schedules are left", out)
    code, out, _ = check(capsys, *words)
    assert code == 0 and row(out, "case_right")[-1] == "ok"


@pytest.mark.slow
def test_lint_compiles_the_same_case_for_every_target(file, capsys):
    code, out, _ = check(capsys, f"{file}::case_right", "--schedules", 2, "--lint")
    assert code == 0 and row(out, "case_right")[-1] == "ok"
    compiled = [words for line in out.splitlines() if (words := line.replace("│", " ").split())[:1]]
    assert {words[0] for words in compiled if words[0] in TARGETS and words[-1] == "ok"} == set(TARGETS)


def test_the_lint_compiles_cases_of_files_and_modules_with_their_world_size(monkeypatch):
    """Even if a kernel has the name of one of the library's."""
    asked = [("mine:case_x", None), ("mine.py::case_x", None), ("mine.py::case_x", 3), ("mine.py::case_x", 5)]
    found = [Found(name, size, size or 2, ("meet_kernel",)) for name, size in asked]
    compiled: list[CompileCase] = []
    monkeypatch.setattr("fusedtp.checks.lint.check", None)
    monkeypatch.setattr("fusedtp.lint.check_cases", lambda cases, done: compiled.extend(cases) or [])
    assert lint(found, lambda: None)[0]
    assert [each.make.args for each in compiled if each.target == "sm_90"] == asked
    assert [each.config for each in compiled if each.target == "sm_90"] == ["", "", "3 ranks", "5 ranks"]


@pytest.mark.slow
def test_a_fused_kernel_goes_by_its_name_and_by_target(capsys):
    code, out, _ = check(capsys, "moe_dispatch", "--world-size", 2, "--schedules", 2, "--target", "sm_80", "sm_90")
    assert code == 0
    for target in TARGETS_RUN:
        assert row(out, f"moe_dispatch ({target})")[1:3] == ["2", "2"]


@pytest.mark.slow
def test_workers_compile_though_the_caller_interprets(file, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code, out, _ = check(capsys, f"{file}::case_right", "--schedules", 1)
    assert code == 0 and row(out, "case_right")[-1] == "ok"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--strategies", "clever"], "--strategies 'clever' must be one of random, pct"),
        (["--resident", "0"], "--resident '0' must be all, varying or at least 1"),
        (["--schedules", "0"], "--schedules 0 is too small"),
        (["--seconds", "-1"], "--seconds -1.0 is too small"),
        (["--seconds", "nan"], "--seconds nan is too small"),
        (["--world-size", "0"], "--world-size 0 must be at least 1"),
        (["--target", "sm_70"], "--target 'sm_70' must be one of sm_80, sm_90"),
        (["--timeline", "/no/such/folder/x.html"], "no such folder"),
        (["--timeline", "."], "--timeline . is a folder; name a file"),
        (["--exhaust", "1", "--seconds", "5"], "--seconds does not limit --exhaust; use --schedules"),
    ],
)
def test_wrong_options_are_said_in_one_line_before_anything_starts(words, said, capsys):
    code = fusedtp(["check", *words])
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and len(err.splitlines()) == 1 and said in err


def test_what_cannot_be_checked_ends_with_two_and_one_line(capsys):
    code, out, err = check(capsys, "nowhere.py")
    assert code == 2 and out == "" and err == "fusedtp check: error: no such file: nowhere.py\n"


@pytest.mark.slow
@given(
    st.integers(1, 400),
    st.integers(1, 16),
    st.integers(0, 1000),
    st.sampled_from([(), ("1",), ("all", "varying")]),
    st.sampled_from(["no", "yes", "both"]),
)
def test_every_schedule_is_run_once_whatever_the_number_of_workers(count, workers, seed, resident, weak):
    options = CheckOptions(schedules=count, seed=seed, resident=resident, weak=weak)
    run = [schedule for _, part in _parts(options, workers, "sm_90") for schedule in part]
    assert run == list(itertools.islice(options.chosen(), count))
    assert [schedule.seed for schedule in run] == list(range(seed, seed + count))


class Workers:
    """Finishes parts in a random order; a part shows a fault if one of its seeds is faulty."""

    def __init__(self, workers: int, faulty: set[int], draw) -> None:
        self.workers, self.faulty, self.draw = workers, faulty, draw
        self.waiting: list[tuple[Future[Part], tuple[Schedule, ...]]] = []

    def submit(self, function, found, schedules, seconds) -> Future[Part]:
        future: Future[Part] = Future()
        self.waiting.append((future, schedules))
        if len(self.waiting) == self.workers:
            self.finish(self.draw(st.integers(0, len(self.waiting) - 1)))
        return future

    def finish(self, index: int) -> None:
        future, schedules = self.waiting.pop(index)
        seeds = [schedule.seed for schedule in schedules if schedule.seed in self.faulty]
        fault = Fault("deadlock", "", seed=seeds[0]) if seeds else None
        future.set_result(Part(len(schedules), 0, fault))


@pytest.mark.slow
@given(st.data(), st.integers(1, 4), st.sets(st.integers(0, 150), min_size=1, max_size=5))
def test_the_reported_fault_is_the_earliest_however_workers_finish(data, workers, faulty):
    pool = Workers(workers, faulty, data.draw)

    def waits(futures, return_when):
        """Like concurrent.futures.wait: at least one is done."""
        if not any(future.done() for future in futures):
            pool.finish(data.draw(st.integers(0, len(pool.waiting) - 1)))
        return type("Done", (), {"done": [future for future in futures if future.done()]})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusedtp.checks.command.wait", waits)
        result = run_case(Found("case", None, 2), CheckOptions(schedules=200), pool, lambda count: None)
    assert result.part.fault is not None and result.part.fault.seed == min(faulty)
