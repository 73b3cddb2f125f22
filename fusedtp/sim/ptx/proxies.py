"""Which bytes of shared memory the async proxy may read.

wgmma and copies by TMA read shared memory by the async proxy; st, stmatrix, atomics and cp.async write by the generic
one. A fence.proxy.async has to stand between the two (PTX ISA 9.7.13.4; 9.7.15, Async Proxy): by the thread that
wrote, or by another one after threads have met at a barrier, in a warp or by an mbarrier. In the machine no value is
wrong without it. So the instruction that reads looks whether one is missing.

Note [Stamps]: of every 4 bytes the last generic write leaves thread + 1, how many fences that thread had made, and how
many times threads of the program had met. A write by TMA takes the stamp away.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
# Triton 3.6 puts no fence between cp.async and wgmma, and its kernels run right on an H100; 3.9 does.
FENCES_COPIES = tuple(map(int, version("triton").split(".")[:2])) >= (3, 9)
THREAD_BITS, FENCE_BITS = 11, 26  # then meetings
THREADS, FENCES = (1 << THREAD_BITS) - 1, (1 << FENCE_BITS) - 1


class GenericWrites:
    """Of a program's shared memory, of so many bytes, by its threads. read: whether the async proxy ever reads it."""

    def __init__(self, nbytes: int, threads: int, read: bool = True) -> None:
        self.read = read
        self.stamps = np.zeros(-(-nbytes // 4) + 4, np.int64)
        self.fences = np.zeros(threads, np.int64)
        self.meetings, self.covered = 0, 0  # covered: writes before so many meetings are fenced

    def write(self, at: Array, nbytes: int, threads: Array) -> None:
        """Of nbytes bytes at each address."""
        if self.read:
            stamps = (self.meetings << FENCE_BITS | self.fences[threads]) << THREAD_BITS | (threads + 1)
            self.stamps[(at >> 2)[:, None] + np.arange(max(1, nbytes // 4))] = stamps[:, None]

    def write_async(self, at: Array, nbytes: int = 4) -> None:
        """Of up to nbytes bytes at each address, by TMA or another copy that needs no fence."""
        if self.read:
            self.stamps[(at >> 2)[:, None] + np.arange(max(1, nbytes // 4))] = 0

    def fence(self, threads: Array) -> None:
        self.fences[threads] += 1
        self.covered = max(self.covered, self.meetings)

    def meet(self) -> None:
        """Threads of the program have met. It is not asked which: rather a fence too many than a false alarm."""
        self.meetings += 1

    def lacking(self, at: Array) -> bool:
        """Whether the async proxy may not see what is at these addresses."""
        stamps = self.stamps[at >> 2]
        stamps = stamps[stamps != 0]
        fences, meetings = stamps >> THREAD_BITS & FENCES, stamps >> (THREAD_BITS + FENCE_BITS)
        return bool(((fences == self.fences[(stamps & THREADS) - 1]) & (meetings >= self.covered)).any())
