"""Translates a kernel's PTX into Python functions, one per basic block.

A block ends at a jump or a barrier, and before an instruction that may observe other programs, where the machine may
switch to another program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from ..faults import Site
from . import access, copies, descriptors, multimem, numerics, tensor_core
from .access import counted, is_shared, is_strong
from .alu import VIEWS, Emitter, size_of, typed
from .parse import Address, Imm, Instruction, Listing, Operand, Reg, Symbol, Vector, parse

JUMPS = ("bra", "ret", "exit")
BARRIERS = ("bar", "barrier")


@dataclass(frozen=True, slots=True)
class Block:
    """run(lanes) executes the block for all lanes; then comes `end`: a jump, a barrier, or None.

    pauses   other programs may run before the block
    target   of the jump; jumps: whether `end` is a jump; count: number of instructions; site: of the first one
    """

    run: Callable[[Any], None]
    end: Instruction | None
    pauses: bool
    target: int
    jumps: bool
    count: int
    site: Site


@dataclass
class Kernel:
    """A translated kernel. bodies: the instructions of each block without its end."""

    listing: Listing
    blocks: tuple[Block, ...]
    bodies: list[list[Instruction]]

    @cached_property
    def masked(self) -> list[Callable[[Any, Any], None]]:
        """run(lanes, mask) of each block, for diverged lanes."""
        return _functions(self.listing, self.bodies, every=False)

    @cached_property
    def specialized(self) -> bool:
        """Whether the kernel is warp-specialized: its warps run different code and use barriers of some warps."""
        barriers = [i for i in self.listing.instructions if i.root in BARRIERS and not i.has("warp")]
        first = [i for i in barriers if i.args and isinstance(i.args[0], Imm) and int(i.args[0].text, 0) == 0]
        return len(first) < len(barriers) or any(i.root == "setmaxnreg" for i in self.listing.instructions)

    @cached_property
    def grain(self) -> int:
        """Bytes of the smallest load or store of shared memory, at most 4."""
        accesses = [i for i in self.listing.instructions if i.root in ("ld", "st") and is_shared(i)]
        return min([4, *(size_of(typed(i)) * counted(i) for i in accesses)])

    @cached_property
    def by_tma(self) -> bool:
        """Whether the kernel copies by TMA, which accesses global memory through the async proxy."""
        return any(i.root == "cp" and i.has("bulk") for i in self.listing.instructions)


@lru_cache(maxsize=256)
def translated(text: str, shared: int) -> Kernel:
    """Translates the kernel of a PTX text. Raises UnsupportedPtx naming the opcode and its source line."""
    listing = parse(text, shared)
    instructions = listing.instructions
    starts = {0, *listing.labels.values(), len(instructions)}
    starts |= {number for number, i in enumerate(instructions) if is_strong(i)}
    starts |= {number + 1 for number, i in enumerate(instructions) if _ends_block(i)}
    numbered = {start: number for number, start in enumerate(sorted(starts))}
    labels = {name: numbered[at] for name, at in listing.labels.items()}
    spans = [instructions[start:stop] for start, stop in pairwise(numbered)]
    ends = [span[-1] if _ends_block(span[-1]) else None for span in spans]
    bodies = [span if end is None else span[:-1] for span, end in zip(spans, ends)]
    blocks = []
    for run, span, end in zip(_functions(listing, bodies, every=True), spans, ends):
        jumps = end is not None and end.root in JUMPS
        blocks.append(Block(run, end, is_strong(span[0]), _target(end, labels), jumps, len(span), span[0].site))
    return Kernel(listing, tuple(blocks), bodies)


def _ends_block(i: Instruction) -> bool:
    return i.root in (*JUMPS, *BARRIERS) and not i.has("warp")


def _functions(listing: Listing, bodies: list[list[Instruction]], every: bool) -> list[Any]:
    """One function per block: f(lanes) if `every`, else f(lanes, mask)."""
    emitter = Emitter(every, _unread(listing))
    source = []
    for number, body in enumerate(bodies):
        lines = _lines(emitter, body)
        views = [v for v in VIEWS if any(f"{v}[" in line for line in lines)]
        source.append(f"def b{number}(S{'' if every else ', m'}):")
        source += [f"    {v} = S.views[{v!r}]" for v in views]
        source += [f"    {line}" for line in lines or ["pass"]]
    names = {**vars(numerics), **vars(tensor_core), **vars(multimem), "np": np, "K": emitter.constants}
    exec(compile("\n".join(source) + "\n", f"<{listing.name}>", "exec"), names)
    return [names[f"b{number}"] for number in range(len(bodies))]


def _unread(listing: Listing) -> frozenset[Operand]:
    """Registers that are written but never read: they occur only as first operands."""
    written: set[Operand] = set()
    read: set[Operand] = {i.guard for i in listing.instructions if i.guard is not None}
    for i in listing.instructions:
        for n, x in enumerate(i.args):
            writes = n == 0 and not isinstance(x, Address) and i.root not in (*BARRIERS, *JUMPS, "call")
            (written if writes else read).update(_registers(x))
    return frozenset(written - read)


def _registers(x: Operand) -> Iterator[Reg]:
    if isinstance(x, Reg):
        yield x
    for each in x.items if isinstance(x, Vector) else (x.base, *x.coordinates) if isinstance(x, Address) else ():
        yield from _registers(each)


def _lines(emitter: Emitter, body: list[Instruction]) -> list[str]:
    """Lines of Python for a block. Merges consecutive independent mma instructions into one call."""
    runs: list[list[Instruction]] = []
    written: set[Operand] = set()
    for i in body:
        products = i.root == "mma" and i.guard is None
        read = {x for arg in i.args[1:4] for x in emitter.items(arg)}
        if products and runs and runs[-1][0].op == i.op and runs[-1][0].guard is None and not read & written:
            runs[-1].append(i)
        else:
            runs.append([i])
            written = set()
        written |= set(emitter.items(i.args[0])) if products else set()
    lines: list[str] = []
    for run in runs:
        one = tensor_core.products(emitter, run) if len(run) > 1 else None
        lines += one or emitter.guarded(run[0])
    return lines


def _target(end: Instruction | None, labels: dict[str, int]) -> int:
    if end is None or end.root != "bra":
        return -1
    (label,) = end.args
    if not isinstance(label, Symbol) or label.name not in labels:
        raise end.unsupported("label")
    return labels[label.name]


HANDLED_BY = (access, copies, descriptors, tensor_core)  # importing them registers their opcodes
