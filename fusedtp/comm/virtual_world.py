"""The `virtual` world: W ranks in one process, each a host thread (and on a GPU a stream).

`VirtualWorld(W).run(fn)` calls `fn(group)` once per rank; operations accept `group` as their group. Backward runs in
the rank's own thread, so a rank may wait for its peers there too. (All ranks would share autograd's device thread, and
a rank that waits for another in it would never return.)
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from .errors import PeerDied, PeerFailed, SignalTimeout
from .memory import Region, allocate_plain

_ids = itertools.count()
GROUPS: weakref.WeakValueDictionary[str, VirtualGroup] = weakref.WeakValueDictionary()  # by name
BEFORE_RUNS: list[Callable[[list[VirtualGroup]], None]] = []  # hooks of communicator.py; they get all ends of a group


MEETING_SECONDS = 60.0


class Ranks:
    """Threads that act as ranks on one device: all ranks of a VirtualWorld, or some of them.

    on_device   number of ranks on the device, which must run concurrently
    threads     the identity of each rank's thread: (id of its VirtualWorld, rank in it). None: this is that world
    """

    def __init__(
        self,
        world_size: int,
        device: torch.device,
        timeout_s: float | None,
        on_device: int,
        threads: list[tuple[int, int]] | None = None,
    ) -> None:
        self.world_size, self.device, self.timeout_s = world_size, device, timeout_s
        self.on_device = on_device
        self.id = next(_ids)
        self.threads = threads or [(self.id, rank) for rank in range(world_size)]
        self.barrier = threading.Barrier(world_size)
        self.board: list[Any] = [None] * world_size
        self.arrivals = [0] * world_size  # at the barrier, by rank
        self.raised: list[int] = []  # ranks that raised, in the order in which they did
        self.left: set[int] = set()  # ranks that have returned from their function
        self.groups = [VirtualGroup(self, rank) for rank in range(world_size)]
        self._parts: dict[tuple[int, ...], Ranks] = {}
        self._lock = threading.Lock()

    def part(self, ranks: tuple[int, ...]) -> Ranks:
        """The sub-group of these ranks, in this order; all callers get the same object."""
        with self._lock:
            if ranks not in self._parts:
                threads = [self.threads[rank] for rank in ranks]
                made = Ranks(len(ranks), self.device, self.timeout_s, self.on_device, threads)
                for rank in [rank for rank in self.raised if rank in ranks]:
                    made.give_up(ranks.index(rank))
                for rank in self.left.intersection(ranks):
                    made.leave(ranks.index(rank))
                self._parts[ranks] = made
            return self._parts[ranks]

    def ready(self) -> None:
        """Reset before a run: no rank has raised or arrived."""
        self.barrier.reset()
        self.raised.clear()
        self.left.clear()
        self.arrivals = [0] * self.world_size
        for part in self._parts.values():
            part.ready()

    def give_up(self, rank: int) -> None:
        """`rank` has raised: the others must not wait for it."""
        with self._lock:
            self.raised.append(rank)
            self.barrier.abort()
            parts = self._parts_of(rank)
        for at, part in parts:
            part.give_up(at)

    def leave(self, rank: int) -> None:
        """`rank` has returned and will not signal again. (Others may still be leaving the barrier.)"""
        with self._lock:
            self.left.add(rank)
            parts = self._parts_of(rank)
        for at, part in parts:
            part.leave(at)

    def _parts_of(self, rank: int) -> list[tuple[int, Ranks]]:
        return [(ranks.index(rank), part) for ranks, part in self._parts.items() if rank in ranks]

    def every_group(self) -> Iterator[list[VirtualGroup]]:
        """All ends of each group: first this one, then each part."""
        yield self.groups
        for part in self._parts.values():
            yield from part.every_group()


class VirtualWorld(Ranks):
    """W ranks on one device.

    timeout_s   bounds every wait for another rank, as `set_timeout` does for one group. None: 60 s when ranks meet on
                the host, 600 s in an operation

    Raises ValueError if there are no ranks or the timeout is not positive.
    """

    def __init__(self, world_size: int, device: str | torch.device = "cpu", timeout_s: float | None = None) -> None:
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}; it must be at least 1")
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}; it must be positive")
        device = torch.device(device)
        if device.type == "cuda":
            prepare_cuda(world_size)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(world_size, device, timeout_s, world_size)
        self._streams = [torch.cuda.Stream(device) for _ in self.groups] if device.type == "cuda" else []
        self._running = threading.Lock()

    def run(self, fn: Callable[[VirtualGroup], Any]) -> list[Any]:
        """fn's results in rank order. Raises the error of the first rank that raised, after all threads have ended.

        fn runs with the caller's autocast and grad mode. Run backward inside fn: elsewhere a rank has no peers.
        A failed run may leave calls incomplete; the next run then starts with new memory.
        Raises RuntimeError if this world is already running.
        """
        if not self._running.acquire(blocking=False):
            raise RuntimeError("this VirtualWorld is already running; wait until its run ends")
        try:
            return self._run(fn)
        finally:
            self._running.release()

    def _run(self, fn: Callable[[VirtualGroup], Any]) -> list[Any]:
        results: list[Any] = [None] * self.world_size
        errors: list[BaseException | None] = [None] * self.world_size
        for groups in self.every_group():
            for prepare in BEFORE_RUNS:
                prepare(groups)
        self.ready()
        modes = _modes(self.device.type)
        if self._streams:
            torch.cuda.synchronize(self.device)
        importlib.import_module("torch._dynamo")  # else the first call of a custom op imports it, in all threads

        def body(rank: int) -> None:
            stream = torch.cuda.stream(self._streams[rank]) if self._streams else nullcontext()
            if self._streams:
                torch.cuda.set_device(self.device)  # else this thread has no context until its first launch
            try:
                with stream, torch.autograd.set_multithreading_enabled(False), modes():
                    results[rank] = fn(self.groups[rank])
                    if self._streams:
                        self._streams[rank].synchronize()
                self.leave(rank)
            except BaseException as error:
                errors[rank] = error
                self.give_up(rank)

        threads = [threading.Thread(target=body, args=(r,), name=f"fusedtp rank {r}") for r in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        raised = [e for e in errors if e is not None]
        if raised:  # PeerDied and PeerFailed are consequences of another rank's error
            raise next(
                (e for e in raised if not isinstance(e, (PeerDied, PeerFailed))),
                raised[0],
            )
        return results


def _modes(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """A factory of contexts with this thread's autocast and grad mode, for other threads, which do not inherit them."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)

    def made() -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(torch.autocast(device_type, autocast[1], enabled=autocast[0]))
        return stack

    return made


