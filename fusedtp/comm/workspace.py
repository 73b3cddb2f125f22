"""One workspace a group: two rotating data slots, flags, and the protocol that every call follows.

    control region   semaphores [W]         CPU: posted by source, taken by the owner
                     records [2, W]         words of signatures, by call parity and source
                     flags [W, 4096] int32  kernels: set to the epoch by source and chunk
                     arrivals [2, W] int64  kernels: epoch and hash of the signature, by call parity and source
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
What a call declares of a slot, for a gathered x [T, K] or a scattered y [T, N] with R_p rows on rank p, in
elements of the working dtype. A group holds two slots of the largest of its calls, and the control region.

                                       chunked         triton
    all_gather_matmul, _wgrad          max R_p * K     T * K
    column_grads, of both              T * K           -
    matmul_reduce_scatter              T * N           W * max R_p * N
    scaled_all_gather_matmul           as all_gather_matmul, of rows of K + 16 bytes, K rounded up to 16
    scaled_matmul_reduce_scatter       as matmul_reduce_scatter
    matmul_all_reduce, small           T * N           W * T * N, of no more than 128 KiB a partial
    matmul_all_reduce, larger          T * N           W * ceil(T / W) * N + T * N
    matmul_all_reduce by multimem      -               T * N, N rounded up to 16
    scaled_matmul_all_reduce           as matmul_all_reduce
    all_gather_rows, ...               as the matmul   -
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
before and after the copies of `chunked`, and before growing, which waits for its answer. Before a collective of
`collective` it is launched in the group's first COMPARED_CALLS calls only, a count that all ranks share, or always if a
rank of the group was started with FUSEDTP_DEBUG=1. The host reads what a kernel recorded when it begins its next call,
and then the group is unusable. Ranks that are threads of one process compare all words at the beginning of every
call. Without Triton, ranks on GPUs compare nothing.

Note [Failed calls]
A rank that finds a mismatch, or raises, still signals and waits for everybody before the error leaves the call, so
that the group stays in step and can be used again (a rank to which the failing one had already published finishes
its call). After a timeout it cannot: the workspace is marked failed and
every later call raises at once.

On a GPU a rank that raises in a call has not started its kernel, and its next one would be taken for it. So it meets
its peers by a signature of its own. If all ranks have raised, they are in step. Those that have not find a stranger, at
once instead of when their time is over, and so does this one; then the group is at its end.

Note [Refused calls]
A rank may also raise before its call begins: it alone has found x on another device. On CPU it then takes part in
that call by signalling "refused" to every peer, and raises at once; it takes the peers' signals when it begins its
next call. (Its peers may have the same fault, or come much later.) Every peer sees the refusal, so none goes on to
what only all ranks together can do, such as growing.

Note [Inference mode]
What a workspace keeps is made outside of inference mode. A view that is made inside it cannot be written outside, so a
group that first ran in a validation loop could not train.

Note [Apart]
torch.compile's CUDA graphs (mode "reduce-overhead") warm up with all of a thread's allocations in the graphs' own pool,
and raise if anything stays there that is no output; torch's rendezvous keeps some, too. So what a workspace keeps of a
GPU's memory is made in another thread.
"""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from sys import byteorder
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from . import device_view, semaphore
from .copies import Copies
from .device_view import DeviceView, epoch_words, runs_kernels
from .errors import PeerDied, PeerFailed, SignalTimeout, SignatureMismatch, TooManyRows
from .launching import on
from .memory import Region, round_up
from .process_world import ProcessWorld
from .semaphore import LIBC
from .signature import FAILED, OF_KERNELS, REFUSED, Signature, compare, failure_words, operation_of, published_bytes
from .streams import SideStream, StreamOrder, finish, is_capturing
from .virtual_world import ThreadWorld

