"""fusedtp bench compare OLD.json NEW.json: lists rows that became slower by more than the spread of either run.

A row is slower if the faster quartile of its new samples is slower than the slower quartile of its old samples by more
than --slack, so that the middle halves of the two runs do not overlap. A row is also worse if its error exceeds the
bound of its dtype, or if it was measured before and no longer is.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import machine
from .output import plain_table
from .rows import FORMAT, Row


@dataclass(frozen=True)
class Change:
    """One row of both files."""

    key: str
    verdict: str  # "slower", "faster", "same", "wrong", "lost", "new"
    old: Row | None
    new: Row | None

    @property
    def is_regression(self) -> bool:
        return self.verdict in ("slower", "wrong", "lost")

    @property
    def ratio(self) -> float | None:
        """New median over old."""
        if self.old is None or self.new is None or self.old.seconds is None or self.new.seconds is None:
            return None
        return self.new.seconds.median / self.old.seconds.median


def verdict(old: Row, new: Row, slack: float) -> str:
    """Compares `new` with `old`. Baselines are compared too: a change there means that the machine changed."""
    if new.error_share is not None and new.error_share > 1 and not (old.error_share or 0) > 1:
        return "wrong"
    if old.seconds is None or new.seconds is None:
        return "lost" if old.seconds is not None else "new" if new.seconds is not None else "same"
    if new.seconds.low > old.seconds.high * (1 + slack):
        return "slower"
    if new.seconds.high * (1 + slack) < old.seconds.low:
        return "faster"
    return "same"


def changes(old: Sequence[Row], new: Sequence[Row], slack: float) -> list[Change]:
    """Every row of both files, in the order of the old file."""
    before, after = {row.key: row for row in old}, {row.key: row for row in new}
    found = []
    for key, row in before.items():
        other = after.get(key)
        if other is None:
            found.append(Change(key, "lost" if row.seconds is not None else "same", row, None))
        else:
            found.append(Change(key, verdict(row, other, slack), row, other))
    return found + [Change(key, "new", None, row) for key, row in after.items() if key not in before]


def load(path: Path) -> dict[str, Any]:
    """Loads the result of a suite. Raises ValueError for an invalid file."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is not a result of `fusedtp bench` in format {FORMAT}")
    return found


@dataclass(frozen=True)
class Arguments:
    """Compare two results of `fusedtp bench` on one machine: exit code 1 where NEW is worse than OLD."""

    files: tuple[str, str]
    slack: float
    force: bool


def parse(argv: Sequence[str]) -> Arguments:
    """Uses argparse: two positional files look the same with and without tyro."""
    import argparse

    parser = argparse.ArgumentParser(prog="fusedtp bench compare", description=__doc__.split("\n\n")[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument(
        "--slack", type=float, default=0.02, help="what a time may grow beyond the spread (default 0.02)"
    )
    parser.add_argument("--force", action="store_true", help="compare results of different machines")
    found = parser.parse_args(list(argv))
    if not 0 <= found.slack < math.inf:
        parser.error(f"--slack is {found.slack}; it must be finite and not negative")
    return Arguments((found.old, found.new), found.slack, found.force)


def main(argv: Sequence[str]) -> int:
    """Returns 0 if nothing is worse, 1 for a regression, 2 for invalid files or different machines."""
    arguments = parse(argv)
    try:
        old, new = (load(Path(name)) for name in arguments.files)
        different = machine.same(old["machine"], new["machine"])
        if different and not arguments.force:
            raise ValueError(f"results of different machines ({'; '.join(different)}); --force compares them anyway")
        before, after = ([Row.from_dict(row) for row in result["rows"]] for result in (old, new))
    except (ValueError, KeyError, TypeError) as error:
        print(f"fusedtp bench compare: {error}", file=sys.stderr)
        return 2
    found = changes(before, after, arguments.slack)
    told = [change for change in found if change.verdict not in ("same", "new")]
    lines = [
        [c.verdict, "" if c.ratio is None else f"{c.ratio:.3f}", _times(c.old), _times(c.new), c.key] for c in told
    ]
    if lines:
        print(plain_table("changes", ["", "new / old", "old ms", "new ms", "row"], lines))
    worse = [change for change in found if change.is_regression]
    print(f"{len(found)} rows: {len(worse)} worse, {sum(c.verdict == 'faster' for c in found)} faster")
    return 1 if worse else 0


def _times(row: Row | None) -> str:
    return "" if row is None or row.seconds is None else str(row.seconds)
