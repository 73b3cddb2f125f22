"""How much CI runs: fewer examples of laws whose examples take seconds, and a part of the slow tests.

CI sets HYPOTHESIS_PROFILE=ci and passes `--part`, see .ci/run. CONTRIBUTING.md says what runs the rest.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol, TypeVar

from tests.faults.table import areas, load

SAMPLED = os.environ.get("HYPOTHESIS_PROFILE") == "ci"
PARTS = 25


class Item(Protocol):
    """What pytest collects: a test with its parameters."""

    nodeid: str

    def get_closest_marker(self, name: str) -> object: ...


T = TypeVar("T", bound=Item)


def examples(whole: int, sampled: int) -> int:
    """How many examples of a law to draw, or schedules to run, where one takes seconds."""
    return sampled if SAMPLED else whole


def of_part(items: Sequence[T], part: int, names: set[str] | None = None) -> tuple[list[T], list[T]]:
    """(the tests of this part, the others), both in order.

    Every part has all tests that are not marked `slow`, and the slow ones that a row of tests/faults names: they are
    known to find a fault. The other slow tests are dealt out to PARTS parts, so that each runs in one of PARTS
    consecutive commits if `part` counts commits. names: what the rows name, a test or one of its cases; LookupError if
    a file of these items has no such test.
    """
    named = names_of_faults() if names is None else names
    files, known = {item.nodeid.partition("::")[0] for item in items}, {name for item in items for name in _names(item)}
    if missing := sorted(name for name in named - known if name.partition("::")[0] in files):
        raise LookupError(f"rows of tests/faults name what does not exist: {', '.join(missing)}")
    rare = [item for item in items if item.get_closest_marker("slow") and named.isdisjoint(_names(item))]
    left = {id(item) for number, item in enumerate(rare) if number % PARTS != part % PARTS}
    return [item for item in items if id(item) not in left], [item for item in items if id(item) in left]


def names_of_faults() -> set[str]:
    """The tests that rows of tests/faults name, as pytest does."""
    return {test for area in areas() for fault in load(area) for test in fault.tests}


def _names(item: Item) -> tuple[str, str]:
    """The names by which a row may mean this item: with and without its parameters."""
    return item.nodeid, item.nodeid.partition("[")[0]
