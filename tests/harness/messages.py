"""Messages between the driver and its workers; importable without torch."""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PerRank:
    """An argument with one value per rank: rank r receives `values[r]`."""

    values: Sequence[Any]


@dataclass(frozen=True)
class Failure:
    """How one rank failed: the class names of the exception, base classes included, and its message.

    A worker that died has the kind "WorkerDied", one that did not answer in time "WorkerHung".
    """

    kinds: tuple[str, ...]
    message: str
    details: str
    seconds: float

    @classmethod
    def of(cls, error: BaseException, seconds: float) -> "Failure":
        """Make a Failure from `error`, raised `seconds` after the call began."""
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        return cls(kinds, str(error), "".join(traceback.format_exception(error)), seconds)

    def is_a(self, *kinds: str) -> bool:
        """Whether the exception is an instance of one of these classes, given by name."""
        return any(kind in self.kinds for kind in kinds)


class WorldError(AssertionError):
    """Some ranks of a world failed; `outcomes` holds each rank's result or `Failure`."""

    def __init__(self, name: str, outcomes: Sequence[Any]) -> None:
        self.outcomes = list(outcomes)
        parts = [
            f"--- rank {rank} of {len(self.outcomes)}: {failure.kinds[0]} after {failure.seconds:.1f} s\n"
            f"{failure.details}"
            for rank, failure in enumerate(self.outcomes)
            if isinstance(failure, Failure)
        ]
        super().__init__(f"{name} failed on {len(parts)} rank(s)\n" + "\n".join(parts))
