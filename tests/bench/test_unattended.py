"""Problems of an unattended run: engines and rivals that raise, a slow host, a tree without git."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from fusedtp.bench import cli, machine, output, rivals, sample
from fusedtp.bench.rivals import ByHand
from fusedtp.bench.sample import LONGER, Alone, DeviceClock
from fusedtp.bench.shapes import MODELS
from fusedtp.bench.suites import local
from fusedtp.ops.operation import OPERATIONS

RUN = ["--smoke", "--device", "cpu", "--minutes", "0", "--no-plots", "--tp", "2", "--dtype", "float32"]


def rows_of(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Engine -> row of the last case; number of failed cases."""
    found = json.loads(path.read_text())
    return {row["engine"]: row for row in found["rows"]}, found["failures"]


def test_an_engine_that_raises_has_a_row_that_says_so_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = OPERATIONS["matmul_all_reduce"]
    example = operation.example
    assert example is not None

    def raises(*args: Any) -> Any:
        if args[-1] == "chunked":
            raise NotImplementedError("not today\nor ever")
        return example.call(*args)

    monkeypatch.setattr(operation, "example", example._replace(call=raises))
    path = tmp_path / "r.json"
    assert cli.main(["matmul-all-reduce", *RUN, "--world", "virtual", "--out", str(path)]) == 1
    rows, failures = rows_of(path)
    assert rows["fusedtp chunked"]["note"] == "failed: NotImplementedError: not today" and failures == 2
    assert rows["fusedtp collective"]["seconds"] and rows["fusedtp collective"]["error_share"] <= 1
    assert rows["matmul alone"]["seconds"]


def test_what_fails_on_one_rank_is_dropped_by_all() -> None:
    from fusedtp.bench.cases import Case
    from fusedtp.bench.options import Options, plan_of
    from fusedtp.bench.rank import Rank, run
    from fusedtp.bench.ways import Ways

    def body(rank: Rank) -> list[dict[str, str]]:
        def way() -> None:
            if rank.rank == 1:
                raise MemoryError("full")

        ways = Ways(rank, "s", Case("x", "float32", 8))
        ways.add("theirs", way)
        ways.add("fusedtp", lambda: None)
        ways.prepare([()])
        assert list(ways.functions) == list(ways.timed) == ["fusedtp"] and rank.comm is not None
        return rank.comm.world.exchange(ways.absent)

    plan = plan_of(Options(smoke=True, device="cpu", world="virtual", tp="2"))
    assert run(plan, 2, body) == [{"theirs": "failed on another rank"}, {"theirs": "MemoryError: full"}]


def test_a_picture_that_cannot_be_drawn_costs_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(*_: Any) -> Any:
        raise OSError("no font")

    monkeypatch.setattr(output, "draw", raises)
    path = tmp_path / "r.json"
    run = [word for word in RUN if word != "--no-plots"]
    assert cli.main(["linear-cross-entropy", *run, "--world", "virtual", "--out", str(path)]) == 0
    assert "no pictures: OSError: no font" in capsys.readouterr().err
    assert json.loads(path.read_text())["complete"]


