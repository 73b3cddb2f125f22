"""The order of a group's calls on CUDA streams."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch


def finish(device: torch.device) -> None:
    """Wait for all that was enqueued on `device`; on CPU nothing ever is."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_capturing() -> bool:
    """Whether the current stream is being captured; a torch without CUDA has none to ask."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class StreamOrder:
    """CUDA: calls of one group run in the order of the host's calls, whatever streams of `device` they are on.

    The current stream is known by its handle: an object of it, asked for twice a call, costs more than a launch.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._handle, self._stream = -1, None  # type: int, torch.cuda.Stream | None
        self._event: torch.cuda.Event | None = None  # where the last call ended; None: nothing to wait for
        self._capturing = False

    def enter(self) -> bool:
        """Order the current stream behind the last call; True while a graph is being captured (which begins idle)."""
        self._capturing = torch.cuda.is_current_stream_capturing()
        if self._capturing:
            return True
        handle = torch._C._cuda_getCurrentRawStream(self._index)
        if handle != self._handle:
            self._handle, self._stream = handle, torch.cuda.current_stream(self.device)
            if self._event is not None:
                self._stream.wait_event(self._event)
        return False

    def leave(self) -> None:
        """Remember where the stream of the last `enter` stands after its call."""
        if self._capturing:
            return
        if self._event is None:
            self._event = torch.cuda.Event()
        self._event.record(self._stream)


NON_BLOCKING, HIGH = 1, -1  # CU_STREAM_NON_BLOCKING: it does not wait for the default stream; a priority


class Driver(NamedTuple):
    """libcuda's functions; each returns 0 or an error."""

    create: Any
    copy: Any


@cache
def driver() -> Driver:
    """Of this machine. Raises OSError where there is none."""
    library = ctypes.CDLL("libcuda.so.1")
    made = Driver(library.cuStreamCreateWithPriority, library.cuMemcpyDtoDAsync_v2)
    made.create.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint, ctypes.c_int]
    made.copy.argtypes = [ctypes.c_ulonglong, ctypes.c_ulonglong, ctypes.c_size_t, ctypes.c_void_p]
    return made


def _checked(code: int, what: str) -> None:
    if code != 0:
        raise RuntimeError(f"{what}: CUDA error {code}")


class SideStream:
    """CUDA: a stream beside the current one, for copies.

    It is nobody else's. torch's own come from a pool and may be used by FSDP as well: copies behind an NCCL kernel that
    finds no room beside kernels that wait for those copies would never be made.

    Copies go straight to the driver: a gather makes two of them a peer, and torch would make two views for each.
    """

    def __init__(self, device: torch.device) -> None:
        handle = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # a call of the runtime, which makes the context current that the driver wants
            _checked(driver().create(ctypes.byref(handle), NON_BLOCKING, HIGH), "cuStreamCreateWithPriority")
        self._handle = handle.value or 0
        self.stream = torch.cuda.ExternalStream(self._handle, device)  # it stays until the process ends
        self._forked, self._done = torch.cuda.Event(), torch.cuda.Event()

    def fork(self) -> None:
        """What is enqueued there next runs behind what the current stream has now."""
        self._forked.record(torch.cuda.current_stream(self.stream.device))
        self.stream.wait_event(self._forked)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Between addresses that the device reaches. Raises RuntimeError if the driver refuses."""
        _checked(driver().copy(destination, source, nbytes, self._handle), "cuMemcpyDtoDAsync")

    def join(self) -> None:
        """The current stream waits for what was enqueued there."""
        self._done.record(self.stream)
        torch.cuda.current_stream(self.stream.device).wait_event(self._done)
