"""The operations against gloo collectives and matmuls.

share removed   (t_gloo - t_ours) / (t_gloo - t_bare), of the time that gloo adds to the bare matmuls
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from .cases import OPERATIONS, Case, ways
from .rank import Rank
from .sample import Spread

SHAPES = ((512, 512, 1408), (2048, 1024, 2816), (4096, 2048, 2048))  # tokens, K, N
DTYPES = ("float32", "bfloat16")
CASE = ("operation", "dtype", "tokens", "k", "n", "backward")


@dataclass(frozen=True)
class Row:
    """One measured case."""

    case: Case
    bare: Spread
    gloo: Spread
    ours: Spread

    @property
    def ratio(self) -> float:
        return self.gloo.median / self.ours.median

    @property
    def share(self) -> float:
        return (self.gloo.median - self.ours.median) / (self.gloo.median - self.bare.median)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        sizes = {name: getattr(self.case, name) for name in CASE}
        return {**asdict(self), "case": sizes, "ratio": self.ratio, "share_removed": self.share}


@dataclass(frozen=True)
class Result:
    """All rows, and the symmetric memory of their group at the end."""

    rows: list[Row]
    symmetric_bytes: int
    control_bytes: int
    largest_moved_bytes: int

    @property
    def median_share(self) -> float:
        return statistics.median(row.share for row in self.rows)

    @property
    def least_share(self) -> float:
        return min(row.share for row in self.rows)

    @property
    def mean_ratio(self) -> float:
        """Geometric."""
        return math.exp(statistics.fmean(math.log(row.ratio) for row in self.rows))

    @property
    def bound_bytes(self) -> int:
        """What DESIGN.md allows: two slots of the largest gathered or scattered tensor, and flags."""
        return 2 * self.largest_moved_bytes + self.control_bytes

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "rows": [row.as_dict() for row in self.rows],
            "median_share_removed": self.median_share,
            "least_share_removed": self.least_share,
            "geometric_mean_ratio": self.mean_ratio,
            "symmetric_bytes": self.symmetric_bytes,
            "symmetric_bound_bytes": self.bound_bytes,
        }


def moved_bytes(case: Case) -> int:
    """The largest tensor that one call gathers or scatters."""
    width = max(case.k, case.width) if case.backward else case.width
    return case.tokens * width * case.itemsize


def all_cases() -> list[Case]:
    """Every row of the table; large and small alternate with neither operation nor dtype."""
    return [
        Case(operation, dtype, *shape, backward)
        for dtype in DTYPES
        for shape in SHAPES
        for operation in OPERATIONS
        for backward in (False, True)
    ]


def measure(rank: Rank, cases: list[Case], engine: str, budget: float) -> Result:
    """All cases in about `budget` seconds, shared out by the square root of their work. Collective."""
    weights = [math.sqrt(case.flops * (3 if case.backward else 1)) for case in cases]
    rows = []
    for case, weight in zip(cases, weights, strict=True):
        rows.append(Row(case, **rank.measure(ways(case, engine), budget * weight / sum(weights))))
    comm = rank.comm
    assert comm is not None
    if not comm.has_workspace:
        return Result(rows, 0, 0, 0)
    held, control = comm.workspace.nbytes, comm.workspace.control.nbytes
    return Result(rows, held, control, max(moved_bytes(case) for case in cases))
