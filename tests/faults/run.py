"""Puts each known fault into a copy of the tree and runs the tests that must find it.

    python -m tests.faults.run [AREA ...] [--only N] [--jobs N] [--timeout SECONDS]

A test is first seen passing in a copy without a fault. With the fault it must fail; a test that does not answer in
time has failed as well. The exit status is 1 if a fault was missed, or if a row cannot be judged.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.box import ASCII
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tests.faults.table import ROOT, Fault, areas, load

PASSED, FAILED = 0, 1  # exit statuses of pytest
LINKS = {"fusedtp/kernels": "../kernels", "fusedtp/bench": "../bench"}  # as pyproject.toml maps them
TIMEOUT = 300.0


@dataclass(frozen=True)
class Run:
    """One run of one test. `verdict` is "passed", "failed", "no answer", "skipped" or "broken"."""

    verdict: str
    output: str


@contextmanager
def copy_of_tree(fault: Fault | None = None) -> Iterator[Path]:
    """A folder with all files that git does not ignore, in their current state, and the fault in one of them."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    with tempfile.TemporaryDirectory(prefix="fusedtp-fault-") as folder:
        copy = Path(folder)
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        for link, target in LINKS.items():
            (copy / link).symlink_to(target)
        if fault is not None:
            (copy / fault.file).write_text(fault.applied((ROOT / fault.file).read_text()))
        yield copy


def run_test(copy: Path, test: str, timeout: float) -> Run:
    """Run one test in the copy, then end all processes that it started."""
    command = [sys.executable, "-m", "pytest", test, "-x", "-q", "-p", "no:cacheprovider", "--no-header"]
    env = {**os.environ, "PYTHONPATH": str(copy), "HYPOTHESIS_PROFILE": "ci", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=copy, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            status: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end_session(process)
        output.seek(0)
        return Run(_verdict(status, text := output.read()), text)


def _end_session(process: subprocess.Popen) -> None:
    """Kill the process group that this process leads. It includes ranks that a test has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _verdict(status: int | None, output: str) -> str:
    if status is None:
        return "no answer"
    if status == FAILED:
        return "failed"
    if status == PASSED:
        return "passed" if re.search(r"\b[1-9]\d* passed", output) else "skipped"
    return "broken"  # collection failed, or no such test


def baseline(tests: Sequence[str], timeout: float, jobs: int) -> dict[str, Run]:
    """Run every test without a fault."""
    with copy_of_tree() as copy, ThreadPoolExecutor(jobs) as pool:
        return dict(zip(tests, pool.map(lambda test: run_test(copy, test, timeout), tests), strict=True))


def with_fault(fault: Fault, before: dict[str, Run], timeout: float) -> list[tuple[str, Run]]:
    """Run the fault's tests with the fault, except those that do not pass without it."""
    tests = [test for test in fault.tests if before[test].verdict == "passed"]
    with copy_of_tree(fault) as copy:
        return [(test, run_test(copy, test, timeout)) for test in tests]


def judge(fault: Fault, before: dict[str, Run], after: dict[str, Run]) -> tuple[str, bool]:
    """(text for each test of a row, whether the row is as it must be)."""
    lines, good = [], True
    for test in fault.tests:
        first = before[test].verdict
        if first == "skipped":
            lines.append("skipped here")
        elif first != "passed":
            lines.append(f"{first} WITHOUT the fault")
            good = False
        else:
            verdict = after[test].verdict
            good &= verdict in ("failed", "no answer")
            said = {"failed": "found", "no answer": "found: no answer", "broken": "NOT COLLECTED"}
            lines.append(said.get(verdict, "MISSED"))
    return "\n".join(lines), good


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.run", description=__doc__.split("\n\n")[0])
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"of {', '.join(areas())}; default: all")
    parser.add_argument("--only", type=int, metavar="N", help="this row of each area, counted from 1")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="tests at a time")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, metavar="SECONDS", help="of one test")
    asked = parser.parse_args(arguments)
    if unknown := set(asked.areas) - set(areas()):
        parser.error(f"no area {', '.join(sorted(unknown))}; there are {', '.join(areas())}")
    rows = [row for area in asked.areas or areas() for row in load(area) if asked.only in (None, row.number)]
    if not rows:
        parser.error(f"no area has a row {asked.only}")

    console = Console(width=max(150, Console().width))
    tests = list(dict.fromkeys(test for row in rows for test in row.tests))
    console.print(f"{len(tests)} tests without a fault, then {len(rows)} faults")
    before = baseline(tests, asked.timeout, asked.jobs)
    table = Table(box=ASCII, show_lines=True)
    for name in ("fault", "breaks", "tests", "result"):
        table.add_column(name, overflow="fold")
    good = 0
    with ThreadPoolExecutor(asked.jobs) as pool:
        outcomes = pool.map(lambda row: dict(with_fault(row, before, asked.timeout)), rows)
        for row, after in zip(rows, outcomes, strict=True):
            result, fine = judge(row, before, after)
            good += fine
            console.print(f"{row.name}: {' | '.join(result.splitlines())}", highlight=False)
            cells = f"{row.name}\n{row.file}", row.why, "\n".join(row.tests), result
            table.add_row(*map(Text, cells))
            if not fine:
                console.print(_why_not(row, before, after), markup=False, highlight=False)
    console.print(table)
    console.print(f"{good} of {len(rows)} rows are as they must be")
    return 0 if good == len(rows) else 1


def _why_not(row: Fault, before: dict[str, Run], after: dict[str, Run]) -> str:
    """The last output lines of the runs that are not as they must be."""
    wrong = [before[test] for test in row.tests if before[test].verdict not in ("passed", "skipped")]
    wrong += [run for run in after.values() if run.verdict == "broken"]
    return "\n".join("\n".join(run.output.splitlines()[-15:]) for run in wrong)


if __name__ == "__main__":
    sys.exit(main())
