"""Runs of a VirtualWorld: how a rank that leaves or fails affects the others and the next run."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusedtp
from fusedtp import PeerDied, SignalTimeout, VirtualWorld
from fusedtp.nn.mlp import GatedMLP

X, W = torch.arange(12.0).view(2, 6), torch.arange(24.0).view(4, 6)
WANT = torch.cat([X, X]) @ W.T


def multiplied(group: Any, **options: Any) -> torch.Tensor:
    return fusedtp.all_gather_matmul(X, [W], group, **options)[0]


def are_right(found: list[torch.Tensor]) -> bool:
    return len(found) == 2 and all(torch.equal(y, WANT) for y in found)


def raises_between_calls(group: Any) -> None:
    multiplied(group)
    if group.rank() == 1:
        raise KeyError("a fault")
    multiplied(group)


def leaves_early(group: Any) -> None:
    multiplied(group)
    if group.rank() == 0:
        multiplied(group)


def comes_late(group: Any) -> None:
    multiplied(group)
    if group.rank() == 1:
        time.sleep(2.0)
    multiplied(group)


@pytest.mark.slow
def test_a_timeout_holds_in_operations_too():
    with pytest.raises(SignalTimeout, match=r"rank 0 waited 0\.5 s for rank 1 in all_gather_matmul"):
        VirtualWorld(2, timeout_s=0.5).run(comes_late)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_timeout_is_positive(seconds: float):
    with pytest.raises(ValueError, match=r"timeout_s is .*; it must be positive"):
        VirtualWorld(2, timeout_s=seconds)


def test_nobody_waits_for_a_rank_that_has_left():
    start = time.monotonic()
    with pytest.raises(PeerDied, match=r"rank 1 ended \(it raised or left VirtualWorld\.run"):
        VirtualWorld(2, timeout_s=20.0).run(leaves_early)
    assert time.monotonic() - start < 10


def test_a_backward_outside_of_a_run_says_where_it_belongs():
    world, x = VirtualWorld(2, timeout_s=20.0), X.clone().requires_grad_()
    ys = world.run(lambda group: fusedtp.all_gather_matmul(x, [W], group)[0])
    start = time.monotonic()
    with pytest.raises(PeerDied, match="call backward inside of run"):
        ys[0].sum().backward()
    assert time.monotonic() - start < 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "error"), [(raises_between_calls, KeyError), (leaves_early, PeerDied), (comes_late, SignalTimeout)]
)
def test_a_run_that_failed_does_not_spoil_the_next(fails: Callable[[Any], None], error: type[Exception]):
    """The world and its parts, by object and by the names that layers hold."""
    world = VirtualWorld(2, timeout_s=0.5)
    mlps = [GatedMLP(6, 4) for _ in range(2)]
    mlps[1].load_state_dict(mlps[0].state_dict())
    want = mlps[0](torch.cat([X, X]))
    world.run(lambda group: fusedtp.parallelize(mlps[group.rank()], group))
    for whole in (True, False):
        with pytest.raises(error):
            world.run(fails if whole else lambda group: fails(group.along((1, 2), 1)))
        for y in world.run(lambda group: mlps[group.rank()](X)):
            torch.testing.assert_close(y, want[:2])
        assert are_right(world.run(multiplied))
        assert are_right(world.run(lambda group: multiplied(group.along((1, 2), 1))))


def test_ranks_have_the_modes_of_the_caller():
    w = W.clone().requires_grad_()
    made = lambda group: fusedtp.all_gather_matmul(X, [w], group)[0]  # noqa: E731
    world = VirtualWorld(2)
    assert all(y.requires_grad for y in world.run(made))
    with torch.no_grad():
        assert not any(y.requires_grad for y in world.run(made))
    with torch.inference_mode():
        assert all(y.is_inference() for y in world.run(made))
    with torch.autocast("cpu", torch.bfloat16):
        assert all(y.dtype == torch.bfloat16 for y in world.run(made))


def test_one_run_at_a_time():
    world, entered, leave = VirtualWorld(2), threading.Barrier(3), threading.Event()

    def waits(group: Any) -> None:
        entered.wait(30)
        leave.wait(30)

    thread = threading.Thread(target=world.run, args=(waits,))
    thread.start()
    entered.wait(30)
    with pytest.raises(RuntimeError, match="is already running"):
        world.run(multiplied)
    leave.set()
    thread.join()
    assert are_right(world.run(multiplied))
