"""What `tune` and `crossover` share: ranks that time a call together, on a CPU or a GPU.

A sample is `calls` calls back to back, each with the next of several sets of operands that together exceed the last
cache, between two events of the stream (GPU) or readings of the clock (CPU); ranks meet before it, and its time is
that of the slowest. GPU clocks are warm when sampling begins, and untouched. Not measured on a GPU yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fusedtp.comm import Communicator, communicator
from fusedtp.ops.measured import SHIPPED

from . import machine, ranks
from .options import Shared, known, numbers, world_of
from .ranks import drawn
from .sample import Way, cache_bytes, copies
from .shapes import MODELS, layers

SAMPLE_SECONDS = 4e-3  # of a GPU sample at least: what starts and ends it is then below a hundredth
WARM_SECONDS = 0.5
MOST_SETS = 16


@dataclass(frozen=True)
class Rank:
    """One rank of a world, or the only one (`comm` None). All ranks call the same methods in the same order."""

    device: torch.device
    comm: Communicator | None = None
    group: Any = None

    @property
    def rank(self) -> int:
        return 0 if self.comm is None else self.comm.rank

    @property
    def world_size(self) -> int:
        return 1 if self.comm is None else self.comm.world_size

    def worst(self, seconds: Sequence[float]) -> list[float]:
        """The largest of all ranks' numbers, each."""
        everyone = [list(seconds)] if self.comm is None else self.comm.world.exchange(list(seconds))
        return [max(each) for each in zip(*everyone, strict=True)]

    def once(self, way: Way, calls: int = 1) -> float:
        """Seconds of a call on this rank, which the others make at the same time."""
        if self.comm is not None:
            self.comm.world.barrier()
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
        (seconds,) = self.worst([self.once(way)])
        return max(1, min(100, int(SAMPLE_SECONDS / max(seconds, 1e-6)))) if self.device.type == "cuda" else 1

    def rounds(
        self, ways: Mapping[str, Way], seconds: float, least: int = 3, most: int = 40
    ) -> dict[str, float]:
        """Way -> the median of its samples: rounds of one sample of each, forwards and backwards in turn."""
        calls = {name: self.calls(way) for name, way in ways.items()}
        (each,) = self.worst([sum(self.once(way, calls[name]) * calls[name] for name, way in ways.items())])
        times: dict[str, list[float]] = {name: [] for name in ways}
        for i in range(max(least, min(most, int(seconds / max(each, 1e-9))))):
            for name in ways if i % 2 == 0 else reversed(list(ways)):
                times[name].append(self.once(ways[name], calls[name]))
        return {name: median(self.worst(samples)) for name, samples in times.items()}

    def warm(self, way: Way) -> None:
        """A GPU takes a while to reach its clocks."""
        spent = 0.0 if self.device.type == "cuda" else WARM_SECONDS
        while spent < WARM_SECONDS:
            spent += max(1e-4, *self.worst([self.once(way)]))

    def sets(self, make: Callable[[int], tuple[Tensor, Tensor]]) -> Callable[[], tuple[Tensor, Tensor]]:
        """make(0), make(1), ..., in turn, as many as together exceed twice the last cache of a GPU."""
        first, most = make(0), 2 * cache_bytes(self.device) if self.device.type == "cuda" else 0
        nbytes = sum(t.numel() * t.element_size() for t in first)
        each = cycle([first, *(make(i) for i in range(1, min(MOST_SETS, copies(nbytes, most))))])
        return lambda: next(each)

    def randn(self, seed: int, dtype: str, *shape: int) -> Tensor:
        """Normal numbers of this rank."""
        return drawn(self.device, self.rank, shape, dtype, seed)


def run(device: str, world: str, count: int, fn: Callable[..., Any], *args: Any) -> Any:
    """What fn(rank, *args) returns on rank 0 of a world of `count` ranks."""
    return ranks.start(device, world, count, _member, device, fn, args)


def _member(group: Any, device: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if group is None:
        here = f"cuda:{torch.cuda.current_device()}" if device == "cuda" else "cpu"
        return fn(Rank(torch.device(here)), *args)
    comm = communicator(group)
    return fn(Rank(comm.device, comm, group), *args)


def measured(device: str, prog: str, argv: Sequence[str]) -> dict[str, Any]:
    """What a table says of how it came about."""
    about = machine.describe_run(device, [])
    processors = os.cpu_count()
    if device == "cuda":
        processors = torch.cuda.get_device_properties(0).multi_processor_count
    return {
        "device": about["gpu"] or about["cpu"],
        "processors": processors,
        "driver": (about["gpu_state"] or {}).get("driver_version"),
        "torch": about["torch"],
        "triton": about["triton"],
        "commit": about["commit"],
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": " ".join([prog, *argv]),
    }


def columns(name: str, count: int) -> list[tuple[int, int]]:
    """(N of a rank, K) of what a model multiplies after a gather: q, k, v in one; gate and up in one."""
    return [(layer.n, layer.k) for layer in layers(name, count) if layer.kind == "column"]


def sums(name: str, count: int) -> list[tuple[int, int]]:
    """(N, K of a rank) of what is summed after: o and down."""
    return [(layer.n, layer.k) for layer in layers(name, count) if layer.kind == "row"]


@dataclass(frozen=True)
class Where:
    """What `tune` and `crossover` read of their options alike."""

    models: tuple[str, ...]
    tokens: tuple[int, ...]
    ranks: tuple[int, ...]
    dtypes: tuple[str, ...]
    world: str
    folder: Path


def where(
    options: Shared,
    device: str,
    defaults: Sequence[str],
    dtypes: Sequence[str],
    out: Path | None,
    faults: list[str],
) -> Where:
    """Fill in and check; every fault is entered in `faults`.

    defaults   shapes, tokens, tp, dtype
    """
    given = (options.shapes, options.tokens, options.tp, options.dtype)
    shapes, tokens, tp, dtype = (mine or theirs for mine, theirs in zip(given, defaults, strict=True))
    models, counts = known("shapes", shapes, MODELS, faults), numbers("tp", tp, faults)
    for name in models:
        for count in counts:
            try:
                layers(name, count)
            except ValueError as error:
                faults.append(str(error))
    found = Where(
        models, numbers("tokens", tokens, faults), counts, known("dtype", dtype, dtypes, faults),
        world_of(options.world, device), folder_of(device, out, options.save, faults),
    )  # fmt: skip
    if not faults and device == "cuda" and not torch.cuda.is_available():
        faults.append("--device cuda: torch sees no GPU here")
    elif not faults and device == "cuda" and found.world == "processes":
        here = torch.cuda.device_count()
        if max(counts) > here:
            need = "processes need a GPU each"
            faults.append(f"--tp {max(counts)}: {need}, here are {here}; take --world virtual")
    return found


def folder_of(device: str, out: Path | None, save: bool, faults: list[str]) -> Path:
    """Where a table goes: bench/out/tables of a checkout, what ships with the package (--save), or elsewhere."""
    in_checkout = machine.in_checkout()
    if save and out is not None:
        faults.append("--save and --out name two folders")
    if save and device == "cpu":
        faults.append("--save keeps tables of GPUs, for others to use: take --out")
    if save and not in_checkout:
        faults.append("--save keeps a table in the repository, which is not here: take --out")
    if save:
        return SHIPPED
    return out or (machine.HERE / "out" / "tables" if in_checkout else Path("fusedtp-bench"))
