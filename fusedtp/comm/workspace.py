"""One workspace a group: two rotating data slots, flags, and the protocol that every call follows.

    control region   semaphores [W]         CPU: posted by source, taken by the owner
                     records [2, W, words]  signatures, by call parity and source
                     flags [W, 4096] int32  kernels: set to the epoch by source and chunk
                     sigs [2, W] int32      kernels: hash of the signature, by call parity and source
    gone [W] int32         CPU: 1 + the rank that a source gave up on; it will not signal again
    data region      slot 0 | slot 1        grows; a call uses slot (call number & 1)

Note [Two rotating buffers]
In every call every rank signals every peer and waits for every peer, also with no rows. So when a rank begins call
n + 2, all peers have left call n (they signalled in n + 1), and its slot can be written again, its own and every
peer's; no call waits for readiness. Skipping the signal of an empty shard breaks this.

Note [After a fused kernel]
On a GPU a rank that reads nothing, such as one without columns, leaves a fused kernel before its peers' rows have
landed in its slot, and any rank may leave it before its peers have read there. The next fused kernel writes to the
other slot. But the host counts calls and the device epochs, so that copies of `chunked` may go to that very slot: all
ranks meet before them.

Note [Slot bytes]
What a call declares of a slot, for a gathered x [T, K] or a scattered y [T, N] of which rank p has R_p rows, in
elements of the working dtype. A group holds two slots of the largest of its calls, and the control region.

                                       chunked         triton
    all_gather_matmul, _wgrad          max R_p * K     T * K
    matmul_reduce_scatter              T * N           W * max R_p * N
    matmul_all_reduce, small           T * N           W * T * N, of no more than 256 KiB a partial
    matmul_all_reduce, larger          T * N           W * ceil(T / W) * N + T * N
    movers (all_gather, ...)           as the matmul   -
    moe_dispatch, of k choices         max R_p (K + k) max R_p * K
    moe_combine                        max R_p * k * N max R_p * k * N
    moe_dispatch_matmul                as moe_dispatch max_rows * K
    moe_matmul_combine                 as moe_combine  max R_p * k * N, and max_rows * N backward
    collective: none

So two slots are at most twice the largest gathered or scattered tensor, but for the kernels that reduce: they push
W partials of a rank's rows into the slot of that rank, and slots are of equal size on all ranks. Evenly split rows
make that T * N, rounded up to W equal shards; rows of one rank alone, W times as much.

Note [Signatures]
A call's signature is stored beside its flag before the flag is released, and compared by whoever waits for the flag.
Records rotate like the slots. A rank that must grow its data region first exchanges signatures and then votes, since
growing is collective: ranks that disagree would not all do it, nor would a rank that raised.

On a GPU, kernels compare hashes of them: the fused ones, and one that does nothing else (kernels/meet.py), launched
before and after the copies of `chunked`, before a collective of `collective`, and before growing, which waits for its
answer. The host reads what a kernel recorded when it begins its next call, and then the group is at its end. Ranks
that are threads of one process compare all words at the beginning of every call. Without Triton, ranks on GPUs compare
nothing.

Note [Failed calls]
A rank that finds a mismatch, or raises, still signals and waits for everybody before the error leaves the call, so
that the group stays in step and can be used again (a rank to which the failing one had already published finishes
its call). After a timeout it cannot: the workspace is marked failed and
every later call raises at once.

Note [Refused calls]
A rank may also raise before its call begins: it alone has found x on another device. On CPU it then takes part in
that call by signalling "refused" to every peer, and raises at once; it takes the peers' signals when it begins its
next call. (Its peers may have the same fault, or come much later.) Every peer sees the refusal, so none goes on to
what only all ranks together can do, such as growing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from .call import Call
from .device_view import DeviceView, runs_kernels
from .errors import SignalTimeout, SignatureMismatch, TooManyRows
from .memory import Region, round_up
from .regions import Regions
from .signature import Signature
from .streams import SideStream, StreamOrder, finish

if TYPE_CHECKING:
    from .communicator import Communicator

NOTHING = Signature("refused", "collective", torch.float32, 0, ())


class Workspace(Regions):
    """Made by all ranks of a group together; see the module's notes."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self.lock = threading.RLock()
        self.number = 0  # calls begun
        self.failed: Exception | None = None
        on_cuda = comm.device.type == "cuda"
        self._order = StreamOrder(comm.device) if on_cuda else None
        self._in_graph = False
        self.on_cpu = comm.device.type == "cpu"
        self._fused_last = False  # CUDA: whether the last call that used slots was a fused kernel
        self.epochs: int | None = 0  # CUDA: the device's epoch; None once a graph counts too
        self.side = SideStream(comm.device) if on_cuda else None
        self.meets = not comm.world.shares_process and runs_kernels(comm.device)
        self._refused: Call | None = None  # the last call, whose signals this rank still has to take
        self._kept: list[tuple[Region | None, DeviceView | None]] = []
        comm.world.barrier()

    @property
    def can_copy(self) -> bool:
        """Whether the host knows which slot the next call uses, as copies beside a kernel demand."""
        return self.on_cpu or self.epochs is not None

    def grow(self, nbytes: int) -> None:
        """Collective: make each slot hold `nbytes`. Every rank decides alike, from what all ranks share."""
        if nbytes <= self.slot_bytes:
            return
        world = self.comm.world
        self.refuse_capture()
        finish(self.comm.device)
        if self._in_graph:
            self._kept.append((self.data, self._view))  # a captured graph names their addresses
            self._in_graph = False
        world.barrier()
        slot = round_up(nbytes)
        self.data = world.allocate(2 * slot)
        self.slot_bytes, self._view = slot, None
        self._views.clear()
        self.device_view(0)  # now: during capture its tables could not be copied to the device
        finish(self.comm.device)
        world.barrier()

    def refuse_capture(self) -> None:
        """CUDA: raises RuntimeError if growing is asked for while a graph is being captured."""
        if self.comm.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the workspace would grow during CUDA graph capture; call fusedtp.reserve first"
            )

    # -- calls ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises what made the workspace unusable, if anything did."""
        if self.failed is None and self._status[0] != 0:
            self._fail_from_status()
        if self.failed is not None:
            raise self.failed

    def _fail_from_status(self) -> None:
        code, peer, flag, wanted, seen = (int(v) for v in self.status[:5])
        if code == 3:
            self.failed = TooManyRows(
                f"rank {self.comm.rank}: {seen} rows go to the experts of rank {peer}, which has room for max_rows = "
                f"{wanted}; the group {self.comm.name!r} can not be used again"
            )
            return
        what = "had published another signature" if code == 2 else "had not signalled"
        kind = SignatureMismatch if code == 2 else SignalTimeout
        self.failed = kind(
            f"rank {self.comm.rank}: a kernel waited for rank {peer}, which {what} (flag {flag}: wanted {wanted}, "
            f"saw {seen}); the group {self.comm.name!r} can not be used again"
        )

    def refuse(self) -> None:
        """CPU: this rank raises in place of the call that its peers are about to make; see Note [Refused calls]."""
        with self.lock:
            if not self.on_cpu or self.failed is not None:
                return
            try:
                self._settle()
            except SignalTimeout:
                return  # the group is at its end, and the peers have been told
            self.number += 1
            self._refused = Call(self, NOTHING)
            self._refused.refuse()

    def _settle(self) -> None:
        refused, self._refused = self._refused, None
        if refused is None:
            return
        try:
            refused.settle()
        except (SignalTimeout, KeyboardInterrupt) as error:
            self._give_up(refused, error)
            raise

    def _give_up(self, call: Call, error: BaseException) -> None:
        self.failed = error if isinstance(error, SignalTimeout) else SignalTimeout("interrupted in a call")
        call.leave_peers()

    @contextmanager
    def call(self, signature: Signature, nbytes: int) -> Iterator[Call]:
        """One call of this group's order; `nbytes` a slot, the same on all ranks."""
        with self.lock:
            self.check()
            self._settle()
            self.number += 1
            if self._order is not None and self._order.enter():
                self._in_graph, self.epochs = True, None
            call = Call(self, signature)
            try:
                call.compare_threads()
                if nbytes > self.slot_bytes:
                    self.refuse_capture()
                    call.agree()
                    self.grow(nbytes)
                    call.reopen()
                if not self.on_cpu and signature.engine != "collective":
                    fused = signature.engine == "triton"
                    if not fused and (self._fused_last or self._in_graph):
                        call.meet()  # Note [After a fused kernel]
                    self._fused_last = fused
                yield call
                call.close()
            except (SignalTimeout, KeyboardInterrupt) as error:
                self._give_up(call, error)
                raise
            except BaseException as error:
                call.abandon(error)
                raise
            finally:
                if self._order is not None:
                    self._order.leave()
