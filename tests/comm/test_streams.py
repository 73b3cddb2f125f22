"""The order of a group's calls on streams, with a fake CUDA that only records what it is asked for."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedtp.comm.streams import StreamOrder


class Cuda:
    """Streams by handle. `behind[s]`: the last call that all further work on stream s follows; -1: none."""

    def __init__(self) -> None:
        self.current, self.capturing, self.behind = 0, False, dict.fromkeys(range(4), -1)
        self.asked = 0

    def stream(self, _device: object = None) -> "Stream":
        self.asked += 1
        return Stream(self, self.current)


class Stream:
    def __init__(self, cuda: Cuda, handle: int) -> None:
        self.cuda, self.handle = cuda, handle

    def wait_event(self, event: "Event") -> None:
        assert not self.cuda.capturing
        self.cuda.behind[self.handle] = max(self.cuda.behind[self.handle], event.call)


class Event:
    def record(self, stream: Stream) -> None:
        assert not stream.cuda.capturing
        self.call = stream.cuda.behind[stream.handle]


@contextmanager
def fake_cuda() -> Iterator[Cuda]:
    fake = Cuda()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_current_stream_capturing", lambda: fake.capturing)
        patch.setattr("torch.cuda.current_stream", fake.stream)
        patch.setattr("torch.cuda.Event", Event)
        patch.setattr("torch._C._cuda_getCurrentRawStream", lambda index: fake.current, raising=False)
        yield fake


CALLS = st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20)


@given(CALLS)
def test_every_call_follows_the_one_before_it(calls: list[tuple[int, bool]]) -> None:
    """On any streams; a graph capture begins and ends while the device is idle."""
    with fake_cuda() as fake:
        order, last = StreamOrder(torch.device("cuda", 0)), -1
        for number, (stream, capturing) in enumerate(calls):
            fake.current, fake.capturing = stream, capturing
            assert order.enter() == capturing
            if capturing:
                last = -1  # all earlier work is done
            else:
                assert fake.behind[stream] >= last
                fake.behind[stream] = last = number  # the call's own work
            order.leave()


def test_a_stream_is_looked_up_once() -> None:
    with fake_cuda() as fake:
        order = StreamOrder(torch.device("cuda", 0))
        for stream in (0, 0, 0, 2, 2, 0):
            fake.current = stream
            order.enter()
            order.leave()
        assert fake.asked == 3
