"""Pipeline bubbles: torch's own orders, simulated without communication, give the published formulas."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

from fusedtp.bench.bubbles import Costs, formula
from fusedtp.train import bubbles
from fusedtp.train.bubbles import Together
from fusedtp.train.stages import SCHEDULES, SINGLE, V_SHAPED, Action, stage_count, stages_of

SECONDS = st.floats(0.01, 1.0)


def single(name: str, ranks: int, microbatches: int) -> dict[int, list[Together]]:
    """The order of GPipe and 1F1B, for which torch has no list."""
    found: dict[int, list[Together]] = {}
    for rank in range(ranks):
        ahead = microbatches if name == "gpipe" else min(microbatches, ranks - rank)
        order = [("F", m) for m in range(ahead)]
        for m in range(microbatches):
            order.append(("B", m))
            order += [("F", ahead + m)] * (ahead + m < microbatches)
        found[rank] = [((kind, rank, m),) for kind, m in order]
    return found


def of_torch(name: str, ranks: int, microbatches: int) -> dict[int, list[Together]]:
    """The list of torch's schedule. It only asks the stages for their positions."""
    count = stage_count(name, ranks)
    stages: Any = [
        SimpleNamespace(
            stage_index=i, num_stages=count, group_size=ranks, group_rank=0, group=None, device=torch.device("cpu"),
            is_first=i == 0, is_last=i == count - 1, submod=torch.nn.Identity(), stage_index_to_group_rank={},
            has_backward=True,
        )
        for i in stages_of(name, ranks, 0)
    ]  # fmt: skip
    made = schedules.get_schedule_class(SCHEDULES[name])(stages, microbatches, loss_fn=torch.sum)
    found = bubbles.order_of(made)
    assert found is not None
    return dict(found)


def order(name: str, ranks: int, microbatches: int) -> dict[int, list[Together]]:
    return (single if name in SINGLE else of_torch)(name, ranks, microbatches)


@pytest.mark.slow
@given(f=SECONDS, i=SECONDS, w=SECONDS, ranks=st.integers(1, 5), rounds=st.integers(1, 3))
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "looped_bfs"])
def test_idle_is_that_of_the_formula_whatever_passes_cost(
    name: str, f: float, i: float, w: float, ranks: int, rounds: int
):
    costs, stages = Costs(f, i, w), 1 if name in SINGLE else 2
    share, seconds = bubbles.ideal(order(name, ranks, rounds * ranks), costs.each(stages))
    assert share == pytest.approx(formula(name, ranks, stages, rounds * ranks, costs), abs=1e-9)
    assert seconds * (1 - share) == pytest.approx(rounds * ranks * costs.all)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("dualpipev", *SINGLE)])
