"""A signal to all ranks is one release of all their words, and a rank that waits for one rank checks all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from fusedtp.checks.cases import fused_case, meeting_case, operands, plan, slot_bytes
from fusedtp.checks.dense import TILE, Call, SimulatedWorld, launched, meeting
from fusedtp.sim import Case, Run, Schedule, SimulationFault, run_schedule
from fusedtp.sim.explore import schedules
from fusedtp.sim.ptx.program import Lanes


class Atomic(NamedTuple):
    """An atomic instruction that ran, with the number of words it touched at once."""

    rank: int
    order: str
    scope: str
    words: int
    function: str


@contextmanager
def watched() -> Iterator[list[Atomic]]:
    """While entered, all atomics in global memory are recorded."""
    found: list[Atomic] = []
    plain = Lanes.atomic

    def noted(self: Any, operation: str, t: str, at: Any, values: Any, mask: Any, order: str, scope: str,
              site: Any, *more: bool) -> Any:  # fmt: skip
        words = self.count if mask is True else int(mask.sum())
        if words:
            found.append(Atomic(self.window.where[0], order, scope, words, site.function))
        return plain(self, operation, t, at, values, mask, order, scope, site, *more)

    with patch.object(Lanes, "atomic", noted):
        yield found


def released(case: Case, target: str) -> list[Counter[tuple[str, int]]]:
    """By rank: how often each function released how many words to peers at once, over the whole case."""
    run = case.make()
    with watched() as found:
        run_schedule(run, Schedule(target=target))
    assert run.check() == []
    every = [each for each in found if each.order in ("release", "acq_rel")]
    releases = [
        each for each in every if each.function not in ("leave", "complete")
    ]  # which programs of one rank tell each other
    assert {each.scope for each in releases} == {"sys"} and len(releases) < len(every)
    ranks = 1 + max(each.rank for each in releases)
    return [Counter((e.function, e.words) for e in releases if e.rank == rank) for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("w", [2, 3, 5])
def test_a_rank_arrives_at_all_ranks_by_one_release(w: int, target: str) -> None:
    for of_rank in released(meeting_case(w), target):
        assert {words for function, words in of_rank if function == "arrive"} == {w}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("sizes", [(5, 3), (TILE + 1, 0, 2)])
def test_a_program_publishes_its_tiles_to_all_ranks_by_one_release(sizes: tuple[int, ...], target: str) -> None:
    width, w, programs = 3 * TILE + 1, len(sizes), 5
    call = Call("one_shot_all_reduce", sizes, (width,), programs=(programs, 0))
    tiles = -(-sum(sizes) // TILE) * -(-width // TILE)
    for of_rank in released(fused_case("one call", [call]), target):
        assert of_rank == {("arrive", w): 1, ("publish_to_all", w): min(tiles, programs)}


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["two_shot_all_reduce", "moe_dispatch", "moe_matmul_combine"])
def test_what_is_for_all_ranks_is_published_to_all_at_once(operation: str) -> None:
    sizes = (5, 9, 3)
    for of_rank in released(fused_case("one call", [Call(operation, sizes, chunk=1, programs=(2, 2))]), "sm_90"):
        assert of_rank["arrive", 3] == 1 and of_rank["publish_to_all", 3] > 0
        alone = {function for function, words in of_rank if words != 3}
        assert alone == ({"publish"} if operation == "two_shot_all_reduce" else set())  # partials, each to its owner


def stranger_and_failure() -> tuple[Run, SimulatedWorld]:
    """Ranks 0 and 1 agree, rank 2 is in a meeting. Rank 0 has no rows; it soon fails and publishes nothing more."""
    call = Call("matmul_reduce_scatter", (0, 5, 5), chunk=1)
    world, given = SimulatedWorld(3, slot_bytes(call), 64), operands(call, 0)
    planned = [plan(call, given, world, rank, 7)[0] for rank in range(2)]
    work = [[launched(each)] for each in planned] + [[meeting(world, 2, 8)]]
    memory = [replace(each, poisoned=False) for each in world.memory]  # what a failed call reads is not used
    return Run(work, memory, lambda: ()), world


@pytest.mark.slow
def test_a_stranger_is_noticed_by_a_rank_that_waits_for_one_that_failed_because_of_it() -> None:
    """The stranger itself may wait in vain: programs start in any order here, so peers can fail before they arrive."""
    noticed = 0
    for schedule in schedules(8):
        run, world = stranger_and_failure()
        try:
            with patch("fusedtp.sim.ptx.machine.MOST_TURNS", 100_000):
                run_schedule(run, replace(schedule, target="sm_90"))
        except SimulationFault as error:
            if error.fault.rule.endswith("race"):  # data that nobody waits for
                continue
        assert [status[:2].tolist() for status in world.statuses.tensors[:2]] == [[2, 2], [2, 2]], schedule
        noticed += 1
    assert noticed > 2
