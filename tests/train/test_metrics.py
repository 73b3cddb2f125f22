"""Records: waiting time is a share of the step if it is measured, and missing, not 0 %, if it is not."""

import errno
import io
import json
import subprocess
from unittest.mock import MagicMock

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fusedtp.commands import results
from fusedtp.commands.results import sinks_for
from fusedtp.train.config import TrainConfig
from fusedtp.train.loop import Metrics
from fusedtp.train.mesh import World
from tests.harness.warm import warm_python


def record_run(device: str, folder, monkeypatch) -> tuple[dict, dict, str]:
    """The last record, the summary and the screen output of two steps on two ranks with this device."""
    where = World(tp=2, device=torch.device(device), mesh=MagicMock())
    config, screen = TrainConfig(), Console(file=io.StringIO(), width=110)
    monkeypatch.setattr(type(config.run), "folder", folder)
    with Metrics(where, sinks_for(config, where, screen)) as metrics:
        for step in range(2):
            waited = None if device == "cuda" else 1e-5
            waits = {"tp_wait_seconds": waited, "pp_wait_seconds": waited, "dp_wait_seconds": waited}
            metrics.step(step, 10, loss=2.0, grad_norm=1.0, lr=0.1, **waits)
        metrics.validation(1, 2.0)
    summary = results.summarize(config, where, metrics, {}, 10, None)
    results.show(screen, summary, None)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return json.loads(lines[1]), summary, screen.file.getvalue()


@pytest.mark.parametrize("bad", [b"\xff\xfe\n", b"[1]\n", b"{}\n", b'{"step": 7, "lo', b"junk\n"])
def test_one_damaged_line_costs_that_line_alone(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    lines = results.Lines(path)
    lines.append({"step": 0})
    path.write_bytes(path.read_bytes() + bad)
    lines.append({"step": 1})  # on a new line, not appended to a cut one
    assert [record["step"] for record in results.records_of(tmp_path)] == [0, 1]


def test_a_full_disk_ends_no_run(tmp_path, monkeypatch, capsys):
    sink = results.JsonLines(tmp_path / "metrics.jsonl", [{"step": 0}])

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as within:
        within.setattr("builtins.open", full)
        sink.write({"step": 1})
        sink.write({"step": 1})
    assert capsys.readouterr().err == f"{tmp_path / 'metrics.jsonl'} could not be written: No space left on device\n"
    sink.write({"step": 2})
    assert [record["step"] for record in results.records_of(tmp_path)] == [0, 2]
    monkeypatch.setattr(type(tmp_path), "write_text", full)
    with pytest.raises(ValueError, match=r"metrics\.jsonl cannot be written: No space left"):
        results.JsonLines(tmp_path / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # from TensorBoard's writer
@pytest.mark.parametrize("when", ["at first", "later", "at last"])
def test_events_that_cannot_be_written_end_no_run(tmp_path, monkeypatch, capsys, when):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(results, "EVENTS_AGAIN", 0.0)
    with monkeypatch.context() as within:
        if when == "at first":
            within.setattr("tensorboard.summary.writer.record_writer.RecordWriter.flush", full)
        events = results.Events(tmp_path)
        if when == "later":
            within.setattr("tensorboard.summary.writer.record_writer.RecordWriter.write", full)
        for step in range(50):
            events.write({"step": step, "loss": 1.0, "expert_load": [[1, 2]]})
        if when == "at last":
            within.setattr("tensorboard.summary.writer.record_writer.RecordWriter.flush", full)
            events.close()
    events.write({"step": 50, "loss": 2.0})
    events.close()
    told = [line for line in capsys.readouterr().err.splitlines() if "could not be written" in line]
    assert told == [
        f"{tmp_path} could not be written: No space left on device; its curves lack some steps, but metrics.jsonl has "
        "the same numbers"
    ]
    read = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert (read[-1].step, read[-1].value) == (50, 2.0)


def test_a_kill_while_a_file_is_written_leaves_what_was_there(tmp_path):
    path = tmp_path / "config.json"
    results.write_json(path, {"steps": 3})
    killed = subprocess.run([warm_python(), "-c", KILLED, str(path)], timeout=100)
    assert killed.returncode and json.loads(path.read_text()) == {"steps": 3}
    results.write_json(path, {"steps": 4})
    assert json.loads(path.read_text()) == {"steps": 4}


KILLED = """
import resource, signal, sys
from pathlib import Path
from fusedtp.commands.results import write_json
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
write_json(Path(sys.argv[1]), {"name": "x" * 100_000})
"""


def test_waiting_is_measured_on_cpu(tmp_path, monkeypatch):
    record, summary, shown = record_run("cpu", tmp_path, monkeypatch)
    assert record["wait_share"] == summary["wait_share"] == pytest.approx(3e-5 / record["seconds"])
    assert "% of a step" in shown and "not measured" not in shown


def test_waiting_is_not_measured_on_a_gpu(tmp_path, monkeypatch):
    record, summary, shown = record_run("cuda", tmp_path, monkeypatch)
    assert record["wait_share"] is None and summary["wait_share"] is None
    assert "not measured" in shown and "%" not in shown
