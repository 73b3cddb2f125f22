"""Rules on memory order for targets whose code is not executed: finds orders that the compiler lost or moved.

If the source itself lacks an order or a scope, running the code for sm_80 and sm_90 shows it. The rules here check that
the compiler of each target preserves the orders of the source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from fusedtp.sim.ptx import TARGETS

from .compiler import Compiled
from .listing import ATOMICS, LOADS, Finding, Instruction, Listing

EXECUTED = TARGETS  # by fusedtp.sim.ptx


def barriers(made: Compiled) -> Iterator[Finding]:
    """A block barrier separates stores from a release, and an acquire from loads, on every path.

    A release or acquire orders only the thread that executes it; the barrier extends it to the block. Source: PTX ISA,
    Memory Consistency Model, "Release and Acquire Patterns"; triton-lang/triton PRs 10816, 10415, 11591: before 3.9,
    the compiler inserts no barrier before a release.
    """
    of = made.listing.dialect
    for store, release in pending(made.listing, of.store, of.barrier, of.release):
        said = f"`{store.text}` reaches this release with no block barrier between"
        yield Finding("barrier-before-release", said, release.text, release.frames)
    for acquire, load in pending(made.listing, of.acquire, of.barrier, of.load):
        said = f"this load follows `{acquire.text}` with no block barrier between"
        yield Finding("barrier-after-acquire", said, load.text, load.frames)


def system_scope(made: Compiled) -> Iterator[Finding]:
    """If the source acquires or releases at system scope, so does the compiled code.

    Source: PTX ISA, Memory Consistency Model, "Scope"; LLVM AMDGPU memory model gfx942 (buffer_wbl2 and buffer_inv
    sc0 sc1).
    """
    of, orders = made.listing.dialect, [(op, *op.order) for op in made.source.named(*ATOMICS)]
    acquires = [op for op, acquire, _, system in orders if acquire and system]
    releases = [op for op, _, release, system in orders if release and system]
    for order, pattern, asked in (("acquire", of.acquire, acquires), ("release", of.release, releases)):
        if asked and not any(re.search(of.system, one.text) for one in made.listing.find(pattern)):
            said = f"the source {order}s at system scope, but the compiled code does not"
            yield Finding("system-scope", said, asked[0].text, asked[0].frames)


def gated_load(made: Compiled) -> Iterator[Finding]:
    """Every load of data that a peer writes comes after the acquire that guards it.

    The compiler's pipeliner may issue loads of later iterations early, across an acquire in the same loop; then the
    load also occurs before the loop. Source: triton-lang/triton, software pipeliner (num_stages), which orders loads by
    data flow only.
    """
    source, listing = made.source, made.listing
    acquires = listing.find(listing.dialect.acquire)
    ordered = [one for one in acquires if re.search(listing.dialect.system, one.text)]
    gates = {loop for one in ordered for loop in listing.loops(one)}
    for op in source.named(*LOADS):
        if "tensor<" not in op.text or not source.peers(op):
            continue
        for one in listing.of(op, listing.dialect.load):
            gate = next((loop for loop in listing.loops(one) if loop in gates), "")
            if gate and listing.ahead(one, gate):
                said = "this load is pipelined in a loop that acquires: it runs iterations ahead of the acquire"
                yield Finding("gated-load", said, one.text, op.frames)
                break


def pending(listing: Listing, what: str, cleared_by: str, at: str) -> list[tuple[Instruction, Instruction]]:
    """Pairs (first, then) of instructions: on some path, `then` (matches `at`) follows `first` (matches `what`), and no
    instruction between them matches `cleared_by`. One `first` for each `then`.
    """
    found: dict[int, tuple[Instruction, Instruction]] = {}
    entry: list[Instruction | None] = [None] * len(listing.blocks)
    reached = [False] * len(listing.blocks)
    todo = [0]
    while todo:
        number = todo.pop()
        reached[number] = True
        state = entry[number]
        for one in listing.blocks[number].instructions:
            if one.matches(at) and state is not None:
                found.setdefault(one.line, (state, one))
            if one.matches(cleared_by):
                state = None
            elif one.matches(what):
                state = one
        for successor in listing.blocks[number].successors:
            if not reached[successor] or (state is not None and entry[successor] is None):
                entry[successor] = entry[successor] or state
                todo.append(successor)
    return [found[line] for line in sorted(found)]