FLAGS_PER_SOURCE = 4096
MAX_VIEWS = 1024  # kept
DEFAULT_TIMEOUT_S = 600.0
COMPARED_CALLS = 16  # see Note [Signatures]
# A waiter asks again for that long, yielding the core in between, before it sleeps: waking up takes 50 us.
SPIN_SECONDS = 100e-6
OTHER_SIGNATURE, TOO_MANY_ROWS, ARRIVAL = 2, 3, -1  # what kernels record, as in kernels/signals.py
T = TypeVar("T")
NOTHING = Signature(REFUSED, "collective", torch.float32, 0, ())
RAISED = Signature(FAILED, "collective", torch.float32, 0, ())  # CUDA: a rank that raised before its kernel meets by it


def int32(n: int) -> int:
    """n as a wrapping int32."""
    return (n + 2**31) % 2**32 - 2**31


class Workspace:
    """The memory that a group shares and the order of its calls. Made by all ranks of the group together."""

    def __init__(self, world: ProcessWorld | ThreadWorld) -> None:
        self.world, self.rank, self.world_size, self.device = (
            world,
            world.rank,
            world.world_size,
            world.device,
        )
        self.peers = tuple((self.rank + step) % self.world_size for step in range(1, self.world_size))
        self.lock = threading.RLock()
        self.number = 0  # calls begun
        self.failed: Exception | None = None
        self.timeout_s = getattr(world, "operation_timeout_s", None) or DEFAULT_TIMEOUT_S
        self.wait_seconds = 0.0  # host time spent asleep in waits for peers
        self.asleep_since: float | None = None  # monotonic time at which the wait for a peer began that goes on now
        self.operation = ""  # of the last call
        self.on_cpu = self.device.type == "cpu"
        self._order = None if self.on_cpu else StreamOrder(self.device)
        self._in_graph = False
        self._fused_last = False  # CUDA: whether the last call that used slots was a fused kernel
        self.epochs: int | None = 0  # CUDA: the device's epoch; None once a graph counts too
        self.side = None if self.on_cpu or torch.version.hip else SideStream(self.device)
        self.meets = not world.shares_process and runs_kernels(self.device)
        self.debug = any(world.exchange(os.environ.get("FUSEDTP_DEBUG", "0") not in ("", "0")))
        self._refused: Call | None = None  # the last call, whose signals this rank still has to take
        self._kept: list[tuple[Region | None, DeviceView | None]] = []
        with torch.inference_mode(False):
            self._make_control_region()
        world.barrier()

    # -- memory --------------------------------------------------------------------------------------------------

    def _make_control_region(self) -> None:
        w, device = self.world_size, self.device
        self._records_at = w * semaphore.SIZE
        self.record_bytes = published_bytes(w)
        self._flags_at = self._records_at + 2 * w * self._record_stride
        self._arrivals_at = self._flags_at + w * FLAGS_PER_SOURCE * 4
        self._gone_at = self._arrivals_at + 2 * w * 8
        self.control = self.world.allocate(self._gone_at + w * 4)
        self.data: Region | None = None
        self.slot_bytes = 0
        self.views: dict[tuple[int, int, tuple[int, ...], torch.dtype, int], Tensor] = {}
        self._flag_views: dict[tuple[int, int], Tensor] = {}
        self._view: DeviceView | None = None
        self.epoch = torch.zeros(epoch_words(w), dtype=torch.int32, device=device)
        self.epoch[0] = 1
        self.status = torch.zeros(8, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._status: Any = self.status.numpy()
        if device.type == "cpu":
            self.epoch_word: Any = self.epoch.numpy().view(np.uint32)
            self.failure = self.status
            own = self.control.addresses[self.rank]
            for source in range(w):
                semaphore.init(own + source * semaphore.SIZE)
            self.semaphores = [a + self.rank * semaphore.SIZE for a in self.control.addresses]  # this rank's, at p
            own = self.rank
            self.records_at = [[self._record(p, parity, own) for p in range(w)] for parity in (0, 1)]
            self.records_of = [[self._record(own, parity, p) for p in range(w)] for parity in (0, 1)]
            self._flags = [self._array(p, self._flags_at, np.int32, (w, FLAGS_PER_SOURCE)) for p in range(w)]
            self._arrivals = [self._array(p, self._arrivals_at, np.int64, (2, w)) for p in range(w)]
            self.gone = [self._array(p, self._gone_at, np.int32, (w,)) for p in range(w)]
        else:
            self.failure = torch.zeros(8, dtype=torch.int64, device=device)
            self.control.buffers[self.rank].zero_()
            finish(device)  # before a peer's first signal

    def _array(self, p: int, offset: int, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
        count = int(np.prod(shape))
        return np.frombuffer(self.control.buffers[p].numpy(), dtype, count, offset).reshape(shape)

    @property
    def _record_stride(self) -> int:
        return round_up(self.record_bytes, semaphore.SIZE)

    def _record(self, p: int, parity: int, source: int) -> memoryview:
        """What `source` publishes to rank p in calls of that parity."""
        at = self._records_at + (parity * self.world_size + source) * self._record_stride
        control: Any = self.control.buffers[p].numpy()
        return memoryview(control)[at : at + self.record_bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of symmetric memory this rank holds: control and both data slots."""
        return self.control.nbytes + (self.data.nbytes if self.data else 0)

    def view_of(self, p: int, parity: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
        """Rank p's slot of that parity as a tensor; kept, since making it takes as long as a signal."""
        n = math.prod(shape) * dtype.itemsize
        if n == 0:  # there may be no data region yet
            return torch.empty(shape, dtype=dtype, device=self.device)
        assert self.data is not None and offset + n <= self.slot_bytes, (shape, offset, self.slot_bytes)
        start = parity * self.slot_bytes + offset
        if len(self.views) > MAX_VIEWS:
            self.views.clear()
        with torch.inference_mode(False):
            view = self.data.buffers[p][start : start + n].view(dtype).view(shape)
        self.views[p, parity, shape, dtype, offset] = view
        return view

    def slot(self, p: int, parity: int) -> Tensor:
        """All bytes of rank p's slot of that parity."""
        found = self.views.get((p, parity, (self.slot_bytes,), torch.uint8, 0))
        return found if found is not None else self.view_of(p, parity, (self.slot_bytes,), torch.uint8, 0)

    def flags_at(self, p: int, source: int) -> Tensor:
        """int32 [FLAGS_PER_SOURCE]: the flags in rank p's memory that `source` sets; kept, as the region lasts."""
        found = self._flag_views.get((p, source))
        if found is None:
            size = 4 * FLAGS_PER_SOURCE
            begin = self._flags_at + source * size
            with torch.inference_mode(False):
                found = self.control.buffers[p][begin : begin + size].view(torch.int32)
            self._flag_views[p, source] = found
        return found

    def poison(self) -> None:
        """Fill this rank's data slots with NaN (every byte 0xFF), for tests."""
        if self.data is None:
            return
        finish(self.device)
        self.data.buffers[self.rank].fill_(0xFF)
        finish(self.device)

    def device_view(self) -> DeviceView:
        """The addresses for a kernel, of slots as large as they are now."""
        if self._view is None:
            self._view = self._apart(self._make_view)
        return self._view

    def _apart(self, make: Callable[[], T]) -> T:
        """What `make` makes, to be kept. Between processes on GPUs in a thread of its own: Note [Apart]."""

        def made() -> T:
            with torch.inference_mode(False), on(self.device):
                return make()

        if self.on_cpu or self.world.shares_process:
            return made()
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(made).result()

    def _make_view(self) -> DeviceView:
        device, control = self.device, self.control.addresses

        def table(addresses: tuple[int, ...], at: int = 0) -> Tensor:
            return torch.tensor([a + at for a in addresses], dtype=torch.int64, device=device)

        return DeviceView(
            data_ptrs=table(self.data.addresses if self.data else control),
            flag_ptrs=table(control, self._flags_at),
            arrival_ptrs=table(control, self._arrivals_at),
            epoch=self.epoch,
            status=self.status,
            failure=self.failure,
            slot_bytes=self.slot_bytes,
            flags_per_source=FLAGS_PER_SOURCE,
            timeout_s=self.timeout_s,
            ranks_per_device=self.world.ranks_per_device,
            multicast=table((self.data.multicast,)) if self.data and self.data.multicast else None,
            meet=self.world.barrier if self.world.shares_process and device.type == "cuda" else None,
        )

    def set_timeout(self, seconds: float) -> None:
        """Bound the waits of later calls and launches."""
        self.timeout_s = seconds
        if self._view is not None:
            self._view = replace(self._view, timeout_s=seconds)

    @property
    def can_copy(self) -> bool:
        """Whether copies can go beside a kernel: the host knows which slot the next call uses, and has their stream."""
        return self.on_cpu or (self.epochs is not None and self.side is not None)

    def grow(self, nbytes: int) -> None:
        """Collective: make each slot hold `nbytes`. Every rank decides alike, from what all ranks share."""
        if nbytes <= self.slot_bytes:
            return
        self.refuse_capture()
        finish(self.device)
        self.world.barrier()
        slot = round_up(nbytes)
        data = self._apart(lambda: self.world.allocate(2 * slot))
        if self._in_graph:
            self._kept.append((self.data, self._view))  # a captured graph names their addresses
            self._in_graph = False
        self.data = data
        if self.control.multicast and not data.multicast and self.rank == 0:
            warnings.warn(
                f"group {self.world.name!r}: torch's symmetric memory has no multicast address for {2 * slot} bytes; "
                "engine 'multimem' sums without the switch",
                stacklevel=4,
            )
        self.slot_bytes, self._view = slot, None
        self.views.clear()
        self.device_view()  # now: during capture its tables could not be copied to the device
        finish(self.device)
        self.world.barrier()

    def refuse_capture(self) -> None:
        """CUDA: raises RuntimeError if growing is asked for while a graph is being captured."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the workspace would grow during CUDA graph capture; call fusedtp.reserve first")

    # -- calls ---------------------------------------------------------------------------------------------------

    def call(self, signature: Signature, nbytes: int) -> Call:
        """One call of this group's order, a context manager; `nbytes` a slot, the same on all ranks."""
        return Call(self, signature, nbytes)

    def begin(self) -> int:
        """Under the lock: the number of the next call. Raises what made the workspace unusable, if anything did."""
        if self.failed is not None or self._status[0] != 0:
            self.check()
        if self._refused is not None:
            self._settle()
        self.number += 1
        if self._order is not None and self._order.enter():
            self._in_graph, self.epochs = True, None
        return self.number

    def keep_order(self) -> None:
        """For what uses no slot and compares nothing: its stream follows the last call's. Raises as `check` does."""
        with self.lock:
            self.check()
            if self._order is not None:
                self._order.enter()
                self._order.leave()

    def end(self) -> None:
        """Under the lock, which it releases: the last call is over."""
        try:
            if self._order is not None:
                self._order.leave()
        finally:
            self.lock.release()

    def check(self) -> None:
        """Raises the error that made the workspace unusable, if there is one."""
        if self.failed is None and self._status[0] != 0:
            self._fail_from_status()
        if self.failed is not None:
            raise self.failed

    def _fail_from_status(self) -> None:
        code, peer, chunk, wanted, seen = (int(v) for v in self.status[:5])
        if code == TOO_MANY_ROWS:
            self.failed = TooManyRows(
                f"rank {self.rank}: {seen} rows go to the experts of rank {peer}, which has room for max_rows = "
                f"{wanted}; the group {self.world.name!r} can not be used again"
            )
            return
        if code == OTHER_SIGNATURE and RAISED.hash32 in (wanted, seen):
            culprit = peer if seen == RAISED.hash32 else self.rank
            self.failed = PeerFailed(
                f"rank {self.rank}: rank {culprit} raised in a call in which others went on; the group "
                f"{self.world.name!r} can not be used again"
            )
            return
        what = "had published another signature" if code == OTHER_SIGNATURE else "had not signalled"
        kind = SignatureMismatch if code == OTHER_SIGNATURE else SignalTimeout
        where = "arrival" if chunk == ARRIVAL else f"chunk {chunk}"
        self.failed = kind(
            f"rank {self.rank}: a kernel waited for rank {peer}, which {what} ({where}: wanted {wanted}, "
            f"saw {seen}); the group {self.world.name!r} can not be used again"
        )

    def refuse(self) -> None:
        """CPU: this rank raises in place of the call that its peers are about to make; see Note [Refused calls]."""
        with self.lock:
            if not self.on_cpu or self.failed is not None:
                return
            try:
                if self._refused is not None:
                    self._settle()
            except SignalTimeout:
                return  # the group is at its end, and the peers have been told
            self.number += 1
            self._refused = Call(self, NOTHING, 0)
            self._refused.refuse(self.number)

    def _settle(self) -> None:
        """Take the peers' signals of a call that this rank refused."""
        refused, self._refused = self._refused, None
        assert refused is not None
        try:
            for p in sorted(refused.to_wait):
                refused.take(p)
        except (SignalTimeout, KeyboardInterrupt) as error:
            self.give_up(refused, error)
            raise

    def give_up(self, call: Call, error: BaseException) -> None:
        """After a timeout, an interrupt, or copies without their kernel the workspace is not used again."""
        what = "interrupted in a call" if isinstance(error, KeyboardInterrupt) else f"left in a call by {error!r}"
        self.failed = error if isinstance(error, SignalTimeout) else SignalTimeout(what)
        call.leave_peers()

    def order_fused(self, call: Call) -> None:
        """CUDA: Note [After a fused kernel]."""
        if call.signature.engine == "collective":
            return
        fused = call.signature.engine in OF_KERNELS
        if not fused and (self._fused_last or self._in_graph):
            call.meet()
        self._fused_last = fused

    def failure_words(self, number: int, kind: str = FAILED) -> bytes:
        """What a rank publishes that raised."""
        return failure_words(number, kind)[: self.record_bytes]

    def fail_kernels_of_peers(self, number: int, words: bytes) -> None:
        """CPU: let an interpreted kernel of a peer that waits for this rank's flags leave with a mismatch."""
        for p in self.peers:  # all of these first: a kernel that leaves makes its rank tell the others
            self.records_at[number & 1][p][:] = words
        for p in self.peers:
            self._arrivals[p][number & 1, self.rank] = number & 0xFFFFFFFF  # of signature 0
            self._flags[p][self.rank, :] = int32(number)


class Call:
    """One call of a group, a context manager: slot views, publish and wait, on CPUs and on GPUs.

        with workspace.call(signature, nbytes) as call:
            call.publish(p) once and call.wait(p) once for every peer p, or one kernel on call.kernel_view()

    On CPU the hosts signal each other through semaphores; on a GPU the ranks' streams meet, or kernels signal and wait.
    What an interpreted kernel recorded is raised when the call ends.
    """

    used_barrier = False
    watch: PeerWatch | None = None
    counted: int | None = None  # CUDA: the device's epoch before this call's kernel
    copying: Copies | None = None

    def __init__(self, workspace: Workspace, signature: Signature, nbytes: int) -> None:
        self.ws, self.signature, self.nbytes = workspace, signature, nbytes
        self.on_cpu = workspace.on_cpu
        self.blamed = workspace.rank  # whose fault it is that this rank gives up
        self.to_publish, self.to_wait = set(workspace.peers), set(workspace.peers)

    def __enter__(self) -> Call:
        ws = self.ws
        ws.lock.acquire()
        try:
            self._numbered(ws.begin())
        except BaseException:
            ws.lock.release()
            raise
        try:
            if not self.on_cpu and ws.world.shares_process:
                self._compare_threads()
            if self.nbytes > ws.slot_bytes:
                self._grow()
            if not self.on_cpu:
                ws.order_fused(self)
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if self.watch is not None:
                self.watch.stop()
            if error is None:
                if self.counted is not None:
                    self.ws.epochs = self.counted + 1
                if self.on_cpu or self.used_barrier:
                    self._close()
        except BaseException as late:
            self._leave(late)
            raise
        if error is None:
            self.ws.end()
        else:
            self._leave(error)

    def _numbered(self, number: int) -> None:
        self.number, self.parity = number, number & 1
        self.ws.operation = self.signature.operation
        if self.on_cpu or self.ws.world.shares_process:  # else kernels compare hashes
            before, behind = self.signature.around
            words = before + number.to_bytes(8, byteorder) + behind
            self.words = words[: self.ws.record_bytes]  # what this rank publishes
        if self.on_cpu:
            self.ws.epoch_word[0] = number & 0xFFFFFFFF

    def _grow(self) -> None:
        """Growing is collective: every rank comes to it, or every rank raises."""
        self.ws.refuse_capture()
        self._agree()
        self.ws.grow(self.nbytes)
        self.to_publish, self.to_wait = set(self.ws.peers), set(self.ws.peers)

    def _leave(self, error: BaseException) -> None:
        try:
            announced = not self.on_cpu and self.copying is not None and self.copying.begun
            if announced or isinstance(error, (SignalTimeout, KeyboardInterrupt)):
                self.ws.give_up(self, error)
            else:
                self._abandon(error)
        finally:
            self.ws.end()

    # -- slots and kernels ---------------------------------------------------------------------------------------

    def buffer(self, p: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """Rank p's slot of this call as a tensor, `offset` bytes in."""
        found = self.ws.views.get((p, self.parity, shape, dtype, offset))
        return found if found is not None else self.ws.view_of(p, self.parity, shape, dtype, offset)

    def kernel_view(self) -> DeviceView:
        """For one fused kernel, which signals and waits itself.

        On CPU the peers' hosts are also told the signature, so that a peer in another engine finds the mismatch at
        once (nothing here waits for that), and a peer's death ends the kernel.
        """
        ws = self.ws
        if self.on_cpu:
            ws.epoch[1:].zero_()  # a kernel that failed may have left something
            self.publish_all()
            self.watch = PeerWatch(self)
        else:
            # if this raises, it is unknown whether the kernel was started
            self.counted, ws.epochs = ws.epochs, None
        return ws._view or ws.device_view()

    def copies(self) -> Copies | None:
        """How copies send the rows of a fused gather; None where programs must. Before `kernel_view`.

        See Note [Copies beside a kernel] in copies.py.
        """
        ws = self.ws
        if not ws.can_copy:
            return None
        begun = self.number - 1 if self.on_cpu else ws.epochs
        assert begun is not None
        slots = [ws.slot(p, (begun + 1) & 1) for p in range(ws.world_size)]
        flags = [ws.flags_at(p, ws.rank) for p in range(ws.world_size)]
        self.copying = Copies(ws.rank, slots, flags, ws.epoch, ws.side)
        return self.copying

    # -- signals -------------------------------------------------------------------------------------------------

    def publish(self, p: int) -> None:
        """Release everything stored so far to rank p, with this call's signature."""
        if self.on_cpu:
            self._post(p, self.words)
            return
        # A host-sequenced engine: the last publish is a barrier of the ranks' streams, so no wait is needed.
        self.to_publish.discard(p)
        self.used_barrier = True
        if not self.to_publish:
            self.meet()

    def publish_all(self) -> None:
        """`publish` to every peer, the next rank first."""
        for p in self.ws.peers:
            if self.on_cpu:
                self._post(p, self.words)
            else:
                self.publish(p)

    def wait(self, p: int) -> None:
        """Acquire what rank p released in this call; raises SignalTimeout, PeerDied or SignatureMismatch."""
        if self.on_cpu:
            self.take(p)
            theirs = self.ws.records_of[self.parity][p].tobytes()
            if self.words != theirs:
                compare(self.words, theirs, self.ws.rank, p, self.ws.world_size)

    def publish_and_wait(self) -> None:
        """What every rank has stored in its slot so far can be read from here on."""
        self.publish_all()
        for p in sorted(self.to_wait):
            self.wait(p)

    def handshake(self) -> None:
        """Every rank is in this call with the same signature; on a GPU this orders no data.

        There kernels compare, if they can, and the host hears of another signature when it next looks.
        """
        if self.on_cpu:
            self.publish_and_wait()
        elif self.ws.meets:
            self.meet()

    def meet(self, signature: Signature | None = None) -> None:
        """CUDA: a barrier of the ranks' streams, which compares signatures where a kernel can; None: the call's."""
        ws = self.ws
        if ws.meets:
            counted, ws.epochs = ws.epochs, None  # if this raises, it is unknown whether the kernel was started
            device_view.meet(ws.device_view(), ws.rank, ws.world_size, (signature or self.signature).hash32)
            ws.epochs = None if counted is None else counted + 1
        else:
            ws.world.stream_barrier(ws.control, ws.timeout_s)

    def _compare_threads(self) -> None:
        """CUDA, ranks that are threads of one process: raises SignatureMismatch, in all of them, if two differ.

        Not during capture, which ranks do one after another; the kernels compare when the graph is replayed.
        """
        world = self.ws.world
        if is_capturing():
            return
        for p, theirs in enumerate(world.exchange(self.words)):
            if not isinstance(theirs, bytes):
                what = f"{self.signature.operation} (call {self.number})"
                raise SignatureMismatch(
                    f"rank {p} is not in a call of the group, rank {world.rank} in {what}: it may have raised in one"
                )
            compare(self.words, theirs, world.rank, p, world.world_size)

    def _agree(self) -> None:
        """Before growing: every rank comes back from here, or every rank raises.

        On CPU a handshake alone would let a rank through that a failing peer had already signalled.
        """
        if not self.on_cpu:
            self.handshake()
            finish(self.ws.device)
            self.ws.check()
            return
        fault: BaseException | None = None
        try:
            self.handshake()
        except (SignalTimeout, SignatureMismatch, KeyboardInterrupt):
            raise  # these all ranks see, or the group is at its end
        except BaseException as error:
            fault = error
            self._abandon(error)
            if self._is_refused():  # by a rank that does not vote, as all the others know too
                raise
        consequence = isinstance(fault, PeerFailed)  # of what another rank raised, which is the one to name
        votes = self.ws.world.exchange(0 if fault is None else 1 if consequence else 2)
        if fault is not None:
            raise fault
        if any(votes):
            culprit = votes.index(max(votes))
            what = f"rank {culprit} raised during {self.signature.operation} (call {self.number})"
            raise PeerFailed(f"{what}; rank {self.ws.rank} stops too")

    def _is_refused(self) -> bool:
        """After all peers' signals were taken: whether one of them refused this call."""
        records = self.ws.records_of[self.parity]
        return any(operation_of(records[p].tobytes()) == REFUSED for p in self.ws.peers)

    def _close(self) -> None:
        """Signal and wait for whoever is left (Note [Two rotating buffers]), and raise what a kernel recorded."""
        ws = self.ws
        if self.on_cpu:
            if self.watch is not None and self.watch.error is not None:
                raise self.watch.error
            if ws._status[0] not in (0, OTHER_SIGNATURE):
                ws.check()
            for p in sorted(self.to_publish):
                self.publish(p)
            for p in sorted(self.to_wait):
                self.wait(p)
            if ws._status[0] == OTHER_SIGNATURE:
                raise PeerFailed(f"a peer left call {self.number} ({self.signature.operation}); rank {ws.rank} too")
        else:  # no slot is written again before all have read it
            self.meet()

    # -- between CPU ranks: semaphores, and leaving a call when something fails -------------------------------------

    def _post(self, p: int, words: bytes) -> None:
        ws = self.ws
        ws.records_at[self.parity][p][:] = words
        if LIBC.post(ws.semaphores[p]) != 0:
            semaphore.fail("sem_post")
        self.to_publish.discard(p)

    def take(self, p: int) -> None:
        """Take the signal of rank p, whatever it says. Raises SignalTimeout or PeerDied."""
        self.to_wait.discard(p)
        ws = self.ws
        address = ws.control.addresses[ws.rank] + p * semaphore.SIZE
        if LIBC.trywait(address) == 0:
            return
        begin = ws.asleep_since = time.monotonic()
        try:
            while time.monotonic() - begin < SPIN_SECONDS:
                os.sched_yield()
                if semaphore.try_wait(address):
                    return
            while not semaphore.wait_slice(address, begin + ws.timeout_s - time.monotonic()):
                lost = self.lost(p)
                if lost is not None and not semaphore.try_wait(address, put_back=True):
                    raise lost
                if time.monotonic() - begin > ws.timeout_s:
                    self.blamed = p
                    raise SignalTimeout(
                        f"rank {ws.rank} waited {ws.timeout_s:g} s for rank {p} in {self.signature.operation} "
                        f"(call {self.number}); the group {ws.world.name!r} can not be used again"
                    )
        finally:
            ws.wait_seconds += time.monotonic() - begin
            ws.asleep_since = None

    def lost(self, p: int) -> SignalTimeout | None:
        """The error to raise if rank p's process has ended or rank p has given up, else None."""
        gave_up_on = int(self.ws.gone[self.ws.rank][p]) - 1
        died = self.ws.world.has_died(p)
        if gave_up_on < 0 and not died:
            return None
        self.blamed = p if died else gave_up_on
        what = "ended" if died else f"gave up, blaming rank {gave_up_on},"
        if died and self.ws.world.shares_process:
            what = "ended (it raised or has left VirtualWorld.run, and backward belongs inside of that)"
        kind = PeerDied if self.ws.world.has_died(self.blamed) else SignalTimeout
        return kind(f"rank {p} {what} while rank {self.ws.rank} waited for it in call {self.number}")

    def _abandon(self, error: BaseException) -> None:
        """Note [Failed calls]: keep in step with the peers although this rank raises."""
        ws = self.ws
        if not self.on_cpu:
            if ws.meets and ws.failed is None and not is_capturing():
                with suppress(RuntimeError):  # a device that an error has ended starts nothing
                    self.meet(RAISED)
            return
        consequence = isinstance(error, (SignatureMismatch, PeerFailed))  # then the blame is another rank's
        words = self.words if consequence else ws.failure_words(self.number)
        ws.fail_kernels_of_peers(self.number, words)
        for p in sorted(self.to_publish):
            self._post(p, words)
        try:
            for p in sorted(self.to_wait):
                self.take(p)
        except SignalTimeout as timeout:
            ws.failed = timeout
        ws.status.zero_()

    def refuse(self, number: int) -> None:
        """Note [Refused calls]: signal every peer that this rank raised in place of this call."""
        self._numbered(number)
        words = self.ws.failure_words(number, REFUSED)
        self.ws.fail_kernels_of_peers(number, words)
        for p in self.ws.peers:
            self._post(p, words)

    def leave_peers(self) -> None:
        """After a timeout or an interrupt: notify peers that still wait for this rank, without waiting."""
        if not self.on_cpu:
            return
        words = self.ws.failure_words(self.number)
        self.ws.fail_kernels_of_peers(self.number, words)
        for p in range(self.ws.world_size):
            self.ws.gone[p][self.ws.rank] = self.blamed + 1
        for p in sorted(self.to_publish):
            self._post(p, words)


class PeerWatch(threading.Thread):
    """CPU: fails an interpreted kernel that waits for a rank whose process has ended or that gave up."""

    GRACE_SECONDS = 2.0  # a peer that exits after its last signal is no failure

    def __init__(self, call: Call) -> None:
        super().__init__(daemon=True, name="fusedtp watch")
        self.call, self._stopped = call, threading.Event()
        self.error: SignalTimeout | None = None
        self.start()

    def stop(self) -> None:
        """The kernel has ended."""
        self._stopped.set()
        self.join()

    def run(self) -> None:
        while not self._stopped.wait(0.2):
            fault = next((f for p in self.call.ws.peers if (f := self.call.lost(p)) is not None), None)
            if fault is not None and not self._stopped.wait(self.GRACE_SECONDS):
                self.error = fault
                self.call.ws.status[0] = 1
                return
