"""A resumed run equals the uninterrupted run, bit for bit on the same mesh."""

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fusedtp import cli
from fusedtp.commands import launch
from fusedtp.commands.build import build_stages
from fusedtp.commands.run import CHECKPOINTS, END, INCIDENTS, note_incident, trainer_of
from fusedtp.commands.verify import rounding
from fusedtp.nn.init import init_
from fusedtp.parallel import parallelize
from fusedtp.train import checkpoint
from fusedtp.train.checkpoint import FORMAT, Checkpoints, Saver, path_of, steps_in
from fusedtp.train.config import parse
from fusedtp.train.data import Batches
from fusedtp.train.loop import Trainer, learning_rate
from fusedtp.train.shard import shard
from tests.harness.warm import warm_python
from tests.train.support import mesh_of, ranks_of, world_on
from tests.train.test_checkpoint import EXPERTS, Shuffled, flip, whole
from tests.train.test_run import TINY, command, environment
from tests.train.test_stages import model_of

SIZES = (
    "--width 16 --heads 4 --kv-heads 2 --mlp-width 10 --layers 2 --length 16 --batch 8 --steps 4 --warmup 1 "
    "--val-every 2 --val-batches 1 --dropout 0.2 --documents separate"
)
MIDDLE = 2  # step

Trained = tuple[list[dict[str, Any]], dict[str, torch.Tensor], list[float], list[int]]


def trained(group: Any, mesh: str, options: str, tokens: Path, folder: Path, resume: bool = False) -> Trained:
    """Train to the end, from the start or from the folder's last checkpoint, and save every MIDDLE steps.

    Returns the steps' numbers, the whole state, the next draws of all generators, and the saved steps.
    """
    here = world_on(group, mesh)
    config = parse(f"{SIZES} {options}".split())
    batches = Batches(
        tokens, length=16, batch=8, accumulate=config.data.accumulate, seed=0, dp=here.dp, dp_rank=here.dp_rank,
        documents="separate",
    )  # fmt: skip
    seeds = 100 * resume + here.rank  # a resumed run must not depend on these
    torch.manual_seed(seeds), random.seed(seeds), np.random.seed(seeds)  # type: ignore[func-returns-value]
    checkpoints = Checkpoints(folder, group=here.checkpoint_group, keep_last=9)
    model, pipeline = build_stages(config, here)
    trainer = trainer_of(config, here, batches, model, pipeline)
    if resume:
        checkpoints.load(trainer.state)
    trainer.saver = Saver(checkpoints, here, every=MIDDLE)
    trainer.train(config.optim.steps)
    checkpoints.close()
    draws = [torch.rand(()).item(), random.random(), float(np.random.rand())]
    records = [{k: r[k] for k in ("step", "loss", "grad_norm", "lr")} for r in trainer.metrics.steps]
    return records, whole(trainer.state), draws, list(checkpoints.steps())


def middle_of(folder: Path, copy: Path) -> Path:
    """A folder that has only the checkpoint from the middle of a run."""
    shutil.copytree(path_of(folder, MIDDLE), path_of(copy, MIDDLE))
    return copy


@pytest.fixture(scope="module")
def at_once(worlds, tokens: Path, tmp_path_factory: pytest.TempPathFactory):
    """at_once(mesh, options): results of `trained` on each rank of an uninterrupted run, and its folder."""

    @cache
    def of(mesh: str, options: str) -> tuple[list[Trained], Path]:
        folder = tmp_path_factory.mktemp("at-once")
        return worlds(ranks_of(mesh)).run(trained, mesh, options, tokens, folder), folder

    return of


