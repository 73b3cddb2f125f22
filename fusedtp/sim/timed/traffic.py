"""The cost of a segment and the route of its bytes: matmuls, the SM's bandwidth, memories, links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..faults import UnsupportedKernel
from .account import DOT, PREFETCH, SPREAD, STALL, STORE, SUM, Entry
from .actor import Gpu
from .node import Node
from .share import Share


@dataclass
class Cost:
    """alone       seconds if nothing is shared
    products    seconds of matmuls
    missed      bytes of loads from local memory that miss the cache
    prefetched  bytes prefetched from local memory; nothing waits for them
    loaded      bytes from other ranks' memories, by rank
    stored      bytes to all ranks' memories, by rank
    summed      bytes that a switch sums over all ranks' memories
    spread      bytes that a switch writes to all ranks' memories
    """

    alone: float = 0.0
    products: float = 0.0
    missed: int = 0
    prefetched: int = 0
    loaded: Counter[int] = field(default_factory=Counter)
    stored: Counter[int] = field(default_factory=Counter)
    summed: int = 0
    spread: int = 0

    def away(self, rank: int) -> bool:
        """Whether any bytes cross a link."""
        return self.summed + self.spread > 0 or any(other != rank for other in (*self.loaded, *self.stored))


class Traffic:
    """Computes costs and shared transfers; counts FLOPs by rank, and bytes by (source, destination).

    Bytes that a switch sums or spreads are not counted by destination.
    """

    def __init__(self, node: Node, gpus: Sequence[Gpu]) -> None:
        self._node, self._gpus = node, gpus
        self.sent: Counter[tuple[int, int]] = Counter()

    def cost(self, rank: int, entries: Sequence[Entry]) -> Cost:
        """The cost of a program's entries. Raises UnsupportedKernel for matmuls in a dtype of unknown rate."""
        gpu, node, cost = self._gpus[rank], self._node, Cost()
        moved = stalls = 0
        for what, where, amount, key in entries:
            if what == DOT:
                cost.products += amount / self._rate(str(where))
                gpu.flops += amount
            elif what == STALL:
                stalls += amount
            elif what == PREFETCH:
                cost.prefetched += amount
            else:
                moved += amount
                owner = int(where or 0)
                if what == STORE:
                    cost.stored[owner] += amount
                elif what == SUM:
                    cost.summed += amount
                elif what == SPREAD:
                    cost.spread += amount
                elif owner != rank:
                    cost.loaded[owner] += amount
                else:
                    assert key is not None
                    cost.missed += gpu.missed(key, amount)
        latency = 2 * node.link_latency if cost.loaded or cost.summed else node.memory_latency
        cost.alone = stalls * latency + max(cost.products, moved / node.sm_bandwidth)
        return cost

    def _rate(self, dtype: str) -> float:
        """The matmul rate of one SM."""
        known = self._node.flops
        name = "fp32" if dtype == "tf32" and dtype not in known else dtype
        if name not in known:
            raise UnsupportedKernel(
                f"machine {self._node.name} has no matmul rate for {dtype}, only for {', '.join(known)}"
            )
        return known[name] / self._node.sms

    def loads(self, rank: int, cost: Cost) -> Iterator[tuple[Share, int]]:
        """Transfers that the segment waits for."""
        if cost.missed:
            yield self._gpus[rank].memory, cost.missed
        for owner, nbytes in cost.loaded.items():
            for share in (self._gpus[owner].memory, *self._link(owner, rank, nbytes)):
                yield share, nbytes
        if cost.summed:  # every memory sends its bytes to the switch, which forwards the sum
            yield self._gpus[rank].ingress, cost.summed
            for gpu in self._gpus:
                yield gpu.memory, cost.summed
                yield gpu.egress, cost.summed

    def stores(self, rank: int, cost: Cost) -> Iterator[tuple[Share, int, float]]:
        """Transfers that start with the segment, and the latency until each has landed."""
        for owner, nbytes in cost.stored.items():
            latency = self._node.link_latency if owner != rank else 0.0
            for share in (self._gpus[owner].memory, *self._link(rank, owner, nbytes)):
                yield share, nbytes, latency
        if cost.spread:
            yield self._gpus[rank].egress, cost.spread, self._node.link_latency
            for gpu in self._gpus:
                yield gpu.memory, cost.spread, self._node.link_latency
                yield gpu.ingress, cost.spread, self._node.link_latency

    def prefetch(self, rank: int, cost: Cost) -> tuple[Share, int, float]:
        """The transfer of a prefetch, and its duration if it is alone."""
        return self._gpus[rank].memory, cost.prefetched, cost.prefetched / self._node.sm_bandwidth

    def copy(self, rank: int, source: int, to: int, nbytes: int) -> list[Share]:
        """The resources that a copy by this rank's engines passes through."""
        ends = (self._gpus[source].memory, self._gpus[to].memory)
        return [self._gpus[rank].engines, *ends, *self._link(source, to, nbytes)]

    def _link(self, source: int, to: int, nbytes: int) -> tuple[Share, ...]:
        if source == to:
            return ()
        self.sent[source, to] += nbytes
        return self._gpus[source].egress, self._gpus[to].ingress
