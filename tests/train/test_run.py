"""Whole runs of a tiny model: what they write, that they equal one process, and that a wrong run is detected."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fusedtp import cli
from fusedtp.commands import launch
from fusedtp.commands.verify import rounding
from fusedtp.train import checkpoint
from fusedtp.train.config import parse
from tests.harness.warm import warm_python

SIZES = "--width 32 --mlp-width 50 --layers 1 --length 32 --batch 8 --steps 6 --warmup 2"
TINY = [*SIZES.split(), "--val-every", "4", "--val-batches", "2", "--sample", "8"]


@pytest.fixture(autouse=True)
def one_thread():
    """With a tiny model, several threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "book.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(3000)))
    return path


def environment() -> dict[str, str]:
    """This environment with one thread per rank, without variables of an outer torchrun."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    return kept | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def command(
    *arguments: str,
    cold: bool = False,
    cold_ranks: bool = False,
    folder: Path | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """`cold`: the user's Python, not one that has already imported torch; `cold_ranks`: only for torchrun's ranks."""
    python = sys.executable if cold else warm_python()
    ranks = {} if cold or cold_ranks else {"PYTHON_EXEC": python}
    return subprocess.run(
        [python, *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment() | ranks | variables,
        cwd=folder,
    )


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("said", [None, "active"])
def test_threads_of_ranks_that_wait_leave_their_cores(said, monkeypatch):
    seen = {}
    monkeypatch.setattr("torch.distributed.run.run", lambda options: seen.update(os.environ))
    with patch.dict(os.environ):
        os.environ.pop("OMP_WAIT_POLICY", None)
        if said:
            os.environ["OMP_WAIT_POLICY"] = said
        assert launch.launch([], 2) == 0
    assert seen["OMP_WAIT_POLICY"] == (said or "passive")


@pytest.mark.parametrize("said", [None, "7"])
def test_torchrun_waits_for_a_last_step_and_its_save(said, monkeypatch):
    found = []
    monkeypatch.setattr(torchrun, "run", lambda options: found.append(torchrun.config_from_args(options)[0]))
    with patch.dict(os.environ):
        os.environ.pop(launch.SHUTDOWN, None)
        if said:
            os.environ[launch.SHUTDOWN] = said
        assert launch.launch([], 2) == 0
    assert found[0].shutdown_timeout == int(said or 3600)


def test_one_process_trains_and_leaves_its_results(corpus, tmp_path, capsys):
    arguments = [
        "train",
        *TINY,
        "--tp",
        "1",
        "--verify",
        "--data",
        str(corpus),
        "--runs",
        str(tmp_path),
        "--name",
        "one",
    ]
    assert cli.main(arguments) == 0
    folder = tmp_path / "one"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == list(range(6))
    assert [record["step"] for record in records if "val_loss" in record] == [3, 5]
    summary = summary_of(folder)
    assert summary["loss_first"] == steps[0]["loss"] and summary["loss_last"] == steps[-1]["loss"]
    assert summary["loss_last"] < summary["loss_first"]
    assert summary["val_loss"] == records[-1]["val_loss"]
    assert summary["world_size"] == 1 and summary["dtype"] == "fp32" and summary["engines"] == {}
    assert summary["tokens_per_second"] == pytest.approx(8 * 32 * 5 / sum(record["seconds"] for record in steps[1:]))
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard").iterdir())
    assert json.loads((folder / "config.json").read_text())["model"]["width"] == 32
    assert json.loads((folder / "versions.json").read_text())["packages"]["torch"]
    said = capsys.readouterr().out
    assert "validation loss" in said and f"rank 0, pp 0, dp 0, tp 0 on {os.uname().nodename}\n" in said
    words = checkpoint.about(checkpoint.path_of(folder / "checkpoints", 6))
    assert words["versions"]["packages"]["torch"] == torch.__version__ and words["config"]["run"]["seed"] == 0


def test_files_that_are_not_trained_on_are_said(tmp_path, capsys):
    """Otherwise files in another encoding would be missing silently."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(4):
        (folder / f"{i}.txt").write_text("".join(f"{n} times {i} is {n * i}.\n" for n in range(60)))
    some = ["train", *TINY, "--tp", "1", "--steps", "1", "--sample", "0", "--runs", str(tmp_path), "--no-save"]
    assert cli.main([*some, "--data", str(folder)]) == 0
    assert "skipped" not in capsys.readouterr().out
    (folder / "4.txt").write_text("grün " * 90, encoding="latin-1")
    (folder / "5.txt").write_text((folder / "1.txt").read_text())
    for _ in range(2):  # the second time from existing token files
        assert cli.main([*some, "--data", str(folder)]) == 0
        said = capsys.readouterr().out
        assert (
            f"skipped 2 of 6 files, not UTF-8 text or copies of others: {folder / '4.txt'}, {folder / '5.txt'}\n"
            in said
        )