def test_collectives_that_raise_are_a_baseline_that_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process, with collectives that seem to be available."""

    class Raises(ByHand):
        def __init__(self) -> None: ...

        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("NCCL error: unhandled system error")

    monkeypatch.setattr(rivals, "by_hand", lambda *_: (Raises(), ""))
    path = tmp_path / "r.json"
    assert cli.main(["matmul-all-reduce", *RUN, "--world", "virtual", "--out", str(path)]) == 0
    rows, failures = rows_of(path)
    assert rows["gloo + matmul"]["note"] == "RuntimeError: NCCL error: unhandled system error"
    assert failures == 0 and rows["fusedtp chunked"]["hidden_share"] is not None


class Device:
    """A stream and a host with their own clocks, instead of torch.cuda."""

    def __init__(self) -> None:
        self.host = self.stream = 0.0

    def work(self, seconds: float) -> None:
        """Enqueue work."""
        self.stream = max(self.stream, self.host) + seconds

    def event(self, **_: Any) -> Any:
        at = [0.0]
        return mock.Mock(
            record=lambda stream: at.__setitem__(0, max(self.stream, self.host)),
            query=lambda: at[0] <= self.host,
            synchronize=lambda: setattr(self, "host", max(self.host, self.stream)),
            elapsed_time=lambda end: 1e3 * (end.at() - at[0]),
            at=lambda: at[0],
        )


@pytest.mark.parametrize(
    ("host", "late", "times"),
    [
        (1e-3, [False] * 4, [5.0] * 4),  # within the gate of 2 ms, so only the device's time
        (7e-3, [True, True, False, False], [10.0, 8.0, 5.0, 5.0]),  # gates of 2, 4 and 8 ms
        (30e-3, [True] * 4, [33.0, 31.0, 27.0, 19.0]),  # longer than any gate
    ],
)
def test_a_gate_grows_until_the_host_is_done_behind_it(host: float, late: list[bool], times: list[float]) -> None:
    """The host works this long in a call and then enqueues 5 ms."""
    device = Device()

    def way() -> None:
        device.host += host
        device.work(5e-3)

    cuda = mock.Mock(
        Event=device.event,
        current_stream=lambda _: mock.Mock(synchronize=device.event().synchronize),
        _sleep=lambda cycles: device.work(cycles / 1e9),
    )
    with (
        mock.patch.object(sample, "cycles_per_second", lambda _: 1e9),
        mock.patch.object(sample.torch, "cuda", cuda),
    ):
        clock = DeviceClock(torch.device("cuda"))
        found = []
        for _ in range(4):
            seconds = clock(Alone(), way)
            found.append((clock.late(way), pytest.approx(1e3 * seconds)))
    assert found == list(zip(late, times)) and LONGER == 8
    assert not clock.late(lambda: None)


def test_code_without_git_or_with_changes_has_a_name_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a run resumes only with the same code."""
    answers = {"rev-parse": "abc1234", "status": ""}
    monkeypatch.setattr(machine, "in_checkout", lambda: True)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(machine, "_git", lambda *args: answers[args[0]])
    (tmp_path / "bench").mkdir()
    file = tmp_path / "bench" / "a.py"
    file.write_text("1")
    assert machine.commit() == "abc1234"
    answers["status"] = " M bench/a.py"
    first = machine.commit()
    file.write_text("2")
    second = machine.commit()
    assert first.startswith("abc1234+") and second.startswith("abc1234+") and first != second
    answers["rev-parse"] = ""
    assert machine.commit() == "+" + second.partition("+")[2]
    monkeypatch.setattr(machine, "in_checkout", lambda: False)
    assert machine.commit() == ""


def test_results_do_not_make_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run in a checkout has the same commit name, although the first run wrote its result there."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    for name in (*machine.CODE, "bench/results"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text("1")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "m"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(machine, "in_checkout", lambda: True)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    (tmp_path / "bench" / "results" / "a.py").write_text("2")
    assert machine.commit() and "+" not in machine.commit()
    for name in machine.CODE:
        (tmp_path / name / "a.py").write_text("2")
        assert "+" in machine.commit(), name
        (tmp_path / name / "a.py").write_text("1")


@pytest.mark.parametrize("version", ["with the sum", "without"])
def test_liger_is_asked_for_its_own_residual_sum_where_it_has_one(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins take the same arguments as Liger's functions."""
    asked: list[str] = []

    def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *_: Any) -> torch.Tensor:
        asked.append("norm")
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def both(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *_: Any) -> Any:
        return norm(x + residual, weight, eps), asked.append("sum") or x + residual

    def liger(module: str, name: str, device: torch.device) -> rivals.Found:
        if module == "fused_add_rms_norm":
            return (mock.Mock(apply=both), "") if version == "with the sum" else (None, "too old")
        return mock.Mock(apply=norm), ""

    monkeypatch.setattr(rivals, "liger", liger)
    case = local.pointwise_case("add_rms_norm", MODELS["tiny"], 4, 1, "float32", False)
    function, why = local.liger(case.operation, torch.device("cpu"))
    tensors = tuple(torch.randn(shape) for shape in ((4, 64), (4, 64), (64,)))
    assert why == "" and local.error(case, function, tensors).share <= 1
    assert asked == ["norm", "sum"][: 1 + (version == "with the sum")]
