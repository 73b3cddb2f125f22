"""Rules of memory order for the targets whose code is not executed: what the compiler may have lost or moved there.

Orders and scopes that the source itself lacks show where the same kernel runs as compiled for sm_80 and sm_90. Here
are the laws that each target's compiler has to keep.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .compiler import Compiled
from .listing import ATOMICS, LOADS, Finding, Instruction, Listing

EXECUTED = ("sm_80", "sm_90")  # by fusedtp.sim.ptx


def barriers(made: Compiled) -> Iterator[Finding]:
    """Only the thread that releases or acquires is ordered by it: a block barrier stands between it and the others.

    Between stores and a release, and between an acquire and loads, on every path. Source: PTX ISA, Memory Consistency
    Model, "Release and Acquire Patterns"; triton-lang/triton PRs 10816, 10415, 11591: the compiler puts no barrier
    before a release before 3.9.
    """
    of = made.listing.dialect
    for store, release in pending(made.listing, of.store, of.barrier, of.release):
        said = f"`{store.text}` reaches this release with no block barrier between"
        yield Finding("barrier-before-release", said, release.text, release.frames)
    for acquire, load in pending(made.listing, of.acquire, of.barrier, of.load):
        said = f"this load follows `{acquire.text}` with no block barrier between"
        yield Finding("barrier-after-acquire", said, load.text, load.frames)


def system_scope(made: Compiled) -> Iterator[Finding]:
    """What the source orders at system scope, the compiled code does.

    Source: PTX ISA, Memory Consistency Model, "Scope"; LLVM AMDGPU memory model gfx942 (buffer_wbl2 and buffer_inv
    sc0 sc1).
    """
    of, orders = made.listing.dialect, [(op, *op.order) for op in made.source.named(*ATOMICS)]
    acquires = [op for op, acquire, _, system in orders if acquire and system]
    releases = [op for op, _, release, system in orders if release and system]
    for order, pattern, asked in (("acquire", of.acquire, acquires), ("release", of.release, releases)):
        if asked and not any(re.search(of.system, one.text) for one in made.listing.find(pattern)):
            said = f"the source {order}s at system scope, the compiled code nowhere"
            yield Finding("system-scope", said, asked[0].text, asked[0].frames)


def gated_load(made: Compiled) -> Iterator[Finding]:
    """Every copy of what a peer writes comes after the acquire that gates it.

    The compiler's pipeliner issues loads of later iterations early, across an acquire in the same loop: then the load
    stands ahead of the loop as well. Source: triton-lang/triton, software pipeliner (num_stages), which orders loads by
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
    """Pairs (first, then): on some path `then`, matching `at`, follows `first`, matching `what`, with nothing that
    matches `cleared_by` between them. One `first` for each `then`.
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
