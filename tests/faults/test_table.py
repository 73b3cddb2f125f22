"""The fault tables still match the tree: the texts to replace occur, and the tests exist. `make faults` runs them."""

import dataclasses
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.run import Run, judge, run_test
from tests.faults.table import areas, faults_of, load


@pytest.mark.parametrize("area", areas())
def test_every_row_fits_the_tree(area):
    assert load(area), f"{area}.toml is empty"
    found = [line for fault in load(area) for line in faults_of(fault)]
    assert not found, "\n".join(found)


def test_no_fault_stands_twice():
    counts = Counter((row.file, row.old, row.new) for area in areas() for row in load(area))
    assert [key for key, count in counts.items() if count > 1] == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"file": "fusedtp/none.py"}, "there is no file"),
        ({"old": "no such text in the file"}, "`old` occurs 0 times"),
        ({"old": "    "}, "times in"),
        ({"new": "("}, "does not compile"),
        ({"tests": ()}, "names no test"),
        ({"tests": ("tests/ops/test_tokens.py::test_nothing",)}, "there is no test"),
        ({"tests": ("tests/ops/test_nothing.py::test_x",)}, "there is no test"),
        ({"tests": ("tests/ops/test_tokens.py",)}, "there is no test"),
    ],
)
def test_a_row_that_does_not_fit_is_told(change, said):
    good = load("ops")[0]
    (line,) = faults_of(dataclasses.replace(good, **change))
    assert line.startswith("ops 1") and said in line


def test_a_fault_that_changes_nothing_is_told():
    good = load("ops")[0]
    assert faults_of(dataclasses.replace(good, new=good.old)) == ["ops 1: `new` equals `old`"]


def test_a_row_is_good_only_if_every_test_passes_without_the_fault_and_fails_with_it():
    row = dataclasses.replace(load("ops")[0], tests=("a", "b"))
    passed, failed, broken = (Run(verdict, "") for verdict in ("passed", "failed", "broken"))
    both = lambda a, b: {"a": a, "b": b}  # noqa: E731
    assert judge(row, both(passed, passed), both(failed, failed)) == ("found\nfound", True)
    assert judge(row, both(passed, passed), both(failed, passed)) == ("found\nMISSED", False)
    assert judge(row, both(passed, passed), both(failed, broken)) == ("found\nNOT COLLECTED", False)
    assert judge(row, both(passed, failed), {"a": failed}) == ("found\nfailed WITHOUT the fault", False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "verdict"), [("pass", "passed"), ("assert 0", "failed"), ("pytest.skip('no')", "skipped")]
)
def test_the_verdict_on_a_test(body, verdict, tmp_path):
    (tmp_path / "test_it.py").write_text(f"import pytest\ndef test_it():\n    {body}\n")
    assert run_test(tmp_path, "test_it.py::test_it", 60).verdict == verdict


HANGS = """
import pathlib, subprocess, time
def test_it():
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path("pid").write_text(str(child.pid))
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_test_that_hangs_is_ended_with_its_children(tmp_path):
    (tmp_path / "test_it.py").write_text(HANGS)
    for seconds in (5, 20, 80):  # on a busy machine the test may not have started before it is ended
        assert run_test(tmp_path, "test_it.py::test_it", seconds).verdict == "no answer"
        if (tmp_path / "pid").exists():
            break
    stat = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    deadline = time.monotonic() + 60  # it was killed, but on a busy machine it may die late
    while (state := state_of(stat)) not in ("gone", "Z") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert state in ("gone", "Z")


def state_of(stat: Path) -> str:
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
