"""What a run has measured so far, a line a case, so that an interrupted run goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .rows import Row


class Journal:
    """A file of JSON lines: first the key of the run (commit, options), then the roofs and cases in the order measured.

    Read again only by a run with the same key; any other one begins anew.
    """

    def __init__(self, path: Path, key: Mapping[str, Any], resume: bool) -> None:
        self.path = path
        kept, first = _read(path) if resume else [], {"key": dict(key)}
        if not kept or kept[0] != first:
            kept = [first]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))  # and no line that was cut off

    def add(self, **line: Any) -> None:
        """Append a line; it is on disk when this returns."""
        with self.path.open("a") as f:
            f.write(json.dumps(line) + "\n")

    def add_case(self, suite: str, label: str, rows: list[Row], failed: bool = False) -> None:
        self.add(suite=suite, case=label, failed=failed, rows=[row.as_dict() for row in rows])

    def lines(self) -> list[dict[str, Any]]:
        return _read(self.path)[1:]

    def done(self) -> set[tuple[str, str]]:
        """(suite, case) of every case that was measured or failed."""
        return {(line["suite"], line["case"]) for line in self.lines() if "case" in line}

    def rows(self) -> list[Row]:
        return [Row.from_dict(row) for line in self.lines() for row in line.get("rows", [])]

    def failures(self) -> int:
        return sum(bool(line.get("failed")) for line in self.lines())

    def roofs(self) -> dict[str, dict[str, float]]:
        """World -> what was reached there, the last time."""
        return {line["world"]: line["roofs"] for line in self.lines() if "roofs" in line}


def _read(path: Path) -> list[dict[str, Any]]:
    """The lines that are whole: a run may have been killed in the middle of one."""
    found: list[dict[str, Any]] = []
    try:
        text = path.read_text()
    except OSError:
        return found
    for line in text.split("\n"):
        try:
            found.append(json.loads(line))
        except ValueError:  # cut off, or the nothing after the last one
            break
    return found
