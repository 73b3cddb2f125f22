"""A recorded step has every pass of its schedule once and in dependency order. Recording changes no gradient."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedtp.commands.results import pipeline_in_words, screen
from fusedtp.commands.run import PIPELINE, record_step
from fusedtp.nn import init_
from fusedtp.train.bubbles import ideal, mean_cost, order_of, recorded_order, shares
from fusedtp.train.config import parse
from fusedtp.train.mesh import World
from fusedtp.train.stages import (
    SCHEDULES,
    TWO_PASSES,
    Action,
    Pipeline,
    cut,
    prune_,
    stage_count,
    stages_of,
)
from tests.train.support import mesh_of
from tests.train.test_stages import batches_of, model_of

MICROBATCHES = 4


def pipeline_of(group: Any, schedule: str) -> Pipeline:
    mesh = mesh_of(pp=2)
    model = model_of(False)
    parts, here = cut([1.0] * 5, 0.5, stage_count(schedule, 2)), stages_of(schedule, 2, group.rank())
    prune_(model, parts, here)
    init_(model.to_empty(device="cpu"), 0, std=0.3)
    return Pipeline(model, mesh["pp"], schedule, parts, here)


def recorded(group: Any, schedule: str) -> tuple[list[list[Action]], list[float], bool, Any, Any]:
    """Record the second of three equal steps.

    Returns its actions, all gradient norms, whether later steps are recorded too, torch's order, and the idle shares.
    """
    pipeline = pipeline_of(group, schedule)
    told: list[list[Action]] = []
    norms, batches = [], batches_of(MICROBATCHES, 8, 0)
    for again in range(3):
        if again == 1:
            pipeline.record(0, told.append)
        pipeline.step(batches, 7, 0)
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in pipeline.model.parameters()]).item())
        pipeline.model.zero_grad()
    torch_schedule = pipeline.torch_schedule(batches)
    stages = getattr(torch_schedule, "_stages", None) or [torch_schedule._stage]
    left = any(stage.timeline is not None for stage in stages)
    return told, norms, left, order_of(pipeline.ran), shares(told[0], pipeline.ran)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_pass_once_and_after_what_it_waits_for(worlds, schedule: str):
    (told, norms, left, listed, found), (other, *_) = worlds(2).run(recorded, schedule)
    assert len(told) == 1 and told == other and not left and norms[0] == norms[1] == norms[2]
    actions, last = told[0], stage_count(schedule, 2) - 1
    done: dict[tuple[str, int, int], Action] = {}
    for action in actions:
        key = ("B" if action.kind == "I" else action.kind, action.stage, action.microbatch)
        assert key not in done and 0 < action.begin <= action.end
        assert action.stage in stages_of(schedule, 2, action.rank)
        done[key] = action
    for stage in range(last + 1):
        for microbatch in range(MICROBATCHES):
            forward, backward = done[("F", stage, microbatch)], done[("B", stage, microbatch)]
            before = done[("F", stage - 1, microbatch)].end if stage else 0.0
            after = forward.end if stage == last else done[("B", stage + 1, microbatch)].end
            assert before <= forward.begin and max(after, forward.end) <= backward.begin
            weight = done.get(("W", stage, microbatch))
            assert (weight is not None) == (backward.kind == "I")
            assert weight is None or backward.end <= weight.begin
    for rank in range(2):
        own = [action for action in actions if action.rank == rank]
        assert all(one.end <= other.begin for one, other in pairwise(own))
    assert ("I" in {action.kind for action in actions}) == (schedule in TWO_PASSES)
    of_order = listed or recorded_order(actions)  # the list names all that ran, or the costs would lack a pass
    assert found[1] == ideal(of_order, mean_cost(actions))[0] and all(0 < share < 1 for share in found)


def written(group: Any, options: str) -> str:
    """The console output of this rank."""
    pipeline, config, console = pipeline_of(group, "1f1b"), parse(options.split()), screen(group.rank() != 0)
    with console.capture() as said:
        record_step(pipeline, config, World(rank=group.rank()), console)
        for step in range(config.optim.steps):
            pipeline.step(batches_of(MICROBATCHES, 8, 0), 7, step)
    return said.get()


def test_a_step_that_cannot_be_written_is_shown_all_the_same(worlds, tmp_path: Path):
    (path := tmp_path / "main" / PIPELINE).mkdir(parents=True)
    said, _ = worlds(2).run(written, f"--pp 2 --runs {tmp_path} --steps 4")
    assert f"{path} could not be written: Is a directory\n" in said and "idle" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "step"),
    [
        ("--steps 4", 2),
        ("--steps 2", 1),
        ("--steps 4 --record-step 1", 0),
        ("--steps 4 --record-step 0", None),
    ],
)
def test_a_run_leaves_one_step_in_its_folder(worlds, tmp_path: Path, options: str, step: int | None):
    (tmp_path / "main").mkdir()
    said, other = worlds(2).run(written, f"--pp 2 --runs {tmp_path} {options}")
    path = tmp_path / "main" / PIPELINE
    assert path.exists() == (step is not None) == bool(said) and other == ""
    if step is not None:
        found = json.loads(path.read_text())
        assert (found["step"], found["schedule"]) == (step, "1f1b")
        assert Counter((rank, stage, kind) for rank, stage, kind, *_ in found["actions"]) == {
            (rank, rank, kind): MICROBATCHES for rank in range(2) for kind in "FB"
        }
        assert (found["idle"], found["ideal"]) == shares([Action(*each) for each in found["actions"]])
        assert said == f"{pipeline_in_words(found)}\n" and f"alone {found['ideal']:.0%}" in said
