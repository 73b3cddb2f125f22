"""A rank as a suite sees it: its group, device and how to sample there; and the worlds that ranks live in.

one          this process, no group
processes    a process a rank: gloo on CPU, one core and thread each; NCCL on a GPU each
virtual      threads of this process, on a GPU a stream each: fusedtp.VirtualWorld
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fusedtp
from fusedtp.comm import VirtualWorld, communicator
from fusedtp.comm.device_view import runs_kernels
from fusedtp.ops.engines import interpreting

from . import link, sample
from .options import Plan, Refused
from .sample import Spread, Way
from .world import run_ranks

LATE = "host time is in this: the device waited for the host"
SMOKE_ROTATE = 1 << 20
TIMEOUT_SECONDS = (
    90.0  # of a virtual world: what eight threads take to compile a kernel, and less than a part of a run
)
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
PUSHED = (
    1024,
    8192,
)  # of a rank in bf16: at 50 GB/s they take 2 ms to seven peers, a hundred times what starting a kernel does
SQUARES = {"cuda": (4096, 8192), "cpu": (1024, 1536)}


@dataclass
class Rank:
    """One rank of a world. All ranks call the same methods in the same order.

    seconds    what the samples of one case may take
    link       what its sending is held to, if it is
    roofs      dtype -> FLOP/s, "copy" -> bytes read and written a second: of all ranks at once
    """

    plan: Plan
    group: Any = None
    seconds: float = 0.0
    roofs: dict[str, float] = field(default_factory=dict)
    link: link.Held | None = None
    notes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        comm = None if self.group is None else communicator(self.group)
        self.comm = comm
        self.rank, self.world_size = (0, 1) if comm is None else (comm.rank, comm.world_size)
        self.device = comm.device if comm is not None else torch.device(self.plan.device)
        self.world = "one" if comm is None else self.plan.world
        self.meeting: sample.Meeting = sample.Alone()
        if comm is not None:
            self.meeting = sample.ByWorld(comm.world) if self.plan.world == "virtual" else sample.ByGroup()
        threads = self.world_size if self.plan.world == "virtual" else 1
        # Held copies are many small ones, which take the host longer to enqueue.
        self.clock = sample.clock_of(self.device, threads * (4 if self.plan.link_gbps is not None else 1))

    @property
    def mesh(self) -> Any:
        """What fusedtp.parallelize takes."""
        if not isinstance(self.group, dist.ProcessGroup):
            return self.group
        return DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=("tp",))

    def copies(self, make: Callable[[int], tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """make(0), make(1), ... until their tensors together exceed twice the last cache."""
        first = make(0)
        nbytes = sum(t.numel() * t.element_size() for t in first if isinstance(t, torch.Tensor))
        most = SMOKE_ROTATE if self.plan.smoke else 2 * sample.cache_bytes(self.device)
        return [first, *(make(seed) for seed in range(1, sample.copies(nbytes, most)))]

    def randn(self, *shape: int, dtype: str, seed: int, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers of this rank."""
        return drawn(self.device, self.rank, shape, dtype, seed, scale)

    def measure(self, ways: Mapping[str, Way]) -> dict[str, Spread]:
        """Interleaved samples of each way; `notes` then says of which the host's time is in them."""
        times = sample.interleave(ways, self.seconds, self.meeting, self.clock)
        if isinstance(self.clock, sample.DeviceClock):
            late = self.worst(*(float(self.clock.late(way)) for way in ways.values()))
            self.notes = {name: LATE for name, is_late in zip(ways, late, strict=True) if is_late}
        return {name: Spread.of(seconds) for name, seconds in times.items()}

    def host(self, way: Way, spread: Spread) -> float:
        """Host time of one eager call; on a CPU the call is the work, which `spread` has the time of."""
        if self.device.type == "cpu":
            return spread.median
        return sample.host_seconds(way, self.meeting, self.device)

    def worst(self, *numbers: float) -> list[float]:
        """The largest over ranks, each."""
        return self.meeting.slowest(list(numbers))

    def warm(self, way: Way) -> None:
        """Until it takes the same time again and again."""

        def once() -> float:
            return self.worst(self.clock(self.meeting, way))[0]

        sample.warm_up(once, 0.05 if self.plan.smoke else 2.0)

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
        budget, self.seconds = self.seconds, min(self.seconds, 2.0)
        found = self.measure(ways)
        self.seconds = budget
        for dtype in self.plan.dtypes:
            self.roofs[dtype] = max(
                flops[name] / found[name].median for name in flops if name.startswith(dtype + " ")
            )
        self.roofs["copy"] = 2.0 * nbytes * self.world_size / found["copy"].median


