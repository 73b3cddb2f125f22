"""Options of `fusedtp check`, as a typed dataclass that lists its own faults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from .explore import Schedule, schedules
from .strategies import DEFAULT, STRATEGIES
from .workers import resident_of

SCHEDULES = 200
EXHAUST_LIMIT = 10_000


@dataclass(frozen=True)
class CheckOptions:
    """Find races, deadlocks and wrong results of multi-rank Triton kernels, on simulated ranks."""

    cases: tyro.conf.Positional[tuple[str, ...]] = ()
    """Fused kernels by name, or files: ring.py::exchange is one case, ring.py all that it defines. Default: every
    fused kernel of the library."""
    world_size: tuple[int, ...] = ()
    """Ranks; several numbers check each. Default: 4, or what the case itself says."""
    schedules: int | None = None
    """Schedules of each case. Default: 200, or as many as fit where --seconds is given."""
    seconds: float | None = None
    """Stop each case after about so long."""
    seed: int = 0
    """Seed of the first schedule; the next ones count up."""
    strategies: tuple[str, ...] = DEFAULT
    """Who runs next, in turn."""
    resident: Annotated[tuple[str, ...], tyro.conf.arg(metavar="{all,varying,N}...")] = ()
    """Programs of a rank that are alive at once, in turn. Default: all 1 varying 2."""
    weak: Literal["no", "yes", "both"] = "both"
    """Whether stores reach other programs late and in any order until a release; both: in turn."""
    fine: bool = False
    """Switch at every memory access, not only at atomics."""
    exhaust: int | None = None
    """Instead: every schedule with at most so many switches away from a program that could go on. For small cases."""
    workers: int | None = None
    """Processes. Default: one a core."""
    lint: bool = True
    """Compile the kernels for several kinds of GPU, none of which need be here, and check the memory order and the
    instructions of the result. Default: only where no case is named."""
    timeline: Path | None = None
    """Write an HTML timeline of the fault, or of one schedule where there is none."""

    def faults(self) -> list[str]:
        """What is wrong with the options themselves."""
        found = [f"--strategies {name!r} must be one of {', '.join(DEFAULT)}" for name in self.strategies
                 if name not in STRATEGIES or name == "replay"]  # fmt: skip
        for word in self.resident:
            try:
                resident_of(word)
            except ValueError as error:
                found.append(str(error))
        for name in ("schedules", "seconds", "workers", "exhaust"):
            value = getattr(self, name)
            if value is not None and value < (0 if name == "exhaust" else 1e-9):
                found.append(f"--{name} {value} is too small")
        found += [f"--world-size {w} must be at least 1" for w in self.world_size if w < 1]
        if not self.strategies:
            found.append("--strategies names none")
        if self.timeline is not None and not self.timeline.absolute().parent.is_dir():
            found.append(f"--timeline {self.timeline}: no such folder")
        return found

    def residents(self) -> tuple[int | str | None, ...] | None:
        return tuple(resident_of(word) for word in self.resident) or None

    def chosen(self) -> Iterator[Schedule]:
        """The schedules of a case, without end."""
        for schedule in schedules(1 << 40, self.strategies, first_seed=self.seed, residents=self.residents()):
            weak = {"no": False, "yes": True, "both": schedule.weak}[self.weak]
            yield replace(schedule, fine=self.fine, weak=weak)

    def limit(self) -> int | None:
        """How many schedules a case gets; None: as many as time allows."""
        return SCHEDULES if self.schedules is None and self.seconds is None else self.schedules
