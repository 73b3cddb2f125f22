"""The harness itself: results, failures, deaths and hangs of workers, with nothing left behind."""

import functools
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import Failure, PerRank, World, WorldError, world
from tests.harness.warm import warm_python


def total(group, own: int, common: int) -> tuple[int, float]:
    summed = torch.tensor([float(own)])
    dist.all_reduce(summed, group=group)
    return dist.get_rank(group), summed.item() + common


def fail_on(group, rank: int) -> str:
    if dist.get_rank(group) == rank:
        raise KeyError("the reason")
    return "fine"


def wait_for_all_but(group, rank: int) -> None:
    if dist.get_rank(group) == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def environment(group) -> tuple[int, str]:
    return torch.get_num_threads(), os.environ["TRITON_INTERPRET"]


def drawn(group, numbers: int) -> list[float]:
    return torch.rand(numbers).tolist()


def group_name(group) -> str:
    return group.group_name


def test_every_rank_gets_its_own_argument_and_the_common_one():
    assert world(3).run(total, PerRank([1, 2, 4]), 10) == [(0, 17.0), (1, 17.0), (2, 17.0)]


def test_a_failure_is_told_by_its_kinds_and_ends_the_workers_that_were_one_thread_each():
    small = world(2)
    with pytest.raises(WorldError, match=r"rank 1 of 2: KeyError(.|\n)*the reason"):
        small.run(fail_on, 1)
    pids = small.pids
    outcomes = small.outcomes(fail_on, 0)
    assert outcomes[0].is_a("KeyError", "nothing else") and outcomes[0].is_a("LookupError") and outcomes[1] == "fine"
    assert small.run(total, 1, 0) == [(0, 2.0), (1, 2.0)]
    assert small.run(environment) == [(1, "1")] * 2
    assert not set(small.pids) & set(pids)


def test_one_group_serves_all_calls_unless_a_fresh_one_is_asked_for():
    small = world(2)
    first, pids = small.run(group_name), small.pids
    assert small.run(group_name) == first
    assert small.run(group_name, fresh=True) != first
    assert small.pids == pids


def test_dead_and_hanging_workers_are_replaced_and_gone():
    with World(2) as own:
        own.run(total, 1, 0)
        pids = own.pids
        dead, hung = own.outcomes(wait_for_all_but, 0, grace=0.5)
        assert dead.is_a("WorkerDied") and "-9" in dead.message
        assert hung.is_a("WorkerHung") and "wait_for_all_but" in hung.details
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert own.run(total, 1, 0) == [(0, 2.0), (1, 2.0)]
        pids = own.pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_ranks_draw_the_same_whatever_they_drew_before():
    """A test whose model is random would pass or fail by what ran before it."""
    small = world(2)
    small.run(drawn, PerRank([1, 2]))
    first, second = small.run(drawn, 1)
    assert first == second and small.run(drawn, 1) == [first] * 2


@pytest.mark.slow
def test_workers_end_with_a_killed_driver():
    script = (
        "from tests.harness import World\n"
        "from tests.harness.test_harness import total\n"
        "w = World(2)\nw.run(total, 1, 0)\nprint(*w.pids, flush=True)\nimport time\ntime.sleep(600)"
    )
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        driver.kill()
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline, f"workers {pids} outlived their driver"
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_failure_is_not_mistaken_for_a_result():
    with pytest.raises(WorldError) as caught:
        world(2).run(fail_on, 1)
    assert caught.value.outcomes[0] == "fine" and isinstance(caught.value.outcomes[1], Failure)


@pytest.mark.slow
def test_a_warm_python_runs_and_ends_as_a_cold_one(tmp_path):
    """Arguments, environment, folder and files are the client's, and it ends the same way: an exit code or a signal."""
    (tmp_path / "where.py").write_text(
        "import os, sys, torch; print(sys.argv[1:], os.getcwd(), os.environ['MINE'], __name__, __file__)"
    )
    programs = (
        ["where.py", "a", "b c"],
        ["-m", "where", "d"],
        ["-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"],
        ["-c", "raise SystemExit('words')"],
        ["-c", "raise KeyError('the reason')"],
        ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"],
    )
    environment = os.environ | {"MINE": "x", "PYTHONPATH": str(tmp_path)}
    run = functools.partial(subprocess.run, capture_output=True, text=True, cwd=tmp_path, env=environment)
    for program in programs:
        warm, cold = (run([python, *program]) for python in (warm_python(), sys.executable))
        last = [done.stderr.splitlines()[-1:] for done in (warm, cold)]
        assert (warm.returncode, warm.stdout, last[0]) == (cold.returncode, cold.stdout, last[1]), program


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_ends_a_warm_python_ends_its_process(number):
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen([warm_python(), "-c", program], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        pid = int(client.stdout.readline())
        client.send_signal(number)
        assert client.wait(60) == -number
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("sent", ["nothing", "a length", "a part", "all"])
def test_a_client_killed_while_it_asks_takes_nobody_with_it(sent):
    """The client's child ends, even if it started before the client learnt of it, and later clients are served."""
    request = pickle.dumps((["-c", "import time; time.sleep(600)"], dict(os.environ), os.getcwd()))
    ended, output = os.pipe()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(Path(warm_python()).with_name("server")))
        if sent != "nothing":
            socket.send_fds(client, [len(request).to_bytes(8, "little")], [0, output, 2])
        client.sendall({"a part": request[:9], "all": request}.get(sent, b""))
    os.close(output)
    assert subprocess.run([warm_python(), "-c", "print('fine')"], capture_output=True, timeout=60).stdout == b"fine\n"
    ready, _, _ = select.select([ended], [], [], 60)
    assert ready and os.read(ended, 1) == b"", "its process goes on"
    os.close(ended)
