"""Interleaved samples of several ways to do one thing.

A round takes one sample of every way, forwards and backwards in turn, so that whatever else the machine does meets
all of them alike. Ranks meet at a barrier before each sample; its time is that of the slowest rank.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist

LEAST, MOST = 3, 60  # rounds


@dataclass(frozen=True)
class Spread:
    """Seconds: the median of `samples` samples and its quartiles."""

    median: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, seconds: list[float]) -> Spread:
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(statistics.median(seconds), low, high, len(seconds))

    def __str__(self) -> str:
        return f"{1e3 * self.median:.2f} +-{5e2 * (self.high - self.low):.2f}"


def _slowest(seconds: list[float]) -> list[float]:
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()


def _timed(way: Callable[[], object]) -> float:
    dist.barrier()
    begin = perf_counter()
    way()
    return perf_counter() - begin


def interleave(ways: Mapping[str, Callable[[], object]], budget: float) -> dict[str, list[float]]:
    """Way -> seconds of each sample, in about `budget` seconds. Collective; all ranks get the same answer."""
    names = list(ways)
    for name in names:  # the first call grows workspaces and connects
        ways[name]()
    round_seconds = sum(_slowest([_timed(ways[name]) for name in names]))
    rounds = max(LEAST, min(MOST, int(budget / round_seconds)))
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            for name in names if i % 2 == 0 else reversed(names):
                times[name].append(_timed(ways[name]))
    finally:
        gc.enable()
    return {name: _slowest(seconds) for name, seconds in times.items()}
