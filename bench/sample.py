"""Interleaved samples of several ways to do one thing, on a CPU or a GPU.

A round takes one sample of every way, in alternating order, so that other load on the machine affects all of them
alike. Ranks synchronize before each sample; its time is that of the slowest rank.

             CPU                              GPU
    begin    ranks leave a barrier            every stream waits at a gate, which opens when all work is enqueued
    clock    the host's, around the call      the device's, from the gate to the end of what the call enqueued

So a GPU sample contains no host time unless the call itself waits for the device. Host time of a call is measured
separately (`host_seconds`). Operands rotate through copies that together exceed the last-level cache (`Rotating`), and
sampling begins when the time of repeated warm-up calls is stable (`warm_up`).
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist

LEAST, MOST = 3, 60  # rounds
ROTATIONS = 64  # maximum copies of the operands
# Time for a rank to pass the barrier and enqueue a call; threads do so one after another. A call that takes longer gets
# a gate up to LONGER times as long.
GATE_SECONDS, LONGER = 2e-3, 8
Way = Callable[[], object]


@dataclass(frozen=True)
class Spread:
    """Seconds: the median of `samples` samples and its quartiles."""

    median: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, seconds: list[float]) -> Spread:
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(statistics.median(seconds), low, high, len(seconds))

    def __str__(self) -> str:
        return f"{1e3 * self.median:.2f} +-{5e2 * (self.high - self.low):.2f}"


class Meeting(Protocol):
    """How ranks synchronize. Every method is collective."""

    def barrier(self) -> None: ...

    def slowest(self, seconds: list[float]) -> list[float]:
        """The largest of all ranks' numbers, entry by entry."""
        ...


class Alone:
    """One rank."""

    def barrier(self) -> None: ...

    def slowest(self, seconds: list[float]) -> list[float]:
        return list(seconds)


class ByGroup:
    """Processes: torch's default group."""

    def barrier(self) -> None:
        dist.barrier()

    def slowest(self, seconds: list[float]) -> list[float]:
        on_gpu = dist.get_backend() == "nccl"
        times = torch.tensor(seconds, dtype=torch.float64, device="cuda" if on_gpu else "cpu")
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        found: list[float] = times.tolist()
        return found


class ByWorld:
    """Threads of a VirtualWorld; `world` is one rank's fusedtp.comm ThreadWorld."""

    def __init__(self, world: Any) -> None:
        self.world = world

    def barrier(self) -> None:
        self.world.barrier()

    def slowest(self, seconds: list[float]) -> list[float]:
        return [max(each) for each in zip(*self.world.exchange(list(seconds)))]


class Clock(Protocol):
    """Returns the seconds of one call on this rank. Collective."""

    def __call__(self, meeting: Meeting, way: Way) -> float: ...


def host_clock(meeting: Meeting, way: Way) -> float:
    """For synchronous calls."""
    meeting.barrier()
    begin = perf_counter()
    way()
    return perf_counter() - begin


