"""The result of each task so far, in verdicts.jsonl, which a run reads and extends; equivalent faults, with the reason.

    ["drop wait | publish | the line", key, Triton's version, [its verdicts]]        one line per task, sorted

The key is a hash of everything that the verdicts depend on: the fault, and the functions that the kernels under trial
reach, without comments and docstrings. A change of one kernel makes its own verdicts stale. A stale task counts as not
tried.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from .source import functions, plain, reached

KEPT = Path(__file__).with_name("verdicts.jsonl")
KINDS = ("found", "equivalent", "survived", "crashed", "not tried yet")
# faults that no schedule shows: why, where (of PTX kernels, or kernels and a target; else everywhere), names
TABLE: list[dict[str, Any]] = tomllib.loads(KEPT.with_name("equivalent.toml").read_text())["equivalent"]


class Verdict(NamedTuple):
    """The result for a fault.

    fault    "operator | function | the line's text"
    where    the kernel and target of a fault in PTX, "" for one in the source
    result   found, survived, or crashed, which does not count as found
    """

    fault: str
    where: str
    result: str
    said: str
    schedules: int

    @property
    def reason(self) -> str:
        """Why no schedule shows the fault; "" if it is not in the table."""
        rows = [row for row in TABLE if self.fault in row["faults"]]
        rows += [{"why": "nothing was changed"}] if self.fault.startswith("none") else []
        return next((row["why"] for row in rows if self.where.startswith(tuple(row.get("where", [""])))), "")

    @property
    def right(self) -> bool:
        """Whether it was found, or survived and is in the table."""
        return self.result == ("survived" if self.reason else "found")

    @property
    def missed(self) -> bool:
        """Whether it survived although the table has no reason."""
        return self.result == "survived" and not self.reason

    @property
    def kind(self) -> str:
        """One of KINDS."""
        return "equivalent" if self.result == "survived" and self.reason else self.result


class Kept(NamedTuple):
    """A line of the file."""

    task: str
    key: str
    triton: str
    verdicts: list[Verdict]


def key(kernels: Iterable[str], fault: str = "", *more: str) -> str:
    """Hash of a verdict's dependencies: the functions that these kernels reach, a faulty function, and `more`."""
    names = frozenset[str]().union(*map(reached, kernels))
    sources = [f.src for f in functions() if f.__name__ in names] + [fault] * bool(fault)
    return hashlib.sha256("\0".join([*map(plain, sources), *more]).encode()).hexdigest()[:16]


def load(file: Path) -> dict[str, Kept]:
    """The file's lines by task; none if there is no file."""
    lines = map(json.loads, file.read_text().splitlines() if file.exists() else ())
    return {task: Kept(task, key, triton, [Verdict(*v) for v in made]) for task, key, triton, made in lines}


def save(file: Path, kept: dict[str, Kept]) -> None:
    """Rewrite the file atomically."""
    written = file.with_suffix(".new")
    written.write_text("".join(json.dumps(made) + "\n" for _, made in sorted(kept.items())))
    written.replace(file)