def drawn(
    device: torch.device, rank: int, shape: Sequence[int], dtype: str, seed: int, scale: float = 1.0
) -> torch.Tensor:
    """Normal numbers, others on each rank."""
    generator = torch.Generator(device).manual_seed(1000 * seed + rank)
    return (torch.randn(shape, generator=generator, device=device) * scale).to(getattr(torch, dtype))


def _mm(a: torch.Tensor, b: torch.Tensor) -> Way:
    return lambda: torch.matmul(a, b)


def run(plan: Plan, ranks: int, fn: Callable[..., Any], *args: Any) -> Any:
    """What fn(rank, *args) returns on rank 0 of a world of `ranks`. Raises Refused where that world cannot be."""
    if ranks == 1:
        with _threads(1 if plan.smoke else torch.get_num_threads()):
            return fn(Rank(plan), *args)
    if plan.world == "virtual":
        # Of a CPU, which all ranks share.
        with _threads(max(1, torch.get_num_threads() // ranks)):
            if plan.link_gbps is not None:
                return _held(plan, plan.link_gbps, ranks, fn, args)
            return start(plan.device, plan.world, ranks, _with_plan, plan, fn, args)
    return start(plan.device, plan.world, ranks, _with_plan, plan, fn, args)


def _with_plan(group: Any, plan: Plan, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    return fn(Rank(plan, group), *args)


def start(device: str, world: str, ranks: int, fn: Callable[..., Any], *args: Any) -> Any:
    """What fn(group, *args) returns on rank 0 of a world; a rank that is alone has no group.

    Raises Refused where that world cannot be. Kernels are interpreted only by processes that were started so.
    """
    if ranks == 1 and (device == "cuda" or not interpreting()):
        return fn(None, *args)
    if world == "virtual" and ranks > 1:
        return VirtualWorld(ranks, device, TIMEOUT_SECONDS).run(lambda group: fn(group, *args))[0]
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise Refused(
            f"{ranks} processes need a GPU each, here are {torch.cuda.device_count()}: take --world virtual"
        )
    return run_ranks(
        _in_process, ranks, fn, args, backend="cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    )


def _in_process(_rank: int, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    return fn(dist.group.WORLD if dist.get_world_size() > 1 else None, *args)


def _held(plan: Plan, link_gbps: float, ranks: int, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    world = VirtualWorld(ranks, plan.device, TIMEOUT_SECONDS)
    held, piece, cycles = hold(world, plan, link_gbps)
    with link.paced(piece, cycles):
        return world.run(lambda group: fn(Rank(plan, group, link=held), *args))[0]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def hold(world: VirtualWorld, plan: Plan, link_gbps: float) -> tuple[link.Held, int, int]:
    """(what is held, bytes of a piece, cycles of a spin) for every rank at once. Not measured on a GPU yet.

    Kernels of this world's group are held from then on.
    """

    def body(group: Any) -> tuple[link.Held, int, int]:
        rank = Rank(plan, group)
        source = torch.empty(64 << 20, dtype=torch.uint8, device=rank.device)
        target, clock = torch.empty_like(source), sample.cycles_per_second(rank.device)
        rank.meeting.barrier()
        (clock,) = rank.worst(clock)

        def rate_of(way: Way) -> float:
            times = [rank.worst(rank.clock(rank.meeting, way))[0] for _ in range(5)]
            return source.numel() / statistics.median(times)

        alone = rate_of(lambda: target.copy_(source))  # all ranks at once: each gets its share
        link.check_total(link_gbps, rank.world_size, alone * rank.world_size / 1e9)

        def held_with(piece: int, spin: float) -> float:
            return rate_of(lambda: link.paced_copy(target, source, piece, int(spin * clock)))

        piece, spin, held = link.calibrate(link_gbps * 1e9, alone, held_with)
        kernels = _hold_kernels(rank, link_gbps * 1e9) if runs_kernels(rank.device) else None
        return link.Held(held / 1e9, kernels), piece, int(spin * clock)

    found: tuple[link.Held, int, int] = world.run(body)[0]
    return found


def _hold_kernels(rank: Rank, rate: float) -> float:
    """Hold this rank's kernels to `rate` bytes/s, and return what they then move, in GB/s. Collective."""
    assert rank.comm is not None
    workspace = rank.comm.workspace
    workspace.hold_link(rate)
    x, w = rank.randn(*PUSHED, dtype="bfloat16", seed=1), rank.randn(16, PUSHED[1], dtype="bfloat16", seed=2)

    def push() -> None:
        fusedtp.all_gather_matmul(x, [w], rank.group, engine="triton")

    rank.warm(push)
    before, count = workspace.carried(), 5
    times = [rank.worst(rank.clock(rank.meeting, push))[0] for _ in range(count)]
    of_call = (workspace.carried() - before) / count
    assert of_call == (rank.world_size - 1) * x.numel() * x.element_size(), of_call
    held = of_call / statistics.median(times)
    link.check_kernels(held, rate)
    return held / 1e9
