"""A rank that dies or raises in the middle of an operation: peers raise at once, exit, and leave nothing behind."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

import fusedtp
from fusedtp.comm import Call
from tests.comm.test_failures import shared_memory_files
from tests.engines import ENGINES
from tests.harness import PerRank, World, world


def layer(group, engine: str) -> torch.Tensor:
    x, w = torch.ones(3, 4, requires_grad=True), torch.ones(5, 4, requires_grad=True)
    (h,) = fusedtp.all_gather_matmul(x, [w], group, engine=engine)
    y = fusedtp.matmul_reduce_scatter(h, w.t(), group, engine=engine)
    y.sum().backward()
    return y.detach()


def used_memory(group, engine: str) -> set[str]:
    layer(group, engine)
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/memfd:fusedtp" in line}


def fail_at_signal(group, engine: str, number: int, act, timeout: float = 600) -> None:
    """The layer's forward and backward; this rank calls `act` before its `number`-th signal to a peer.

    With `chunked` and three ranks, signals 1 and 2 precede the growth of the workspace, 3 and 4 belong to the
    all-gather, 5 and 6 to the reduce-scatter, and 7 is the first of backward. The group must be a fresh one: a
    workspace that other tests have grown does not grow.
    """
    fusedtp.set_timeout(group, timeout)
    post, left = Call._post, [number]

    def counted(call, p, words) -> None:
        left[0] -= 1
        if left[0] == 0 and act is not None:
            act()
        post(call, p, words)

    Call._post = counted
    try:
        layer(group, engine)
    finally:
        Call._post = post


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fault() -> None:
    raise KeyError("a fault of one rank")


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 7])  # before the first signal, between two, in backward
@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_killed_in_an_operation_fails_its_peers_and_leaves_nothing(engine, number):
    with World(3) as own:
        used = set.union(*own.run(used_memory, engine))
        pids = own.pids
        outcomes = own.outcomes(fail_at_signal, engine, number, PerRank([None, die, None]), grace=20)
    assert outcomes[1].is_a("WorkerDied")
    for peer in (outcomes[0], outcomes[2]):
        if engine == "collective":  # gloo already reports a waiting peer in its own words
            assert peer.is_a("RuntimeError") and peer.seconds < 30, peer
        else:
            assert peer.is_a("PeerDied") and "rank 1" in peer.message and peer.seconds < 30, peer
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert used and not used & shared_memory_files()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "number"),
    [*(("chunked", n) for n in (1, 2, 3, 5, 7)), ("collective", 1), ("collective", 5), ("triton", 1)],
)
def test_a_rank_that_raises_in_an_operation_is_named_by_its_peers(engine, number):
    outcomes = world(3).outcomes(fail_at_signal, engine, number, PerRank([None, fault, None]), fresh=True)
    assert outcomes[1].is_a("KeyError"), outcomes[1]
    for peer in (outcomes[0], outcomes[2]):
        assert peer.is_a("PeerFailed") and "rank 1" in peer.message and peer.seconds < 30, peer


def late_fault() -> None:
    time.sleep(0.5)
    fault()


@pytest.mark.slow
def test_a_rank_that_raises_between_two_signals_is_named_in_the_vote_before_growing():
    """Rank 2 has already received its signal; rank 0 raises only as a consequence and must not be named."""
    outcomes = world(3).outcomes(fail_at_signal, "chunked", 2, PerRank([None, late_fault, None]), fresh=True)
    for peer in (outcomes[0], outcomes[2]):
        assert peer.is_a("PeerFailed") and "rank 1 raised" in peer.message, peer


@pytest.mark.slow
@pytest.mark.parametrize("number", [4, 6])  # the second of two signals: rank 2 already has its own
def test_a_peer_that_was_signalled_before_the_fault_may_finish_the_call_and_stops_in_the_next(number):
    outcomes = world(3).outcomes(fail_at_signal, "chunked", number, PerRank([None, fault, None]), 1, fresh=True)
    assert outcomes[1].is_a("KeyError"), outcomes[1]
    assert outcomes[0].is_a("PeerFailed") and "rank 1" in outcomes[0].message, outcomes[0]
    assert outcomes[2].is_a("PeerFailed", "SignalTimeout") and outcomes[2].seconds < 30, outcomes[2]


def wait_in_vain(group, engine: str) -> torch.Tensor | None:
    fusedtp.set_timeout(group, 1)
    return None if group.rank() == 1 else layer(group, engine)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_that_never_comes_is_named_after_the_timeout(engine):
    outcomes = world(3).outcomes(wait_in_vain, engine, fresh=True)
    for peer in (outcomes[0], outcomes[2]):
        assert peer.is_a("SignalTimeout") and "rank 1" in peer.message and 0.9 < peer.seconds < 30, peer