@pytest.mark.parametrize(("batch", "told"), [(16, 0), (32, 1)])
def test_a_batch_larger_than_the_text_is_told_once(tmp_path, capsys, batch: int, told: int):
    (tmp_path / "book.txt").write_text("".join(f"{n} times 7 is {7 * n}.\n" for n in range(40)))
    where = ["--data", str(tmp_path / "book.txt"), "--runs", str(tmp_path), "--no-save"]
    some = ["--tp", "1", "--steps", "2", "--sample", "0", "--batch", str(batch)]
    assert cli.main(["train", *TINY, *some, *where]) == 0
    said = capsys.readouterr()
    assert (said.out + said.err).count("more than once") == told


@pytest.mark.slow
def test_a_run_repeats_itself_and_replaces_its_outputs(corpus, tmp_path):
    arguments = [
        "train",
        *TINY,
        "--tp",
        "1",
        "--data",
        str(corpus),
        "--runs",
        str(tmp_path),
        "--name",
        "again",
        "--replace",
    ]
    losses = []
    for _ in range(2):
        assert cli.main(arguments) == 0
        (tmp_path / "again" / "mine.txt").touch()
        lines = (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line).get("loss") for line in lines])
        assert len(list((tmp_path / "again" / "tensorboard").iterdir())) == 1
    assert losses[0] == losses[1]
    assert (tmp_path / "again" / "mine.txt").exists()


@pytest.mark.slow
def test_accumulation_gives_the_same_training(corpus, tmp_path):
    def losses(accumulate: int) -> list[float]:
        arguments = [
            "--tp",
            "1",
            "--data",
            str(corpus),
            "--runs",
            str(tmp_path),
            "--accumulate",
            str(accumulate),
        ]
        assert cli.main(["train", *TINY, *arguments, "--dropout", "0.1", "--replace"]) == 0
        lines = (tmp_path / "main" / "metrics.jsonl").read_text().splitlines()
        return [record["loss"] for record in map(json.loads, lines) if "loss" in record]

    # Accumulation only changes the order of sums. In six steps at this rate, no step's roundings are amplified.
    assert losses(4) == pytest.approx(losses(1), rel=6 * rounding(parse(TINY)))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["own", "llama"])
