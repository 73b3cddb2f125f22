"""The order of a group's calls on CUDA streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def finish(device: torch.device) -> None:
    """Wait for all that was enqueued on `device`; on CPU nothing ever is."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_capturing() -> bool:
    """Whether the current stream is being captured; a torch without CUDA has none to ask."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class StreamOrder:
    """CUDA: calls of one group run in the order of the host's calls, whatever streams of `device` they are on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.last: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None

    def enter(self) -> bool:
        """Order the current stream behind the last call; True while a graph is being captured (which begins idle)."""
        if torch.cuda.is_current_stream_capturing():
            return True
        stream = torch.cuda.current_stream(self.device)
        if self.last is not None and self.last[0] != stream:
            stream.wait_event(self.last[1])
        return False

    def leave(self) -> None:
        """Remember where the current stream stands after a call."""
        if torch.cuda.is_current_stream_capturing():
            self.last = None
            return
        stream = torch.cuda.current_stream(self.device)
        event = self.last[1] if self.last is not None else torch.cuda.Event()
        event.record(stream)
        self.last = (stream, event)


class SideStream:
    """CUDA: a stream beside the current one, that runs what is enqueued there behind what the current one had then."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._forked, self._done = torch.cuda.Event(), torch.cuda.Event()

    @contextmanager
    def forked(self) -> Iterator[None]:
        """Make it the current stream, behind the one that was."""
        self._forked.record(torch.cuda.current_stream(self.stream.device))
        self.stream.wait_event(self._forked)
        with torch.cuda.stream(self.stream):
            try:
                yield
            finally:
                self._done.record(self.stream)

    def join(self) -> None:
        """The current stream waits for what ran beside it."""
        torch.cuda.current_stream(self.stream.device).wait_event(self._done)
