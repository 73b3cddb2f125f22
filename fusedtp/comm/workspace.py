"""The workspace of a group: two rotating data slots, flags, and the protocol that every call follows.

    control region   semaphores [W]         CPU: posted by source, taken by the owner
                     records [2, W]         words of signatures, by call parity and source
                     flags [W, 4096] int32  kernels: set to the epoch by source and chunk
                     arrivals [2, W] int64  kernels: epoch and hash of the signature, by call parity and source
                     gone [W] int32         CPU: 1 + the rank that a source gave up on; it will not signal again
    data region      slot 0 | slot 1        grows; a call uses slot (call number & 1)

Note [Two rotating buffers]
In every call, every rank signals every peer and waits for every peer, even with no rows. So when a rank begins call
n + 2, all peers have left call n (they signalled in n + 1), and the slot of call n can be written again on every rank;
no call waits for a slot to become free. Skipping the signal of an empty shard breaks this.

Note [After a fused kernel]
On a GPU, a rank that reads nothing, such as one without columns, leaves a fused kernel before its peers' rows have
landed in its slot, and any rank may leave before its peers have read theirs. The next fused kernel writes to the other
slot. But the host counts calls and the device counts epochs, so the copies of `chunked` may target that same slot: all
ranks meet before them.

Note [Slot bytes]
The slot size that a call declares, for a gathered x [T, K] or a scattered y [T, N] with R_p rows on rank p, in elements
of the working dtype. A group holds two slots, sized for the largest of its calls, and the control region.

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
    moe_plan, of E experts, in int32   E + max R_p * k -
    moe_dispatch, of k choices         max R_p (K + k) max R_p (K + k)
    moe_combine                        max R_p * k * N max R_p * k * N
    moe_dispatch_matmul                as moe_dispatch max_rows * K
    moe_matmul_combine                 as moe_combine  max R_p * k * N, and max_rows * N backward
    collective: none

So two slots are at most twice the largest gathered or scattered tensor, except for the kernels that reduce: they push
W partials of a rank's rows into that rank's slot, and all ranks have slots of the same size. With an even split of rows
that is T * N, rounded up to W equal shards; if one rank has all rows, it is W times as much. Slots that have grown may
be an eighth larger, see `grow`.

Note [Signatures]
A call's signature is stored next to its flag before the flag is released; the peer that waits for the flag compares it.
Records rotate like the slots. Growing the data region is collective, so a rank that must grow it first exchanges
signatures and then votes: ranks that disagree, or a rank that raised, would not take part.

On a GPU, kernels compare hashes of the signatures. The fused kernels do, and so does a kernel that does nothing else
(kernels/meet.py). It is launched before and after the copies of `chunked`, and before growing, which waits for its
result. Before a collective of `collective` it is launched only in the group's first COMPARED_CALLS calls, a count that
all ranks share, or always if a rank of the group was started with FUSEDTP_DEBUG=1. The host reads a kernel's record
when it begins its next call; the group is then unusable. Ranks that are threads of one process compare all words at the
beginning of every call. Without Triton, ranks on GPUs compare nothing.

Note [Failed calls]
A rank that finds a mismatch, or raises, still signals and waits for all peers before the error leaves the call. So the
group stays in step and can be used again (a peer that already has the failing rank's signal finishes its call). After a
timeout this is impossible: the workspace is marked as failed, and every later call raises at once.

On a GPU, a rank that raises in a call has not launched its kernel, and its peers would take its next kernel for it. So
it launches the meeting kernel with a signature reserved for this. If all ranks have raised, they stay in step.
Otherwise the peers see a signature mismatch at once, instead of waiting for the timeout, and so does this rank; the
group is then unusable.

Note [Refused calls]
A rank may also raise before its call begins, for example because only this rank has x on another device. On CPU it then
takes part in that call by signalling "refused" to every peer, and raises at once; it takes the peers' signals when it
begins its next call. (Its peers may have the same fault, or come much later.) Every peer sees the refusal, so none
continues to a step that needs all ranks, such as growing.

On a GPU it stores an arrival with the signature of Note [Failed calls] where its peers' kernels will look for its
arrival in that call. Neither host nor stream waits: the peers may be in a plain collective, which compares nothing.
Before its next call it launches the meeting kernel of the refused one and waits for it. If only some ranks have
refused, the group is then unusable, as after a failed call. Ranks of a virtual world on a GPU do not refuse, nor do
ranks without Triton.

Note [Inference mode]
Tensors that a workspace keeps are made outside of inference mode. A view made inside it cannot be written outside, so a
group that first ran in a validation loop could not train.

Note [Apart]
While torch.compile's CUDA graphs (mode "reduce-overhead") warm up, all allocations of the thread go to the graphs'
private pool, and torch raises if anything but an output stays there; torch's rendezvous also keeps some. So a workspace
allocates the GPU memory that it keeps in another thread.
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
from .device_view import OTHER_SIGNATURE, DeviceView, epoch_words, runs_kernels
from .errors import PeerDied, PeerFailed, SignalTimeout, SignatureMismatch
from .launching import on
from .memory import Region, round_up
from .process_world import ProcessWorld
from .semaphore import LIBC
from .signature import OF_KERNELS, RAISED, REFUSED, Signature, compare, failure_words, operation_of, published_bytes
from .streams import SideStream, StreamOrder, finish, is_capturing
from .virtual_world import ThreadWorld

FLAGS_PER_SOURCE = 4096
MAX_VIEWS = 1024  # cached
DEFAULT_TIMEOUT_S = 600.0
COMPARED_CALLS = 16  # see Note [Signatures]
# A waiter polls for this long, yielding the core in between, before it sleeps: waking up takes 50 us.
SPIN_SECONDS = 100e-6
T = TypeVar("T")
NOTHING = Signature(REFUSED, "collective", torch.float32, 0, ())


def int32(n: int) -> int:
    """n as a wrapping int32."""
    return (n + 2**31) % 2**32 - 2**31


class Workspace:
    """The memory that a group shares, and the order of its calls. Constructed collectively by all ranks."""

    def __init__(self, world: ProcessWorld | ThreadWorld, debug: bool = False) -> None:
        self.world, self.rank, self.world_size, self.device = world, world.rank, world.world_size, world.device
        self.peers = tuple((self.rank + step) % self.world_size for step in range(1, self.world_size))
        self.lock = threading.RLock()
        self.number = 0  # calls begun
        self.plain = 0  # plain collectives that compared nothing
        self.failed: Exception | None = None
        self.timeout_s = getattr(world, "operation_timeout_s", None) or DEFAULT_TIMEOUT_S
        self.wait_seconds = 0.0  # host time spent asleep in waits for peers
        self.asleep_since: float | None = None  # monotonic time at which the current wait for a peer began
        self.operation = ""  # of the last call
        self.on_cpu = self.device.type == "cpu"
        self._order: StreamOrder | None = None  # CUDA: of this rank's calls on its device, see `join_order`
        self._in_graph = False
        self._fused_last = False  # CUDA: whether the last call that used slots was a fused kernel
        self.epochs: int | None = 0  # CUDA: the device's epoch; None once a graph may advance it
        self.side = None if self.on_cpu or torch.version.hip else SideStream(self.device)
        self.meets = not world.shares_process and runs_kernels(self.device)
        self.debug = debug  # the same on all ranks
        self._refused: Call | None = None  # the last call if this rank refused it and has not taken its signals
        self._kept: list[tuple[Region | None, DeviceView | None]] = []
        self._apart(self._make_control_region)
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
            self.semaphores = [a + self.rank * semaphore.SIZE for a in self.control.addresses]  # ours in p's memory
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
        """The record that `source` publishes to rank p in calls of that parity."""
        at = self._records_at + (parity * self.world_size + source) * self._record_stride
        control: Any = self.control.buffers[p].numpy()
        return memoryview(control)[at : at + self.record_bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of symmetric memory this rank holds: control and both data slots."""
        return self.control.nbytes + (self.data.nbytes if self.data else 0)

    def view_of(self, p: int, parity: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
        """Rank p's slot of that parity as a tensor; cached, because making it takes as long as a signal."""
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
        """int32 [FLAGS_PER_SOURCE]: the flags in rank p's memory that `source` sets; cached: the region never moves."""
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
        """The addresses for a kernel, with the current size of slots."""
        if self._view is None:
            self._view = self._apart(self._make_view)
        return self._view

    def _apart(self, make: Callable[[], T]) -> T:
        """Run `make` for something that is kept; for processes on GPUs in a thread of its own: Note [Apart]."""

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
        """Whether copies can run while a kernel runs: the host knows the next call's slot and has a copy stream."""
        return self.on_cpu or (self.epochs is not None and self.side is not None)

    def grow(self, nbytes: int) -> None:
        """Collective: make each slot hold `nbytes`. All ranks decide alike, because `nbytes` is equal on all.

        A slot grows by an eighth at least: batches that get longer little by little would allocate again and again.
        """
        if nbytes <= self.slot_bytes:
            return
        self.refuse_capture()
        finish(self.device)
        self.world.barrier()
        slot = round_up(max(nbytes, self.slot_bytes * 9 // 8))
        data = self._apart(lambda: self.world.allocate(2 * slot))
        if self._in_graph:
            self._kept.append((self.data, self._view))  # a captured graph uses their addresses
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
        self.device_view()  # not later: during capture its tables could not be copied to the device
        finish(self.device)
        self.world.barrier()

    def refuse_capture(self) -> None:
        """CUDA: raises RuntimeError if the workspace would grow during graph capture."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the workspace would grow during CUDA graph capture; call fusedtp.reserve first")

    # -- calls ---------------------------------------------------------------------------------------------------

    def call(self, signature: Signature, nbytes: int) -> Call:
        """The group's next call, a context manager; it needs `nbytes` of a slot, the same on all ranks."""
        return Call(self, signature, nbytes)

    def begin(self) -> int:
        """Under the lock: the number of the next call. Raises the error that made the workspace unusable, if any."""
        if self.failed is not None or self._status[0] != 0:
            self.check()
        if self._order is not None and self._order.enter():
            self._in_graph, self.epochs = True, None
        if self._refused is not None:
            self._settle()
        self.number += 1
        return self.number

    def join_order(self, other: Workspace | None) -> None:
        """CUDA: share the order of another group of this rank, or begin one: Note [One order for all groups]."""
        order = StreamOrder(self.device) if other is None or other._order is None else other._order
        self._order, self.lock = order, order.lock

    def keep_order(self) -> None:
        """Order the current stream after the last call, without slots or comparison. Raises like `check`."""
        with self.lock:
            self.check()
            self.plain += 1
            if self._order is not None:
                self._order.enter()
                self._order.leave()

    def end(self) -> None:
        """End the last call. Expects the lock and releases it."""
        try:
            if self._order is not None:
                self._order.leave()
        finally:
            self.lock.release()

    def check(self) -> None:
        """Raises the error that made the workspace unusable, if there is one."""
        if self.failed is None and self._status[0] != 0:
            self.failed = device_view.recorded_error(self.status, self.rank, self.world.name)
        if self.failed is not None:
            raise self.failed

    def refuse(self) -> None:
        """This rank raises instead of making the call that its peers make; see Note [Refused calls]."""
        with self.lock, suppress(RuntimeError):  # SignalTimeout: the peers have been notified; or the device is lost
            announces = self.meets and self._status[0] == 0 and not is_capturing()
            if self.failed is not None or not (self.on_cpu or announces):
                return
            if self._order is not None:
                self._order.enter()
            if self._refused is not None:
                self._settle()
            self.number += 1
            self._refused = Call(self, NOTHING, 0)
            self._refused.refuse(self.number)
            if self._order is not None:
                self._order.leave()

    def _settle(self) -> None:
        """Wait for the peers in a call that this rank refused. Raises the error of an unusable group."""
        if not self.on_cpu and is_capturing():
            raise RuntimeError("the last call raised before it began; make a call before CUDA graph capture")
        refused, self._refused = self._refused, None
        assert refused is not None
        try:
            if not self.on_cpu:
                refused.meet(RAISED)
                finish(self.device)  # this rank must not arrive again before its peers have seen RAISED
                self.check()
                return
            for p in sorted(refused.to_wait):
                refused.take(p)
        except (SignalTimeout, KeyboardInterrupt) as error:
            self.give_up(refused, error)
            raise

    def arrivals_at(self, p: int) -> Tensor:
        """int64 [2], by parity of the call: this rank's arrival words in rank p's memory."""
        words = self.control.buffers[p][self._arrivals_at : self._gone_at].view(torch.int64)
        return words.view(2, self.world_size)[:, self.rank]

    def give_up(self, call: Call, error: BaseException) -> None:
        """Mark the workspace as unusable after a timeout, an interrupt, or copies without their kernel."""
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

    def failure_words(self, number: int) -> bytes:
        """The record of a rank that raised in a call."""
        return failure_words(number)[: self.record_bytes]

    def fail_kernels_of_peers(self, number: int, words: bytes) -> None:
        """CPU: make peers' interpreted kernels that wait for this rank's flags leave with a mismatch."""
        for p in self.peers:  # all records before any flag: a kernel that leaves makes its rank notify the others
            self.records_at[number & 1][p][:] = words
        for p in self.peers:
            self._arrivals[p][number & 1, self.rank] = number & 0xFFFFFFFF  # with signature hash 0
            self._flags[p][self.rank, :] = int32(number)


class Call:
    """One call of a group, a context manager: slot views, publish and wait, on CPUs and on GPUs.

        with workspace.call(signature, nbytes) as call:
            call.publish(p) once and call.wait(p) once for every peer p, or one kernel on call.kernel_view()

    On CPU the hosts signal each other through semaphores; on a GPU the ranks' streams meet, or kernels signal and wait.
    An error recorded by an interpreted kernel is raised when the call ends.
    """

    used_barrier = False
    watch: PeerWatch | None = None
    counted: int | None = None  # CUDA: the device's epoch before this call's kernel
    copying: Copies | None = None

    def __init__(self, workspace: Workspace, signature: Signature, nbytes: int) -> None:
        self.ws, self.signature, self.nbytes = workspace, signature, nbytes
        self.on_cpu = workspace.on_cpu
        self.blamed = workspace.rank  # the rank to blame if this rank gives up
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
            self.words = words[: self.ws.record_bytes]  # this rank's record
        if self.on_cpu:
            self.ws.epoch_word[0] = number & 0xFFFFFFFF

    def _grow(self) -> None:
        """Growing is collective: every rank gets here, or every rank raises."""
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
        """Rank p's slot of this call as a tensor, from byte `offset` on."""
        found = self.ws.views.get((p, self.parity, shape, dtype, offset))
        return found if found is not None else self.ws.view_of(p, self.parity, shape, dtype, offset)

    def kernel_view(self) -> DeviceView:
        """The view for one fused kernel, which signals and waits by itself.

        On CPU this also publishes the signature to the peers' hosts, so that a peer in another engine finds the
        mismatch at once (without waiting here), and watches the peers, so that the kernel ends if one dies.
        """
        ws = self.ws
        if self.on_cpu:
            ws.epoch[1:].zero_()  # a failed kernel may have left counts
            self.publish_all()
            self.watch = PeerWatch(self)
        else:
            # stays None if the launch raises: then it is unknown whether the kernel was started
            self.counted, ws.epochs = ws.epochs, None
        return ws._view or ws.device_view()

    def copies(self) -> Copies | None:
        """The copies that send the rows of a fused gather; None if programs must. Call it before `kernel_view`.

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
        # A host-driven engine: the last publish is a barrier of the ranks' streams, so no wait is needed.
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
        """Acquire rank p's stores of this call; raises SignalTimeout, PeerDied or SignatureMismatch."""
        if self.on_cpu:
            self.take(p)
            theirs = self.ws.records_of[self.parity][p].tobytes()
            if self.words != theirs:
                compare(self.words, theirs, self.ws.rank, p, self.ws.world_size)

    def publish_and_wait(self) -> None:
        """Publish to and wait for every peer: afterwards everything that ranks stored in their slots can be read."""
        self.publish_all()
        for p in sorted(self.to_wait):
            self.wait(p)

    def handshake(self) -> None:
        """Check that every rank is in this call with the same signature; on a GPU this orders no data.

        There kernels compare, if they can, and the host sees a mismatch when it next checks.
        """
        if self.on_cpu:
            self.publish_and_wait()
        elif self.ws.meets:
            self.meet()

    def meet(self, signature: Signature | None = None) -> None:
        """CUDA: a barrier of the ranks' streams; it compares signatures if kernels can run. None: the call's own."""
        ws = self.ws
        if ws.meets:
            counted, ws.epochs = ws.epochs, None  # stays None if the launch raises: then the epoch is unknown
            device_view.meet(ws.device_view(), ws.rank, ws.world_size, (signature or self.signature).hash32)
            ws.epochs = None if counted is None else counted + 1
        else:
            ws.world.stream_barrier(ws.control, ws.timeout_s)

    def _compare_threads(self) -> None:
        """CUDA, ranks that are threads of one process: raises SignatureMismatch on all ranks if two differ.

        Not during capture, which ranks do one after another; kernels compare when the graph is replayed.
        """
        world = self.ws.world
        if is_capturing():
            return
        for p, theirs in enumerate(world.exchange(self.words)):
            if not isinstance(theirs, bytes):
                what = f"{self.signature.operation} (call {self.number})"
                raise SignatureMismatch(
                    f"rank {world.rank} is in {what}, but rank {p} is in no call of the group: it may have raised"
                )
            compare(self.words, theirs, world.rank, p, world.world_size)

    def _agree(self) -> None:
        """Before growing: every rank returns from here, or every rank raises.

        On CPU a handshake is not enough: a rank would pass if a failing peer had already signalled it.
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
            raise  # all ranks see these, or the group is unusable
        except BaseException as error:
            fault = error
            self._abandon(error)
            if self._is_refused():  # the refusing rank does not vote, and all others know it
                raise
        consequence = isinstance(fault, PeerFailed)  # caused by another rank's error, which is the one to report
        votes = self.ws.world.exchange(0 if fault is None else 1 if consequence else 2)
        if fault is not None:
            raise fault
        if any(votes):
            culprit = votes.index(max(votes))
            what = f"rank {culprit} raised during {self.signature.operation} (call {self.number})"
            raise PeerFailed(f"{what}; rank {self.ws.rank} stops too")

    def _is_refused(self) -> bool:
        """Whether a peer refused this call. Only after all peers' signals were taken."""
        records = self.ws.records_of[self.parity]
        return any(operation_of(records[p].tobytes()) == REFUSED for p in self.ws.peers)

    def _close(self) -> None:
        """Signal and wait for the remaining peers (Note [Two rotating buffers]); raise an error a kernel recorded."""
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
                raise PeerFailed(
                    f"a peer left call {self.number} ({self.signature.operation}); rank {ws.rank} stops too"
                )
        else:  # no slot is written again before all ranks have read it
            self.meet()

    # -- between CPU ranks: semaphores, and leaving a call when something fails -------------------------------------

    def _post(self, p: int, words: bytes) -> None:
        ws = self.ws
        ws.records_at[self.parity][p][:] = words
        if LIBC.post(ws.semaphores[p]) != 0:
            semaphore.fail("sem_post")
        self.to_publish.discard(p)

    def take(self, p: int) -> None:
        """Take rank p's signal, whatever its record. Raises SignalTimeout or PeerDied."""
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
                        f"(call {self.number}); the group {ws.world.name!r} cannot be used again"
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
            what = "ended (it raised or left VirtualWorld.run; call backward inside of run)"
        kind = PeerDied if self.ws.world.has_died(self.blamed) else SignalTimeout
        return kind(f"rank {p} {what} while rank {self.ws.rank} waited for it in call {self.number}")

    def _abandon(self, error: BaseException) -> None:
        """Stay in step with the peers although this rank raises: Note [Failed calls]."""
        ws = self.ws
        if not self.on_cpu:
            if ws.meets and ws.failed is None and not is_capturing():
                with suppress(RuntimeError):  # after a fatal error a device starts nothing
                    self.meet(RAISED)
            return
        consequence = isinstance(error, (SignatureMismatch, PeerFailed))  # then another rank is to blame
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
        """Signal every peer that this rank raised instead of making this call: Note [Refused calls]."""
        if not self.on_cpu:
            device_view.announce(self.ws.epoch, map(self.ws.arrivals_at, self.ws.peers), RAISED.hash32)
            return
        self._numbered(number)
        words = failure_words(number, REFUSED)[: self.ws.record_bytes]
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
    """CPU: ends an interpreted kernel that waits for a rank that has died or given up."""

    GRACE_SECONDS = 2.0  # a peer may exit after its last signal

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
