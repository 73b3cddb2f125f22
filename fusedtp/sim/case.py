"""What to simulate: the launches of every rank, the memory they share, and a check of the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .faults import Mismatch as Mismatch
from .memory import Map, Memory


@dataclass(frozen=True)
class Launch:
    """A kernel launch on a stream of a rank.

    kernel    a triton.jit function, optionally wrapped by triton.autotune and triton.heuristics
    grid      1 to 3 numbers, or a function of the arguments that returns them
    args      arguments by name; tensors are on the CPU
    options   compiler options (num_warps, num_stages, maxnreg), and launch_cooperative_grid
    tuned     the config of an autotuned kernel: a triton.Config or its index; None: cycle through all configs, one
              per schedule
    replace   device function -> its replacement (a triton.jit or language function), or None to drop the call; for
              external libraries, which do not exist on a CPU (nvshmem.py has some bodies)
    """

    kernel: Any
    grid: int | tuple[int, ...] | Callable[[dict[str, Any]], Any]
    args: dict[str, Any]
    stream: str = "0"
    options: dict[str, int] = field(default_factory=dict)
    tuned: Any = None
    replace: Mapping[Any, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return name_of(self.kernel)

    @property
    def shape(self) -> tuple[int, int, int]:
        assert not callable(self.grid), "launching.plain calls it"
        grid = (self.grid,) if isinstance(self.grid, int) else tuple(self.grid)
        x, y, z = (*grid, 1, 1)[:3]
        return x, y, z


def name_of(kernel: Any) -> str:
    """The name of a kernel, with or without decorators such as autotune and heuristics."""
    while not hasattr(kernel, "__name__") and inside(kernel) is not None:
        kernel = inside(kernel)
    return str(getattr(kernel, "__name__", "kernel"))


def inside(kernel: Any) -> Any:
    """The function that a decorator wraps, or None. jit_func is an attribute of torch's requires_nvshmem."""
    return getattr(kernel, "fn", None) or getattr(kernel, "jit_func", None)


@dataclass(frozen=True)
class Copy:
    """A copy by a copy engine, in `pieces` that land one after another. Both tensors: same shape, contiguous."""

    dst: Tensor
    src: Tensor
    pieces: int = 1
    stream: str = "0"


@dataclass(frozen=True)
class Signal:
    """The stream writes a flag at system scope, after all earlier work of the stream."""

    flag: Tensor  # one element of an int32 or int64 tensor, as a view
    value: int
    stream: str = "0"
    fence: bool = True  # the write releases that work; False: CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER


@dataclass(frozen=True)
class Await:
    """The stream waits until the flag satisfies the comparison `by` with `value`, then acquires.

    by   ">=" (wrapping arithmetic), "==", "&" (a common bit) or "nor" (some bit set in neither), as in the CUDA
         Driver API's CUstreamWaitValue_flags; also "!="
    """

    flag: Tensor
    value: int
    stream: str = "0"
    by: str = ">="

    def __post_init__(self) -> None:
        if self.by not in COMPARED:
            raise ValueError(f"by is {self.by!r}; it must be one of {', '.join(COMPARED)}")

    def over(self, seen: int) -> bool:
        """Whether this value ends the wait."""
        bits = 8 * self.flag.element_size()
        return COMPARED[self.by](seen % (1 << bits), self.value % (1 << bits), bits)


COMPARED: dict[str, Callable[[int, int, int], bool]] = {
    ">=": lambda seen, value, bits: (seen - value) % (1 << bits) < 1 << (bits - 1),
    "==": lambda seen, value, bits: seen == value,
    "!=": lambda seen, value, bits: seen != value,
    "&": lambda seen, value, bits: seen & value != 0,
    "nor": lambda seen, value, bits: (seen | value) != (1 << bits) - 1,
}

Work = Launch | Copy | Signal | Await


@dataclass(frozen=True)
class Run:
    """One fresh instance of a case.

    work     one list per rank: the work of its streams, in order of issue
    memory   memory that kernels reach by address rather than by argument
    check    called after the schedule; raises or returns mismatches if the result is wrong; True and False are
             refused
    failures returns the failed waits that kernels recorded, in words; called after the schedule, and also when it
             ends with another fault, because the failed wait may have caused that fault
    """

    work: Sequence[Sequence[Work]]
    memory: Sequence[Memory] = ()
    check: Callable[[], Sequence[Mismatch] | None] | None = None
    failures: Callable[[], Sequence[str]] | None = None


def memory_map(run: Run, more: Iterable[tuple[str, int, Tensor]] = ()) -> Map:
    """All memory that a run names. Raises ValueError for a memory without one tensor per rank, a bad copy or flag.

    more   memory that launches allocate for their kernels: name, rank and tensor; not written yet
    """
    found, world_size = Map(), len(run.work)
    for memory in run.memory:
        if len(memory.tensors) != world_size:
            raise ValueError(f"memory {memory.name!r} has {len(memory.tensors)} tensors for {world_size} ranks")
        for rank, tensor in enumerate(memory.tensors):
            found.add_slice(memory.name, rank, tensor, memory.poisoned)
        if "_window" in vars(memory):  # its multicast address was requested
            found.multicasts.append((memory.multicast, memory.nbytes, memory.pointers.tolist()))
    for name, rank, tensor in more:
        found.add_slice(name, rank, tensor, poisoned=True)
    for rank, of_rank in enumerate(run.work):
        for work in of_rank:
            if isinstance(work, Launch):
                for name, value in work.args.items():
                    found.add_arguments(name, rank, value)
            elif isinstance(work, Copy):
                kinds = {(each.shape, each.dtype, each.is_contiguous()) for each in (work.dst, work.src)}
                if len(kinds) > 1 or not work.src.is_contiguous() or work.pieces < 1:
                    raise ValueError(f"rank {rank}: dst, src must be contiguous, of one shape and dtype, pieces >= 1")
                found.add("copied to", rank, work.dst)
                found.add("copied from", rank, work.src)
            elif work.flag.numel() != 1 or work.flag.dtype not in (torch.int32, torch.int64):
                raise ValueError(f"rank {rank}: a flag must be a single element of int32 or int64")
            else:
                found.add("flag", rank, work.flag)
    found.freeze()
    return found


@dataclass(frozen=True)
class Case:
    """A named way to make runs. Each call of `make()` allocates new memory and returns the same run.

    `explore` raises ValueError if `make` returns a run without `check`: a schedule that compares nothing proves
    little.
    """

    name: str
    make: Callable[[], Run]


def compare(name: str, got: Sequence[Tensor], want: Sequence[Tensor]) -> list[Mismatch]:
    """Compares every rank's output with its reference bit for bit (NaN equals NaN); returns the mismatches."""
    found = []
    for rank, (g, w) in enumerate(zip(got, want, strict=True)):
        if g.shape != w.shape or g.dtype != w.dtype:
            shapes = f"{tuple(g.shape)} {g.dtype}, its reference {tuple(w.shape)} {w.dtype}"
            raise ValueError(f"{name} of rank {rank} is {shapes}")
        differ = ~((g == w) | ((g != g) & (w != w)))
        if bool(differ.any()):
            index = tuple(torch.atleast_1d(differ).nonzero()[0].tolist())
            seen, wanted, count = torch.atleast_1d(g)[index], torch.atleast_1d(w)[index], int(differ.sum())
            found.append(Mismatch(name, rank, index, str(wanted.item()), str(seen.item()), count, seen.data_ptr()))
    return found
