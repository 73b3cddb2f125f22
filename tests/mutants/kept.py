"""Verdicts kept in a file as they come, a line each, so that a run that was broken off need not begin again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import fusedtp.checks
import fusedtp.sim

from .mutant import Mutant
from .source import Sources
from .verdict import Verdict

FIELDS = ("result", "rule", "where", "report", "schedules", "seconds")
# mutants, cases, simulator and lint: a verdict of another version of them does not count
CHECKS = [Path(__file__).parent, *(Path(p.__file__ or "").parent for p in (fusedtp.checks, fusedtp.sim))]


class Kept:
    """path None keeps nothing. A verdict is known by what the mutated kernels and the checks are, and by `how`."""

    def __init__(self, path: Path | None, sources: Sources, how: str) -> None:
        self._path, self._sources = path, sources
        files = sorted(f for folder in CHECKS for kind in ("*.py", "*.json") for f in folder.rglob(kind))
        self._how = hashlib.sha256(how.encode())
        for file in files if path else ():
            self._how.update(file.read_bytes())
        self._known: dict[str, dict[str, object]] = {}
        if path is not None and path.exists():
            text = path.read_text()
            if not text.endswith("\n"):
                path.write_text(text := text[: text.rfind("\n") + 1])  # the last line was cut off
            for line in text.splitlines():
                row = json.loads(line)
                self._known[row.pop("key")] = row

    def verdict(self, mutant: Mutant, judge: str) -> Verdict | None:
        """What was kept of this mutant and judge."""
        if not self._known:
            return None
        row = self._known.get(self._key(mutant, judge))
        return None if row is None else Verdict(mutant, judge, **row)  # type: ignore[arg-type]

    def add(self, verdict: Verdict) -> None:
        if self._path is not None:
            row = {name: getattr(verdict, name) for name in FIELDS}
            line = json.dumps({"key": self._key(verdict.mutant, verdict.judge), **row})
            with self._path.open("a") as file:
                file.write(line + "\n")

    def _key(self, mutant: Mutant, judge: str) -> str:
        made = self._how.copy()
        made.update(
            repr((judge, mutant.expects, sorted(self._sources.edited(mutant.edits).items()))).encode()
        )
        return made.hexdigest()
