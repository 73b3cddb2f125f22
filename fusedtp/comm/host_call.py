"""A call between CPU ranks: its signature, the signals that hosts post and take, and leaving it when something fails.

The protocol and its notes are in workspace.py, the memory order of the signals in semaphore.py.
"""

from __future__ import annotations

import os
import time
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from . import semaphore
from .errors import PeerDied, PeerFailed, SignalTimeout, SignatureMismatch
from .signature import REFUSED, Signature, compare, failure_words, operation_of

if TYPE_CHECKING:
    from .workspace import Workspace

# A waiter asks again for that long, yielding the core in between, before it sleeps: waking up takes 50 us.
SPIN_SECONDS = 100e-6


def int32(n: int) -> int:
    """n as a wrapping int32."""
    return (n + 2**31) % 2**32 - 2**31


class HostCall:
    """What every call is, and how hosts signal each other in it: `_post` once and `_take` once for every peer."""

    def __init__(self, ws: Workspace, signature: Signature) -> None:
        self.ws, self.comm, self.signature = ws, ws.comm, signature
        self.number, self.parity = ws.number, ws.number & 1
        self.on_cpu = ws.on_cpu
        self.blamed = self.comm.rank  # whose fault it is that this rank gives up
        if self.on_cpu:
            ws._epoch[0] = int32(self.number - 1)
        self.reopen()

    @cached_property
    def words(self) -> np.ndarray:
        """What this rank publishes."""
        return self.signature.words(self.number)

    def reopen(self) -> None:
        """Nothing published, nothing waited for (again: after the handshake that precedes growing)."""
        self.peers = [p for p in range(self.comm.world_size) if p != self.comm.rank]
        self.to_publish, self.to_wait = set(self.peers), set(self.peers)

    def _post(self, p: int, words: np.ndarray) -> None:
        self.ws._records[p][self.parity, self.comm.rank] = words
        semaphore.post(self.ws.control.addresses[p] + self.comm.rank * semaphore.SIZE)
        self.to_publish.discard(p)

    def _take(self, p: int) -> None:
        self.to_wait.discard(p)
        address = self.ws.control.addresses[self.comm.rank] + p * semaphore.SIZE
        if semaphore.try_wait(address):
            return
        begin = time.monotonic()
        try:
            while time.monotonic() - begin < SPIN_SECONDS:
                os.sched_yield()
                if semaphore.try_wait(address):
                    return
            while not semaphore.wait_slice(address, begin + self.comm.timeout_s - time.monotonic()):
                lost = self.lost(p)
                if lost is not None and not semaphore.try_wait(address, put_back=True):
                    raise lost
                if time.monotonic() - begin > self.comm.timeout_s:
                    self.blamed = p
                    raise SignalTimeout(
                        f"rank {self.comm.rank} waited {self.comm.timeout_s:g} s for rank {p} in "
                        f"{self.signature.operation} (call {self.number}); the group {self.comm.name!r} can not be "
                        "used again"
                    )
        finally:
            self.comm.wait_seconds += time.monotonic() - begin

    def compare(self, p: int) -> None:
        """Raises SignatureMismatch if rank p is in another call than this rank."""
        theirs = self.ws._records[self.comm.rank][self.parity, p]
        compare(self.words, theirs, self.comm.rank, p, self.comm.world_size)

    def lost(self, p: int) -> SignalTimeout | None:
        """The error to raise if rank p's process has ended or rank p has given up, else None."""
        gave_up_on = int(self.ws._gone[self.comm.rank][p]) - 1
        died = self.comm.world.has_died(p)
        if gave_up_on < 0 and not died:
            return None
        self.blamed = p if died else gave_up_on
        what = "ended" if died else f"gave up, blaming rank {gave_up_on},"
        kind = PeerDied if self.comm.world.has_died(self.blamed) else SignalTimeout
        return kind(f"rank {p} {what} while rank {self.comm.rank} waited for it in call {self.number}")

    def abandon(self, error: BaseException) -> None:
        """Note [Failed calls]: keep in step with the peers although this rank raises."""
        if not self.on_cpu:
            return
        consequence = isinstance(error, (SignatureMismatch, PeerFailed))  # then the blame is another rank's
        words = self.words if consequence else failure_words(self.number)
        self.fail_peers(words)
        for p in sorted(self.to_publish):
            self._post(p, words)
        try:
            for p in sorted(self.to_wait):
                self._take(p)
        except SignalTimeout as timeout:
            self.ws.failed = timeout
        self.ws._epoch[0] = int32(self.number)
        self.ws.status.zero_()

    def refuse(self) -> None:
        """Note [Refused calls]: signal every peer that this rank raised in place of this call."""
        words = failure_words(self.number, REFUSED)
        self.fail_peers(words)
        for p in self.peers:
            self._post(p, words)
        self.ws._epoch[0] = int32(self.number)

    def settle(self) -> None:
        """Take the peers' signals of a call that this rank refused."""
        for p in sorted(self.to_wait):
            self._take(p)

    def is_refused(self) -> bool:
        """After all peers' signals were taken: whether one of them refused this call."""
        records = self.ws._records[self.comm.rank][self.parity]
        return any(operation_of(records[p]) == REFUSED for p in self.peers)

    def leave_peers(self) -> None:
        """After a timeout or an interrupt: tell whoever still waits for this rank, and wait for nobody."""
        self.fail_peers()
        if self.on_cpu:
            for p in range(self.comm.world_size):
                self.ws._gone[p][self.comm.rank] = self.blamed + 1
            for p in sorted(self.to_publish):
                self._post(p, failure_words(self.number))

    def fail_peers(self, words: np.ndarray | None = None) -> None:
        """CPU: let an interpreted kernel of a peer that waits for this rank's flags leave with a mismatch."""
        if not self.on_cpu:
            return
        words = failure_words(self.number) if words is None else words
        for p in self.peers:  # all of these first: a kernel that leaves makes its rank tell the others
            self.ws._records[p][self.parity, self.comm.rank] = words
        for p in self.peers:
            self.ws._sigs[p][self.parity, self.comm.rank] = 0
            self.ws._flags[p][self.comm.rank, :] = int32(self.number)
