"""pytest -p tests.resume --resume FILE --code COMMIT: run only the tests that have not passed yet.

FILE holds the commit and one line for each test that passed with it, written as soon as the test ends. The output of a
failed test is printed at once. An interrupted run therefore loses nothing. Without a commit, or with another one, the
run starts over. Under xdist the main process writes FILE and tells the workers which tests to skip.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--resume", type=Path, help="file of the tests that have passed")
    parser.addoption("--code", default="", help="the commit that they passed with")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--resume")
    if path is not None:
        passed = getattr(config, "workerinput", {}).get("passed")
        config.pluginmanager.register(Resume(path, config.getoption("--code"), passed))


class Resume:
    """Skip the tests that have passed, and record new passes. passed: the tests another process read and will write."""

    def __init__(self, path: Path, commit: str, passed: list[str] | None) -> None:
        self.path, self.writes = path, passed is None
        if passed is not None:
            self.passed = set(passed)
            return
        lines = path.read_text().splitlines() if path.is_file() else []
        self.passed = set(lines[1:]) if commit and lines[:1] == [commit] else set()
        if not self.passed:
            path.write_text(f"{commit}\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["passed"] = sorted(self.passed)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        done = [item for item in items if item.nodeid in self.passed]
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item.nodeid not in self.passed]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self.writes:
            return
        if report.when == "call" and report.passed:
            with self.path.open("a") as file:
                file.write(f"{report.nodeid}\n")
        elif report.failed:
            print(f"\n{report.nodeid}, {report.when}\n{report.longreprtext}", file=sys.stderr, flush=True)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.passed:  # all tests have passed
            session.exitstatus = pytest.ExitCode.OK