def test_token_ids_without_a_tokenizer_are_trained_on_and_gone_on_with(tmp_path, capsys, model):
    np.save(tmp_path / "ids.npy", np.arange(20_000) * 7 % 500)
    sizes = TINY if model == "own" else [*TINY[6:], "--model", model]
    where = ["--data", str(tmp_path / "ids.npy"), "--runs", str(tmp_path), "--vocab-size", "500"]
    assert cli.main(["train", "--tp", "1", *sizes, *where]) == 0
    said = capsys.readouterr().out
    assert " 19,000 tokens\n" in said and "nats/token" in said and "nats/byte" not in said
    shown = re.sub(r"\W+", " ", said[said.index("sample \u2500") : said.index("written to")]).split()[1:]
    assert [int(each) for each in shown[:160]] == [n * 7 % 500 for n in range(19_000, 19_160)]
    assert len(shown) == 168 and all(int(each) < 500 for each in shown)
    arguments = ["generate", "--run", str(tmp_path / "main"), "--tokens", "9"]
    assert cli.main([*arguments, "3 10 499"]) == 0
    ids = capsys.readouterr().out.split()
    assert ids[:3] == ["3", "10", "499"] and len(ids) == 12 and all(0 <= int(each) < 500 for each in ids)
    assert cli.main([*arguments, "3 ten"]) == 1
    assert "'ten' is not a token id from 0 to 499" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_with_more_ids_than_bytes_writes_a_sample(corpus, tmp_path, capsys):
    shape = {"vocab_size": 5000, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "num_attention_heads": 2, **shape}))
    where = ["--data", str(corpus), "--runs", str(tmp_path)]
    assert cli.main(["train", "--tp", "1", "--model", str(path), *TINY[6:], "--lr", "1e-5", *where]) == 0
    assert "\N{REPLACEMENT CHARACTER}" in capsys.readouterr().out
    assert cli.main(["generate", "--run", str(tmp_path / "main"), "7 times"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("7 times") and "\N{REPLACEMENT CHARACTER}" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "--tp 2",
        "--tp 2 --dtype bf16",
        "--dp 2 --tp 2 --accumulate 2 --tie-embeddings --dropout 0.1",
        "--dp 4 --tp 1 --dp-replicate 2 --data-parallel zero2 --accumulate 2 --dropout 0.1",
    ],
)
def test_ranks_together_train_like_one_process(corpus, tmp_path, layout):
    done = command(
        "-m",
        "fusedtp",
        "train",
        *TINY,
        *layout.split(),
        "--verify",
        "--data",
        str(corpus),
        "--runs",
        str(tmp_path),
        cold="bf16" in layout,
    )
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path / "main")
    assert summary["verified"] is True
    assert summary["world_size"] == summary["dp"] * summary["tp"] == (4 if "--dp" in layout else 2)
    assert summary["verified_steps"] == 6
    if summary["tp"] == 1:
        return
    calls = {kind: engines["chunked"] for kind, engines in summary["engines"].items()}
    columns, rows = (
        ("self_attn.q_proj+k_proj+v_proj", "mlp.gate_proj+up_proj"),
        ("self_attn.o_proj", "mlp.down_proj"),
    )
    assert {*columns, *rows, "lm_head"} <= set(calls), calls
    assert calls[columns[0]] == calls[columns[1]] > 0 and calls[rows[0]] == calls[rows[1]] > 0, calls
    assert "one process" in done.stdout
    assert 0 <= summary["wait_share"] < 1  # 0 if no rank had to sleep, see tests/comm