SAME = [
    ("1", "--accumulate 2"),
    ("dp2", "--accumulate 2"),
    ("tp2", "--tie-embeddings"),
    ("dp2 tp2", ""),
    ("dp2 tp2 ep4", EXPERTS),
    ("pp2 tp2", "--pp 2 --accumulate 2 --tie-embeddings"),
    ("pp2 dp2", "--pp 2 --accumulate 2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "options"), SAME)
def test_a_resumed_run_equals_one_that_never_stopped(
    worlds, at_once, tokens: Path, tmp_path: Path, mesh: str, options: str
):
    wanted, folder = at_once(mesh, options)
    then = worlds(ranks_of(mesh)).run(trained, mesh, options, tokens, middle_of(folder, tmp_path), True)
    for rank, (records, state, draws, saved) in enumerate(then):
        wanted_records, wanted_state, wanted_draws, _ = wanted[rank]
        assert records == wanted_records[MIDDLE:]
        assert state.keys() == wanted_state.keys()
        assert [name for name in state if not torch.equal(state[name], wanted_state[name])] == []
        assert draws == wanted_draws, "of generators that no step uses"
        assert saved == [2, 4]
    assert len({tuple(draws) for _, _, draws, _ in then}) == len(then), "ranks draw differently"


OTHER = [
    ("pp2 tp2", "1", "--pp 2 --accumulate 2 --tie-embeddings"),
    ("tp2", "pp2 dp2", "--pp 2 --accumulate 2 --schedule gpipe"),
    ("tp2", "dp2", "--tie-embeddings"),
    ("dp2 tp2", "1", ""),
    ("1", "dp2 tp2 ep4", EXPERTS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other", "options"), OTHER)
def test_on_another_mesh_the_order_stays_and_losses_are_within_rounding(
    worlds, at_once, tokens: Path, tmp_path: Path, one: str, other: str, options: str
):
    ((wanted_records, *_), *_), folder = at_once(one, options)
    then = worlds(ranks_of(other)).run(trained, other, options, tokens, middle_of(folder, tmp_path), True)
    bound = rounding(parse(f"{SIZES} {options}".split()))
    for records, *_ in then:
        assert [record["step"] for record in records] == [2, 3]
        for record, wanted in zip(records, wanted_records[MIDDLE:], strict=True):
            assert record["lr"] == wanted["lr"]
            assert record["loss"] == pytest.approx(wanted["loss"], rel=4 * bound)  # two steps' roundings, with margin
            before = wanted_records[MIDDLE - 1]["loss"]
            assert abs(record["loss"] / before - 1) > 100 * bound, "other tokens, other loss"
    draws = [draws for _, _, draws, _ in then]
    assert len({tuple(each) for each in draws}) == len(draws), "ranks draw differently"


# -- the command -------------------------------------------------------------------------------------------------------


def with_loader(group: Any, dp: int, tp: int, folder: Path, resume: bool) -> tuple[list[tuple[float, float]], Any, str]:
    """Train with a stateful loader, from the start to step 4, or from step 2 on."""
    mesh, model = mesh_of(dp=dp, tp=tp), model_of(tied=False)
    parallelize(model, mesh["tp"])
    shard(model, mesh["dp"])
    init_(model.to_empty(device="cpu"), 0, std=0.3)
    loader = Shuffled(mesh.get_local_rank("dp") + 5 * resume * (dp > 1))
    trainer = Trainer(model, loader, torch.optim.AdamW(model.parameters(), lr=1e-2), mesh, accumulate=2)
    checkpoints = Checkpoints(folder, group=trainer.world.checkpoint_group, keep_last=9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if resume:
            checkpoints.load(trainer.state, MIDDLE)
    trainer.saver = None if resume else Saver(checkpoints, trainer.world, every=MIDDLE)
    trainer.train(4)
    checkpoints.close()
    said = " ".join(str(each.message) for each in caught if "loader" in str(each.message))
    return [(r["loss"], r["grad_norm"]) for r in trainer.metrics.steps], loader.state, said


@pytest.mark.slow
def test_each_data_parallel_rank_goes_on_with_its_own_loader(worlds, tmp_path: Path):
    """Tensor-parallel peers share a loader state. With another number of ranks, as many batches are dropped."""
    ranks = worlds(4)
    at_once = ranks.run(with_loader, 2, 2, tmp_path, False)
    for then, wanted in zip(ranks.run(with_loader, 2, 2, tmp_path, True), at_once, strict=True):
        assert then == (wanted[0][MIDDLE:], wanted[1], "")
    assert [state["order"] for _, state, _ in at_once] == [Shuffled(rank // 2).order for rank in range(4)]
    for rank, (_, state, said) in enumerate(worlds(2).run(with_loader, 1, 2, tmp_path, True)):
        assert state == {"order": Shuffled(0).order, "at": 8}, rank
        assert "no loader state of data-parallel rank 0 of 1" in said and "first 4 batches are dropped" in said


def arguments(book: Path, runs: Path, *more: str) -> list[str]:
    return ["train", *TINY, "--tp", "1", "--data", str(book), "--runs", str(runs), "--length", "16", *more]


def losses(folder: Path) -> list[Any]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record.get("loss"), record.get("val_loss")) for record in records]


def incidents(folder: Path) -> list[str]:
    return [json.loads(line)["what"] for line in (folder / INCIDENTS).read_text().splitlines()]


@pytest.mark.slow
def test_sigterm_saves_and_the_run_goes_on_later(book, tmp_path, monkeypatch, capsys):
    assert cli.main(arguments(book, tmp_path, "--name", "one")) == 0

    def asked(options, step):
        if step == 3:
            signal.raise_signal(signal.SIGTERM)
        return learning_rate(options, step)

    monkeypatch.setattr("fusedtp.commands.run.learning_rate", asked)
    assert cli.main(arguments(book, tmp_path, "--name", "two")) == 0
    monkeypatch.undo()
    folder = tmp_path / "two"
    assert steps_in(folder / CHECKPOINTS) == [4] and not (folder / "summary.json").exists()
    out = capsys.readouterr().out
    assert "asked to end by SIGTERM: saved after step 4" in out
    assert "training waited " in out and "; with a failure every 24 h, saving every " in out
    assert cli.main(["train", "--runs", str(tmp_path), "--name", "two", "--resume"]) == 0
    assert "resumed at step 4, lost 0 steps\n" in capsys.readouterr().out  # a regular end needs no reason
    assert losses(folder) == losses(tmp_path / "one") and (folder / "summary.json").exists()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["loss_first"] == losses(folder)[0][1]


@pytest.mark.slow
def test_a_run_that_was_killed_right_after_a_checkpoint_says_why_it_ended(book, tmp_path, capsys):
    """It lost no step, but the reason is news to whoever resumes it."""
    assert cli.main(arguments(book, tmp_path)) == 0
    note_incident(tmp_path / "main", "rank 1, killed by SIGKILL", END)
    capsys.readouterr()
    assert cli.main(["train", "--runs", str(tmp_path), "--resume", "--steps", "8"]) == 0
    assert "resumed at step 6, lost 0 steps, because rank 1, killed by SIGKILL\n" in capsys.readouterr().out


@pytest.mark.slow
def test_a_damaged_checkpoint_is_left_out_and_said(book, tmp_path, capsys):
    assert cli.main(arguments(book, tmp_path, "--save-every", "2", "--keep-last", "9")) == 0
    folder = tmp_path / "main"
    before = losses(folder)
    flip(path_of(folder / CHECKPOINTS, 6) / "__0_0.distcp", 99999)
    capsys.readouterr()
    assert cli.main(["checkpoints", "verify", str(folder)]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[:2] == ["step 2: good", "step 4: good"]
    assert told[2].startswith("step 6: step-00000006/__0_0.distcp has another SHA-256")
    assert cli.main(["checkpoints", "verify", str(folder), "--step", "4"]) == 0
    assert cli.main(["checkpoints", "list", str(folder)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "kB" in line]
    assert [row[1] for row in rows] == ["2", "4", "6"], rows
    assert cli.main(["train", "--runs", str(tmp_path), "--resume"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "resumed at step 4, lost 2 steps, because step-00000006/__0_0.distcp has another SHA-256" in said
    assert "newer checkpoints are now aside-00000006" in said and losses(folder) == before
    assert steps_in(folder / CHECKPOINTS) == [2, 4, 6] and any(
        "resumed at step 4" in line for line in incidents(folder)
    )


@pytest.mark.slow
def test_more_steps_and_an_earlier_checkpoint(book, tmp_path, capsys):
    every = ("--save-every", "2", "--keep-last", "9")
    assert cli.main(arguments(book, tmp_path, *every)) == 0
    again = ["train", "--runs", str(tmp_path), "--resume"]
    assert cli.main([*again, "--steps", "8"]) == 0
    folder = tmp_path / "main"
    assert [step for step, loss, _ in losses(folder) if loss] == list(range(8))
    assert cli.main([*again, "--step", "2"]) == 0  # with --steps 8 from the previous run
    assert steps_in(folder / CHECKPOINTS) == [2, 4, 6, 8]
    assert len(list((folder / CHECKPOINTS).glob("aside-*"))) == 3
    told = capsys.readouterr().out
    assert "resumed at step 2, lost 6 steps, because --step 2 was asked for; newer checkpoints" in told
    assert cli.main(again) == 0  # no steps are left
    assert "no step was trained" in capsys.readouterr().out


@pytest.mark.slow
def test_the_speed_of_a_run_whose_batch_was_changed_is_that_of_its_tokens(book, tmp_path):
    assert cli.main(arguments(book, tmp_path, "--batch", "8", "--steps", "3")) == 0
    assert cli.main(["train", "--runs", str(tmp_path), "--resume", "--batch", "2", "--steps", "6"]) == 0
    folder = tmp_path / "main"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record][1:]
    tokens = 16 * (2 * 8 + 3 * 2)
    assert json.loads((folder / "summary.json").read_text())["tokens_per_second"] == pytest.approx(
        tokens / sum(record["seconds"] for record in steps)
    )


@pytest.mark.slow
def test_a_finished_run_that_lost_its_records_ends_in_order(book, tmp_path, capsys):
    assert cli.main(arguments(book, tmp_path, "--verify", "--verify-steps", "1")) == 0
    path = tmp_path / "main" / "metrics.jsonl"
    records = path.read_text().splitlines()
    for left, said in (([], "metrics.jsonl holds none: there is nothing to summarize"), (records[:1], "? nats/byte")):
        path.write_text("".join(f"{line}\n" for line in left))
        capsys.readouterr()
        assert cli.main(["train", "--runs", str(tmp_path), "--resume"]) == 0
        assert said in capsys.readouterr().out


@pytest.mark.slow
def test_a_copy_of_a_run_is_gone_on_with_and_the_run_stays(book, tmp_path):
    assert cli.main(arguments(book, tmp_path, "--name", "books", "--save-every", "2", "--keep-last", "9")) == 0
    shutil.copytree(tmp_path / "books", tmp_path / "main")
    assert cli.main(["train", "--runs", str(tmp_path), "--resume", "--steps", "8"]) == 0
    assert steps_in(tmp_path / "books" / CHECKPOINTS) == [2, 4, 6]
    assert steps_in(tmp_path / "main" / CHECKPOINTS) == [2, 4, 6, 8]
    assert json.loads((tmp_path / "main" / "config.json").read_text())["run"]["name"] == "main"


@pytest.mark.slow
def test_without_saving_a_resumed_run_leaves_all_checkpoints_as_they_are(book, tmp_path, monkeypatch, capsys):
    assert cli.main(arguments(book, tmp_path, "--save-every", "2", "--keep-last", "9")) == 0
    folder = tmp_path / "main" / CHECKPOINTS
    (folder / ".draft-00000008").mkdir()
    before = sorted(path.name for path in folder.iterdir())
    again = ["train", "--runs", str(tmp_path), "--resume", "--no-save", "--keep-last", "1", "--save-every", "1"]
    assert cli.main([*again, "--step", "4", "--steps", "9"]) == 0
    assert "resumed at step 4" in capsys.readouterr().out
    assert [step for step, loss, _ in losses(tmp_path / "main") if loss] == list(range(9))

    def asked(options, step):
        if step == 6:
            signal.raise_signal(signal.SIGTERM)
        return learning_rate(options, step)

    monkeypatch.setattr("fusedtp.commands.run.learning_rate", asked)
    assert cli.main([*again, "--steps", "9"]) == 0
    told = capsys.readouterr().out
    assert "asked to end by SIGTERM after step 7; --no-save: nothing was saved" in told and "continues from" not in told
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.slow
def test_first_steps_of_other_options_are_not_compared_with_one_process(book, tmp_path, capsys):
    """More --steps change the learning rate of every step, including the first ones."""
    assert cli.main(arguments(book, tmp_path, "--verify", "--verify-steps", "5")) == 0
    again = ["train", "--runs", str(tmp_path), "--resume"]
    assert cli.main(again) == 0 and "against one process (5 steps)" in capsys.readouterr().out
    for more in (["--steps", "7"], []):
        assert cli.main([*again, *more]) == 0
        told = capsys.readouterr().out
        assert "not compared with one process: the first steps were trained with another --steps" in told


@pytest.mark.slow
def test_what_a_run_cannot_go_on_from_is_refused_with_all_that_differs(book, tmp_path, capsys):
    assert cli.main(arguments(book, tmp_path)) == 0
    again = ["train", "--runs", str(tmp_path), "--resume"]
    for more, wanted in {
        ("--width", "64", "--seed", "3"): ["--width was 32, now it is 64", "--seed was 0, now it is 3"],
        ("--length", "32"): ["--length was 16, now it is 32"],
        ("--data", str(book / "1.txt")): ["the files of --data or the tokenizer have changed"],
        ("--steps", "5"): ["the checkpoint is of step 6, but --steps is only 5"],
    }.items():
        capsys.readouterr()
        assert cli.main([*again, *more]) == launch.WRONG_USAGE
        told = capsys.readouterr().err
        assert all(each in told for each in wanted), told
    assert cli.main([*again, "--step", "5"]) == launch.WRONG_USAGE
    assert "--step 5: " in (told := capsys.readouterr().err) and "has only checkpoints of steps 6" in told
    assert cli.main(["train", "--runs", str(tmp_path), "--name", "new", "--resume"]) == launch.WRONG_USAGE
    assert "holds no checkpoint" in capsys.readouterr().err
    assert cli.main(arguments(book, tmp_path)) == launch.WRONG_USAGE
    assert "holds checkpoints up to step 6: --resume continues from there, --replace removes" in capsys.readouterr().err
    assert cli.main(arguments(book, tmp_path, "--replace", "--steps", "2")) == 0
    assert steps_in(tmp_path / "main" / CHECKPOINTS) == [2]


def test_a_folder_that_no_run_can_go_on_from_is_refused_before_ranks_start(book, tmp_path, monkeypatch, capsys):
    """A checkpoint is of a newer version or another program, damaged or empty. The error lists all other faults too."""

    def refuse(*args, **kwargs):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(launch, "launch", refuse)
    monkeypatch.setattr(launch, "run_rank", refuse)
    again = arguments(book, tmp_path, "--resume", "--lr", "0")
    folder = path_of(tmp_path / "main" / CHECKPOINTS, 7)
    ours = {"format": FORMAT, "step": 7, "config": parse(again[1:]).to_dict()}
    for words, wanted in (
        (None, "about.json cannot be read"),
        ("{", "about.json cannot be read"),
        ("[]", "about.json cannot be read"),
        (json.dumps(ours | {"format": FORMAT + 1}), f"has format {FORMAT + 1}, which a newer fusedtp wrote"),
        (json.dumps({"format": FORMAT, "step": 7}), "it was not saved by fusedtp train"),
        (json.dumps(ours | {"step": 700}), "step-00000007 holds step 700"),
        (json.dumps(ours | {"format": FORMAT - 1}), "the checkpoint is of step 7, but --steps is only 6"),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        if words is not None:
            (folder / "about.json").write_text(words)
        assert cli.main(again) == launch.WRONG_USAGE
        faults = capsys.readouterr().err.splitlines()
        assert len(faults) == 2 and "--lr 0.0 is not positive" in faults[0] and wanted in faults[1], faults
    (folder.parent.parent / "config.json").write_text("[]")
    assert cli.main(again) == launch.WRONG_USAGE
    (fault,) = capsys.readouterr().err.splitlines()
    assert "is not the configuration of a run" in fault, "and nothing that follows from that"


def test_a_checkpoint_that_lost_a_file_is_refused_before_ranks_start(book, tmp_path, monkeypatch, capsys):
    assert cli.main(arguments(book, tmp_path)) == 0
    (file,) = (tmp_path / "main" / CHECKPOINTS).glob("step-*/.metadata")
    file.unlink()
    monkeypatch.setattr(launch, "run_rank", lambda *given: pytest.fail("a rank was started"))
    capsys.readouterr()
    assert cli.main(["train", "--runs", str(tmp_path), "--resume", "--steps", "9"]) == launch.WRONG_USAGE
    assert "no checkpoint can be read: step-00000006/.metadata is missing" in capsys.readouterr().err


@pytest.mark.slow
def test_a_configuration_that_was_cut_is_named_with_its_copy_in_the_newest_checkpoint(book, tmp_path, capsys):
    assert cli.main(arguments(book, tmp_path, "--seed", "3", "--save-every", "2")) == 0
    config = tmp_path / "main" / "config.json"
    before = config.read_text()
    config.write_text(before[:100])
    again = ["train", "--runs", str(tmp_path), "--resume", "--step", "4"]
    capsys.readouterr()
    assert cli.main(again) == launch.WRONG_USAGE
    (fault,) = capsys.readouterr().err.splitlines()
    copy = path_of(tmp_path / "main" / CHECKPOINTS, 6) / "about.json"
    assert (
        f"error: {config} is not the configuration of a run: " in fault and f'{copy} has a copy, as "config"' in fault
    )
    config.write_text(json.dumps(json.loads(copy.read_text())["config"]))
    assert cli.main(again) == 0 and config.read_text() == before


@pytest.mark.slow
def test_two_runs_on_one_folder_are_refused(book, tmp_path, capsys):
    with launch.sole_writer(tmp_path / "main"):
        assert cli.main(arguments(book, tmp_path)) == launch.WRONG_USAGE
    assert f"{tmp_path / 'main'} is being written by another run: process " in capsys.readouterr().err
    assert cli.main(arguments(book, tmp_path)) == 0


def test_a_run_folder_that_cannot_be_made_is_told_in_one_line(tmp_path):
    """A rank may meet the same error on a full disk."""
    (tmp_path / "file").touch()
    with (
        pytest.raises(ValueError, match=r"cannot write the run to .*file/main: Not a directory"),
        launch.sole_writer(tmp_path / "file" / "main"),
    ):
        pytest.fail("it was made")


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["continue", "stop"])
def test_a_full_disk_ends_the_run_or_not_as_asked(book, tmp_path, monkeypatch, capsys, choice):
    """A file size limit of 20 kB applies while step 2 is saved; the next save has room again."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(options, step):
        room = 20_000 if step == 1 else limits[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        return learning_rate(options, step)

    monkeypatch.setattr("fusedtp.commands.run.learning_rate", limited)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        more = ("--save-every", "2", "--no-async-save", "--on-save-error", choice)
        code = cli.main(arguments(book, tmp_path, *more))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    output = capsys.readouterr()
    assert code == (0 if choice == "continue" else 1)
    assert "step 2 was not saved: " in (output.out if choice == "continue" else output.err), output
    assert steps_in(tmp_path / "main" / CHECKPOINTS) == ([4, 6] if choice == "continue" else [])


def test_a_last_save_that_fails_fails_the_run(book, tmp_path, monkeypatch, capsys):
    def failing(self, *args):
        raise checkpoint.CheckpointError("step 6 was not saved: no room")

    monkeypatch.setattr(checkpoint.Checkpoints, "_write", failing)
    assert cli.main(arguments(book, tmp_path)) == 1
    assert "step 6 was not saved: no room" in capsys.readouterr().err


KILLED = """
import os, signal, sys
from unittest.mock import patch
from fusedtp import cli
from fusedtp.train.loop import Trainer, learning_rate
from fusedtp.train.shard import shard

def killed(options, step):
    if step == 5 and os.environ.get("RANK") == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return learning_rate(options, step)

with patch("fusedtp.commands.run.learning_rate", killed):
    sys.exit(cli.main(["train", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_a_run_whose_rank_was_killed_goes_on_and_says_why(book, tmp_path):
    """Two ranks: the second dies in step 5, and the run continues from step 4."""
    where = ["--tp", "2", "--data", str(book), "--runs", str(tmp_path), "--length", "16", "--save-every", "2"]
    whole_run = command("-m", "fusedtp", "train", *TINY, *where, "--name", "whole")
    assert whole_run.returncode == 0, whole_run.stderr
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    died = command(*torchrun, str(script), *TINY, *where)
    folder = tmp_path / "main"
    assert died.returncode != 0 and steps_in(folder / CHECKPOINTS) == [2, 4]
    done = command("-m", "fusedtp", "train", "--runs", str(tmp_path), "--resume", "--tp", "2")
    assert done.returncode == 0, done.stderr
    assert "resumed at step 4, lost 1 steps, because the previous run ended without a message" in done.stdout
    assert losses(folder) == losses(tmp_path / "whole")
    asked = command("-m", "fusedtp", "generate", "--run", str(folder), "one", "--tokens", "5")
    assert asked.returncode == 0 and asked.stdout.startswith("one"), asked.stderr


KILLED_IN = """
import os, signal, sys
import torch.distributed as dist
from fusedtp import cli
from fusedtp.commands import run
from fusedtp.train import stages

phase, steps = sys.argv[1], []
rate_of, forward, send = run.learning_rate, stages.Stage.forward, dist.batch_isend_irecv

def die(*_):
    os.kill(os.getpid(), signal.Signals[sys.argv[2]])

def its_time(now):
    return now == phase and steps[-1:] == [5] and os.environ["RANK"] == "1"

def noted(options, step):
    steps.append(step)
    return rate_of(options, step)

def forwarded(stage, *args, **kwargs):
    if its_time("forward"):
        die()
    out = forward(stage, *args, **kwargs)
    if its_time("backward"):
        out.register_hook(die)
    return out

def sent(messages):
    works = send(messages)
    if its_time("send") and any(message.op is dist.isend for message in messages):
        die()
    return works

run.learning_rate, stages.Stage.forward, dist.batch_isend_irecv = noted, forwarded, sent
sys.exit(cli.main(["train", *sys.argv[3:]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "by"), [("forward", "SIGKILL"), ("backward", "SIGSEGV"), ("send", "SIGABRT")])
def test_a_rank_killed_in_a_pipeline_ends_the_run_which_goes_on_later(book, tmp_path, capsys, phase, by):
    """The second stage dies in step 5, in its forward, backward or send. One process continues from step 4."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED_IN)
    pipeline = ["--layers", "2", "--pp", "2", "--tp", "1", "--accumulate", "2"]
    where = ["--data", str(book), "--runs", str(tmp_path), "--length", "16", "--save-every", "2"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    died = command(*torchrun, str(script), phase, by, *TINY, *pipeline, *where)
    assert died.returncode != 0
    assert f"exitcode: -{signal.Signals[by]}" in died.stderr or " by peer" in died.stderr, (
        died.stderr
    )  # depends on who ended first
    assert steps_in(tmp_path / "main" / CHECKPOINTS) == [2, 4]
    again = ["train", "--runs", str(tmp_path), "--resume", "--pp", "1", "--tp", "1", "--accumulate", "1"]
    assert cli.main(again) == 0
    assert "resumed at step 4, lost 1 steps" in capsys.readouterr().out
    assert [step for step, loss, _ in losses(tmp_path / "main") if loss is not None] == list(range(6))


def started(*arguments: str) -> subprocess.Popen[str]:
    """`fusedtp train` that starts its ranks with torchrun."""
    python = warm_python()
    return subprocess.Popen(
        [python, "-m", "fusedtp", "train", *arguments], env=environment() | {"PYTHON_EXEC": python},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for_step(job: subprocess.Popen[str], folder: Path, step: int) -> None:
    until = time.monotonic() + 120
    while job.poll() is None and time.monotonic() < until:
        path = folder / "metrics.jsonl"
        if path.exists() and any(f'"step": {step},' in line for line in path.read_text().splitlines()):
            return
        time.sleep(0.05)
    job.kill()
    raise AssertionError(job.communicate())


def process_of_rank(rank: int, runs: Path) -> int:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environ, line = (path / "environ").read_bytes(), (path / "cmdline").read_bytes()
        except OSError:
            continue
        if f"\0RANK={rank}\0".encode() in environ and str(runs).encode() in line:
            return int(path.name)
    raise AssertionError(f"rank {rank} is not there")


@pytest.mark.slow
def test_a_killed_rank_then_a_preemption_through_the_launcher(book, tmp_path):
    """The launcher reports which rank was killed. On SIGTERM, it saves and exits with code 0."""
    folder = tmp_path / "main"
    where = ["--tp", "2", "--data", str(book), "--runs", str(tmp_path), "--length", "16", "--save-every", "2"]
    job = started(*TINY, *where, "--steps", "100000")
    try:
        wait_for_step(job, folder, 6)
        os.kill(process_of_rank(1, tmp_path), signal.SIGKILL)
        _, err = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == launch.FAILED and "rank 1, killed by SIGKILL" in err
    job = started("--runs", str(tmp_path), "--resume")
    try:
        wait_for_step(job, folder, max(step for step, _, _ in losses(folder)) + 3)
        job.terminate()
        out, err = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == 0, err
    assert re.search(r"resumed at step \d+, lost \d+ steps, because rank 1, killed by SIGKILL", out), out
    step = steps_in(folder / CHECKPOINTS)[-1]
    assert f"asked to end by SIGTERM: saved after step {step}" in out
    assert [each for each, loss, _ in losses(folder) if loss is not None] == list(range(step))


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--tokens", "-5"], 2, "--tokens -5 must be at least 1"),
        (["--temperature", "-1"], 2, "--temperature -1.0 must be at least 0 and finite"),
        (["--temperature", "nan"], 2, "--temperature nan must be at least 0 and finite"),
        (["--step", "7"], 1, "has no checkpoint of step 7; it has steps 33, 80"),
    ],
)
def test_generate_says_in_one_line_what_it_cannot_do(words, code, said, tmp_path, capsys):
    for step in (33, 80):
        path_of(tmp_path / CHECKPOINTS, step).mkdir(parents=True)
    assert cli.main(["generate", "--run", str(tmp_path), *words, "Once"]) == code
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and said in err
