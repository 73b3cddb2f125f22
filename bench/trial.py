"""What `tune` and `crossover` share: ranks that time a call together, on a CPU or a GPU.

A sample is `calls` calls back to back, each with the next of several sets of operands that together exceed the last
cache, between two events of the stream (GPU) or readings of the clock (CPU); ranks meet before it, and its time is
that of the slowest. GPU clocks are warm when sampling begins, and untouched. Not measured on a GPU yet.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusedtp.comm import Communicator, VirtualWorld, communicator
from fusedtp.ops.measured import SHIPPED

from . import machine
from .world import pin, run_ranks

HERE = Path(__file__).resolve().parent
Way = Callable[[], object]
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
        made = [make(0)]
        if self.device.type == "cuda":
            cache = torch.cuda.get_device_properties(self.device).L2_cache_size
            nbytes = sum(t.numel() * t.element_size() for t in made[0])
            made += [make(i) for i in range(1, min(MOST_SETS, 1 + -(-2 * cache // max(1, nbytes))))]
        each = cycle(made)
        return lambda: next(each)

    def randn(self, seed: int, dtype: str, *shape: int) -> Tensor:
        """Normal numbers of this rank."""
        generator = torch.Generator(self.device).manual_seed(1000 * seed + self.rank)
        return torch.randn(shape, generator=generator, device=self.device).to(getattr(torch, dtype))


def run(device: str, world: str, ranks: int, fn: Callable[..., Any], *args: Any) -> Any:
    """What fn(rank, *args) returns on rank 0 of "processes" or of a "virtual" world of this process."""
    if ranks == 1 and device == "cuda":
        return fn(Rank(torch.device("cuda", torch.cuda.current_device())), *args)
    if world == "virtual":
        return VirtualWorld(ranks, device, timeout_s=600.0).run(lambda group: _member(group, fn, args))[0]
    return run_ranks(_process, ranks, device, fn, args)


def _process(rank: int, device: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if device == "cuda":
        torch.cuda.set_device(rank)
        return _member(dist.new_group(backend="nccl"), fn, args)
    pin(rank)
    if dist.get_world_size() == 1:
        return fn(Rank(torch.device("cpu")), *args)
    return _member(dist.group.WORLD, fn, args)


def _member(group: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    comm = communicator(group)
    return fn(Rank(comm.device, comm, group), *args)


def measured(device: str, prog: str, argv: Sequence[str]) -> dict[str, Any]:
    """What a table says of how it came about."""
    about = machine.describe(1, list(argv))
    gpu = device == "cuda" and torch.cuda.get_device_properties(0)
    return {
        "device": gpu.name if gpu else about["cpu"],
        "processors": gpu.multi_processor_count if gpu else os.cpu_count(),
        "driver": _driver() if gpu else None,
        "torch": about["torch"],
        "triton": _triton(),
        "commit": about["commit"],
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": " ".join([prog, *argv]),
    }


def _driver() -> str | None:
    query = ["nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _triton() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


@dataclass(frozen=True)
class Model:
    """Sizes as in config.json."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 128

    def columns(self, ranks: int) -> list[tuple[int, int]]:
        """(N of a rank, K) of what is multiplied after a gather: q, k, v in one; gate and up in one."""
        heads = self.heads // ranks + 2 * max(1, self.kv_heads // ranks)
        return [(heads * self.head_dim, self.hidden), (2 * self.intermediate // ranks, self.hidden)]

    def rows(self, ranks: int) -> list[tuple[int, int]]:
        """(N, K of a rank) of what is summed after: o and down."""
        return [(self.hidden, self.heads // ranks * self.head_dim), (self.hidden, self.intermediate // ranks)]


MODELS = {  # from the config.json of these models on huggingface.co
    "llama3-8b": Model(4096, 14336, 32, 8),
    "llama3-70b": Model(8192, 28672, 64, 8),
    "llama3-405b": Model(16384, 53248, 128, 8),
    "qwen3-0.6b": Model(1024, 3072, 16, 8),
    "qwen3-8b": Model(4096, 12288, 32, 8),
    "qwen3-32b": Model(5120, 25600, 64, 8),
    "tiny": Model(32, 48, 2, 2, 16),
}


def chosen(device: str) -> str:
    """ "auto" as the device that is here."""
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def world_faults(device: str, world: str, ranks: Sequence[int]) -> list[str]:
    """Why these ranks cannot run here."""
    if device == "cuda" and not torch.cuda.is_available():
        return ["--device cuda: torch sees no GPU here"]
    if device == "cuda" and world == "processes" and max(ranks) > torch.cuda.device_count():
        here = torch.cuda.device_count()
        return [f"--tp {max(ranks)}: processes need a GPU each, here are {here}; take --world virtual"]
    return []


def items(text: str) -> tuple[str, ...]:
    """What a list of the command line names."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(name: str, text: str, faults: list[str]) -> tuple[int, ...]:
    """The same of positive whole numbers; what is none is entered in `faults`."""
    wrong = [item for item in items(text) if not item.isdigit() or int(item) < 1]
    faults += [f"--{name} {item!r} is no positive whole number" for item in wrong]
    if not items(text):
        faults.append(f"--{name} names none")
    return tuple(int(item) for item in items(text) if item not in wrong)


def known(name: str, text: str, names: Iterable[str], faults: list[str]) -> tuple[str, ...]:
    """The same of names out of a list."""
    wrong = [item for item in items(text) if item not in names]
    faults += [f"--{name} {item!r} is none of {', '.join(names)}" for item in wrong]
    return tuple(item for item in items(text) if item not in wrong)


def folder_of(device: str, out: Path | None, save: bool, faults: list[str]) -> Path:
    """Where a table goes: bench/out/tables of a checkout, what ships with the package (--save), or elsewhere."""
    in_checkout = (HERE.parent / "pyproject.toml").exists()
    if save and out is not None:
        faults.append("--save and --out name two folders")
    if save and device == "cpu":
        faults.append("--save keeps tables of GPUs, for others to use: take --out")
    if save and not in_checkout:
        faults.append("--save keeps a table in the repository, which is not here: take --out")
    if save:
        return SHIPPED
    return out or (HERE / "out" / "tables" if in_checkout else Path("fusedtp-bench"))


def before_cuda() -> None:
    """Streams of virtual ranks that share a connection, or load a module lazily, would wait for each other."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
