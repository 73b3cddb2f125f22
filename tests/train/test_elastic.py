"""A run on a changing number of ranks trains each step exactly once."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from fusedtp import cli
from fusedtp.commands import elastic, launch
from fusedtp.commands.build import shard_faults
from fusedtp.commands.results import records_of
from fusedtp.commands.run import CHECKPOINTS, END, note_incident
from fusedtp.commands.verify import compare, reference_steps
from fusedtp.train import checkpoint
from fusedtp.train.checkpoint import steps_in
from fusedtp.train.config import TrainConfig, faults, parse
from fusedtp.train.data import Batches
from fusedtp.train.loop import learning_rate
from tests.harness.warm import warm_python
from tests.train.support import world_on
from tests.train.test_resume import incidents, process_of_rank, started, wait_for_step
from tests.train.test_run import environment

TINY = (
    "--width 32 --mlp-width 50 --layers 1 --length 16 --batch 8 --steps 14 --warmup 2 --val-every 100 "
    "--val-batches 1 --sample 0 --dropout 0.1 --documents separate --device cpu"
)


# -- the mesh ---------------------------------------------------------------------------------------------------------


def batches(config: TrainConfig, tokens: Path, dp_rank: int = 0) -> Batches:
    data, dp = config.data, config.parallel.dp
    return Batches(
        tokens, length=data.length, batch=data.batch, accumulate=data.accumulate, dp=dp or 1, dp_rank=dp_rank
    )


def tokens_of_a_step(config: TrainConfig, tokens: Path) -> tuple[torch.Tensor, int]:
    """The tokens that all data-parallel ranks read, in order of position, and the most rows in one microbatch."""
    every = [part for rank in range(config.parallel.dp or 1) for part in batches(config, tokens, rank).step()]
    every.sort(key=lambda part: part.first_token)
    return torch.cat([part.input_ids for part in every]), max(len(part.input_ids) for part in every)


@st.composite
def configurations(draw: st.DrawFn) -> str:
    tp, pp, dp = (draw(st.sampled_from(sizes)) for sizes in ((1, 2), (1, 1, 2), (1, 2, 3, 4, 6)))
    accumulate = draw(st.integers(pp, 4))
    batch = dp * accumulate * draw(st.sampled_from([1, 2, 3, 4]))
    copies = draw(st.sampled_from([n for n in (1, 2, 3) if dp % n == 0]))
    schedule = draw(st.sampled_from(["1f1b", "interleaved_1f1b", "zbv_zero_bubble"]))
    options = f"--tp {tp} --pp {pp} --dp {dp} --accumulate {accumulate} --batch {batch} --dp-replicate {copies}"
    return f"{options} --schedule {schedule}"


def configuration(options: str) -> TrainConfig:
    return parse(f"--elastic --width 32 --layers 4 --length 16 {options}".split())


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example("--tp 2 --dp 2 --batch 8", 6)
@example("--tp 2 --dp 4 --dp-replicate 2 --batch 8", 2)
@example("--tp 1 --pp 2 --dp 1 --accumulate 2 --batch 8", 4)
@example("--tp 1 --pp 2 --dp 2 --accumulate 2 --batch 8 --schedule interleaved_1f1b", 8)
@given(configurations(), st.integers(1, 16))
def test_on_any_number_of_ranks_a_step_is_the_same_or_a_mesh_that_fits_is_named(tokens, options, ranks):
    config = configuration(options)
    parallel = config.parallel
    assume(not faults(config, parallel.dp or 0, parallel.tp or 0))
    wanted, rows = tokens_of_a_step(config, tokens)
    found, why = elastic.fit(config, ranks)
    if why:
        told = re.fullmatch(r"(\d+) ranks would do: (.*)", why[-1])
        assert told, why
        ranks = int(told[1])
        found = configuration(f"--batch {config.data.batch} --schedule {parallel.schedule} {told[2]}")
    new = found.parallel
    assert not faults(found, new.dp or 0, new.tp or 0) + shard_faults(found, new.dp or 0, new.tp or 0)
    assert (new.tp, new.pp) == (parallel.tp, parallel.pp) and ranks == (new.tp or 0) * new.pp * (new.dp or 0)
    if parallel.dp_replicate > 1:
        assert (new.dp or 0) // new.dp_replicate == (parallel.dp or 0) // parallel.dp_replicate, "shards as large"
    read, most = tokens_of_a_step(found, tokens)
    assert torch.equal(read, wanted) and most <= rows
    if new.dp == parallel.dp:
        assert found.data.accumulate == config.data.accumulate


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "ranks", "told"),
    [
        ("--tp 2 --dp 2 --batch 8", 6, ["--batch 8 does not divide over 3 data-parallel", "4 ranks would do: --dp 2"]),
        ("--tp 2 --dp 2 --batch 8", 5, ["5 ranks do not divide by --pp 1 x --tp 2", "4 ranks would do"]),
        ("--tp 4 --heads 4 --dp 2 --batch 8", 2, ["2 ranks do not divide", "4 ranks would do: --dp 1 --tp 4 --acc"]),
        ("--tp 1 --dp 4 --dp-replicate 2 --batch 8", 3, ["multiple of the 2 shards", "2 ranks would do: --dp 2"]),
        ("--tp 2 --batch 8", 4, ["give --tp, and the --dp of the whole job"]),
        ("--tp 2 --dp 2 --batch 8 --no-save --heads 3", 4, ["no checkpoint to resume from", "--width 32 does not"]),
        ("--tp 2 --dp 2 --accumulate 0", 4, ["--accumulate 0 is not positive"]),
        ("--tp 3 --dp 2 --batch 8", 6, ["tp must divide the heads", "no number of ranks would do"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(options, ranks, told):
    why = "; ".join(elastic.fit(configuration(options), ranks)[1])
    assert all(each in why for each in told), why


# -- restarted ranks ---------------------------------------------------------------------------------------------------


class Job:
    """`fusedtp train` on one rank, started again and again as by torchrun. It ends after a step or when it is done."""

    def __init__(self, book: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.command = [
            "train",
            *TINY.split(),
            "--data",
            str(book),
            "--runs",
            str(runs),
            "--tp",
            "1",
            "--dp",
            "1",
        ]
        self.patch, self.folder = monkeypatch, runs / "main"
        monkeypatch.setenv("RANK", "0"), monkeypatch.setenv("WORLD_SIZE", "1")  # type: ignore[func-returns-value]

    def start(self, *options: str, job: str = "none", count: int = 0, until: int = 14) -> tuple[int, list[int]]:
        """Exit code and the steps that it trained."""
        self.patch.setenv("TORCHELASTIC_RUN_ID", job)
        self.patch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
        trained = []

        def seen(options, step):
            trained.append(step)
            if step == until - 1:
                signal.raise_signal(signal.SIGTERM)
            return learning_rate(options, step)

        with self.patch.context() as within:
            within.setattr("fusedtp.commands.run.learning_rate", seen)
            return cli.main([*self.command, *options]), trained

    def steps(self) -> list[int]:
        return [record["step"] for record in records_of(self.folder) if "loss" in record]


@pytest.fixture
def job(book, tmp_path, monkeypatch) -> Job:
    return Job(book, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--replace"], ["--replace", "--elastic"], ["--elastic"]])
def test_ranks_that_are_started_again_go_on_and_those_of_another_job_do_as_asked(job, capsys, more):
    assert job.start("--replace", job="before", until=3) == (0, [0, 1, 2])
    first = job.start(*more, job="this", until=5)
    assert first == (0, [0, 1, 2, 3, 4] if "--replace" in more else [3, 4])
    capsys.readouterr()
    assert job.start(*more, job="this", until=8) == (0, [5, 6, 7])
    assert "resumed at step 5, lost 0 steps, because torchrun restarted the ranks" in capsys.readouterr().out
    assert job.start(*more, job="this") == (0, list(range(8, 14)))
    assert job.steps() == list(range(14))
    assert json.loads((job.folder / "config.json").read_text())["run"]["replace"] is False


@pytest.mark.slow
def test_what_ended_the_ranks_is_told_even_if_no_step_was_lost(job, capsys):
    assert job.start("--replace", until=3) == (0, [0, 1, 2])
    note_incident(job.folder, "rank 1, killed by SIGKILL", END)
    capsys.readouterr()
    assert job.start(until=5, count=1) == (0, [3, 4])
    again = "torchrun restarted the ranks"
    assert f"resumed at step 3, lost 0 steps, because {again}; rank 1, killed by SIGKILL\n" in capsys.readouterr().out
    assert job.start(until=6, count=2) == (0, [5])
    assert f"resumed at step 5, lost 0 steps, because {again}\n" in capsys.readouterr().out  # a regular end


@pytest.mark.slow
def test_without_a_name_torchruns_count_tells_a_restart(job):
    assert job.start(until=3) == (0, [0, 1, 2])
    assert job.start(until=5)[0] == launch.WRONG_USAGE
    assert job.start(until=5, count=1) == (0, [3, 4])
    assert job.start("--resume", "--step", "3", until=6, job="a") == (0, [3, 4, 5])
    assert job.start("--resume", "--step", "3", until=8, job="a") == (0, [6, 7]), "that was for the first ranks"


@pytest.mark.slow
def test_another_torchrun_of_the_same_name_is_another_job(job, monkeypatch, capsys):
    """With a fixed --rdzv-id, only a torchrun that trained the run before may continue it without being asked."""

    def by(name: str, *options: str, **more: Any) -> Any:
        monkeypatch.setattr(elastic, "agent", lambda: name)
        return job.start("--save-every", "2", "--keep-last", "9", *options, job="books", **more)

    assert by("a", until=7) == (0, list(range(7)))
    assert by("b")[0] == launch.WRONG_USAGE
    assert "holds checkpoints up to step 7: --resume continues from there" in capsys.readouterr().err
    assert by("c", "--resume", "--step", "4", until=6) == (0, [4, 5])
    assert by("c", "--resume", "--step", "4", until=8) == (0, [6, 7]), "that was for the first ranks"
    assert by("d", "--elastic", until=9) == (0, [8])
    assert by("e", "--replace", until=3) == (0, [0, 1, 2])
    assert by("e", "--replace", until=4) == (0, [3])


def decided(group: Any, runs: Path, options: str) -> Any:
    """The decision that two ranks of two agents agree on."""
    here = world_on(group, "tp2")
    with patch.object(elastic, "agent", lambda: f"agent {here.rank}"), patch.dict(os.environ, BOOKS):
        try:
            run = elastic.agreed(parse([*options.split(), "--runs", str(runs)]), [4], here, elastic.agents(here)).run
        except ValueError as error:
            return str(error)
    return run.resume, run.replace, run.step


BOOKS = {"TORCHELASTIC_RUN_ID": "books"}


@pytest.mark.slow
@pytest.mark.parametrize("known", [0, 1])
def test_one_agent_that_was_there_before_makes_it_the_same_job(worlds, tmp_path, monkeypatch, known):
    (folder := tmp_path / "main").mkdir()
    with patch.dict(os.environ, BOOKS):
        elastic.note_job(folder, [f"agent {known}", "another"])
    for options in ("", "--replace", "--resume --step 2"):
        assert worlds(2).run(decided, tmp_path, options) == [(True, False, None)] * 2
    with patch.dict(os.environ, BOOKS):
        elastic.note_job(folder, ["another"])
    assert worlds(2).run(decided, tmp_path, "--replace") == [(False, True, None)] * 2
    assert worlds(2).run(decided, tmp_path, "--resume --step 2") == [(True, False, 2)] * 2
    assert all("holds checkpoints up to step 4" in told for told in worlds(2).run(decided, tmp_path, ""))


@pytest.mark.parametrize(("ranks", "refused"), [(4, False), (2, True)])
def test_a_machine_that_joins_leaves_it_to_all_whether_the_run_is_theirs(tmp_path, monkeypatch, ranks, refused):
    checkpoint.path_of(tmp_path / "main" / CHECKPOINTS, 4).mkdir(parents=True)
    place = {"RANK": 2 % ranks, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    for name, value in (BOOKS | place).items():
        monkeypatch.setenv(name, str(value))
    elastic.note_job(tmp_path / "main", ["another"])
    assert bool(launch.checkpoint_faults(parse(["--runs", str(tmp_path)]))) == refused


def test_an_agent_is_known_through_a_script_that_it_has_started(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "books")
    script = ["sh", "-c", "sleep 100 & echo $!; wait"]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True, env=os.environ | BOOKS) as shell:
        assert shell.stdout is not None
        rank = int(shell.stdout.readline())
        assert elastic.agent(rank) == elastic.agent(shell.pid) != elastic.agent()
        assert elastic.agent(rank).split()[2] == str(os.getpid())
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
        assert elastic.agent(rank).split()[2] == str(shell.pid)
        os.kill(rank, signal.SIGKILL)


def test_elastic_says_what_it_needs_of_torchrun(job, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert job.start("--elastic", "--replace")[0] == launch.WRONG_USAGE
    told = capsys.readouterr().err
    assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in told and "give torchrun an --rdzv-id" in told


def test_a_rank_that_others_leave_asks_to_be_started_again(job, monkeypatch):
    """Its own torchrun did not ask it to stop, so it must not exit like a finished rank."""
    monkeypatch.setattr(elastic, "NEWS_SECONDS", 0.1)
    monkeypatch.setattr(checkpoint.Saver, "asked", lambda self, patience=0.0: False)
    assert job.start("--elastic", until=4) == (launch.FAILED, [0, 1, 2, 3])
    assert steps_in(job.folder / CHECKPOINTS) == [4]
    monkeypatch.undo()
    assert job.start("--elastic") == (0, list(range(4, 14)))


@pytest.mark.slow
def test_a_rank_that_is_started_again_waits_for_the_one_before_it(tmp_path):
    holder = subprocess.Popen(
        [warm_python(), "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match="is being written by another run"), launch.sole_writer(tmp_path):
        pass
    with launch.sole_writer(tmp_path, 60):
        assert holder.wait(60) == 0


HOLDER = """
import sys, time
from pathlib import Path
from fusedtp.commands.launch import sole_writer
with sole_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(1)
"""


@pytest.mark.slow
def test_a_killed_rank_is_started_again_by_the_command_itself(book, tmp_path):
    folder = tmp_path / "main"
    where = [
        "--tp",
        "2",
        "--data",
        str(book),
        "--runs",
        str(tmp_path),
        "--save-every",
        "2",
        "--max-restarts",
        "1",
    ]
    run = started(*TINY.split(), *where, "--steps", "100000")
    try:
        wait_for_step(run, folder, 6)
        os.kill(process_of_rank(1, tmp_path), signal.SIGKILL)
        before = records_of(folder)[-1]["step"]
        wait_for_step(run, folder, before + 10)
        run.terminate()
        out, err = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 0, err
    because = "torchrun restarted the ranks; rank 1, killed by SIGKILL"
    assert re.search(rf"resumed at step \d+, lost \d+ steps, because {because}", out), out
    step = steps_in(folder / CHECKPOINTS)[-1]
    assert [record["step"] for record in records_of(folder) if "loss" in record] == list(range(step))
    assert incidents(folder)[-1] == "ended in order"


# -- two nodes, each with one torchrun agent and two ranks -------------------------------------------------------------

SOON = "join_timeout=60,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=5"


class Node:
    """torchrun and its two ranks; their output goes to a file."""

    def __init__(self, name: str, folder: Path, port: int, *options: str) -> None:
        self.output, self.mark = folder / f"{name}.txt", f"FUSEDTP_TEST_NODE={folder}/{name}"
        python, script = warm_python(), str(Path(__file__).with_name("paced_rank.py"))
        key, value = self.mark.split("=")
        host = f",is_host={int(name == 'first')}"  # hosts the rendezvous, so this node must stay
        torchrun = [
            "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two-nodes",
            "--rdzv-conf", SOON + host, "--local-addr", "127.0.0.1",
        ]  # fmt: skip
        with open(self.output, "w") as output:
            self.agent = subprocess.Popen(
                [python, *torchrun, script, str(folder), *options], stdout=output, stderr=output,
                env=environment() | {"PYTHON_EXEC": python, key: value, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            )  # fmt: skip

    def kill(self) -> None:
        """Kill agent and ranks at once, like a node that loses power.

        The agent goes first. If it outlived its ranks for a moment, it would join the next rendezvous and die in it,
        and the other node would wait for it.
        """
        self.agent.kill()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if f"\0{self.mark}\0".encode() in b"\0" + (path / "environ").read_bytes():
                    os.kill(int(path.name), signal.SIGKILL)
            except OSError:
                continue
        self.agent.wait()


def eventually(happened: Any, *nodes: Node) -> None:
    until = time.monotonic() + 100
    while not happened():
        failed = any(node.agent.poll() not in (None, 0) for node in nodes)
        if failed or time.monotonic() > until:
            raise AssertionError("\n".join(node.output.read_text() for node in nodes))
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


@pytest.mark.slow
def test_a_run_goes_on_when_a_node_is_killed_and_when_it_is_back(book, tokens, tmp_path):
    """4 ranks, then 2, then 4: each step is trained once and equals one process."""
    options = [*TINY.split(), "--tp", "2", "--dp", "2", "--data", str(book)]
    here = ["--runs", str(tmp_path), "--elastic", "--save-every", "4", "--replace"]
    folder, port, nodes = tmp_path / "main", free_port(), []

    def started(name: str) -> Node:
        nodes.append(Node(name, tmp_path, port, *options, *here))
        return nodes[-1]

    try:
        # A node that exists before the rendezvous begins is included in it.
        second, first = started("second"), started("first")
        eventually(lambda: len(records_of(folder)) == 6 and steps_in(folder / CHECKPOINTS), first, second)
        second.kill()
        (tmp_path / "killed").touch()
        eventually(lambda: len(records_of(folder)) == 10, first)
        third = started("third")
        eventually(lambda: first.agent.poll() == third.agent.poll() == 0, first, third)
    finally:
        for node in nodes:
            node.kill()
    # Rank 0 prints it. Rank 0 is on the node whose agent has the lower process id. Ids wrap, so this may be either
    # node.
    told = " ".join(" ".join(node.output.read_text() for node in nodes).split())
    assert (
        "resumed at step 4, lost 2 steps, because 4 ranks became 2; now on 2 ranks, dp 1, tp 2, accumulate 2" in told
    ), told
    assert (
        "resumed at step 11, lost 0 steps, because 2 ranks became 4; now on 4 ranks, dp 2, tp 2, accumulate 1" in told
    ), told
    records = [record for record in records_of(folder) if "loss" in record]
    assert [record["step"] for record in records] == list(range(14))
    config = parse(options)
    one, shaken = (reference_steps(config, tokens, 14, torch.device("cpu"), shaken) for shaken in (False, True))
    found = compare(config, records, one, shaken)
    assert found.passed and found.steps == 14, found.in_words()
    other = compare(config, [*records[1:], records[0]], one, shaken)
    assert not other.passed, "other tokens, other loss"
