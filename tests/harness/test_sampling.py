"""CI's part of the tests: all that are quick, all that are known to find a fault, and a share of the others."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.faults.table import areas, load
from tests.sampling import PARTS, names_of_faults, of_part

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Item:
    nodeid: str
    slow: bool

    def get_closest_marker(self, name: str) -> object:
        return self.slow if name == "slow" else None


@st.composite
def collected(draw) -> list[Item]:
    """Tests of some files, with and without parameters, in the order in which pytest collects them."""
    tests = draw(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=12))
    return [
        Item(f"tests/test_{number % 3}.py::test_{number}" + (f"[{case}]" if cases else ""), slow)
        for number, (cases, slow) in enumerate(tests)
        for case in range(max(cases, 1))
    ]


@given(collected(), st.integers(0, 10_000), st.data())
def test_every_part_has_the_quick_and_the_named_and_consecutive_parts_have_all(items, part, data):
    names = set(data.draw(st.lists(st.sampled_from([i.nodeid for i in items] or ["none"]), max_size=4)))
    names |= {name.partition("[")[0] for name in data.draw(st.lists(st.sampled_from(sorted(names) or ["none"])))}
    always = [i for i in items if not i.slow or i.nodeid in names or i.nodeid.partition("[")[0] in names]
    times = dict.fromkeys(items, 0)
    for number in range(part, part + PARTS):
        kept, left = of_part(items, number, names)
        assert kept == [i for i in items if i in kept] and left == [i for i in items if i not in kept]
        assert set(always) <= set(kept)
        rare = len(items) - len(always)
        assert len(kept) - len(always) in (rare // PARTS, -(-rare // PARTS))
        for item in kept:
            times[item] += 1
    assert all(count == (PARTS if item in always else 1) for item, count in times.items())


def test_a_name_that_no_test_of_its_file_has_is_told():
    items = [Item("tests/test_a.py::test_x[1]", True)]
    with pytest.raises(LookupError, match=r"does not exist: tests/test_a\.py::test_x\[2\], tests/test_a\.py::test_y$"):
        of_part(
            items,
            0,
            {f"tests/test_{name}" for name in ("a.py::test_y", "a.py::test_x[2]", "a.py::test_x", "b.py::test_z")},
        )


def test_the_names_are_those_of_all_rows():
    assert names_of_faults() == {test for area in areas() for row in load(area) for test in row.tests}
    assert any("[" in name for name in names_of_faults())


FILE = """
import pytest
@pytest.mark.slow
@pytest.mark.parametrize("case", range({parts}))
def test_slow(case): pass
def test_quick(): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 2])
def test_the_option_leaves_out_the_other_parts(tmp_path, processes):
    (tmp_path / "test_it.py").write_text(FILE.format(parts=PARTS))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
    ]
    command += ["--rootdir", str(tmp_path), "-n", str(processes), "--part", str(3 * PARTS + 4), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"part 4 of the {PARTS}" in done.stdout and "2 passed" in done.stdout
    assert "test_slow[4]" in done.stdout and "test_quick" in done.stdout
