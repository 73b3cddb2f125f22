"""The faults that tests must find: rows of tests/faults/AREA.toml.

    [[fault]]
    file = "fusedtp/ops/rows.py"
    old = "text that occurs once in the file"
    new = "the same text with the fault"
    tests = ["tests/properties/test_exact.py::test_equals_the_formula"]   # each must fail
    why = "one line: what the fault breaks"

`new` may also be a fault that was once in the library. A test may be named with its parameters, `::test_x[4]`.
"""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent
FIELDS = {"file": str, "old": str, "new": str, "tests": list, "why": str}


@dataclass(frozen=True)
class Fault:
    """One row. `number` counts the rows of an area from 1."""

    area: str
    number: int
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str

    @property
    def name(self) -> str:
        return f"{self.area} {self.number}"

    def applied(self, source: str) -> str:
        """The file's text with the fault applied; ValueError if `old` does not occur exactly once."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: `old` occurs {count} times in {self.file}, wanted once")
        return source.replace(self.old, self.new)


def areas() -> list[str]:
    """All areas that have a table."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(area: str) -> list[Fault]:
    """The rows of one area; ValueError if the table does not have this form."""
    table = tomllib.loads((FOLDER / f"{area}.toml").read_text())
    if set(table) != {"fault"}:
        raise ValueError(f"{area}.toml holds {sorted(table)}, wanted [[fault]] alone")
    rows = []
    for number, row in enumerate(table["fault"], 1):
        wrong = {name for name, kind in FIELDS.items() if not isinstance(row.get(name), kind)}
        wrong |= set(row) - set(FIELDS)
        if wrong:
            raise ValueError(f"{area} {number}: missing, unknown or of the wrong type: {sorted(wrong)}")
        rows.append(Fault(area, number, **row | {"tests": tuple(row["tests"])}))
    return rows


def faults_of(fault: Fault) -> list[str]:
    """Errors in a row that are found without running a test."""
    found = []
    path = ROOT / fault.file
    if not path.is_file():
        return [f"{fault.name}: there is no file {fault.file}"]
    if fault.new == fault.old:
        found.append(f"{fault.name}: `new` equals `old`")
    try:
        changed = fault.applied(path.read_text())
        if path.suffix == ".py":
            ast.parse(changed)
    except SyntaxError as error:
        found.append(f"{fault.name}: {fault.file} does not compile with the fault: {error}")
    except ValueError as error:
        found.append(str(error))
    if not fault.tests:
        found.append(f"{fault.name} names no test")
    found += [f"{fault.name}: there is no test {test}" for test in fault.tests if not _exists(test)]
    return found


def _exists(test: str) -> bool:
    file, _, name = test.partition("::")
    path = ROOT / file
    if not name or not path.is_file():
        return False
    return name.partition("[")[0].rpartition("::")[2] in _functions(path)


@cache
def _functions(path: Path) -> set[str]:
    """The functions and methods of a file; a run's tests do not change them."""
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
