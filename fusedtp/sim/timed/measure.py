"""One operation timed: fused, its parts alone, how much of the communication is hidden, and what the end waited for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .cases import ENGINE, GATHER, PROGRAMS, REDUCE, Problem, fused_run, matmul_run
from .engine import Engine
from .node import Node
from .timeline import Timeline


@dataclass(frozen=True)
class Measured:
    """Times in seconds.

    matmul          the same products by the plain kernel on all SMs
    collective      by a library, on its own
    communication   the faster of that and of plain copies
    """

    problem: Problem
    fused: Timeline
    matmul: float
    collective: float
    communication: float

    @property
    def unfused(self) -> float:
        """The library's collective and the product, one after the other."""
        return self.matmul + self.collective

    @property
    def hidden(self) -> float:
        """Share of the shorter of the two parts that fusing hides; negative where fusing costs more than it hides."""
        parts = self.communication, self.matmul
        return (sum(parts) - self.fused.total) / min(parts)


def collective_time(problem: Problem, node: Node) -> float:
    """A library's all-gather, reduce-scatter or all-reduce (the other two in turn) of the problem, by its best ring."""
    hops = (problem.world_size - 1) * (2 if problem.operation == REDUCE else 1)
    rings = node.collectives.values()
    return min(r["start"] + hops * r["hop"] + problem.traffic / r["bandwidth"] for r in rings)


def copies_time(problem: Problem, node: Node) -> float:
    """Plain copies of what each rank needs from its peers, by a copy engine."""
    starts = (problem.world_size - 1) * node.copy_latency
    rate = min(node.link_bandwidth, node.copy_bandwidth)
    return starts + problem.traffic / rate + node.link_latency


def measure(problem: Problem, node: Node, *, matmul: float | None = None, exact: bool = False) -> Measured:
    """Run the operation and its parts. `matmul`: the time of the products alone, if it is known."""
    if matmul is None:
        matmul = Engine(matmul_run(problem, node), node, exact=exact).run().total
    fused = Engine(fused_run(problem, node), node, exact=exact).run()
    collective = collective_time(problem, node)
    return Measured(problem, fused, matmul, collective, min(collective, copies_time(problem, node)))


COMPARISONS = ("none", "transport", "chunk", "programs", "order", "all")


def alternatives(problem: Problem, node: Node, compare: str) -> Iterator[tuple[str, Problem]]:
    """The problem as launched, then with other choices. Raises ValueError for what the operation does not have."""
    gather = problem.operation == GATHER
    if compare not in COMPARISONS:
        raise ValueError(f"comparison {compare!r}; known are {', '.join(COMPARISONS)}")
    if compare == "transport" and not gather:
        raise ValueError(f"{problem.operation} has one transport: its programs store to the owner")
    yield "as launched", problem
    seen = {problem}
    for choice in COMPARISONS[1:-1] if compare == "all" else (compare,):
        if gather or choice != "transport":
            for name, other in _others(problem, node, choice):
                if other not in seen:
                    yield name, other
                seen.add(other)


def compared(problem: Problem, node: Node, compare: str) -> Iterator[tuple[str, Measured]]:
    """The alternatives measured, all beside the product of the problem as launched."""
    matmul = None
    for name, variant in alternatives(problem, node, compare):
        got = measure(variant, node, matmul=matmul)
        matmul = got.matmul
        yield name, got


def _others(problem: Problem, node: Node, compare: str) -> Iterator[tuple[str, Problem]]:
    config, gather = problem.chosen(node), problem.operation == GATHER
    if compare == "transport":
        other = PROGRAMS if problem.transport == ENGINE else ENGINE
        yield other, replace(problem, transport=other, config=None)
    elif compare == "chunk":
        what = "rows" if gather else "tiles"
        for times in (0.25, 0.5, 2, 4):
            chunk = max(1, int(config.chunk * times))
            if chunk != config.chunk:
                yield f"{chunk} {what} a flag", replace(problem, config=replace(config, chunk=chunk))
    elif compare == "programs":
        for count in (4, 8, 12, 24, 32) if gather else (8, 16, 32, 132):
            changed = replace(config, other_programs=count)
            if gather:
                changed = replace(config, send_programs=count, other_programs=node.sms - count)
            if changed != config and changed.other_programs > 0:
                name = "sending" if gather else "reducing"
                yield f"{count} programs {name}", replace(problem, config=changed)
    elif compare == "order":
        for group in (1, 4, 16):
            yield f"tiles in groups of {group} rows", replace(problem, config=replace(config, group=group))
        if gather:
            engine = replace(problem, transport=ENGINE, config=None)
            yield "copy engine, successor first", engine
            yield "copy engine, rank 0 first", replace(engine, order="same")
