"""A rank of a benchmark: its group and device, warm-up, sampling and synchronization; and the worlds of ranks.

one          this process, no group
processes    one process per rank: gloo on CPU, with one core and thread each; NCCL with one GPU each
virtual      threads of this process, with one stream each on a GPU: fusedtp.VirtualWorld

`run(plan, count, fn, *args)` starts a world of `count` ranks and returns the result of fn(rank, *args) on rank 0.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.spawn import start_processes

from fusedtp.comm import VirtualWorld, communicator
from fusedtp.comm.errors import PeerFailed, SignalTimeout
from fusedtp.ops.engines import interpreting

from . import sample
from .options import Plan, Refused
from .sample import Spread, Way

LATE = "host time is in this: the device waited for the host"
SMOKE_ROTATE = 1 << 20
# For a virtual world: enough for eight threads to compile a kernel, and less than one part of a run.
TIMEOUT_SECONDS = 90.0
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
SQUARES = {"cuda": (4096, 8192), "cpu": (1024, 1536)}
SAMPLE_SECONDS = 4e-3  # minimum for back-to-back calls on a GPU: start and end then cost less than 1 %
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc's maximum


@dataclass
class Rank:
    """One rank of a world. All ranks call the same methods in the same order.

    seconds    time budget for the samples of one case
    roofs      dtype -> FLOP/s, "copy" -> bytes read and written per second: of all ranks at once
    notes      way -> note on its last samples
    """

    plan: Plan
    group: Any = None
    seconds: float = 0.0
    roofs: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        comm = None if self.group is None else communicator(self.group)
        self.comm = comm
        self.rank, self.world_size = (0, 1) if comm is None else (comm.rank, comm.world_size)
        here = torch.device("cuda", torch.cuda.current_device()) if self.plan.device == "cuda" else "cpu"
        self.device = comm.device if comm is not None else torch.device(here)
        self.world = "one" if comm is None else self.plan.world
        self.meeting: sample.Meeting = sample.Alone()
        if comm is not None:
            self.meeting = sample.ByWorld(comm.world) if self.plan.world == "virtual" else sample.ByGroup()
        threads = self.world_size if self.plan.world == "virtual" else 1
        self.clock = sample.clock_of(self.device, threads)

    @property
    def mesh(self) -> Any:
        """The mesh for fusedtp.parallelize."""
        if not isinstance(self.group, dist.ProcessGroup):
            return self.group
        return DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=("tp",))

    # -- operands --

    def randn(self, *shape: int, dtype: str, seed: int, scale: float = 1.0) -> torch.Tensor:
        """Normal random numbers, different on each rank."""
        generator = torch.Generator(self.device).manual_seed(1000 * seed + self.rank)
        drawn = torch.randn(shape, generator=generator, device=self.device) * scale
        return drawn.to(getattr(torch, dtype))

    def copies(self, make: Callable[[int], tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """make(0), make(1), ... until their tensors exceed twice the last-level cache; the same number on all ranks.

        Collective, and `make` may be collective.
        """
        first = make(0)
        nbytes = sum(t.numel() * t.element_size() for t in first if isinstance(t, torch.Tensor))
        nbytes = int(self.worst(float(nbytes))[0])
        most = SMOKE_ROTATE if self.plan.smoke else 2 * sample.cache_bytes(self.device)
        return [first, *(make(seed) for seed in range(1, sample.copies(nbytes, most)))]

    # -- what ranks agree on --

    def worst(self, *numbers: float) -> list[float]:
        """The maximum of each number over ranks."""
        return self.meeting.slowest(list(numbers))

    def meet(self) -> None:
        """A barrier of all ranks."""
        self.worst(0.0)

    def failures(self, ways: Mapping[str, Way]) -> dict[str, str]:
        """Call each way once; returns why ways failed on any rank (wrong version, out of memory). Collective."""
        found = {}
        for name, way in ways.items():
            why = ""
            try:
                way()
                if self.device.type == "cuda":
                    torch.cuda.current_stream(self.device).synchronize()
            except (SignalTimeout, PeerFailed):
                raise  # the ranks are no longer synchronized
            except Exception as error:
                lines = str(error).strip().splitlines() or [""]
                why = f"{type(error).__name__}: {lines[0]}"
            if self.worst(float(bool(why)))[0]:
                found[name] = why or "failed on another rank"
        return found

    # -- time --

    def warm(self, way: Way, seconds: float = 2.0) -> None:
        """Call until the times are steady, for at most this long."""

        def once() -> float:
            return self.worst(self.clock(self.meeting, way))[0]

        sample.warm_up(once, 0.05 if self.plan.smoke else seconds)

    def measure(self, ways: Mapping[str, Way], seconds: float | None = None) -> dict[str, Spread]:
        """Interleaved samples of each way; `notes` lists those that include host time."""
        budget = self.seconds if seconds is None else seconds
        times = sample.interleave(ways, budget, self.meeting, self.clock)
        if isinstance(self.clock, sample.DeviceClock):
            late = self.worst(*(float(self.clock.late(way)) for way in ways.values()))
            self.notes = {name: LATE for name, is_late in zip(ways, late, strict=True) if is_late}
        return {name: Spread.of(seconds) for name, seconds in times.items()}

    def host(self, way: Way, spread: Spread) -> float:
        """Host time of one eager call; on a CPU, the time of the call itself, from `spread`."""
        if self.device.type == "cpu":
            return spread.median
        return sample.host_seconds(way, self.meeting, self.device)

    def once(self, way: Way, calls: int = 1) -> float:
        """Seconds per call on this rank, from `calls` back-to-back calls that all ranks make at the same time.

        There is no gate: if the host is slower than the device, its time counts, as it does for users.
        """
        self.meeting.barrier()
        if self.device.type != "cuda":
            begin = perf_counter()
            for _ in range(calls):
                way()
            return (perf_counter() - begin) / calls
        stream = torch.cuda.current_stream(self.device)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(stream)
        for _ in range(calls):
            way()
        last.record(stream)
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3 / calls

    def calls(self, way: Way) -> int:
        """Number of calls per sample. Also makes the first call, which compiles, connects and grows workspaces."""
        self.once(way)
        (seconds,) = self.worst(self.once(way))
        return max(1, min(100, int(SAMPLE_SECONDS / max(seconds, 1e-6)))) if self.device.type == "cuda" else 1

    def rounds(self, ways: Mapping[str, Way], seconds: float) -> dict[str, float]:
        """Way -> the median of interleaved samples, each of several back-to-back calls."""
        calls = {way: self.calls(way) for way in ways.values()}
        times = sample.interleave(ways, seconds, self.meeting, lambda _, way: self.once(way, calls[way]))
        return {name: median(samples) for name, samples in times.items()}

    def measure_roofs(self) -> None:
        """Measure large square matmuls of the vendor's library, and a copy, on all ranks at once after a warm-up."""
        ways: dict[str, Way] = {}
        flops: dict[str, float] = {}
        squares = (128,) if self.plan.smoke else SQUARES[self.device.type]
        for dtype in self.plan.dtypes:
            for n in squares:
                a, b = (self.randn(n, n, dtype=dtype, seed=seed) for seed in (1, 2))
                name = f"{dtype} {n}"
                ways[name], flops[name] = _mm(a, b), 2.0 * n**3 * self.world_size
        nbytes = (1 << 20 if self.plan.smoke else COPY_BYTES[self.device.type]) // self.world_size
        source = torch.ones(nbytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        ways["copy"] = lambda: target.copy_(source)
        self.warm(ways[f"{self.plan.dtypes[0]} {squares[-1]}"])
        found = self.measure(ways, min(self.seconds, 2.0))
        for dtype in self.plan.dtypes:
            mine = [name for name in flops if name.startswith(dtype + " ")]
            self.roofs[dtype] = max(flops[name] / found[name].median for name in mine)
        self.roofs["copy"] = 2.0 * nbytes * self.world_size / found["copy"].median


def _mm(a: torch.Tensor, b: torch.Tensor) -> Way:
    return lambda: torch.matmul(a, b)


# -- worlds ----------------------------------------------------------------------------------------------------------


def run(plan: Plan, ranks: int, fn: Callable[..., Any], *args: Any) -> Any:
    """Run fn(rank, *args) in a world of `ranks`; returns the result of rank 0. Raises Refused for an impossible world.

    With plan.interpret the ranks are processes in which Triton interprets kernels, even a single rank.
    """
    if ranks == 1 and not plan.interpret:
        with _threads(1 if plan.smoke else torch.get_num_threads()):
            return fn(Rank(plan), *args)
    if plan.world == "virtual" and ranks > 1:
        with _threads(max(1, torch.get_num_threads() // ranks)):  # the ranks share the CPU
            world = VirtualWorld(ranks, plan.device, TIMEOUT_SECONDS)
            return world.run(lambda group: fn(Rank(plan, group), *args))[0]
    if plan.device == "cuda" and torch.cuda.device_count() < ranks:
        raise Refused(
            f"{ranks} processes need a GPU each, but there are {torch.cuda.device_count()}: use --world virtual"
        )
    backend = "cpu:gloo,cuda:nccl" if plan.device == "cuda" else "gloo"
    with _interpreting() if plan.interpret else nullcontext():
        return run_ranks(_in_process, ranks, plan, fn, args, backend=backend)


def _in_process(_rank: int, plan: Plan, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    return fn(Rank(plan, dist.group.WORLD if dist.get_world_size() > 1 else None), *args)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _interpreting() -> Iterator[None]:
    """Processes started in this context interpret kernels."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        del os.environ["TRITON_INTERPRET"]
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, backend: str = "gloo") -> Any:
    """Run fn(rank, *args) in one process per rank; returns the result of rank 0.

    With a CUDA backend, rank r uses GPU r; gloo's ranks may share a GPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        # A fork server imports once for all ranks and worlds. But CUDA must not start before a fork, and Triton
        # interprets only if TRITON_INTERPRET was set at import, so such ranks are spawned.
        method = "spawn" if "cuda" in backend or interpreting() else "forkserver"
        if method == "forkserver":
            modules = {each.__module__ for each in (fn, *args) if callable(each)} - {"__main__"}
            mp.get_context(method).set_forkserver_preload(["torch", "torch.distributed", "fusedtp", *modules])
        start_processes(_enter, (fn, world_size, folder, args, backend), world_size, start_method=method)
        with open(os.path.join(folder, "result"), "rb") as f:
            return pickle.load(f)


def _enter(
    rank: int, fn: Callable[..., Any], world_size: int, folder: str, args: tuple[Any, ...], backend: str
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent reports Ctrl-C
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine; its host name may not resolve
    if "cuda" in backend:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    else:
        pin(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    result = fn(rank, *args)
    if rank == 0:
        with open(os.path.join(folder, "result"), "wb") as f:
            pickle.dump(result, f)
    dist.barrier()
    dist.destroy_process_group()


def pin(rank: int) -> None:
    """Run this process on one thread and one core (if there are several), and keep freed memory in its heap."""
    torch.set_num_threads(1)
    keep_heap()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def keep_heap() -> bool:
    """Make glibc keep freed memory, as other allocators do; returns False without glibc.

    By default glibc returns free memory at the top of the heap to the kernel, and later faults it in again, zeroed.
    This can be up to a third of a call, depending on what happens to be at the top: when two ways are measured in
    turn, it affects sometimes one and sometimes the other.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(M_TRIM_THRESHOLD, 1 << 30), mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
    return all(kept)
