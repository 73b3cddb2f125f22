"""`fusedtp check` on many cases at once: no case affects another's result; exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fusedtp.checks.command import CheckOptions, main, run_case
from fusedtp.checks.workers import (
    CRASHED,
    DIED,
    FAULTY,
    REFUSED,
    Found,
    Part,
    Result,
    find,
    pool,
    run_part,
)
from fusedtp.sim import Fault
from fusedtp.sim.explore import schedules

ROOT = Path(__file__).resolve().parents[2]
VERDICTS = {
    "raises": "raised", "does_not_compile": "refused", "unknown_opcode": "refused", "four_axes": "refused",
    "empty_world": "refused", "reference_raises": "raised", "three_axes": "ok", "assertion_fails": "assertion",
}  # fmt: skip
CASES = "from tests.sim.ptx import user_cases\n" + "".join(
    f"case_{name} = user_cases.case_{name}\n" for name in VERDICTS
)


@pytest.fixture
def file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file in the current folder, importable as a module too. Its first case raises."""
    (tmp_path / "mine_of_many.py").write_text(CASES)
    monkeypatch.chdir(tmp_path)
    return "mine_of_many.py"


@pytest.mark.slow
def test_every_case_has_its_own_result(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--target", "sm_80", "--schedules", "2", "--seconds", "60", "--workers", "1"]
    code = main([file, "nowhere.py", "--module", "mine_of_many:case_three_axes", *words, "--json"])
    made = json.loads(capsys.readouterr().out)
    verdicts = {case["case"]: case["verdict"] for case in made["cases"]}
    wanted = {f"{file}::case_{name}": verdict for name, verdict in VERDICTS.items()}
    assert verdicts == wanted | {"nowhere.py": "refused", "mine_of_many:case_three_axes": "ok"}
    assert code == made["exit_code"] == FAULTY
    by_name = {case["case"].partition("case_")[2]: case for case in made["cases"]}
    fault = by_name["assertion_fails"]["fault"]
    assert "must be positive" in fault["message"] and fault["accesses"][0]["site"]["function"] == "asserts"
    assert "--target sm_80" in by_name["assertion_fails"]["replay"]
    assert "KeyError: 'mine'" in by_name["raises"]["words"] and "only halves" in by_name["does_not_compile"]["words"]
    assert "dp4a" in by_name["unknown_opcode"]["words"]


def test_a_part_ends_with_its_time() -> None:
    """--seconds also ends a running schedule: 500,000 polls would take half a minute."""
    (found,) = find("tests.sim.ptx.user_cases:case_polls_and_stores", None, "sm_80")
    part = run_part(found, list(schedules(3, target="sm_80")), 1.0)
    assert part.late and part.schedules == 0 and part.fault is None
    assert Result(found, 0, 0, 1.0, part).verdict == "out of time"


FAULT = Fault("deadlock", "")


@pytest.mark.parametrize(
    ("found", "part", "verdict", "code"),
    [
        (Found("a", None, 2), Part(3), "ok", 0),
        (Found("a", None, 2), Part(3, fault=FAULT), "deadlock", FAULTY),
        (Found("a", None, 2), Part(1, fault=Fault("assertion", "device_assert")), "assertion", FAULTY),
        (Found("a", None, 2), Part(1, fault=Fault("raised", ""), raised="Traceback"), "raised", CRASHED),
        (Found("a", None, 2, raised="Traceback"), Part(), "raised", CRASHED),
        (Found("a", None, 2, refused="no such file"), Part(), "refused", REFUSED),
        (Found("a", None, 2), Part(refused="brev.b32"), "refused", REFUSED),
        (Found("a", None, 2), Part(late="kernel.py:3"), "out of time", REFUSED),
        (Found("a", None, 2), Part(), "out of time", REFUSED),
    ],
)
def test_exit_codes(found: Found, part: Part, verdict: str, code: int) -> None:
    """A fault, a crash and a refusal differ; a schedule that was cut off does not count if another one ended."""
    result = Result(found, part.schedules, 0, 1.0, part)
    assert (result.verdict, result.code) == (verdict, code)
    assert Result(found, 5, 0, 1.0, Part(5, late="kernel.py:3")).code in (0, REFUSED, CRASHED)
    assert len({0, FAULTY, REFUSED, CRASHED}) == 4


BUILT = """
import os
from tests.sim.ptx import user_cases
def case_first(): return user_cases.case_three_axes()
def case_dies(): os._exit(9)
def case_interrupts(): raise KeyboardInterrupt
def case_last(): return user_cases.case_three_axes()
"""


@pytest.mark.slow
def test_a_case_that_ends_its_process_while_it_is_built_takes_no_other_with_it(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(file).write_text(BUILT)
    code = main([file, "--target", "sm_80", "--schedules", "1", "--workers", "1", "--json"])
    made = json.loads(capsys.readouterr().out)
    by_name = {case["case"].partition("case_")[2]: case for case in made["cases"]}
    assert {name: case["verdict"] for name, case in by_name.items()} == {
        "first": "ok", "dies": "raised", "interrupts": "raised", "last": "ok",
    }  # fmt: skip
    assert code == made["exit_code"] == CRASHED
    assert by_name["dies"]["words"] == f"{file}::case_dies: the process died while building it\n"
    assert "in case_interrupts" in by_name["interrupts"]["words"]


def test_a_case_that_is_never_built_ends_with_its_time(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(file).write_text("def case_spins():\n    while True:\n        pass\n")
    assert main([f"{file}::case_spins", "--seconds", "1", "--workers", "1"]) == REFUSED
    said = f"out of time while building it, at {file}:"
    assert said in capsys.readouterr().err


def die(found: Found, *arguments: Any) -> Part:
    """A worker that kills its process, except for the case called "right"."""
    if found.name != "right":
        os.kill(os.getpid(), signal.SIGKILL)
    return Part(len(arguments[0]))


@pytest.mark.slow
def test_a_worker_that_dies_takes_no_other_case_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusedtp.checks.command.run_part", die)
    options = CheckOptions(schedules=3)
    with pool(1) as workers:
        first, second = (run_case(Found(n, None, 2), options, workers, lambda count: None) for n in ("dies", "right"))
    assert first.part.raised == DIED and first.code == CRASHED
    assert second.verdict == "ok" and second.schedules == 3


KILLED = """
import os, signal, time
from fusedtp.checks.workers import pool
with pool(1) as workers:
    print(workers.submit(os.getpid).result(), flush=True)
    workers.submit(time.sleep, 600)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_workers_end_with_a_command_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        worker = int(command.stdout.readline())
        assert command.wait(60) == -signal.SIGKILL
    for _ in range(100):
        if not Path(f"/proc/{worker}").exists():
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker goes on")


SERVED = """
import multiprocessing, sys
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["triton"])
first = context.Process(target=print)
first.start()
first.join()
from fusedtp.checks.command import main
sys.exit(main(["mine_of_many.py::case_three_axes", "--target=sm_80", "--schedules=1", "--workers=1", "--json"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("interpret", "code"), [("0", 0), ("1", REFUSED)])
def test_a_fork_server_that_the_program_had_before_serves_too(file: str, interpret: str, code: int) -> None:
    """It has already imported Triton; if it was imported to interpret, the check says so."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": interpret}
    done = subprocess.run([sys.executable, "-c", SERVED], capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stderr
    assert ("unset TRITON_INTERPRET before triton is imported" in done.stdout) == (code == REFUSED)
