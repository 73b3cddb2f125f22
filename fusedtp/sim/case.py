"""What to simulate: launches of every rank, the memory they share, and what must come out."""

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
    """A kernel on a stream of a rank.

    kernel    of triton.jit, under triton.autotune and triton.heuristics or not
    grid      1 to 3 numbers, or a function of the arguments that returns them
    args      by name, tensors on the CPU
    options   of the compiler (num_warps, num_stages, maxnreg), and launch_cooperative_grid
    tuned     the config of an autotuned kernel: a triton.Config, or its number; None: every config in turn, a
              schedule each
    replace   device function -> what is called in its place, of triton.jit or the language, or None for nothing: for
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
    """Of a kernel, decorated by autotune, heuristics and their like or not."""
    while not hasattr(kernel, "__name__") and inside(kernel) is not None:
        kernel = inside(kernel)
    return str(getattr(kernel, "__name__", "kernel"))


def inside(kernel: Any) -> Any:
    """What a decorator wraps, or None. jit_func: of torch's requires_nvshmem."""
    return getattr(kernel, "fn", None) or getattr(kernel, "jit_func", None)


@dataclass(frozen=True)
class Copy:
    """A copy by a copy engine, in `pieces` that land one after another. Tensors of one shape, contiguous."""

    dst: Tensor
    src: Tensor
    pieces: int = 1
    stream: str = "0"


@dataclass(frozen=True)
class Signal:
    """A flag written by the stream, at system scope, after all that came before it there."""

    flag: Tensor  # one element of an int32 or int64 tensor, as a view
    value: int
    stream: str = "0"
    fence: bool = True  # whether that is released by it; False: CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER


@dataclass(frozen=True)
class Await:
    """The stream waits until the flag compares so with `value`, and acquires.

    by   ">=" in arithmetic that wraps, "==", "!=", "&" (a common bit) or "nor" (some bit in neither): CUDA Driver API,
         CUstreamWaitValue_flags, and its opposite of EQ
    """

    flag: Tensor
    value: int
    stream: str = "0"
    by: str = ">="

    def __post_init__(self) -> None:
        if self.by not in COMPARED:
            raise ValueError(f"a wait by {self.by!r}; it must be one of {', '.join(COMPARED)}")

    def over(self, seen: int) -> bool:
        """Whether the wait ends at this value."""
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

    work     one list a rank: what its streams do, in order of issue
    memory   what kernels reach by address rather than by argument
    check    called after the schedule; raises or returns mismatches where the result is wrong; True and False are
             refused
    failures what kernels wrote down of waits that failed, in words: called after the schedule and where one ends with
             another fault, which may have come of that
    """

    work: Sequence[Sequence[Work]]
    memory: Sequence[Memory] = ()
    check: Callable[[], Sequence[Mismatch] | None] | None = None
    failures: Callable[[], Sequence[str]] | None = None


def memory_map(run: Run, more: Iterable[tuple[str, int, Tensor]] = ()) -> Map:
    """All memory that a run names. Raises ValueError where it has not one tensor a rank, or a copy or flag is amiss.

    more   memory that launches allocate for their kernels: name, rank and tensor, which nobody has written yet
    """
    found, world_size = Map(), len(run.work)
    for memory in run.memory:
        if len(memory.tensors) != world_size:
            raise ValueError(f"memory {memory.name!r} has {len(memory.tensors)} tensors, the world {world_size} ranks")
        for rank, tensor in enumerate(memory.tensors):
            found.add_slice(memory.name, rank, tensor, memory.poisoned)
        if "_window" in vars(memory):  # somebody asked for its multicast address
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
                    raise ValueError(f"rank {rank} copies tensors not of one shape and dtype, contiguous, in pieces")
                found.add("copied to", rank, work.dst)
                found.add("copied from", rank, work.src)
            elif work.flag.numel() != 1 or work.flag.dtype not in (torch.int32, torch.int64):
                raise ValueError(f"rank {rank} has a flag that is no single element of int32 or int64")
            else:
                found.add("flag", rank, work.flag)
    found.freeze()
    return found


@dataclass(frozen=True)
class Case:
    """A named way to make runs. `make()` allocates anew each time and does the same every time.

    Raises ValueError from `explore` if `make` gives a run without `check`: a schedule that compares nothing would
    prove little.
    """

    name: str
    make: Callable[[], Run]


def compare(name: str, got: Sequence[Tensor], want: Sequence[Tensor]) -> list[Mismatch]:
    """Mismatches of every rank's output with its reference, bit for bit (NaN equals NaN)."""
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
