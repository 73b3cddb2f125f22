"""All ways of one case: what runs, why others do not, how wrong each is; sampled together, a row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fusedtp.ops.engines import interpreting

from .cases import Case
from .errors import Error
from .rank import Rank
from .rows import FAILED, Row
from .sample import Rotating, Spread, Way

Function = Callable[..., Any]
NO_SWITCH = "no switch sums what these GPUs hold"
INTERPRETED = "engine triton is interpreted on a CPU: its time says nothing"


class Ways:
    """Functions of the same operands by name, and what is absent with the words that say why."""

    def __init__(self, rank: Rank, suite: str, case: Case) -> None:
        self.rank, self.suite, self.case = rank, suite, case
        self.functions: dict[str, Function] = {}
        self.absent: dict[str, str] = {}
        self.timed: dict[str, Way] = {}

    def add(self, name: str, function: Function | None, why: str = "") -> None:
        """One that rivals.py found, or why there is none."""
        if function is not None:
            self.functions[name] = function
        else:
            self.absent[name] = why

    def add_engine(self, engine: str, function: Function) -> None:
        """One of ours, but for a kernel that only Triton's interpreter would run."""
        on_cpu = self.rank.device.type == "cpu"
        kernels = engine in ("triton", "triton-copy", "multimem")
        interpreted = kernels and on_cpu and not (self.rank.plan.smoke and interpreting())
        self.add(f"fusedtp {engine}", None if interpreted else function, INTERPRETED)

    def prepare(
        self,
        sets: Sequence[tuple[Any, ...]] | Mapping[str, Sequence[tuple[Any, ...]]],
        timed: Callable[[str, Function], Function] = lambda name, function: function,
    ) -> None:
        """Drop what fails at its first call, on any rank: another version, too little memory. Collective.

        Of ours it is said that it failed, and the case counts as one that did.

        sets    of operands, for all or by name
        timed   what a sample calls of (name, function)
        """
        for name, function in self.functions.items():
            mine = sets.get(name, sets.get("")) if isinstance(sets, Mapping) else sets
            assert mine is not None
            self.timed[name] = Rotating(timed(name, function), mine)
        for name, why in self.rank.failures(self.timed).items():
            self.absent[name] = FAILED + why if name.startswith("fusedtp") else why
            del self.timed[name], self.functions[name]

    def rows(self, each: Mapping[str, Mapping[str, Any]] | None = None, **figures: Any) -> list[Row]:
        """Sample all, interleaved: a row a way, and one for what is absent. Collective.

        each   way -> figures of its own; `figures` are those of all
        """
        spreads = self.rank.measure(self.timed)
        own = each or {}
        rows = [self.row(name, spread, **{**figures, **own.get(name, {})}) for name, spread in spreads.items()]
        return rows + self.missing()

    def row(self, name: str, spread: Spread, **figures: Any) -> Row:
        """A row of what was sampled."""
        host = self.rank.host(self.timed[name], spread)
        note = self.rank.notes.get(name, "")
        return self._made(name, seconds=spread, host_seconds=host, note=note, **figures)

    def missing(self) -> list[Row]:
        """Rows of what is absent."""
        return [self._made(name, note=why) for name, why in self.absent.items()]

    def _made(self, name: str, **figures: Any) -> Row:
        """A row of this world. `error` may be an Error."""
        rank, error = self.rank, figures.pop("error", None)
        if isinstance(error, Error):
            figures |= {"error": error.largest, "error_share": error.share}
        return Row(self.suite, self.case.shape, self.case.dtype, name, rank.world, rank.world_size, **figures)
