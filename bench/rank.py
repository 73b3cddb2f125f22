"""A rank as every benchmark sees it: group and device, how it warms up, samples, meets the others; and their worlds.

one          this process, no group
processes    a process a rank: gloo on CPU, one core and thread each; NCCL on a GPU each
virtual      threads of this process, on a GPU a stream each: fusedtp.VirtualWorld

`run(plan, count, fn, *args)` starts a world of so many ranks and returns what fn(rank, *args) returns on its first one.
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
# Of a virtual world: what eight threads take to compile a kernel, and less than a part of a run.
TIMEOUT_SECONDS = 90.0
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
SQUARES = {"cuda": (4096, 8192), "cpu": (1024, 1536)}
SAMPLE_SECONDS = 4e-3  # of calls back to back on a GPU at least: what starts and ends them is then below a hundredth
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
LARGEST_MMAP_THRESHOLD = 32 << 20  # that glibc takes


@dataclass
class Rank:
    """One rank of a world. All ranks call the same methods in the same order.

    seconds    what the samples of one case may take
    roofs      dtype -> FLOP/s, "copy" -> bytes read and written a second: of all ranks at once
    notes      of the last samples: way -> what is to be said of it
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
        """What fusedtp.parallelize takes."""
        if not isinstance(self.group, dist.ProcessGroup):
            return self.group
        return DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=("tp",))

    # -- operands --

    def randn(self, *shape: int, dtype: str, seed: int, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers, others on each rank."""
        generator = torch.Generator(self.device).manual_seed(1000 * seed + self.rank)
        drawn = torch.randn(shape, generator=generator, device=self.device) * scale
        return drawn.to(getattr(torch, dtype))

    def copies(self, make: Callable[[int], tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """make(0), make(1), ... until their tensors together exceed twice the last cache: as many on all ranks.

        Collective: what makes them may be.
        """
        first = make(0)
        nbytes = sum(t.numel() * t.element_size() for t in first if isinstance(t, torch.Tensor))
        nbytes = int(self.worst(float(nbytes))[0])
        most = SMOKE_ROTATE if self.plan.smoke else 2 * sample.cache_bytes(self.device)
        return [first, *(make(seed) for seed in range(1, sample.copies(nbytes, most)))]

    # -- what ranks agree on --

    def worst(self, *numbers: float) -> list[float]:
        """The largest over ranks, each."""
        return self.meeting.slowest(list(numbers))

    def meet(self) -> None:
        """Nobody goes on before all have come here."""
        self.worst(0.0)

    def failures(self, ways: Mapping[str, Way]) -> dict[str, str]:
        """Call each once: way -> why it failed, on any rank (another version, too little memory). Collective."""
        found = {}
        for name, way in ways.items():
            why = ""
            try:
                way()
                if self.device.type == "cuda":
                    torch.cuda.current_stream(self.device).synchronize()
            except (SignalTimeout, PeerFailed):
                raise  # ranks do not know of each other any more
            except Exception as error:
                lines = str(error).strip().splitlines() or [""]
                why = f"{type(error).__name__}: {lines[0]}"
            if self.worst(float(bool(why)))[0]:
                found[name] = why or "failed on another rank"
        return found

    # -- time --

    def warm(self, way: Way, seconds: float = 2.0) -> None:
        """Until it takes the same time again and again, or for so long."""

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
        """Host time of one eager call; on a CPU the call is the work, which `spread` has the time of."""
        if self.device.type == "cpu":
            return spread.median
        return sample.host_seconds(way, self.meeting, self.device)

    def once(self, way: Way, calls: int = 1) -> float:
        """Seconds of a call on this rank, of so many back to back, which the others make at the same time.

        No gate is there: where the host is slower than the device, its time counts, as it does for a user.
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
        """How many calls make a sample. The first one of `way` compiles, connects and grows workspaces."""
        self.once(way)
        (seconds,) = self.worst(self.once(way))
        return max(1, min(100, int(SAMPLE_SECONDS / max(seconds, 1e-6)))) if self.device.type == "cuda" else 1

    def rounds(self, ways: Mapping[str, Way], seconds: float) -> dict[str, float]:
        """Way -> the median of interleaved samples, each of calls back to back."""
        calls = {way: self.calls(way) for way in ways.values()}
        times = sample.interleave(ways, seconds, self.meeting, lambda _, way: self.once(way, calls[way]))
        return {name: median(samples) for name, samples in times.items()}

    def measure_roofs(self) -> None:
        """Large square matmuls by the vendor's library, and a copy; all ranks at once, after a warm-up."""
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
    """What fn(rank, *args) returns on the first rank of a world of `ranks`. Raises Refused where it cannot be.

    With plan.interpret the ranks are processes in which Triton interprets kernels, also where there is one only.
    """
    if ranks == 1 and not plan.interpret:
        with _threads(1 if plan.smoke else torch.get_num_threads()):
            return fn(Rank(plan), *args)
    if plan.world == "virtual" and ranks > 1:
        with _threads(max(1, torch.get_num_threads() // ranks)):  # of a CPU, which all ranks share
            world = VirtualWorld(ranks, plan.device, TIMEOUT_SECONDS)
            return world.run(lambda group: fn(Rank(plan, group), *args))[0]
    if plan.device == "cuda" and torch.cuda.device_count() < ranks:
        raise Refused(f"{ranks} processes need a GPU each, here are {torch.cuda.device_count()}: take --world virtual")
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
    """Processes that start in here interpret kernels."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        del os.environ["TRITON_INTERPRET"]
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, backend: str = "gloo") -> Any:
    """What fn(rank, *args) returns on rank 0; fn runs in a process for each number of a rank.

    With a backend that serves CUDA, rank r has GPU r; gloo's ranks may share one.
    """
    with tempfile.TemporaryDirectory() as folder:
        # A fork server imports once for all ranks and worlds. CUDA must not start before a fork, and Triton interprets
        # only where it was imported for that: such ranks spawn.
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
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # who started the ranks says what Ctrl-C ended
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine; its host name need not resolve
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
    """Keep this process on one core, if there is more than one, on one thread, and what it frees in its heap."""
    torch.set_num_threads(1)
    keep_heap()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def keep_heap() -> bool:
    """Have glibc keep memory that was freed, as other allocators do; False where there is no glibc.

    It gives free memory at the heap's top back to the kernel, and faults it in again, zeroed. Up to a third of a call
    then depends on what happens to lie at the top: of two ways that are measured in turn, sometimes on one, sometimes
    on the other.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(M_TRIM_THRESHOLD, 1 << 30), mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
    return all(kept)
