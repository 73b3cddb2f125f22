"""Rules of memory order, on TTGIR where the structure counts and on PTX or amdgcn where the instruction does."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .compiler import Compiled
from .facts import LOADS, TMA_LOADS, TMA_STORES, Atomic, Facts, holds, innermost_loop, loops_around
from .mlir import Op, Value, behind
from .report import Finding
from .rule import rule

GLOBAL_FENCE = r"fence\.proxy\.async(\.global)?\s*;"


@rule(
    "barrier-before-release",
    "Only the thread that releases a flag is ordered by it: between the other threads' stores and the release "
    "stands a block barrier, on every path.",
    "PTX ISA, Memory Consistency Model, 'Release and Acquire Patterns'; triton-lang/triton PRs 10816, 10415, 11591: "
    "the compiler puts no barrier there before 3.9",
)
def barrier_before_release(made: Compiled, facts: Facts) -> Iterator[Finding]:
    of = made.listing.dialect
    for store, release in made.listing.pending(of.store, of.barrier, of.release):
        said = f"`{store.text}` reaches this release with no block barrier between"
        yield Finding("barrier-before-release", said, release.text, release.frames)


@rule(
    "barrier-after-acquire",
    "Only the thread that acquires is ordered by it: a block barrier stands between the acquire and the other "
    "threads' loads.",
    "PTX ISA, Memory Consistency Model, 'Release and Acquire Patterns' and 'Barriers'",
)
def barrier_after_acquire(made: Compiled, facts: Facts) -> Iterator[Finding]:
    of = made.listing.dialect
    for acquire, load in made.listing.pending(of.acquire, of.barrier, of.load):
        said = f"this load follows `{acquire.text}` with no block barrier between"
        yield Finding("barrier-after-acquire", said, load.text, load.frames)


@rule(
    "system-scope",
    "An atomic on memory of another device, or that another device polls, is at system scope.",
    "PTX ISA, Memory Consistency Model, 'Scope'; LLVM AMDGPU memory model gfx942 (buffer_wbl2 and buffer_inv sc0 sc1)",
)
def system_scope(made: Compiled, facts: Facts) -> Iterator[Finding]:
    visible = [a for a in facts.atomics if facts.peer_visible(a.op)]
    for a in visible:
        if a.scope != "sys":
            said = f"{a.scope} scope orders nothing for another device"
            yield Finding("system-scope", said, a.op.text, a.op.frames)
    of = made.listing.dialect
    system = r"(?=.*\.sys)" if made.target.backend == "cuda" else r"(?=.*sc0 sc1)"
    wanted = [a for a in visible if a.scope == "sys"]
    for pattern, asked in ((of.release, "releases"), (of.acquire, "acquires")):
        if any(getattr(a, asked) for a in wanted) and not made.listing.find(system + f"({pattern})"):
            yield Finding("system-scope", f"the source {asked} at system scope, the compiled code nowhere")


@rule(
    "block-scope",
    "An atomic on global memory is seen by the other programs of the kernel: block scope (cta) orders nothing for "
    "them, and two atomics whose scopes do not include each other race.",
    "PTX ISA, Memory Consistency Model, 'Morally Strong Operations'",
)
def block_scope(made: Compiled, facts: Facts) -> Iterator[Finding]:
    for a in facts.atomics:
        if a.scope == "cta" and not facts.peer_visible(a.op):
            said = "block scope orders nothing for the other programs of the kernel"
            yield Finding("block-scope", said, a.op.text, a.op.frames)


@rule(
    "signal-order",
    "A flag that tells a peer of data is a release, a poll that waits for data an acquire; ordinary loads and "
    "relaxed atomics order nothing.",
    "PTX ISA, Memory Consistency Model, 'Synchronizes-With'",
)
def signal_order(made: Compiled, facts: Facts) -> Iterator[Finding]:
    for a in facts.atomics:
        if not a.word or not facts.peer_visible(a.op):
            continue
        if message := _weak(a):
            yield Finding("signal-order", message, a.op.text, a.op.frames)
    for spin in facts.module.named("scf.while"):
        for op in _polled(spin, _condition(spin)):
            if op.name in LOADS and facts.peer_visible(op):
                said = "this loop polls a peer's flag with an ordinary load"
                yield Finding("signal-order", said, op.text, op.frames)


def _weak(a: Atomic) -> str:
    if a.kind == "poll" and not a.acquires:
        return f"a poll of a peer's flag that is {a.sem}, not acquire"
    if a.kind == "signal" and not a.releases:
        return f"a signal to a peer that is {a.sem}, not release"
    if a.kind == "lock" and not (a.acquires or a.releases):
        return "a compare-and-swap between ranks that is relaxed"
    return ""


@rule(
    "gated-load",
    "Every copy of what a peer writes comes after the acquire that gates it: the compiler's pipeliner issues loads of "
    "later iterations early, across an acquire in the same loop.",
    "triton-lang/triton, software pipeliner (num_stages): it orders loads by data flow only",
)
def gated_load(made: Compiled, facts: Facts) -> Iterator[Finding]:
    source = Facts(made, made.ttir)
    in_source = {op.frames for op in source.gated() if _ungated(source, op)}
    from_table = Facts(made, made.ttgir, shared=())
    for op in facts.gated():
        loop = _gating_loop(facts, op)
        if _ungated(facts, op):
            if op.frames not in in_source:
                said = "the compiler issues this load ahead of the acquire that gates it"
                yield Finding("gated-load", said, op.text, op.frames)
            elif loop is not None and from_table.peer_visible(op):
                said = "this load stands before the acquire of its own iteration"
                yield Finding("gated-load", said, op.text, op.frames)
        elif loop is not None and innermost_loop(op) is loop and facts.twin_ahead(op, loop):
            said = "this load is pipelined in a loop that acquires: it runs iterations ahead of the acquire"
            yield Finding("gated-load", said, op.text, op.frames)


def _gating_loop(facts: Facts, load: Op) -> Op | None:
    """The innermost loop around a load that holds an acquire."""
    return next((loop for loop in loops_around(load) if holds(loop, facts.acquires)), None)


def _ungated(facts: Facts, load: Op) -> bool:
    """Whether no acquire stands before the load, in the innermost loop that holds one and the load."""
    loop = _gating_loop(facts, load)
    near = [a for a in facts.acquires if loop is None or a.inside(loop)]
    return bool(near) and not any(facts.before(a, load) for a in near)


@rule(
    "pipelined",
    "A matmul's loads are software-pipelined: asynchronous copies (cp.async, TMA; on AMD loads into registers) of "
    "later iterations are in flight while this one multiplies. An acquire or a barrier in the loop turns that off.",
    "triton-lang/triton, software pipeliner; PTX ISA, 'Asynchronous copy'",
)
def pipelined(made: Compiled, facts: Facts) -> Iterator[Finding]:
    for loop in _matmul_loops(facts):
        inner = [op for op in facts.loads if innermost_loop(op) is loop]
        loads = [op for op in inner if "tensor<" in op.text or op.name in TMA_LOADS]
        for op in loads:
            if made.num_stages < 2:
                yield Finding("pipelined", "num_stages is 1", op.text, op.frames)
            elif facts.twin_ahead(op, loop) is None:
                said = "no copy of this load is issued ahead of the loop"
                yield Finding("pipelined", said, op.text, op.frames)
            elif made.target.backend == "cuda" and op.name == "tt.load":
                yield Finding("pipelined", "an ordinary load, not an asynchronous copy", op.text, op.frames)


def _matmul_loops(facts: Facts) -> list[Op]:
    """The loop of each dot of the source. Of its copies, peeled iterations too, the deepest one tells which that is."""
    deepest: dict[object, Op] = {}
    for dot in sorted(facts.dots, key=lambda op: len(loops_around(op))):
        if loop := innermost_loop(dot):
            deepest[dot.frames] = loop
    return list({id(loop): loop for loop in deepest.values()}.values())


@rule(
    "tma-store",
    "What a peer reads is not stored by TMA before Triton 3.8: `wait_group.read` waits until the source may be "
    "reused, not until the data have landed.",
    "PTX ISA, cp.async.bulk.wait_group: what `.read` waits for; compiled code of Triton 3.6, 3.7 and 3.8",
)
def tma_store(made: Compiled, facts: Facts) -> Iterator[Finding]:
    releases = any(a.releases for a in facts.atomics if facts.peer_visible(a.op))
    for op in facts.module.named(*TMA_STORES):
        if releases and made.version < (3, 8) and facts.peer_visible(op):
            said = f"a TMA store of peer-visible data under Triton {made.triton}"
            yield Finding("tma-store", said, op.text, op.frames)
    if made.target.backend == "cuda" and made.version >= (3, 8):
        stores, landed = (
            r"cp\.(async|reduce\.async)\.bulk\S*\.global\S*shared",
            r"cp\.async\.bulk\.wait_group\s",
        )
        for store, release in made.listing.pending(stores, landed, made.listing.dialect.release):
            said = f"`{store.text}` may not have landed when this release is done"
            yield Finding("tma-store", said, release.text, release.frames)


@rule(
    "proxy-fence",
    "A TMA load reads through the async proxy. What a peer wrote during the kernel it may read only behind a "
    "fence.proxy.async that covers global memory, after the acquire.",
    "PTX ISA, Memory Consistency Model, 'Proxy' and membar/fence.proxy.async",
)
def proxy_fence(made: Compiled, facts: Facts) -> Iterator[Finding]:
    asm = facts.module.named("tt.elementwise_inline_asm", "ttng.fence_async")
    fences = [op for op in asm if re.search(GLOBAL_FENCE, op.text)]
    acquires = facts.acquires
    for op in facts.gated():
        if op.name not in TMA_LOADS or not acquires:
            continue
        loop = _gating_loop(facts, op)
        behind_acquire = [
            f for f in fences if any(facts.before(a, f) for a in acquires) and facts.before(f, op)
        ]
        if not any(loop is None or fence.inside(loop) for fence in behind_acquire):
            said = "a TMA load of what a peer wrote, with no fence.proxy.async after the acquire"
            yield Finding("proxy-fence", said, op.text, op.frames)


@rule(
    "bounded-spin",
    "A loop that polls has a second exit, so that a lost peer is an error and not a hang.",
    "fusedtp.kernels.signals, Note [A failed call]",
)
def bounded_spin(made: Compiled, facts: Facts) -> Iterator[Finding]:
    for spin in facts.module.named("scf.while"):
        condition = _condition(spin)
        if not any(facts.peer_visible(op) for op in _polled(spin, condition)):
            continue
        if not any(_bounds(facts, spin, factor) for factor in _factors(condition)):
            said = "this loop ends only if the peer's flag comes"
            yield Finding("bounded-spin", said, spin.text.split(" : (")[0], spin.frames)


def _condition(loop: Op) -> Value:
    return next(op for op in loop.body if op.name == "scf.condition").operands[0]


def _polled(loop: Op, condition: Value) -> list[Op]:
    """Reads of memory inside the loop on which a value depends."""
    reads = [
        v.op for v in behind(condition) if v.op is not None and v.op.name.startswith(("tt.atomic", "tt.load"))
    ]
    return [op for op in reads if op.inside(loop)]


def _factors(value: Value) -> list[Value]:
    """The terms of a conjunction."""
    if value.op is not None and value.op.name == "arith.andi":
        return [factor for part in value.op.operands for factor in _factors(part)]
    return [value]


# what gives a value of the next round that differs from this one's
_MOVES = (
    "arith.addi",
    "arith.subi",
    "arith.ori",
    "arith.select",
    "scf.if",
    "tt.atomic_rmw",
    "tt.elementwise_inline_asm",
    "tt.extern_elementwise",
)


def _bounds(facts: Facts, loop: Op, factor: Value) -> bool:
    """Whether a term changes from one round to the next for another reason than a peer."""
    if any(facts.peer_visible(op) for op in _polled(loop, factor)):
        return False
    carried = {id(value) for value in loop.carried[0]}
    values = behind(factor)
    turns = any(id(v) in carried for v in values) or any(_polled(loop, factor))
    return turns and any(v.op is not None and v.op.inside(loop) and v.op.name in _MOVES for v in values)
