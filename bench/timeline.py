"""Records and draws one chunked call of each operation on all ranks.

A shard is awaited (pale) from the beginning of the call until its sender has published it. The sender's own spans give
that time (all ranks share one clock): a gather publishes just before its first matmul, a reduce-scatter after the
matmul for that owner. Matmuls (solid) of other shards run meanwhile. To make this visible, the last rank enters each
call late, by a quarter of its usual time.
"""

from __future__ import annotations

import re
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch.distributed as dist

from fusedtp.comm import communicator

from .cases import OPERATIONS, Case, ways


class Call(NamedTuple):
    """One rank's call: its begin and end, and the spans (label, begin, end) that the operation recorded."""

    begin: float
    end: float
    spans: list[tuple[str, float, float]]

    def labelled(self, kind: str) -> dict[int, tuple[float, float]]:
        """Rank -> (begin, end) of the spans "matmul 1" or "wait 1"."""
        found = (re.fullmatch(rf"{kind} (\d+)", label) for label, _, _ in self.spans)
        return {int(m[1]): span[1:] for m, span in zip(found, self.spans) if m}


def arrivals(operation: str, calls: list[Call], rank: int) -> dict[int, float]:
    """Peer -> time at which it had published its shard to `rank`."""
    found = {}
    for p, call in enumerate(calls):
        matmuls = call.labelled("matmul")
        if p != rank:
            found[p] = matmuls[p][0] if operation == "all_gather_matmul" else matmuls[rank][1]
    return found


def overlapped(operation: str, calls: list[Call], rank: int) -> float:
    """Seconds that `rank` spent in matmuls before the last shard had arrived."""
    last = max(arrivals(operation, calls, rank).values(), default=0.0)
    return sum(max(0.0, min(end, last) - begin) for begin, end in calls[rank].labelled("matmul").values())


def record(rank: int, tokens: int, k: int, n: int) -> dict[str, list[Call]]:
    """Operation -> every rank's call. Collective."""
    group = dist.group.WORLD
    assert group is not None
    comm, world_size = communicator(group), dist.get_world_size()
    calls = {}
    for operation in OPERATIONS:
        run = ways(Case(operation, "float32", tokens, k, n, False), "chunked")["ours"]
        run(), run()
        begin = monotonic()
        run()
        usual = monotonic() - begin
        comm.timeline = []
        dist.barrier()
        begin = monotonic()
        if rank == world_size - 1:
            sleep(usual / 4)
        run()
        call = Call(begin, monotonic(), comm.timeline)
        comm.timeline = None
        every: list[Any] = [None] * world_size
        dist.all_gather_object(every, call)
        calls[operation] = every
    return calls


def draw(path: Path, calls: dict[str, list[Call]]) -> None:
    """One panel per operation, one lane per rank and kind."""
    figure, axes = plt.subplots(len(calls), 1, figsize=(9, 2.6 * len(calls)), squeeze=False, layout="constrained")
    for axis, (operation, ranks) in zip(axes[:, 0], calls.items()):
        start, lanes = min(call.begin for call in ranks), []
        for rank, call in enumerate(ranks):
            lanes += [f"rank {rank}: awaited", f"rank {rank}: runs"]
            for p, end in arrivals(operation, ranks, rank).items():
                _bar(
                    axis,
                    len(lanes) - 2,
                    call.begin - start,
                    max(call.begin, end) - start,
                    f"shard {p}",
                    p,
                    0.35,
                )
            for label, begin, end in call.spans:
                which = int(label.split()[1]) if label.startswith("matmul ") else None
                if not label.startswith("wait"):
                    _bar(axis, len(lanes) - 1, begin - start, end - start, label, which, 1.0)
        axis.set_yticks(range(len(lanes)), lanes, fontsize=8)
        axis.set(title=operation, xlabel="ms")
        axis.invert_yaxis()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _bar(axis: Any, lane: int, begin: float, end: float, label: str, p: int | None, alpha: float) -> None:
    color = "tab:gray" if p is None else f"C{p % 10}"
    axis.broken_barh([(1e3 * begin, 1e3 * (end - begin))], (lane - 0.4, 0.8), color=color, alpha=alpha)
    axis.text(5e2 * (begin + end), lane, label, ha="center", va="center", fontsize=7, clip_on=True)