class DeviceClock:
    """CUDA events on the current stream, behind a gate that all ranks' streams leave together.

    The gate is a spin on the device. Streams of a virtual world wait for the last one's gate; processes, which share no
    stream, start their own right after a barrier. If the gate opens before the host has enqueued the call, the sample
    contains host time, and the next sample of this call gets a gate twice as long. A call stays `late` if it waits for
    the device itself, or if the host takes longer than the longest gate.
    """

    def __init__(self, device: torch.device, ranks: int = 1) -> None:
        self.device = device
        self._cycles = int(cycles_per_second(device) * GATE_SECONDS * ranks)
        self._longer: dict[int, int] = {}
        self._late: dict[int, bool] = {}

    def late(self, way: Way) -> bool:
        """Whether the last sample of `way` contains host time."""
        return self._late.get(id(way), False)

    def __call__(self, meeting: Meeting, way: Way) -> float:
        stream = torch.cuda.current_stream(self.device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream.synchronize()
        meeting.barrier()
        longer = self._longer.get(id(way), 1)
        torch.cuda._sleep(longer * self._cycles)
        if isinstance(meeting, ByWorld):
            meeting.world.stream_barrier(None, 0.0)
        begin.record(stream)
        way()
        late = self._late[id(way)] = begin.query()
        end.record(stream)
        end.synchronize()
        if late:
            self._longer[id(way)] = min(LONGER, 2 * longer)
        return float(begin.elapsed_time(end)) / 1e3


def cycles_per_second(device: torch.device) -> float:
    """Cycles of torch.cuda._sleep per second at the device's current clock rate."""
    cycles, events = 20_000_000, [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for _ in range(2):  # the first iteration wakes the device
        events[0].record()
        torch.cuda._sleep(cycles)
        events[1].record()
        torch.cuda.synchronize(device)
    return float(cycles / (events[0].elapsed_time(events[1]) / 1e3))


def clock_of(device: torch.device, ranks: int = 1) -> Clock:
    """The clock for `ranks` threads of this process that share the device."""
    return DeviceClock(device, ranks) if device.type == "cuda" else host_clock


def interleave(
    ways: Mapping[str, Way], budget: float, meeting: Meeting | None = None, clock: Clock = host_clock
) -> dict[str, list[float]]:
    """Way -> seconds of each sample, in about `budget` seconds. Collective; all ranks get the same result.

    meeting   default: torch's default group
    """
    meet = ByGroup() if meeting is None else meeting
    names = list(ways)
    for name in names:  # the first call grows workspaces, connects and compiles
        ways[name]()
    round_seconds = sum(meet.slowest([_whole(clock, meet, ways[name]) for name in names]))
    rounds = max(LEAST, min(MOST, int(budget / max(round_seconds, 1e-9))))
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect(1)  # recent garbage only: a full collection of torch's objects takes a quarter of a second
    gc.disable()
    try:
        for i in range(rounds):
            for name in names if i % 2 == 0 else reversed(names):
                times[name].append(clock(meet, ways[name]))
    finally:
        gc.enable()
    return {name: meet.slowest(seconds) for name, seconds in times.items()}


def _whole(clock: Clock, meeting: Meeting, way: Way) -> float:
    """Wall time of one sample, including barrier and gate."""
    begin = perf_counter()
    clock(meeting, way)
    return perf_counter() - begin


def host_seconds(way: Way, meeting: Meeting, device: torch.device, calls: int = 5) -> float:
    """Median host time of one eager call while the GPU is idle."""
    times = []
    for _ in range(calls):
        torch.cuda.current_stream(device).synchronize()
        times.append(host_clock(meeting, way))
    torch.cuda.current_stream(device).synchronize()
    return meeting.slowest([statistics.median(times)])[0]


def steady(seconds: Sequence[float], window: int = 4, within: float = 0.02) -> bool:
    """Whether the last `window` times are within a factor 1 + `within` of their minimum."""
    last = seconds[-window:]
    return len(last) == window and max(last) <= (1 + within) * min(last)


def warm_up(sample: Callable[[], float], most_seconds: float) -> list[float]:
    """Sample until the times are steady or their sum reaches `most_seconds`; ranks with equal samples stop together."""
    seen: list[float] = []
    while not steady(seen) and sum(seen) < most_seconds:
        seen.append(sample())
    return seen


class Rotating:
    """Each call uses the next of several copies of the operands."""

    def __init__(self, fn: Callable[..., object], operands: Sequence[tuple[Any, ...]]) -> None:
        self._fn, self._operands, self._turn = fn, operands, -1

    def __call__(self) -> object:
        self._turn = (self._turn + 1) % len(self._operands)
        return self._fn(*self._operands[self._turn])


def copies(operand_bytes: int, rotate_bytes: int) -> int:
    """Number of copies of the operands that together exceed `rotate_bytes`, at most ROTATIONS."""
    return max(1, min(ROTATIONS, ceil(rotate_bytes / max(1, operand_bytes))))


def cache_bytes(device: torch.device) -> int:
    """Size of the last-level cache: L2 of a GPU, the largest cache of a CPU (32 MiB if unknown)."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    found = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    try:
        return max([_bytes(path.read_text()) for path in found], default=32 << 20)
    except (OSError, ValueError):
        return 32 << 20


def _bytes(text: str) -> int:
    """Parses a size such as "32768K"."""
    text = text.strip()
    shift = {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0)
    return int(text.rstrip("KMG")) << shift
