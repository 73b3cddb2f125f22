"""The order of a rank's calls on streams, with a fake CUDA that only records what it is asked for."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import pytest
import torch
import torch._dynamo  # which keeps the real functions; a virtual world imports it
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fusedtp.comm import Signature, VirtualGroup, VirtualWorld, communicator
from fusedtp.comm.process_world import ProcessWorld
from fusedtp.comm.streams import StreamOrder
from tests.harness import world


class Cuda:
    """Streams by handle; each thread has its own current one.

    behind   by stream: the calls that all further work on it follows
    asked    number of Stream objects that were made
    events   "wait" and "record" of events
    """

    def __init__(self) -> None:
        self.of_thread, self.capturing = threading.local(), False
        self.behind: dict[int, set[int]] = defaultdict(set)
        self.asked, self.events = 0, list[str]()

    @property
    def current(self) -> int:
        return getattr(self.of_thread, "handle", 0)

    @current.setter
    def current(self, handle: int) -> None:
        self.of_thread.handle = handle

    def stream(self, _device: object = None) -> "Stream":
        self.asked += 1
        return Stream(self, self.current)


class Stream:
    def __init__(self, cuda: Cuda, handle: int) -> None:
        self.cuda, self.handle = cuda, handle

    def wait_event(self, event: "Event") -> None:
        assert not self.cuda.capturing
        self.cuda.events.append("wait")
        self.cuda.behind[self.handle] |= event.calls


class Event:
    def record(self, stream: Stream) -> None:
        assert not stream.cuda.capturing
        stream.cuda.events.append("record")
        self.calls = set(stream.cuda.behind[stream.handle])


@contextmanager
def fake_cuda() -> Iterator[Cuda]:
    fake = Cuda()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_current_stream_capturing", lambda: fake.capturing)
        patch.setattr("torch.cuda.current_stream", fake.stream)
        patch.setattr("torch.cuda.current_device", lambda: 0)
        patch.setattr("torch.cuda.Event", Event)
        patch.setattr("torch._C._cuda_getCurrentRawStream", lambda index: fake.current, raising=False)
        yield fake


CALLS = st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20)


@given(CALLS)
def test_every_call_follows_the_one_before_it(calls: list[tuple[int, bool]]) -> None:
    """On any streams; a graph capture begins and ends while the device is idle."""
    with fake_cuda() as fake:
        order, unfinished = StreamOrder(torch.device("cuda", 0)), set()
        for number, (stream, capturing) in enumerate(calls):
            fake.current, fake.capturing = stream, capturing
            assert order.enter() == capturing
            if capturing:
                unfinished.clear()  # all earlier work is done
            else:
                assert fake.behind[stream] >= unfinished
                unfinished.add(number)
                fake.behind[stream].add(number)  # the call's own work
            order.leave()


def test_a_stream_is_looked_up_once() -> None:
    with fake_cuda() as fake:
        order = StreamOrder(torch.device("cuda", 0))
        for stream in (0, 0, 0, 2, 2, 0):
            fake.current = stream
            order.enter()
            order.leave()
        assert fake.asked == 3


OF_GROUPS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=12)


def calls_of_groups(fake: Cuda, calls: list[tuple[int, int]]) -> list[set[int]]:
    """Calls of three groups of the same two ranks, as (group, stream). Each rank has streams of its own.

    Returns the calls that each rank's last call follows. Numbers of rank r's calls begin at 1000 r.
    """

    def body(group: VirtualGroup) -> set[int]:
        groups = [group, group.along((1, 2), 1), group.along((2, 1), 0).along((2,), 0)]
        found, seen = [communicator(each) for each in groups], set()
        for i, (which, stream) in enumerate(calls):
            fake.current = 10 * group.rank() + stream
            with found[which].workspace.call(Signature("a_call", "chunked", torch.float32, 1, (1, 1)), 0):
                seen = set(fake.behind[fake.current])
                assert seen >= {1000 * group.rank() + before for before in range(i)}, (which, stream, seen)
                fake.behind[fake.current].add(1000 * group.rank() + i)
        return seen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("fusedtp.comm.communicator"), "has_streams", lambda device: True)
        return VirtualWorld(2, timeout_s=20.0).run(body)


@pytest.mark.slow
@given(OF_GROUPS)
def test_calls_of_all_groups_of_a_rank_follow_each_other_and_no_rank_s_calls_follow_another_s(calls):
    """Otherwise ranks could run kernels of two groups in different orders, each waiting for the one without room."""
    with fake_cuda() as fake:
        for rank, seen in enumerate(calls_of_groups(fake, calls)):
            assert {number // 1000 for number in seen} <= {rank}


def test_on_one_stream_a_call_of_any_group_costs_one_record_of_an_event():
    with fake_cuda() as fake:
        calls_of_groups(fake, [(i % 3, 0) for i in range(9)])
        assert fake.events == ["record"] * 2 * 9


def owners(group) -> list[bool]:
    """Whether another group of this process has the same streams on the same GPU, and on another GPU."""
    first, second = ProcessWorld(dist.group.WORLD), ProcessWorld(dist.new_group())
    found = []
    for index in (0, 1):
        first.device, second.device = torch.device("cuda", 0), torch.device("cuda", index)
        found.append(first.stream_owner == second.stream_owner)
    return found


def test_groups_of_one_process_share_its_streams_on_a_gpu():
    assert world(2).run(owners) == [[True, False]] * 2


def test_ranks_of_virtual_worlds_share_no_streams():
    def owner(group: VirtualGroup) -> list[tuple[int, int]]:
        groups = group, group.along((2, 2), 0), group.along((2, 2), 1)
        return [communicator(each).world.stream_owner for each in groups]

    found = VirtualWorld(4).run(owner) + VirtualWorld(4).run(owner)
    assert [len(set(of_rank)) for of_rank in found] == [1] * 8
    assert len({of_rank[0] for of_rank in found}) == 8
