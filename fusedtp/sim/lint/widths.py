"""A rule of how wide the rows move that ranks exchange: 16 bytes an instruction."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .asm import Instruction
from .compiler import Compiled
from .facts import LOADS, TMA_LOADS, Facts
from .mlir import Op
from .report import Finding
from .rule import rule

VECTOR_BYTES = 16
_TILE = re.compile(r"tensor<((?:\d+x)+)!tt\.ptr<[a-z]+(\d+)")
_LOAD = r"ld\.\S*global|cp\.async\.c[ag]\."
_STORE = r"st\.\S*global"


@rule(
    "vector-width",
    "A thread loads and stores a peer's slot 16 bytes at a time where every row begins at a multiple of 16 bytes. "
    "tl.multiple_of must stand after the cast to a pointer: on an integer before the cast the hint is lost.",
    "CUDA C++ Best Practices Guide, 'Coalesced Access to Global Memory'; PTX ISA, ld, st and cp.async: vector sizes",
)
def vector_width(made: Compiled, facts: Facts) -> Iterator[Finding]:
    if made.target.backend != "cuda" or not made.case.aligned_rows:
        return
    for op in exchanged(facts):
        want = min(VECTOR_BYTES, _bytes_per_thread(made, op))
        found = moves(made, op)
        if not found:
            yield Finding("vector-width", "no instruction has this source line", op.text, op.frames)
        for one in found:
            if width(one) < want:
                said = f"{width(one)} bytes at a time, {want} are possible"
                yield Finding("vector-width", said, one.text, op.frames)
                break


def exchanged(facts: Facts) -> list[Op]:
    """Loads and stores of tiles in memory that ranks share. TMA's copies are not among them: they have no width."""
    names = [name for name in LOADS if name not in TMA_LOADS]
    return [
        op
        for op in facts.module.named(*names, "tt.store")
        if _TILE.search(op.text) and facts.peer_visible(op)
    ]


def moves(made: Compiled, op: Op) -> list[Instruction]:
    """The instructions of a load or store, by its source line. PTX keeps only the innermost two calls of a line."""
    kind = _STORE if op.name == "tt.store" else _LOAD
    return [
        one for one in made.listing.find(kind) if one.frames and one.frames == op.frames[: len(one.frames)]
    ]


def width(one: Instruction) -> int:
    """Bytes that one instruction moves."""
    if one.text.startswith("cp.async"):
        return int(re.findall(r"(?:0x)?[0-9a-f]+", one.text.split("],")[-1])[0], 0)
    vector, bits = re.search(r"(?:\.v(\d))?\.[a-z](\d+)\s", one.text).groups()  # type: ignore[union-attr]
    return int(vector or 1) * int(bits) // 8


def _bytes_per_thread(made: Compiled, op: Op) -> int:
    """A thread's share of the tile."""
    shape, bits = _TILE.findall(op.text)[0]
    elements = 1
    for extent in shape.strip("x").split("x"):
        elements *= int(extent)
    return elements * int(bits) // 8 // (made.target.wave * made.num_warps)
