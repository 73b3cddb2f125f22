"""All ways of one case: those that run, those that are absent with the reason, and one result row for each."""

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
NO_SWITCH = "no NVSwitch with NVLink SHARP connects these GPUs"
INTERPRETED = "engine triton is interpreted on a CPU: its time is meaningless"


class Ways:
    """Functions of the same operands by name, and absent ways with the reason."""

    def __init__(self, rank: Rank, suite: str, case: Case) -> None:
        self.rank, self.suite, self.case = rank, suite, case
        self.functions: dict[str, Function] = {}
        self.absent: dict[str, str] = {}
        self.timed: dict[str, Way] = {}

    def add(self, name: str, function: Function | None, why: str = "") -> None:
        """Add a way, or the reason why it is absent."""
        if function is not None:
            self.functions[name] = function
        else:
            self.absent[name] = why

    def add_engine(self, engine: str, function: Function) -> None:
        """Add one of our engines, unless its kernels would run in Triton's interpreter."""
        on_cpu = self.rank.device.type == "cpu"
        kernels = engine in ("triton", "triton-copy", "multimem")
        interpreted = kernels and on_cpu and not (self.rank.plan.smoke and interpreting())
        self.add(f"fusedtp {engine}", None if interpreted else function, INTERPRETED)

    def prepare(
        self,
        sets: Sequence[tuple[Any, ...]] | Mapping[str, Sequence[tuple[Any, ...]]],
        timed: Callable[[str, Function], Function] = lambda name, function: function,
    ) -> None:
        """Drop ways that fail at their first call on any rank: wrong version, out of memory. Collective.

        If one of ours fails, its row says so and the case counts as failed.

        sets    sets of operands, for all ways or by name
        timed   (name, function) -> the function that a sample calls
        """
        for name, function in self.functions.items():
            mine = sets.get(name, sets.get("")) if isinstance(sets, Mapping) else sets
            assert mine is not None
            self.timed[name] = Rotating(timed(name, function), mine)
        for name, why in self.rank.failures(self.timed).items():
            self.absent[name] = FAILED + why if name.startswith("fusedtp") else why
            del self.timed[name], self.functions[name]

    def rows(self, each: Mapping[str, Mapping[str, Any]] | None = None, **figures: Any) -> list[Row]:
        """Sample all ways, interleaved; one row per way, including absent ones. Collective.

        each   way -> its own figures; `figures` apply to all
        """
        spreads = self.rank.measure(self.timed)
        own = each or {}
        rows = [self.row(name, spread, **{**figures, **own.get(name, {})}) for name, spread in spreads.items()]
        return rows + self.missing()

    def row(self, name: str, spread: Spread, **figures: Any) -> Row:
        """The row of a sampled way."""
        host = self.rank.host(self.timed[name], spread)
        note = self.rank.notes.get(name, "")
        return self._made(name, seconds=spread, host_seconds=host, note=note, **figures)

    def missing(self) -> list[Row]:
        """The rows of absent ways."""
        return [self._made(name, note=why) for name, why in self.absent.items()]

    def _made(self, name: str, **figures: Any) -> Row:
        """A row with the fields of this case and world. `error` may be an Error."""
        rank, error = self.rank, figures.pop("error", None)
        if isinstance(error, Error):
            figures |= {"error": error.largest, "error_share": error.share}
        return Row(self.suite, self.case.shape, self.case.dtype, name, rank.world, rank.world_size, **figures)
