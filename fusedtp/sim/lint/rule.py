"""What a rule is: a name, what it says, where that is from, and a function that yields what breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .report import Finding

if TYPE_CHECKING:
    from .compiler import Compiled
    from .facts import Facts

Check = Callable[["Compiled", "Facts"], Iterator[Finding]]


@dataclass(frozen=True)
class Rule:
    name: str
    says: str
    source: str
    check: Check


def rule(name: str, says: str, source: str) -> Callable[[Check], Rule]:
    """Decorate the function of a rule."""
    return lambda check: Rule(name, says, source, check)
