"""A run of tests resumes with those that have not passed, if the code is the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import os, pathlib, pytest
ran = pathlib.Path(__file__).with_name("ran")
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_of(name):
    with ran.open("a") as file:
        file.write(name)
    if name == os.environ.get("FAILS"):
        assert False
    if name == os.environ.get("ENDS"):
        os._exit(1)
"""


def run(folder: Path, commit: str, *options: str, **environment: str) -> tuple[int, str]:
    """The exit code, and the tests that ran, in order (sorted for several processes). Failures are printed at once."""
    ran = folder / "ran"
    ran.write_text("")
    command = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.resume",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
    ]
    more = [
        "--rootdir",
        str(folder),
        "--resume",
        str(folder / "passed"),
        "--code",
        commit,
        str(folder / "test_it.py"),
    ]
    done = subprocess.run(
        [sys.executable, *command, *more, *options],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )
    failed = environment.get("FAILS", "none of them")
    assert (f"test_it.py::test_of[{failed}], call" in done.stderr) == ("FAILS" in environment)
    assert ("assert False" in done.stderr) == ("FAILS" in environment)
    return done.returncode, "".join(sorted(ran.read_text())) if options else ran.read_text()


@pytest.mark.slow
def test_only_what_has_not_passed_runs_again(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    assert run(tmp_path, "one", FAILS="b") == (1, "abc")
    assert run(tmp_path, "one", ENDS="b") == (1, "b")  # interrupted
    assert run(tmp_path, "one") == (0, "b")
    assert run(tmp_path, "one") == (0, "")  # all have passed
    assert run(tmp_path, "two", ENDS="c") == (1, "abc")  # other code starts over
    assert run(tmp_path, "two") == (0, "c")
    assert run(tmp_path, "") == (0, "abc") and run(tmp_path, "") == (0, "abc")  # without a commit, all run again


@pytest.mark.slow
def test_several_processes_go_on_together(tmp_path):
    pytest.importorskip("xdist")
    (tmp_path / "test_it.py").write_text(TESTS)
    several = ("-n", "2", "--dist", "worksteal")
    assert run(tmp_path, "one", *several, FAILS="b") == (1, "abc")
    assert run(tmp_path, "one", *several, FAILS="b") == (1, "b")
    assert run(tmp_path, "one", *several) == (0, "b")
    assert run(tmp_path, "one", *several) == (0, "")
    assert run(tmp_path, "two", *several) == (0, "abc")
