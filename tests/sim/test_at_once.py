"""What goes to all ranks costs one barrier and one release, of all ranks' words; what has come costs one look."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from fusedtp.checks.cases import fused_case, meeting_case
from fusedtp.checks.dense import TILE, Call
from fusedtp.sim import Case, Schedule, run_schedule
from fusedtp.sim.ptx.program import Lanes


class Atomic(NamedTuple):
    """An atomic instruction that ran, and on how many words at once."""

    rank: int
    order: str
    scope: str
    words: int
    function: str


@contextmanager
def watched() -> Iterator[list[Atomic]]:
    """While entered, all atomics in global memory are noted."""
    found: list[Atomic] = []
    plain = Lanes.atomic

    def noted(self: Any, operation: str, t: str, at: Any, values: Any, mask: Any, order: str, scope: str,
              site: Any, returns: bool) -> Any:  # fmt: skip
        words = self.count if mask is True else int(mask.sum())
        if words:
            found.append(Atomic(self.window.where[0], order, scope, words, site.function))
        return plain(self, operation, t, at, values, mask, order, scope, site, returns)

    with patch.object(Lanes, "atomic", noted):
        yield found


def released(case: Case, target: str) -> list[Counter[tuple[str, int]]]:
    """By rank, how often each function released how many words at once, over the whole case."""
    run = case.make()
    with watched() as found:
        run_schedule(run, Schedule(target=target))
    assert run.check() == []
    releases = [each for each in found if each.order in ("release", "acq_rel")]
    assert {each.scope for each in releases} == {"sys"}
    ranks = 1 + max(each.rank for each in releases)
    return [Counter((e.function, e.words) for e in releases if e.rank == rank) for rank in range(ranks)]


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("w", [2, 3, 5])
def test_a_rank_arrives_at_all_ranks_by_one_release(w: int, target: str) -> None:
    for of_rank in released(meeting_case(w), target):
        assert {words for function, words in of_rank if function == "arrive"} == {w}


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("sizes", [(5, 3), (TILE + 1, 0, 2)])
def test_a_partial_tile_is_published_to_all_ranks_by_one_release(sizes: tuple[int, ...], target: str) -> None:
    width, w = 3 * TILE + 1, len(sizes)
    call = Call("one_shot_all_reduce", sizes, (width,), chunk=1, programs=(2, 2))
    tiles = -(-sum(sizes) // TILE) * -(-width // TILE)
    for of_rank in released(fused_case("one call", [call]), target):
        assert of_rank == {("arrive", w): 1, ("publish_to_all", w): tiles}


@pytest.mark.parametrize("operation", ["two_shot_all_reduce", "moe_dispatch", "moe_matmul_combine"])
def test_what_is_for_all_ranks_is_published_to_all_at_once(operation: str) -> None:
    sizes = (5, 9, 3)
    for of_rank in released(
        fused_case("one call", [Call(operation, sizes, chunk=1, programs=(2, 2))]), "sm_90"
    ):
        assert of_rank["arrive", 3] == 1 and of_rank["publish_to_all", 3] > 0
        alone = {function for function, words in of_rank if words != 3}
        assert alone == (
            {"publish"} if operation == "two_shot_all_reduce" else set()
        )  # partials, each to its owner
