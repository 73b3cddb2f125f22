"""The order of a rank's calls on CUDA streams.

Note [One order for all groups]
A fused kernel may fill the GPU while it waits for its peers. If two kernels, of one group or of two, were in flight on
two streams, one rank might run the first and another rank the second, and each would wait for a kernel that finds no
room on the other rank. So a rank's calls on a device run one after another, whatever their groups and streams. All
groups of the rank share one StreamOrder, which communicator.py hands on from group to group. Ranks of a virtual world
have one each, because they must run at the same time.

This is safe only if all ranks make the calls of the groups that they share in the same order: docs/guide.md.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any, NamedTuple

import torch


def finish(device: torch.device) -> None:
    """Wait for all work enqueued on `device`; a no-op on CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def has_streams(device: torch.device) -> bool:
    """Whether work on `device` is enqueued on streams."""
    return device.type == "cuda"


def is_capturing() -> bool:
    """Whether the current stream is being captured; False if CUDA is not initialized."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class StreamOrder:
    """CUDA: a rank's calls run in the host's order, whatever streams of `device` they are on.

    The current stream is identified by its handle: making a Stream object twice per call costs more than a launch.

    lock   held from `enter` to `leave`
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.lock = device, threading.RLock()
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._handle, self._stream = -1, None  # type: int, torch.cuda.Stream | None
        self._event: torch.cuda.Event | None = None  # where the last call ended; None: nothing to wait for
        self._capturing = False

    def enter(self) -> bool:
        """Order the current stream after the last call. During graph capture return True and order nothing: a graph
        begins idle."""
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
        """Record the end of the call on the stream of the last `enter`."""
        if self._capturing:
            return
        if self._event is None:
            self._event = torch.cuda.Event()
        self._event.record(self._stream)


NON_BLOCKING, HIGH = 1, -1  # CU_STREAM_NON_BLOCKING: not synchronized with the default stream; a high priority


class Driver(NamedTuple):
    """libcuda's functions; each returns 0 or an error."""

    create: Any
    copy: Any


@cache
def driver() -> Driver:
    """This machine's driver. Raises OSError if there is none."""
    library = ctypes.CDLL("libcuda.so.1")
    made = Driver(library.cuStreamCreateWithPriority, library.cuMemcpyDtoDAsync_v2)
    made.create.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint, ctypes.c_int]
    made.copy.argtypes = [ctypes.c_ulonglong, ctypes.c_ulonglong, ctypes.c_size_t, ctypes.c_void_p]
    return made


def _checked(code: int, what: str) -> None:
    if code != 0:
        raise RuntimeError(f"{what}: CUDA error {code}")


class SideStream:
    """CUDA: a side stream for copies.

    It is private. torch's streams come from a pool and may be used by FSDP as well: copies queued behind an NCCL kernel
    would never run if that kernel finds no free SM because of kernels that wait for those copies.

    Copies go directly to the driver: a gather makes two per peer, and torch would make two views for each.
    """

    def __init__(self, device: torch.device) -> None:
        handle = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # a runtime call, which makes current the context that the driver needs
            _checked(driver().create(ctypes.byref(handle), NON_BLOCKING, HIGH), "cuStreamCreateWithPriority")
        self._handle = handle.value or 0
        self.stream = torch.cuda.ExternalStream(self._handle, device)  # never destroyed
        self._forked, self._done = torch.cuda.Event(), torch.cuda.Event()

    def fork(self) -> None:
        """Work enqueued on the side stream from here on runs after the current stream's present work."""
        self._forked.record(torch.cuda.current_stream(self.stream.device))
        self.stream.wait_event(self._forked)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copy between addresses that the device can access. Raises RuntimeError if the driver fails."""
        _checked(driver().copy(destination, source, nbytes, self._handle), "cuMemcpyDtoDAsync")

    def join(self) -> None:
        """The current stream waits for the work enqueued on the side stream."""
        self._done.record(self.stream)
        torch.cuda.current_stream(self.stream.device).wait_event(self._done)
