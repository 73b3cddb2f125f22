"""pytest -p tests.resume --resume FILE --code COMMIT: go on with the tests that have not passed yet.

FILE holds the commit and, line by line, the tests that passed with it, written as each ends; so a run that was cut off
loses nothing. Of another commit, or of none, it begins anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--resume", type=Path, help="file of the tests that have passed")
    parser.addoption("--code", default="", help="the commit that they passed with")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--resume") is not None:
        config.pluginmanager.register(Resume(config.getoption("--resume"), config.getoption("--code")))


class Resume:
    """Leaves out what has passed, and keeps what passes."""

    def __init__(self, path: Path, commit: str) -> None:
        self.path, self.left_out = path, 0
        lines = path.read_text().splitlines() if path.is_file() else []
        self.passed = set(lines[1:]) if commit and lines[:1] == [commit] else set()
        if not self.passed:
            path.write_text(f"{commit}\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        done = [item for item in items if item.nodeid in self.passed]
        self.left_out = len(done)
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item.nodeid not in self.passed]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            with self.path.open("a") as file:
                file.write(f"{report.nodeid}\n")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.left_out:
            session.exitstatus = pytest.ExitCode.OK
