"""One row of a result: what was run, its time, and derived figures; and the journal of a run.

docs/benchmarks.md explains each figure. Derived figures are computed only here, so that they can be recomputed from the
times of a row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .sample import Spread

FORMAT = "fusedtp-bench-1"
DERIVED = ("roof_share", "above_roof", "hidden_share", "over_slower", "overhead", "gain")  # properties of a Row
FAILED = "failed: "  # prefix of the note of a row that should have a time


@dataclass(frozen=True)
class Row:
    """One engine or baseline on one shape. `seconds` is None if it could not run; `note` then gives the reason.

    flops, moved_bytes   of all ranks together, for one call
    roof                 the rate that this machine reached in the same run: FLOP/s, or bytes/s for rows without flops
    t_comm, t_matmul     for fused operations: the faster communication alone; the matmuls alone
    t_plain              for a fused kernel with all its data there: the same work without flags
    error                largest absolute difference from an fp64 reference on sampled rows
    error_share          largest error as a share of the bound of the dtype; above 1 the result is wrong
    t_apart              for a layer that overlaps communication: the same without overlap, one by one
    figures              other measurements of a suite, by name
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
        """Identifies the same row in two files."""
        shape = " ".join(f"{name}={value}" for name, value in self.shape.items())
        return f"{self.suite} {shape} {self.dtype} {self.world}x{self.ranks} | {self.engine}"

    @property
    def rate(self) -> float | None:
        """FLOP/s, or bytes/s if no FLOPs are counted."""
        work = self.flops if self.flops is not None else self.moved_bytes
        return None if work is None or self.seconds is None else work / self.seconds.median

    @property
    def roof_share(self) -> float | None:
        return None if self.rate is None or not self.roof else self.rate / self.roof

    @property
    def above_roof(self) -> bool:
        """Whether the table would show more than 100 % of the roof. Then the roof is wrong: other load disturbed its
        sample, or torch.matmul is slow on this machine in this dtype."""
        return self.roof_share is not None and round(100 * self.roof_share) > 100

    @property
    def hidden_share(self) -> float | None:
        if self.seconds is None or self.t_comm is None or self.t_matmul is None:
            return None
        return hidden_share(self.t_comm, self.t_matmul, self.seconds.median)

    @property
    def over_slower(self) -> float | None:
        """Time over that of the slower part alone: 1 if everything that can be hidden is hidden."""
        if self.seconds is None or self.t_comm is None or self.t_matmul is None:
            return None
        return self.seconds.median / max(self.t_comm, self.t_matmul)

    @property
    def overhead(self) -> float | None:
        """Time over that of the plain matmul: the cost of flags and tile order."""
        return None if self.seconds is None or not self.t_plain else self.seconds.median / self.t_plain

    @property
    def gain(self) -> float | None:
        """Time without overlap over time with overlap: above 1 if overlap pays."""
        return None if self.seconds is None or not self.t_apart else self.t_apart / self.seconds.median

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rate = self.rate
        return asdict(self) | {
            "tflops": rate / 1e12 if rate is not None and self.flops is not None else None,
            "gbps": rate / 1e9 if rate is not None and self.flops is None else None,
            **{name: getattr(self, name) for name in DERIVED},
        }

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Row:
        """Reads the output of as_dict; derived figures are computed again."""
        names = cls.__dataclass_fields__
        fields = {name: value for name, value in found.items() if name in names}
        if fields["seconds"] is not None:
            fields["seconds"] = Spread(**fields["seconds"])
        return cls(**fields)


def hidden_share(t_comm: float, t_matmul: float, t_fused: float) -> float:
    """The hidden share of the shorter part: 0 if one after the other, 1 if as fast as the slower part alone."""
    return (t_comm + t_matmul - t_fused) / min(t_comm, t_matmul)


# -- the results of a run so far, from which an interrupted run resumes -----------------------------------------------


class Journal:
    """A file of JSON lines: first the key of the run (commit, options), then the roofs and cases in the order measured.

    Only a run with the same key resumes from it; any other run starts over.
    """

    def __init__(self, path: Path, key: Mapping[str, Any], resume: bool) -> None:
        self.path = path
        kept, first = _read(path) if resume else [], {"key": dict(key)}
        if not kept or kept[0] != first:
            kept = [first]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))  # drops a truncated line

    def add(self, **line: Any) -> None:
        """Append a line; it is on disk when this returns."""
        with self.path.open("a") as f:
            f.write(json.dumps(line) + "\n")

    def add_case(self, suite: str, label: str, rows: list[Row], failed: bool = False) -> None:
        self.add(suite=suite, case=label, failed=failed, rows=[row.as_dict() for row in rows])

    def lines(self) -> list[dict[str, Any]]:
        return _read(self.path)[1:]

    def done(self) -> set[tuple[str, str]]:
        """(suite, case) of every case that was measured or has failed."""
        return {(line["suite"], line["case"]) for line in self.lines() if "case" in line}

    def rows(self) -> list[Row]:
        return [Row.from_dict(row) for line in self.lines() for row in line.get("rows", [])]

    def failures(self) -> int:
        return sum(bool(line.get("failed")) for line in self.lines())

    def roofs(self) -> dict[str, dict[str, float]]:
        """World -> its latest roofs."""
        return {line["world"]: line["roofs"] for line in self.lines() if "roofs" in line}


def _read(path: Path) -> list[dict[str, Any]]:
    """The complete lines: a run may have been killed while it wrote one."""
    found: list[dict[str, Any]] = []
    try:
        text = path.read_text()
    except OSError:
        return found
    for line in text.split("\n"):
        try:
            found.append(json.loads(line))
        except ValueError:  # truncated, or the empty string after the last line
            break
    return found
