"""One call on a workspace: slot views, publish and wait, of CPU ranks and of ranks on GPUs.

The protocol and its notes are in workspace.py, what CPU ranks alone do in host_call.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import device_view
from .copies import Copies
from .errors import PeerFailed, SignalTimeout, SignatureMismatch
from .host_call import HostCall, int32
from .signature import Signature, compare
from .streams import finish, is_capturing
from .watch import PeerWatch

if TYPE_CHECKING:
    from .device_view import DeviceView
    from .workspace import Workspace


class Call(HostCall):
    """One call: slot views, publish and wait. `publish(p)` once and `wait(p)` once for every peer p."""

    def __init__(self, ws: Workspace, signature: Signature) -> None:
        super().__init__(ws, signature)
        self.used_barrier = False

    def buffer(self, p: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """Rank p's slot of this call as a tensor, `offset` bytes in."""
        key = (p, self.parity, shape, dtype, offset)
        found = self.ws._views.get(key)
        if found is None:
            found = self.ws.view_of(*key)
        return found

    @contextmanager
    def device_view(self) -> Iterator[DeviceView]:
        """For one fused kernel, which signals and waits itself. On CPU the peers' hosts are also told the signature,

        so that a peer in another engine finds the mismatch at once (nobody waits for that here), a peer's death ends
        the kernel, and what the kernel recorded is raised.
        """
        if not self.on_cpu:
            counted = self.ws.epochs
            self.ws.epochs = None  # if this raises, nobody knows whether the kernel was started
            yield self.ws.device_view(0)
            self.ws.epochs = None if counted is None else counted + 1
            return
        self.publish_all()
        watch = PeerWatch(self)
        try:
            yield self.ws.device_view(0)
        finally:
            watch.stop()
        if watch.error is not None:
            raise watch.error
        self.check_kernel()

    def copies(self) -> Copies | None:
        """How copies send the rows of a fused gather; None where programs must. Before `device_view`.

        See Note [Copies beside a kernel] in copies.py.
        """
        ws, comm = self.ws, self.comm
        if not ws.can_copy:
            return None
        begun = self.number - 1 if self.on_cpu else ws.epochs
        assert begun is not None
        slots = [ws.slot(p, (begun + 1) & 1) for p in range(comm.world_size)]
        flags = [ws.flags_at(p, comm.rank) for p in range(comm.world_size)]
        return Copies(comm.rank, slots, flags, ws.epoch, ws.side)

    def publish(self, p: int) -> None:
        """Release everything stored so far to rank p, with this call's signature."""
        if self.on_cpu:
            self._post(p, self.words)
        else:
            self._cuda_publish(p)

    def publish_all(self) -> None:
        """`publish` to every peer, the next rank first."""
        w, r = self.comm.world_size, self.comm.rank
        for step in range(1, w):
            self.publish((r + step) % w)

    def wait(self, p: int) -> None:
        """Acquire what rank p released in this call; raises SignalTimeout, PeerDied or SignatureMismatch."""
        if self.on_cpu:
            self._take(p)
            self.compare(p)

    def _cuda_publish(self, p: int) -> None:
        """CUDA, host-sequenced engines: the last publish is a barrier of the ranks' streams, so no wait is needed."""
        self.to_publish.discard(p)
        self.used_barrier = True
        if not self.to_publish:
            self.meet()

    def meet(self) -> None:
        """CUDA: a barrier of the ranks' streams, which compares signatures where a kernel can."""
        if self.ws.meets:
            view = self.ws.device_view(0)
            device_view.meet(view, self.comm.rank, self.comm.world_size, self.signature.hash32())
            if self.ws.epochs is not None:
                self.ws.epochs += 1
        else:
            self.comm.world.stream_barrier(self.ws.control, self.comm.timeout_s)

    def compare_threads(self) -> None:
        """CUDA, ranks that are threads of one process: raises SignatureMismatch, in all of them, if two differ.

        Not during capture, which ranks do one after another; the kernels compare when the graph is replayed.
        """
        world = self.comm.world
        if self.on_cpu or not world.shares_process or is_capturing():
            return
        for p, theirs in enumerate(world.exchange(self.words)):
            compare(self.words, theirs, self.comm.rank, p, self.comm.world_size)

    def handshake(self) -> None:
        """Publish to all, wait for all: every rank is in this call with the same signature.

        On a GPU the waiting is the stream's, and the host hears of another signature when it next looks.
        """
        if not self.on_cpu:
            if self.ws.meets:
                self.meet()
            return
        self.publish_all()
        for p in sorted(self.to_wait):
            self.wait(p)

    def agree(self) -> None:
        """Before growing, which is collective: every rank comes back from here, or every rank raises.

        On CPU a handshake alone would let a rank through that a failing peer had already signalled.
        """
        if not self.on_cpu:
            self.handshake()
            finish(self.comm.device)
            self.ws.check()
            return
        fault: BaseException | None = None
        try:
            self.handshake()
        except (SignalTimeout, SignatureMismatch, KeyboardInterrupt):
            raise  # these all ranks see, or the group is at its end
        except BaseException as error:
            fault = error
            self.abandon(error)
            if self.is_refused():  # by a rank that does not vote, as all the others know too
                raise
        consequence = isinstance(fault, PeerFailed)  # of what another rank raised, which is the one to name
        votes = self.comm.world.exchange(0 if fault is None else 1 if consequence else 2)
        if fault is not None:
            raise fault
        if any(votes):
            culprit = votes.index(max(votes))
            what = f"rank {culprit} raised during {self.signature.operation} (call {self.number})"
            raise PeerFailed(f"{what}; rank {self.comm.rank} stops too")

    def close(self) -> None:
        """Signal and wait for whoever is left (Note [Two rotating buffers])."""
        if self.on_cpu:
            for p in sorted(self.to_publish):
                self.publish(p)
            for p in sorted(self.to_wait):
                self.wait(p)
            self.ws._epoch[0] = int32(self.number)
        elif self.used_barrier:  # nobody writes a slot again before all have read it
            self.meet()

    def check_kernel(self) -> None:
        """CPU, after an interpreted kernel: raises what it recorded."""
        if self.on_cpu and int(self.ws.status[0]) == 2:
            for p in sorted(self.to_wait):
                self.wait(p)
            raise PeerFailed(
                f"a peer left call {self.number} ({self.signature.operation}); rank {self.comm.rank} too"
            )
        if self.on_cpu:
            self.ws.check()