def broken(breakage: str, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A two-rank run with a deliberate fault; see broken_rank.py."""
    script = str(Path(__file__).with_name("broken_rank.py"))
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return command(*ranks, script, breakage, *TINY, *arguments, folder=folder)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["row_sum", "replicated_gradient"])
def test_verify_finds_a_dropped_reduction(corpus, tmp_path, reduction):
    done = broken(reduction, "--verify", "--data", str(corpus), "--runs", str(tmp_path))
    assert done.returncode != 0
    assert summary_of(tmp_path / "main")["verified"] is False
    assert "NOT EQUAL" in done.stdout
    assert "the parallel run differs from the run of one process" in done.stderr


@pytest.mark.slow
def test_verify_finds_an_error_of_one_percent_that_comes_late(corpus, tmp_path):
    done = broken("late", "--steps", "14", "--verify", "--data", str(corpus), "--runs", str(tmp_path))
    assert done.returncode != 0
    assert summary_of(tmp_path / "main")["verified"] is False
    assert "NOT EQUAL: loss differs" in done.stdout


@pytest.mark.slow
def test_a_failing_rank_ends_the_job_with_its_message(corpus, tmp_path):
    done = broken("raise", "--data", str(corpus), "--runs", str(tmp_path), folder=tmp_path)
    assert done.returncode != 0
    assert "the disk of rank 1 is full" in done.stderr
    own = [line for line in done.stderr.splitlines() if line.startswith('  File "') and "in train_step" in line]
    assert len(own) == 1, own  # not on rank 0, which fails because rank 1 died; torchrun's report has more indent
    assert [path for path in Path("/proc").glob("[0-9]*/cwd") if _target(path) == tmp_path] == []


LAST_WORDS = """
import os, signal, sys
if os.environ.get("RANK") == "1":
    print("\\n".join(f"line {i}" for i in range(100)), file=sys.stderr, flush=True)
"""
ENDS = {
    "os.kill(os.getpid(), signal.SIGKILL)": "killed by SIGKILL",
    "os._exit(7)": "exit code 7",
}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_a_rank_that_dies_is_named_with_its_exit_and_its_last_lines(corpus, tmp_path, end):
    """Rank 1 ends at its start, without an exception to report."""
    (tmp_path / "sitecustomize.py").write_text(LAST_WORDS + f"    {end}\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    where = ["--data", str(corpus), "--runs", str(tmp_path)]
    (tmp_path / "temporary").mkdir()
    found = command(
        "-m",
        "fusedtp",
        "train",
        *TINY,
        "--tp",
        "2",
        *where,
        cold_ranks=True,
        PYTHONPATH=path,
        TMPDIR=str(tmp_path / "temporary"),
    )
    assert found.returncode == 1
    told = found.stderr[found.stderr.index("fusedtp train: error: ") :].splitlines()
    assert told[0] == f"fusedtp train: error: rank 1, {ENDS[end]}; the last lines of its stderr:"
    assert [line.strip() for line in told[1:]] == [f"line {i}" for i in range(100 - launch.LAST_LINES, 100)]
    assert list((tmp_path / "temporary").iterdir()) == []


def test_the_rank_that_died_is_named_and_not_those_that_noticed(tmp_path):
    """Among ranks that record an error, the first is named. A rank that died without a record comes before them, unless
    torchrun ended it after another failed.
    """

    def failure(rank: int, exitcode: int, recorded: int | None = None, message: str = "") -> ProcessFailure:
        path = tmp_path / f"{rank}.json"
        if recorded is not None:
            told = {"message": message or f"error {rank}", "extraInfo": {"timestamp": str(recorded)}}
            path.write_text(json.dumps({"message": told}))
        return ProcessFailure(local_rank=rank, pid=1, exitcode=exitcode, error_file=str(path))

    raised, first = failure(0, 1, recorded=20), failure(1, 1, recorded=10)
    killed, ended = failure(2, -signal.SIGKILL), failure(3, -signal.SIGTERM)
    hung = failure(4, 1, 15, "RankHung: rank 2 no longer responds")
    for failures, named in (
        ({0: raised, 1: first, 3: ended}, "rank 1, exit code 1: error 1"),
        ({0: raised, 2: killed, 3: ended}, "rank 2, killed by SIGKILL; it wrote nothing to stderr"),
        ({3: ended, 0: raised}, "rank 3, killed by SIGTERM; it wrote nothing to stderr"),
        ({4: hung, 2: killed, 3: ended}, "rank 4, exit code 1: RankHung: rank 2 no longer responds"),
        ({2: killed, 4: hung, 3: ended}, "rank 2, killed by SIGKILL; it wrote nothing to stderr"),
    ):
        assert launch.describe_failure(failures, tmp_path) == named


def _target(link: Path) -> Path | None:
    try:
        return link.readlink()
    except OSError:
        return None