def test_with_equal_passes_several_stages_a_rank_wait_as_published(name: str, ranks: int):
    costs = Costs(2.0, 2.0, 2.0)
    share, _ = bubbles.ideal(order(name, ranks, 8), costs.each(2))
    assert share == pytest.approx(formula(name, ranks, 2, 8, costs), abs=1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_pass_of_torchs_lists_is_played_once(name: str):
    every = [each for own in order(name, 2, 8).values() for together in own for each in together]
    assert len(every) == len(set(every))
    assert {each[1:] for each in every if each[0] == "F"} == {each[1:] for each in every if each[0] in "BI"}
    assert {each[1:] for each in every if each[0] == "I"} == {each[1:] for each in every if each[0] == "W"}
    assert any(len(together) == 2 for own in order(name, 2, 8).values() for together in own) == (name == "dualpipev")


def test_pairs_send_when_both_are_done():
    """Rank 1 gets the output of F only after the B in the same action: 2 + 3, then its own 2."""
    costs = Costs(2.0, 2.0, 1.0)
    before = {0: [(("F", 0, 0),)], 1: [(("F", 1, 0),), (("B", 1, 0),)]}
    apart = bubbles.play(
        {**before, 0: [*before[0], (("F", 0, 1),), (("B", 0, 0),)], 1: [*before[1], (("F", 1, 1),)]},
        costs.each(1),
    )
    paired = bubbles.play(
        {**before, 0: [*before[0], (("F", 0, 1), ("B", 0, 0))], 1: [*before[1], (("F", 1, 1),)]},
        costs.each(1),
    )
    assert (apart, paired) == (10.0, 12.0)


def test_an_order_in_which_ranks_wait_for_each_other_is_named():
    with pytest.raises(ValueError, match="wait for each other"):
        bubbles.play({0: [(("B", 0, 0),), (("F", 0, 0),)], 1: [(("F", 1, 0),), (("B", 1, 0),)]}, Costs(1, 1, 1).each(1))


def test_a_first_stage_of_two_passes_has_all_its_backward_in_the_second():
    costs = Costs(1.0, 2.0, 3.0)
    assert [costs.of(kind, stage, 2) for stage in (0, 1) for kind in "BIW"] == [2.5, 0.0, 2.5, 2.5, 1.0, 1.5]


def test_what_a_step_was_idle():
    actions = [Action(0, 0, "F", 0, 1.0, 2.0), Action(1, 1, "F", 0, 2.0, 3.0), Action(1, 1, "B", 0, 3.0, 5.0)]
    assert bubbles.measured(actions) == (0.5, 4.0)
    assert bubbles.recorded_order(actions) == {0: [(("F", 0, 0),)], 1: [(("F", 1, 0),), (("B", 1, 0),)]}
    assert V_SHAPED.keys() < SCHEDULES.keys()


@pytest.mark.slow
@given(ranks=st.integers(2, 8), more=st.integers(0, 9))
@pytest.mark.parametrize("name", sorted(V_SHAPED))
def test_the_first_stage_of_a_v_begins_before_the_last_one_and_ends_after_it(name: str, ranks: int, more: int):
    """Both stages are on rank 0 and use a tied embedding, which the first stage's FSDP2 unit gathers and reduces."""
    own = [each for together in order(name, ranks, 2 * ranks + more)[0] for each in together]
    last = 2 * ranks - 1
    assert own[0] == ("F", 0, 0) and own[-1][1] == 0
    assert {stage for _, stage, _ in own} == {0, last}


def listed(orders: dict[int, list[Together]]) -> Any:
    """A torch schedule with this list."""
    made: Any = object.__new__(schedules.ScheduleInterleaved1F1B)
    made.pipeline_order = {
        rank: [
            SimpleNamespace(sub_actions=tuple(schedules._Action(stage, KINDS[kind], m) for kind, stage, m in each))
            for each in order
        ]
        for rank, order in orders.items()
    }
    return made


KINDS = {"F": schedules._ComputationType.FORWARD, "B": schedules._ComputationType.FULL_BACKWARD}


def test_a_recorded_step_is_compared_with_its_own_order_and_mean_costs():
    """Forward of stage 0 takes 1 and 3, on average 2. By order alone, rank 1 ends at 2 + 2 + 4 + 2 + 4, and rank 0 ends
    4 later. If rank 0 sends its second forward only with the backward that follows it, both end 4 later still.
    """
    actions = [
        Action(0, 0, "F", 0, 0.0, 1.0), Action(0, 0, "F", 1, 1.0, 4.0), Action(0, 0, "B", 0, 12.0, 16.0),
        Action(0, 0, "B", 1, 26.0, 30.0), Action(1, 1, "F", 0, 5.0, 7.0), Action(1, 1, "B", 0, 7.0, 11.0),
        Action(1, 1, "F", 1, 16.0, 18.0), Action(1, 1, "B", 1, 18.0, 22.0),
    ]  # fmt: skip
    assert bubbles.shares(actions) == (pytest.approx(1 - 24 / (2 * 30)), pytest.approx(1 - 24 / (2 * 18)))
    apart = dict(bubbles.recorded_order(actions))
    paired = [*apart[0][:1], (*apart[0][1], *apart[0][2]), *apart[0][3:]]
    assert bubbles.shares(actions, listed({**apart, 0: paired}))[1] == pytest.approx(1 - 24 / (2 * 22))
    assert bubbles.shares(actions, listed({**apart, 0: paired[:2]})) == bubbles.shares(actions), "not what ran"
