"""A kernel's PTX as Python functions, one a block of instructions without a jump.

A block ends at a jump or a barrier, and before an instruction that may see what other programs do at that moment: there
the machine can let another program run.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from ..faults import Site
from . import access, copies, descriptors, multimem, numerics, tensor_core
from .access import is_strong
from .alu import VIEWS, Emitter
from .parse import Address, Imm, Instruction, Listing, Operand, Reg, Symbol, Vector, parse

JUMPS = ("bra", "ret", "exit")
BARRIERS = ("bar", "barrier")


@dataclass(frozen=True, slots=True)
class Block:
    """run(lanes), of all lanes; then `end`: a jump or barrier, or None.

    pauses   others may run before it
    target   of the jump; jumps: whether `end` is one; count: instructions, the first of which stands at `site`
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
    """A translated kernel. shared: bytes; maps: of its TMA descriptors, see `launch.compiled`.

    bodies   instructions of the blocks, without their ends
    scratch  bytes of global memory of its own that each program is given
    """

    listing: Listing
    shared: int
    blocks: tuple[Block, ...]
    bodies: list[list[Instruction]]
    maps: tuple[dict[str, Any], ...] = ()
    scratch: int = 0

    @cached_property
    def masked(self) -> list[Callable[[Any, Any], None]]:
        """run(lanes, mask) of each block, for those of its lanes that a branch has sent there."""
        return _functions(self.listing, self.bodies, every=False)

    @cached_property
    def specialized(self) -> bool:
        """Whether its warps do different things, and meet at barriers of some of them."""
        return any(
            i.root == "setmaxnreg" or (i.root in BARRIERS and not _is_first(i)) for i in self.listing.instructions
        )

    @cached_property
    def reads_async(self) -> bool:
        """Whether it has a wgmma or a copy by TMA, which read shared memory by the async proxy."""
        return self.by_tma or any(i.root == "wgmma" for i in self.listing.instructions)

    @cached_property
    def by_tma(self) -> bool:
        """Whether it copies by TMA, which reaches global memory by the async proxy."""
        return any(i.root == "cp" and i.has("bulk") for i in self.listing.instructions)


def _is_first(i: Instruction) -> bool:
    return i.has("warp") or (bool(i.args) and isinstance(i.args[0], Imm) and int(i.args[0].text, 0) == 0)


@lru_cache(maxsize=256)
def translated(text: str, shared: int, maps: str = "()", scratch: int = 0) -> Kernel:
    """The kernel of a PTX text. maps: a literal. Raises UnsupportedPtx naming the opcode and its source line."""
    listing = parse(text, shared)
    instructions = listing.instructions
    starts = {0, *listing.labels.values()}
    for number, i in enumerate(instructions):
        if i.root in (*JUMPS, *BARRIERS) and not i.has("warp"):
            starts.add(number + 1)
        if is_strong(i):
            starts.add(number)
    ordered = sorted(start for start in starts if start < len(instructions))
    numbered = {start: number for number, start in enumerate(ordered)}
    labels = {
        name: next((numbered[s] for s in ordered if s >= at), len(ordered)) for name, at in listing.labels.items()
    }
    bodies, parts = [], []
    for start, stop in zip(ordered, [*ordered[1:], len(instructions)], strict=True):
        body = instructions[start:stop]
        end = body[-1] if body[-1].root in (*JUMPS, *BARRIERS) and not body[-1].has("warp") else None
        bodies.append(body[:-1] if end is not None else body)
        jumps = end is not None and end.root in JUMPS
        parts.append((end, is_strong(body[0]), _target(end, labels), jumps, len(body), body[0].site))
    functions = _functions(listing, bodies, every=True)
    blocks = tuple(Block(run, *part) for run, part in zip(functions, parts, strict=True))
    return Kernel(listing, listing.shared, blocks, bodies, ast.literal_eval(maps), scratch)


def _functions(listing: Listing, bodies: list[list[Instruction]], every: bool) -> list[Any]:
    """One of each block: of the lanes, all of them, or of the lanes and a mask."""
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
    """Registers that instructions only write: they are first operands alone."""
    written, read = set[Operand](), set[Operand]()

    def collect(x: Operand, to: set[Operand]) -> None:
        inner = x.items if isinstance(x, Vector) else (x.base, *x.coordinates) if isinstance(x, Address) else ()
        for each in inner:
            collect(each, read if isinstance(x, Address) else to)
        if isinstance(x, Reg):
            to.add(x)

    for i in listing.instructions:
        for n, x in enumerate(i.args):
            collect(x, written if n == 0 and i.root not in (*BARRIERS, *JUMPS, "call") else read)
        read |= {i.guard} if i.guard is not None else set()
    return frozenset(written - read)


def _lines(emitter: Emitter, body: list[Instruction]) -> list[str]:
    """Consecutive products of tensor cores that do not depend on each other become one."""
    lines: list[str] = []
    at = 0
    while at < len(body):
        run = [body[at]]
        if run[0].root == "mma" and run[0].guard is None:
            written: set[Operand] = set(emitter.items(run[0].args[0]))
            while at + len(run) < len(body):
                following = body[at + len(run)]
                read = {x for arg in following.args[1:4] for x in emitter.items(arg)}
                if following.op != run[0].op or following.guard is not None or read & written:
                    break
                written |= set(emitter.items(following.args[0]))
                run.append(following)
            made = tensor_core.products(emitter, run)
            if made is None:
                raise run[0].unsupported()
            lines += made
        else:
            lines += emitter.guarded(run[0])
        at += len(run)
    return lines


def _target(end: Instruction | None, labels: dict[str, int]) -> int:
    if end is None or end.root != "bra":
        return -1
    (label,) = end.args
    if not isinstance(label, Symbol) or label.name not in labels:
        raise end.unsupported("label")
    return labels[label.name]


HANDLED_BY = (access, copies, descriptors, tensor_core)  # whose opcodes are known once they are imported
