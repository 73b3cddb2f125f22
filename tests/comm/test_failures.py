"""A rank that dies, raises or is late: its peers raise within the timeout, and nothing is left behind."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from fusedtp.comm import PeerFailed, Signature, VirtualWorld, check, communicator, set_timeout
from tests.harness import PerRank, World, world


def signature(comm) -> Signature:
    return Signature("all_gather_matmul", "chunked", torch.float32, 4, (1,) * comm.world_size)


def call(group, role: str) -> None:
    """One call; halfway through, a rank may die, raise, or be late."""
    comm = communicator(group)
    with comm.workspace.call(signature(comm), 1 << 20) as current:
        if role == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if role == "raise":
            raise KeyError("a fault of this rank alone")
        if role == "late":
            time.sleep(4)
        current.handshake()


def call_with_timeout(group, role: str, seconds: float) -> None:
    set_timeout(group, seconds)
    call(group, role)


def shared_memory_files() -> set[str]:
    """(device and inode) of every memfd that any process maps or has open."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = (process / "maps").read_text().splitlines()
            found |= {line.split()[4] for line in lines if "/memfd:fusedtp" in line}
            for fd in (process / "fd").iterdir():
                if "/memfd:fusedtp" in os.readlink(fd):
                    found.add(str(fd.stat().st_ino))
        except OSError:
            continue
    return found


def named_files() -> set[str]:
    """Files in /dev/shm that this package, or torch's shared memory in its workers, would leave; none of other
    programs.
    """
    return {name for name in os.listdir("/dev/shm") if "fusedtp" in name or name.startswith("torch_")}


def warm_up(group) -> set[str]:
    call(group, "well")
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/memfd:fusedtp" in line}


@pytest.mark.slow
def test_after_sigkill_peers_raise_at_once_and_no_process_or_memory_is_left():
    before = named_files()
    with World(3) as own:
        used = set.union(*own.run(warm_up))
        pids = own.pids
        assert used and used <= shared_memory_files()
        outcomes = own.outcomes(call, PerRank(["well", "die", "well"]), grace=20)
        assert outcomes[1].is_a("WorkerDied")
        for peer in (outcomes[0], outcomes[2]):
            assert peer.is_a("PeerDied") and peer.is_a("SignalTimeout") and "rank 1" in peer.message
            assert peer.seconds < 30
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not used & shared_memory_files()
    assert named_files() <= before


def test_a_rank_that_raises_is_named_by_its_peers_and_the_group_stays_usable():
    outcomes = world(3).run(raise_and_go_on, PerRank(["well", "well", "raise"]))
    kinds = [kind for kind, _ in outcomes]
    assert kinds == ["PeerFailed", "PeerFailed", "KeyError"]
    assert all("rank 2" in message for kind, message in outcomes if kind == "PeerFailed")


def raise_and_go_on(group, role: str) -> tuple[str, str]:
    try:
        call(group, role)
    except (RuntimeError, KeyError) as error:
        call(group, "well")
        return type(error).__name__, str(error)
    raise AssertionError("every rank must learn of the failure")


def time_out_and_try_again(group, role: str) -> tuple[float, str, str]:
    start = time.monotonic()
    with pytest.raises(RuntimeError) as first:
        call_with_timeout(group, role, 1.0)
    seconds = time.monotonic() - start
    with pytest.raises(RuntimeError):
        call(group, "well")
    with pytest.raises(RuntimeError) as second:
        check(group)
    return seconds, f"{type(first.value).__name__}: {first.value}", type(second.value).__name__


@pytest.mark.slow
def test_a_late_rank_is_named_within_the_timeout_and_the_group_is_not_used_again():
    outcomes = world(2).run(time_out_and_try_again, PerRank(["well", "late"]), fresh=True)
    seconds, message, again = outcomes[0]
    assert 0.9 < seconds < 30
    assert message.startswith("SignalTimeout") and "rank 1" in message and "1 s" in message
    assert again == "SignalTimeout"
    assert outcomes[1][2] == "SignalTimeout", "the late rank must learn of it too"


def test_check_passes_while_all_is_well():
    world(2).run(call_and_check)


def call_and_check(group) -> None:
    call(group, "well")
    check(group)


@pytest.mark.slow
def test_set_timeout_refuses_nothing_and_less():
    for seconds in (0, -1.0, float("nan")):
        assert world(2).outcomes(call_with_timeout, "well", seconds)[0].is_a("ValueError")


def test_a_thread_that_raises_stops_the_virtual_world():
    start = time.monotonic()
    with pytest.raises(KeyError):
        VirtualWorld(3).run(lambda group: call(group, "raise" if group.rank() == 1 else "well"))
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("when", ["begun", "not begun"])
def test_a_thread_that_raises_stops_a_part_of_the_virtual_world(when):
    """Rank 1 raises; rank 3 waits for rank 1 in their pair, whether or not the pair has met before."""
    stopped = []

    def body(group) -> None:
        try:
            if when == "begun":
                communicator(group.along((2, 2), 0))
            if group.rank() == 1:
                raise KeyError("a fault")
            while when == "not begun" and group.rank() == 3 and not group._world.raised:
                time.sleep(0.01)
            if group.rank() == 3:
                communicator(group.along((2, 2), 0)).world.barrier()
        except PeerFailed:
            stopped.append(group.rank())
            raise

    start = time.monotonic()
    with pytest.raises(KeyError):
        VirtualWorld(4).run(body)
    assert stopped == [3] and time.monotonic() - start < 10


def test_a_thread_that_is_stopped_stops_its_part_of_the_virtual_world():
    """Rank 1 raises, rank 3 waits for it in the world, rank 2 waits for rank 3 in their pair. The next run works."""
    virtual, met, stopped = VirtualWorld(4), threading.Barrier(4), []

    def body(group) -> None:
        pair, everyone = communicator(group.along((2, 2), 1)), communicator(group)
        met.wait(30)
        if group.rank() == 1:
            raise KeyError("a fault")
        try:
            (pair if group.rank() == 2 else everyone).world.barrier()
        except PeerFailed:
            stopped.append(group.rank())
            raise

    start = time.monotonic()
    with pytest.raises(KeyError):
        virtual.run(body)
    assert sorted(stopped) == [0, 2, 3] and time.monotonic() - start < 10
    meet = lambda group: communicator(group.along((2, 2), 1)).world.exchange(group.rank())  # noqa: E731
    assert virtual.run(meet) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def held_after(group, broken: str) -> tuple[bool, bool]:
    """After a call that broke on exit: whether another thread can take the lock, and whether the group has failed."""
    workspace = communicator(group).workspace

    class Broken:
        error = None

        def enter(self) -> bool:
            return False

        def leave(self) -> None:
            raise RuntimeError("a stream's error")

        def stop(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        with workspace.call(Signature("some_call", "chunked", torch.float32, 1, (1, 1)), 64) as call:
            call.handshake()
            communicator(group).world.barrier()  # no rank may still wait when another one gives up
            if broken == "stream":
                workspace._order = Broken()
            else:
                call.watch = Broken()
    workspace._order, taken = None, []
    thread = threading.Thread(target=lambda: taken.append(workspace.lock.acquire(timeout=5)))
    thread.start()
    thread.join()
    return taken[0], workspace.failed is not None


@pytest.mark.parametrize(("broken", "failed"), [("stream", False), ("interrupt", True)])
def test_a_call_that_breaks_on_its_way_out_lets_go_of_the_lock(broken, failed):
    assert world(2).run(held_after, broken, fresh=True) == [(True, failed)] * 2