def prepare_cuda(world_size: int) -> None:
    """Set what CUDA reads at startup and ranks on one GPU need so that they do not deadlock.

    Streams that share a connection (8 by default, up to 32) wait for each other, and each rank has one stream for
    compute and one for copies. A lazily loaded module waits for the device. Warns if it is too late.
    """
    wanted = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
    if not torch.cuda.is_initialized():
        for name, value in wanted.items():
            os.environ.setdefault(name, value)
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if not connections.isdecimal() or int(connections) < min(2 * world_size, 32):
        settings = " ".join(f"{name}={value}" for name, value in wanted.items())
        warnings.warn(
            f"{world_size} ranks on one GPU may deadlock: start Python with {settings}",
            stacklevel=3,
        )


class VirtualGroup:
    """One rank's end of a VirtualWorld, or of some of its ranks. Operations accept it as `group`."""

    def __init__(self, world: Ranks, rank: int) -> None:
        self._world, self._rank = world, rank
        self.group_name = f"virtual/{world.id}/{rank}"
        GROUPS[self.group_name] = self

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world.world_size

    @property
    def device(self) -> torch.device:
        """The device of its ranks."""
        return self._world.device

    def along(self, shape: Sequence[int], dim: int) -> VirtualGroup:
        """Arrange all ranks in `shape`, last dimension fastest; the group of ranks that differ from this one in `dim`.

        It lives as long as the world. Raises ValueError if the shape has another number of ranks.
        """
        if math.prod(shape) != self.size():
            raise ValueError(f"cannot arrange {self.size()} ranks in the shape {tuple(shape)}")
        lines = torch.arange(self.size(), device="cpu").view(*shape).movedim(dim, -1).reshape(-1, shape[dim]).tolist()
        line = next(each for each in lines if self._rank in each)
        return self._world.part(tuple(line)).groups[line.index(self._rank)]


