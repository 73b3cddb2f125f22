"""docs/checking-kernels.md is true: its kernel, its report, its repair, its tests and its commands are run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fusedtp.checks.command import CheckOptions, main
from fusedtp.lint import TARGETS
from tests.seeded.__main__ import Options as SeededOptions

ROOT = Path(__file__).resolve().parents[2]
DOC = ROOT / "docs" / "checking-kernels.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", DOC.read_text(), re.MULTILINE | re.DOTALL)


def block(language: str, index: int = 0) -> str:
    return [text for name, text in BLOCKS if name == language][index]


@pytest.fixture
def ring(tmp_path, monkeypatch) -> Path:
    """A current folder that contains the page's ring.py."""
    path = tmp_path / "ring.py"
    path.write_text(block("python", 0))
    monkeypatch.chdir(tmp_path)
    return path


def repair(path: Path) -> None:
    (path.parent / "repair.diff").write_text(block("diff"))
    subprocess.run(["git", "apply", "-p1", "repair.diff"], cwd=path.parent, check=True)


@pytest.mark.slow
def test_the_report_of_the_page_is_what_the_command_prints(ring, capsys):
    assert main(["ring.py", "--workers", "1"]) == 1
    printed = capsys.readouterr().out
    report = printed[printed.index("ring.py::case_ring (sm_90) on 3 ranks") :].strip()
    assert report == block("text").strip()


@pytest.mark.slow
def test_the_repaired_ring_passes_where_the_page_says(ring, capsys):
    repair(ring)
    assert main([*["ring.py", "--world-size", "2", "3", "4", "--schedules", "24", "--workers", "1"]]) == 0
    assert capsys.readouterr().out.count(" ok ") == 3


def test_the_words_about_lines_and_ranks_fit_the_report():
    text, report = DOC.read_text(), block("text")
    told = re.search(
        r"Rank (\d) reads its box in line (\d+); rank (\d) stores into the same elements in line (\d+)", text
    )
    assert told
    reader, read_line, writer, write_line = told.groups()
    assert re.search(
        rf"rank {reader}, exchange, program 0: load box of rank {reader} .*\n    ring.py:{read_line} ", report
    )
    assert re.search(
        rf"rank {writer}, exchange, program 0: store box of rank {reader} .*\n    ring.py:{write_line} ",
        report,
    )


def plain_pytest(folder: Path) -> str:
    """The output of pytest on the tests of a folder, in a separate process."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", folder, folder]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=400)
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_tests_of_the_page_fail_on_the_race_and_pass_on_the_repair(ring, tmp_path_factory):
    (ring.parent / "test_ring.py").write_text(block("python", 1))
    repaired = shutil.copytree(ring.parent, tmp_path_factory.mktemp("repaired") / "page")
    repair(repaired / "ring.py")
    with ThreadPoolExecutor() as both:
        racy, right = both.map(plain_pytest, [ring.parent, repaired])
    assert "2 failed" in racy
    assert "2 passed" in right


@pytest.mark.slow
def test_the_lint_says_of_the_ring_what_the_page_says(ring, capsys):
    assert "on `ring.py` it finds nothing" in " ".join(DOC.read_text().split())
    main(["--lint", "ring.py", "--schedules", "1", "--workers", "1"])
    shown = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert {words[0] for words in shown if words[-1:] == ["ok"]} >= set(TARGETS)


def test_every_option_that_the_page_names_exists():
    """The command line accepts each command of the page, and each option in the page's text."""
    import tyro

    commands = re.findall(r"(?:^    |`|^\$ )(fusedtp check[^`#\n]*)", DOC.read_text(), re.MULTILINE)
    assert len(commands) >= 6
    for command in commands:
        tyro.cli(CheckOptions, args=shlex.split(command)[2:])
    options = (CheckOptions, SeededOptions)
    fields = {f"--{name.replace('_', '-')}" for kind in options for name in kind.__dataclass_fields__}
    named = set(re.findall(r"(--[a-z][a-z-]+)", DOC.read_text()))
    assert named <= fields, named - fields


def test_what_the_page_says_of_gsan_holds_for_this_triton():
    """3.9 has it, 3.6 and 3.7 do not; other versions are not covered."""
    find = "import importlib.util as u; print(u.find_spec('triton.experimental.gsan') is not None)"
    import triton

    has = subprocess.run([sys.executable, "-c", find], capture_output=True, text=True, check=True).stdout.strip()
    version = ".".join(triton.__version__.split(".")[:2])
    assert {"3.6": "False", "3.7": "False", "3.9": "True"}.get(version, has) == has
