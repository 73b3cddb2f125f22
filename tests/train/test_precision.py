"""fp16's loss scale: which steps are skipped, that all ranks skip the same ones, and that it changes no more."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from fusedtp.commands.build import build, build_stages
from fusedtp.commands.results import JsonLines, records_of
from fusedtp.commands.run import trainer_of
from fusedtp.commands.verify import compare, reference_steps
from fusedtp.parallel import clip_grad_norm_
from fusedtp.train import loop
from fusedtp.train.checkpoint import Checkpoints
from fusedtp.train.config import parse
from fusedtp.train.data import Batches
from fusedtp.train.loop import SMALLEST, ExpertLoad, LossScale, backward
from fusedtp.train.mesh import World
from tests.train.support import meshes_of, world_on

SIZES = "--width 16 --heads 4 --kv-heads 2 --mlp-width 10 --layers 2 --length 16 --batch 8 --warmup 2"


# -- the scale ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([1.0, 0.0, math.inf, math.nan])), st.integers(1, 4))
def test_the_scale_halves_at_an_overflow_and_doubles_after_a_window_without(norms, window):
    scale, value, run = LossScale(2.0**60, window), 2.0**60, 0
    for norm in norms:
        assert scale.takes(norm) == math.isfinite(norm)
        run = run + 1 if math.isfinite(norm) else 0
        value = value / 2 if not run else value * 2 if run % window == 0 else value
        assert scale.value == value
    assert scale.skipped == sum(not math.isfinite(norm) for norm in norms)


def test_gradients_that_no_scale_mends_are_an_error():
    scale = LossScale(SMALLEST, 10)
    with pytest.raises(OverflowError, match="not an overflow of fp16"):
        scale.takes(math.nan)


def test_other_dtypes_leave_no_step_out():
    assert LossScale().takes(math.nan) and LossScale().numbers == {}


# -- what it does to gradients -----------------------------------------------------------------------------------------

MODELS = {
    "dense": "",
    "documents": "--documents separate --accumulate 2",
    "experts": "--experts 4 --expert-width 8 --balance 0.1 --accumulate 2",
    "pipeline": "--pp 2 --accumulate 2 --experts 4 --expert-width 8 --balance 0.1",
}


def gradients(group: Any, options: str, tokens: Path, scale: float) -> tuple[float, dict[str, torch.Tensor]]:
    """Gradients of one step with this loss scale, unscaled again."""
    config = parse(f"{SIZES} {options}".split())
    pp = config.parallel.pp
    mesh, flat = meshes_of(1, pp=pp) if pp > 1 else (None, {})
    here = World(rank=group.rank() if pp > 1 else 0, mesh=mesh, flat=flat, pp=pp)
    data = config.data
    batches = Batches(
        tokens, length=16, batch=8, accumulate=data.accumulate, documents=data.documents
    )  # fmt: skip
    model, pipeline = build_stages(config, here)
    load = ExpertLoad(model, here, 0.0)
    loss = backward(model, batches, 0, load, 0, pipeline, scale=scale)
    LossScale(scale, 9).unscale_(model)
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_a_power_of_two_changes_no_gradient_by_a_bit(worlds, tokens: Path, options: str):
    """In fp32, every part of the loss is scaled exactly once, including router losses and losses of pipeline stages."""
    ranks = worlds(2)
    for plain, scaled in zip(
        ranks.run(gradients, options, tokens, 1.0),
        ranks.run(gradients, options, tokens, 2.0**10),
        strict=True,
    ):
        assert plain[0] == scaled[0]
        assert plain[1].keys() == scaled[1].keys()
        assert [name for name in plain[1] if not torch.equal(plain[1][name], scaled[1][name])] == []
        assert any(gradient.any() for gradient in plain[1].values())


# -- a run -------------------------------------------------------------------------------------------------------------


def trained(
    group: Any, mesh: str, options: str, tokens: Path, folder: Path | None = None, bad: tuple[int, ...] = ()
) -> tuple[list[dict[str, Any]], list[list[torch.Tensor]], dict[str, Any]]:
    """Train. Rank 1 puts an infinity into its part of the gradients in the steps `bad`.

    Returns the records, the parameters before every step and at the end, and the scale's state.
    """
    here = world_on(group, mesh)
    config = parse(f"{SIZES} {options}".split())
    batches = Batches(tokens, length=16, batch=8, dp=here.dp, dp_rank=here.dp_rank)
    model = build(config, here)
    trainer = trainer_of(config, here, batches, model)
    if folder is not None and any(folder.iterdir()):
        Checkpoints(folder, group=here.checkpoint_group).load(trainer.state)
    seen: list[list[torch.Tensor]] = []
    of = loop.clip_grad_norm_

    def clip(model: torch.nn.Module, *args: Any, **more: Any) -> torch.Tensor:
        seen.append([local(p).detach().clone() for p in model.parameters()])
        if trainer.step in bad and group.rank() == 1:
            local(next(p.grad for p in model.parameters() if p.grad is not None)).view(-1)[0] = math.inf
        return of(model, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "clip_grad_norm_", clip)
        trainer.train(config.optim.steps)
    seen.append([local(p).detach().clone() for p in model.parameters()])
    if folder is not None:
        with_state = Checkpoints(folder, group=here.checkpoint_group)
        with_state.save(trainer.step, trainer.state)
        with_state.close()
    return trainer.metrics.steps, seen, trainer.scale.state_dict()


def local(tensor: Any) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
@pytest.mark.parametrize("norm", ["2", "inf"])
def test_all_ranks_leave_out_the_step_that_overflows_on_one(worlds, tokens: Path, mesh: str, norm: str):
    options = f"--dtype fp16 --steps 4 --clip-norm {norm} --loss-scale 1024 --loss-scale-window 2"
    for records, seen, _ in worlds(2).run(trained, mesh, options, tokens, None, (1,)):
        stays = [all(map(torch.equal, a, b)) for a, b in pairwise(seen)]
        assert stays == [False, True, False, False]
        assert [record["grad_norm"] == math.inf for record in records] == stays
        assert [record["loss_scale"] for record in records] == [1024, 1024, 512, 512]


@pytest.mark.slow
def test_a_run_whose_first_steps_overflow_is_that_of_one_process(worlds, tokens: Path):
    """2^27 times a gradient of about 1 is far above fp16's maximum, 65504, so the overflows are real."""
    options = f"--dtype fp16 --steps 14 --loss-scale {2.0**27} --reduce-dtype bf16"
    config = parse(f"{SIZES} {options}".split())
    (records, *_), (others, *_) = worlds(2).run(trained, "dp2", options, tokens)
    skipped = [record["grad_norm"] == math.inf for record in records]
    assert 2 <= sum(skipped) <= 11 and skipped == sorted(skipped, reverse=True)
    theirs = [
        reference_steps(config, tokens, len(records), torch.device("cpu"), shaken, records) for shaken in (False, True)
    ]
    for own in (records, others):
        found = compare(config, own, *theirs)
        assert found.passed and found.steps > sum(skipped) + 1, found


