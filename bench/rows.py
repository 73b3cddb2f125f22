"""One row of a result: what was run, how long it took, and the figures that follow from it; and the journal of a run.

docs/benchmarks.md explains each figure. Those that follow from others are computed here and nowhere else, so that a
row's own times give them again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .sample import Spread

FORMAT = "fusedtp-bench-1"
FAILED = "failed: "  # how the note of a row begins that should have a time


@dataclass(frozen=True)
class Row:
    """One engine or baseline on one shape. `seconds` is None where it could not run; `note` then says why.

    flops, moved_bytes   of all ranks together, for one call
    roof                 what this machine reached in the same run: FLOP/s, or bytes/s for rows without flops
    t_comm, t_matmul     of fused operations: the faster communication alone; the matmuls alone
    t_plain              of a fused kernel whose data is all there: the same work without flags
    error                largest absolute difference from an fp64 reference on sampled rows
    error_share          the largest share of what the dtype allows there; above 1 the result is wrong
    t_apart              of a layer that communicates while it computes: the same without that, one by one
    figures              what else a suite measures, by name
    """

    suite: str
    shape: dict[str, int | str]
    dtype: str
    engine: str
    world: str
    ranks: int
    seconds: Spread | None = None
    flops: float | None = None
    moved_bytes: float | None = None
    roof: float | None = None
    t_comm: float | None = None
    t_matmul: float | None = None
    t_plain: float | None = None
    t_apart: float | None = None
    host_seconds: float | None = None
    error: float | None = None
    error_share: float | None = None
    peak_bytes: int | None = None
    note: str = ""
    figures: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What makes it the same row in two files."""
        shape = " ".join(f"{name}={value}" for name, value in self.shape.items())
        return f"{self.suite} {shape} {self.dtype} {self.world}x{self.ranks} | {self.engine}"

    @property
    def rate(self) -> float | None:
        """FLOP/s, or bytes/s where no flops are counted."""
        work = self.flops if self.flops is not None else self.moved_bytes
        return None if work is None or self.seconds is None else work / self.seconds.median

    @property
    def roof_share(self) -> float | None:
        return None if self.rate is None or not self.roof else self.rate / self.roof

    @property
    def above_roof(self) -> bool:
        """Whether the table would show more than 100 % of the roof. Then the roof is wrong: its sample was disturbed by
        other load, or torch.matmul is slow here in this dtype."""
        return self.roof_share is not None and round(100 * self.roof_share) > 100

    @property
    def hidden_share(self) -> float | None:
        if self.seconds is None or self.t_comm is None or self.t_matmul is None:
            return None
        return hidden_share(self.t_comm, self.t_matmul, self.seconds.median)

    @property
    def over_slower(self) -> float | None:
        """Time over that of the slower part alone: 1 where all that can be hidden is."""
        if self.seconds is None or self.t_comm is None or self.t_matmul is None:
            return None
        return self.seconds.median / max(self.t_comm, self.t_matmul)

    @property
    def overhead(self) -> float | None:
        """Time over that of the plain matmul: what flags and order cost."""
        return None if self.seconds is None or not self.t_plain else self.seconds.median / self.t_plain

    @property
    def gain(self) -> float | None:
        """Time one by one over time: above 1 where overlap pays."""
        return None if self.seconds is None or not self.t_apart else self.t_apart / self.seconds.median

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rate = self.rate
        return {
            "suite": self.suite,
            "shape": self.shape,
            "dtype": self.dtype,
            "engine": self.engine,
            "world": self.world,
            "ranks": self.ranks,
            "seconds": None if self.seconds is None else vars(self.seconds),
            "flops": self.flops,
            "moved_bytes": self.moved_bytes,
            "tflops": rate / 1e12 if rate is not None and self.flops is not None else None,
            "gbps": rate / 1e9 if rate is not None and self.flops is None else None,
            "roof": self.roof,
            "roof_share": self.roof_share,
            "above_roof": self.above_roof,
            "t_comm": self.t_comm,
            "t_matmul": self.t_matmul,
            "hidden_share": self.hidden_share,
            "over_slower": self.over_slower,
            "t_plain": self.t_plain,
            "overhead": self.overhead,
            "t_apart": self.t_apart,
            "gain": self.gain,
            "host_seconds": self.host_seconds,
            "error": self.error,
            "error_share": self.error_share,
            "peak_bytes": self.peak_bytes,
            "figures": dict(self.figures),
            "note": self.note,
        }

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Row:
        """What as_dict wrote; the figures that follow are computed again."""
        names = cls.__dataclass_fields__
        fields = {name: value for name, value in found.items() if name in names}
        if fields["seconds"] is not None:
            fields["seconds"] = Spread(**fields["seconds"])
        return cls(**fields)


def hidden_share(t_comm: float, t_matmul: float, t_fused: float) -> float:
    """How much of what could be hidden is: 0 one after the other, 1 as long as the slower of the two alone."""
    return (t_comm + t_matmul - t_fused) / min(t_comm, t_matmul)


# -- what a run has measured so far, so that an interrupted one goes on where it was ----------------------------------


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
