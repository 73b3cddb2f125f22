"""The command line reports all errors at once, before any process starts."""

import json
from dataclasses import fields

import pytest

from fusedtp import cli
from fusedtp.commands import launch
from fusedtp.train.config import TrainConfig


@pytest.fixture(autouse=True)
def no_process_starts(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr(launch, "launch", refuse)
    monkeypatch.setattr(launch, "run_rank", refuse)


def errors_of(capsys, *arguments: str) -> list[str]:
    """Messages of a `fusedtp train` that ends with exit code 2."""
    assert cli.main(["train", *arguments]) == 2
    return [line.removeprefix("fusedtp train: error: ") for line in capsys.readouterr().err.splitlines()]


def test_all_faults_of_a_command_line_come_together(capsys, tmp_path):
    (tmp_path / "file").touch()
    found = errors_of(
        capsys,
        *(
            "--tp",
            "3",
            "--heads",
            "4",
            "--lr",
            "0",
            "--data",
            str(tmp_path / "missing"),
            str(tmp_path / "file"),
        ),
        *("--runs", str(tmp_path / "file" / "runs")),
    )
    assert [fault[:22] for fault in found] == [
        "--lr 0.0 is not positi",
        "--tp 3 with 4 heads an",
        f"--data {tmp_path}"[:22],
        f"--data {tmp_path}"[:22],
        "cannot write the run t",
    ]
    assert found[2].endswith("missing does not exist") and found[3].endswith("file is empty")
    assert found[4].endswith(f"{tmp_path / 'file'} is not a folder")


@pytest.mark.slow
def test_a_fault_of_the_schedule_is_one_line(capsys, tmp_path):
    sizes = "--pp 2 --tp 1 --layers 4 --batch 6 --schedule interleaved_1f1b --accumulate 3"
    (found,) = errors_of(capsys, *sizes.split(), "--runs", str(tmp_path))
    assert found == "--schedule interleaved_1f1b needs --pp 2 to divide --accumulate 3"


@pytest.mark.parametrize("by", ["torchrun", "torchrun of an elastic run", "the command"])
def test_a_model_is_looked_at_on_ranks_that_torchrun_started_too(capsys, monkeypatch, tmp_path, by):
    """Otherwise documents that a model cannot separate would be trained together. The command has checked already."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    (tmp_path / "text").write_text("some words " * 400)
    options = "--model bloom --tp 1 --dp 1 --documents separate --length 32 --batch 8 --val-batches 2"
    where = ["--data", str(tmp_path / "text"), "--runs", str(tmp_path / "runs")]
    if by == "torchrun of an elastic run":  # as in docs/launch.md
        monkeypatch.setenv(launch.elastic.OWN_STORE, "1")
    if by != "the command":
        (found,) = errors_of(capsys, *options.split(), *where)
        assert "documents of a row attend to each other" in found
    else:
        monkeypatch.setenv(launch.ASKED, "1")
        with pytest.raises(AssertionError, match="a process was started"):
            cli.main(["train", *options.split(), *where])


@pytest.mark.slow
@pytest.mark.parametrize(("option", "value"), [("--timeout", "inf"), ("--lr", "inf")])
def test_what_has_no_end_is_refused(capsys, tmp_path, option, value):
    (found,) = errors_of(capsys, option, value, "--runs", str(tmp_path / "runs"))
    assert found == f"{option} inf is not finite"


def test_an_unwritable_run_folder_is_refused(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(launch.os, "access", lambda path, mode: path != tmp_path)
    (found,) = errors_of(capsys, "--runs", str(tmp_path / "runs"))
    assert found == f"cannot write the run to {tmp_path}/runs/main: no permission to write in {tmp_path}"
    assert not (tmp_path / "runs").exists()


def test_text_too_short_is_refused(capsys, tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    (found,) = errors_of(capsys, "--data", str(tmp_path / "short.txt"), "--runs", str(tmp_path / "runs"))
    assert "--length 256 needs 257" in found


def test_an_empty_shard_and_a_short_text_are_found_with_all_the_rest(capsys, tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    narrow = "--width 2 --heads 1 --kv-heads 1 --mlp-width 6 --layers 1 --batch 9 --dp 3 --tp 1 --steps 0"
    where = ["--data", str(tmp_path / "short.txt"), "--runs", str(tmp_path / "runs")]
    steps, shard, length = errors_of(capsys, *narrow.split(), *where)
    assert steps == "--steps 0 is not positive"
    assert shard.startswith("with 3 data-parallel x 1 tensor-parallel ranks, a rank would hold no row of ")
    assert "layers.0.self_attn.q_proj.weight [2, 2]" in shard and "mlp.gate_proj" not in shard
    assert "--length 256 needs 257" in length


def test_shards_are_cut_by_tensor_parallelism_first(capsys, tmp_path):
    """Two ranks hold four and three of seven rows. Of the three, one of four data-parallel ranks would get none."""
    sizes = "--width 8 --heads 2 --kv-heads 2 --mlp-width 7 --layers 1 --tp 2 --batch 12"
    narrow = [*sizes.split(), "--runs", str(tmp_path)]
    (found,) = errors_of(capsys, *narrow, "--dp", "4")
    assert "mlp.gate_proj.weight [7, 8], layers.0.mlp.up_proj.weight [7, 8]: use" in found
    assert launch.shard_faults(launch.parse(narrow), 2, 2) == []


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["triton", "multimem"])
def test_an_engine_that_cannot_run_here_is_refused(capsys, monkeypatch, tmp_path, engine):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (found,) = errors_of(capsys, "--engine", engine, "--device", "cpu", "--runs", str(tmp_path / "runs"))
    assert found.startswith(f"--engine {engine} on CPU") and "set TRITON_INTERPRET=1" in found


def test_a_number_of_ranks_that_torchrun_did_not_start_is_refused(capsys, monkeypatch, tmp_path):
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3}.items():
        monkeypatch.setenv(name, str(value))
    (found,) = errors_of(capsys, "--tp", "2", "--dp", "2", "--runs", str(tmp_path / "runs"))
    assert found == "--dp 2 x --tp 2 are 4 ranks, but 3 were started"


@pytest.mark.parametrize(
    ("started", "gpus", "refused"),
    [(False, 1, True), (True, 1, False), (True, 2, True), (True, 3, False), (False, 3, False)],
)
def test_each_rank_of_a_machine_needs_a_gpu_but_may_see_it_alone(monkeypatch, tmp_path, started, gpus, refused):
    """Slurm's --gpus-per-task=1 shows each rank one GPU. The command itself can give its ranks only what it sees."""
    for name, value in {"RANK": 2, "LOCAL_RANK": 2, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3}.items():
        monkeypatch.setenv(name, str(value)) if started else monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    config = launch.parse(["--device", "cuda", "--tp", "3", "--runs", str(tmp_path)])
    found = [fault for fault in launch.machine_faults(config, 1, 3, 3, 3) if "GPU" in fault]
    assert found == [f"3 ranks on a machine with {gpus} GPUs: use fewer ranks or --device cpu"] * refused


def test_an_unknown_option_is_named(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["train", "--stepz", "3"])
    assert exit_.value.code == 2
    output = capsys.readouterr()
    assert "--stepz" in output.out + output.err


def test_an_unknown_command_is_named(capsys):
    assert cli.main(["trian"]) == 2
    assert "'trian'" in capsys.readouterr().err


def test_help_lists_every_option_with_its_default(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["train", "--help"])
    assert not exit_.value.code
    output = " ".join(capsys.readouterr().out.replace("│", " ").split())
    options = [field.name for part in fields(TrainConfig) for field in fields(part.default_factory)]
    assert [name for name in options if f" --{name.replace('_', '-')} " not in output.replace(",", " ")] == []
    assert output.count("(default:") == len(options) >= 30
    assert "{fp32,bf16,fp16}" in output and "(default: fp32)" in output and "(default: main)" in output


def test_env_prints_what_a_bug_report_needs(capsys):
    assert cli.main(["env"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["packages"]["torch"] and printed["python"] and printed["cores"] >= 1
    assert {"gpus", "platform", "processor", "backends", "variables"} <= printed.keys()
