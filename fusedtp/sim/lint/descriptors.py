"""Rules of what a kernel asks of TMA: that it gets the copies, ahead of their use, and warps of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .compiler import Compiled
from .facts import TMA_LOADS, Facts, holds, innermost_loop
from .mlir import Op
from .report import Finding
from .rule import rule

_BLOCK = re.compile(r"-> !ttg\.memdesc<([\dx]+x\w+),")


@rule(
    "tma",
    "On sm_90 and later a matmul loop's loads by descriptor are TMA copies into one of several buffers, so that those "
    "of later iterations are in flight; a loop that asks to be warp-specialised is.",
    "triton-lang/triton, software pipeliner and automatic warp specialisation; PTX ISA, cp.async.bulk.tensor",
)
def tma(made: Compiled, facts: Facts) -> Iterator[Finding]:
    if made.target.name not in ("sm_90", "sm_100"):
        return
    source = Facts(made, made.ttir)
    copies: dict[object, Op] = {}
    for op in facts.module.named(*TMA_LOADS):
        copies.setdefault(op.frames, op)
    for op in source.module.named("tt.descriptor_load"):
        loop = innermost_loop(op)
        if loop is None or not holds(loop, source.dots):
            continue
        copy = copies.get(op.frames)
        if copy is None:
            yield Finding("tma", "this load by descriptor is no TMA copy", op.text, op.frames)
            continue
        if _buffers(facts, copy) < 2:
            yield Finding(
                "tma", "a TMA copy into the only buffer: nothing is in flight", copy.text, copy.frames
            )
    if "{tt.warp_specialize" in made.files["ttir"] and not facts.module.named("ttg.warp_specialize"):
        yield Finding("tma", "a loop that asks to be warp-specialised is not")


def _buffers(facts: Facts, copy: Op) -> int:
    """How many blocks the memory has that a copy goes to, by their shape."""
    block = _BLOCK.search(copy.text)
    if block is None:
        return 0
    sizes = re.compile(rf"memdesc<(\d+)x{block[1]},")
    found = (sizes.search(op.text) for op in facts.module.named("ttg.local_alloc"))
    return max((int(m[1]) for m in found if m), default=1)