class ThreadWorld:
    """The methods of ProcessWorld, between threads.

    operation_timeout_s   bound on waits in operations; None: their default
    """

    shares_process = True

    def __init__(self, group: VirtualGroup) -> None:
        self._virtual: Ranks = weakref.proxy(group._world)  # the registry keeps this, but must not keep the world
        self.group_ref = weakref.ref(group)  # a destroyed group may leave its name to another
        self.rank, self.world_size, self.name = group.rank(), group.size(), group.group_name
        self.device = group.device
        self.stream_owner = group._world.threads[self.rank]
        self.ranks_per_device = group._world.on_device
        self.timeout_s = group._world.timeout_s or MEETING_SECONDS
        self.operation_timeout_s = group._world.timeout_s

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value. Raises SignalTimeout naming absent ranks, PeerFailed naming a rank that raised."""
        virtual = self._virtual
        virtual.board[self.rank] = value
        self._meet()
        out = list(virtual.board)
        self._meet()
        return out

    def _meet(self) -> None:
        virtual = self._virtual
        virtual.arrivals[self.rank] += 1
        try:
            virtual.barrier.wait(self.timeout_s)
        except threading.BrokenBarrierError:
            here = virtual.arrivals[self.rank]
            if virtual.raised:
                raise PeerFailed(
                    f"rank {virtual.raised[0]} raised; rank {self.rank} stops too{self._of_some}"
                ) from None
            absent = [p for p, times in enumerate(virtual.arrivals) if times < here]
            who = ", ".join(f"rank {p}" for p in absent) or "a rank that came too late"
            waited = f"rank {self.rank} waited {self.timeout_s:g} s for {who}{self._of_some}"
            raise SignalTimeout(waited) from None

    @property
    def _of_some(self) -> str:
        """A suffix for messages, if rank numbers are not those of the whole world."""
        return "" if self.world_size == self.ranks_per_device else f" (ranks of group {self.name!r})"

    def barrier(self) -> None:
        self._meet()

    def shared_memory_fault(self) -> str | None:
        return None

    def has_died(self, p: int) -> bool:
        return p in self._virtual.raised or p in self._virtual.left

    def allocate(self, nbytes: int) -> Region:
        return allocate_plain(nbytes, self.device, self.exchange)

    def stream_barrier(self, region: Region, timeout_s: float) -> None:
        """CUDA: work that any rank enqueued before this finishes before work that any rank enqueues after it starts."""
        stream = torch.cuda.current_stream(self.device)
        for event in self.exchange(stream.record_event()):
            stream.wait_event(event)

    def _exchange_tensors(self, x: Tensor) -> list[Tensor]:
        """Every rank's tensor, complete; the caller must call `_done` when it has read them."""
        self._done_computing()
        return self.exchange(x)

    def _done_computing(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _done(self) -> None:
        self._done_computing()
        self.barrier()

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        out = torch.cat(self._exchange_tensors(x))
        self._done()
        assert out.shape[0] == sum(sizes)
        return out

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        self._done_computing()
        parts = self.exchange(x.split(list(sent)))
        out = torch.cat([of_source[self.rank] for of_source in parts])
        self._done()
        assert out.shape[0] == sum(received)
        return out

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int], bias: Tensor | None = None) -> Tensor:
        begin = sum(sizes[: self.rank])
        parts = [t[begin : begin + sizes[self.rank]] for t in self._exchange_tensors(x)]
        out = sum_in_rank_order(parts, bias)
        self._done()
        return out

    def all_reduce(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out = sum_in_rank_order(self._exchange_tensors(x), bias)
        self._done()
        return out


def sum_in_rank_order(parts: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
    """The sum of parts in the given order, plus bias; 16-bit in fp32, rounded once. A new contiguous tensor."""
    first = parts[0]
    narrow = first.dtype in (torch.bfloat16, torch.float16)
    total = torch.zeros(first.shape, dtype=torch.float32 if narrow else first.dtype, device=first.device)
    total.copy_(first)
    for part in parts[1:]:
        total += part
    if bias is not None:
        total += bias
    return total.to(first.dtype)