@pytest.mark.slow
def test_a_run_that_gathers_in_bf16_is_that_of_one_process_and_keeps_its_weights_in_fp32(worlds, tokens: Path):
    options = "--dtype bf16 --param-dtype bf16 --data-parallel zero2 --steps 8"
    config = parse(f"{SIZES} {options}".split())
    ranks = worlds(2).run(trained, "dp2", options, tokens)
    theirs = [reference_steps(config, tokens, 8, torch.device("cpu"), shaken, ranks[0][0]) for shaken in (False, True)]
    for records, seen, _ in ranks:
        found = compare(config, records, *theirs)
        assert found.passed and found.steps == 8, found
        held = seen[-2]  # before the last update; the validation after it leaves parameters gathered
        assert {each.dtype for each in held} == {torch.float32}
        assert any(not torch.equal(each, each.bfloat16().float()) for each in held)


@pytest.mark.slow
def test_a_resumed_run_has_the_scale_that_it_had(worlds, tokens: Path, tmp_path: Path):
    options = "--dtype fp16 --loss-scale 4096 --loss-scale-window 3"
    ranks = worlds(2)
    (at_once, *_), _ = ranks.run(trained, "tp2", f"{options} --steps 9", tokens, None, (1, 4))
    first, _ = ranks.run(trained, "tp2", f"{options} --steps 9", tokens, tmp_path, (1, 4))
    assert first[2] == {"value": 4096 / 2 / 2 * 2, "good": 1, "skipped": 2}
    assert [record["loss_scale"] for record in at_once] == [4096, 4096, *[2048] * 3, *[1024] * 3, 2048]
    then, _ = ranks.run(trained, "tp2", f"{options} --steps 11", tokens, tmp_path)
    assert [record["loss_scale"] for record in then[0]] == [2048, 2048] and then[2]["value"] == 4096


def test_a_checkpoint_from_before_loss_scales_loads(tokens: Path, tmp_path: Path):
    trainers = []
    for dtype in ("fp32", "fp16"):
        config = parse(f"{SIZES} --dtype {dtype} --loss-scale 128".split())
        batches = Batches(tokens, length=16, batch=8)
        trainers.append(trainer_of(config, World(), batches, build(config, World())))
    older, newer = trainers
    older.step = 7
    del older.state.parts["loss_scale"]
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, older.state)
    checkpoints.wait()
    checkpoints.load(newer.state)
    checkpoints.close()
    assert newer.step == 7 and newer.scale.value == 128


# -- norms and records -------------------------------------------------------------------------------------------------


def norm_with_nan(group: Any, kind: float) -> float:
    """The norm of a gradient that is sharded over two ranks and has a NaN in its second half."""
    mesh, _ = meshes_of(2)
    parameter = torch.nn.Parameter(
        DTensor.from_local(torch.ones(3), mesh["dp"], [torch.distributed.tensor.Shard(0)], run_check=False)
    )
    of_rank = torch.tensor([1.0, math.nan if group.rank() else 2.0, 3.0])
    parameter.grad = DTensor.from_local(of_rank, mesh["dp"], [torch.distributed.tensor.Shard(0)], run_check=False)
    return clip_grad_norm_([parameter], 1.0, kind).item()


@pytest.mark.parametrize("kind", [2.0, 3.0, math.inf])
def test_a_nan_on_one_rank_is_in_the_norm_of_all(worlds, kind: float):
    assert not any(map(math.isfinite, worlds(2).run(norm_with_nan, kind)))


@pytest.mark.slow
def test_what_is_not_finite_is_null_in_the_records(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path, [{"step": 0, "loss": math.nan}])
    sink.write({"step": 1, "loss": 1.5, "grad_norm": math.inf, "expert_load": [[1, 2]]})
    sink.close()
    assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()
    assert records_of(tmp_path) == [
        {"step": 0, "loss": None},
        {"step": 1, "loss": 1.5, "grad_norm": None, "expert_load": [[1, 2]]},
    ]
