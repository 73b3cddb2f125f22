"""Watches a run: where each rank's time goes, who is slow, whether communication or compute bounds it, and its losses.

    watch = Watch(world, every=10, folder=runs / "main")      folder: rank 0 writes ranks.jsonl there
    watch.attach(model, pipeline, batches)                    what they wait for is timed
    for step in ...:
        watch.begin()
        ... forward and backward
        watch.computed()
        with watch.clocks("norm"):                            clip; agree on norm and loss
        with watch.clocks("optimizer"):                       optimizer.step()
        numbers = watch.step(step, loss)                      this rank's seconds by kind, for its metrics
    print(watch.verdict())

| kind | what a rank did |
|---|---|
| compute | forward and backward, without what follows |
| tp_wait | slept in fused operations and their plain collectives, for the peers of its layers |
| pp_wait | inside a pipeline's schedule, outside of its passes: the bubble, sends, receives |
| dp_wait | FSDP2's gathers, scatters and reductions |
| data | read batches |
| norm | clipped, and agreed on norm and loss with the others: what is left of waiting for slower ranks falls here |
| optimizer | updated parameters |
| other | the rest: saving, writing what was measured |

They add up to the step. Times are the host's. On a GPU kernels wait, where no host sees it: what it sees there is data
alone, and all other kinds are None.
"""

from __future__ import annotations

import json
import math
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusedtp.train.clocks import OTHER, Clocks, time_fsdp
from fusedtp.train.data import Batches
from fusedtp.train.loader import FromLoader
from fusedtp.train.stages import Pipeline
from fusedtp.train.world import World

RANKS = "ranks.jsonl"  # of a run's folder
WAITS = ("tp_wait", "pp_wait", "dp_wait")
OWN = ("compute", "data", "optimizer")  # what a rank spends by itself; a rank is slow in one of them
KINDS = (OWN[0], *WAITS, *OWN[1:], "norm", OTHER)
SLOW = 2.0  # times the median of the other ranks is slow
NOTICED = 0.1  # if it also is this share of a step above that median


# -- all ranks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """The ranks' times over some steps, the last of which is `step`.

    mean     kind -> a step's seconds of every rank; NaN where a device does not measure them
    usual    the same, but the lower quartile of the steps: a step that something else disturbed does not show
    memory   most bytes that every rank has used
    """

    step: int
    steps: int
    mean: Mapping[str, Sequence[float]]
    usual: Mapping[str, Sequence[float]]
    memory: Sequence[float]

    @property
    def ranks(self) -> int:
        return len(self.memory)

    @staticmethod
    def from_dict(line: Mapping[str, Any]) -> Reading:
        """What to_dict made; its means stand for what is usual too."""
        mean = {
            kind: [math.nan if value is None else float(value) for value in values]
            for kind, values in line["seconds"].items()
        }
        return Reading(line["step"], line["steps"], mean, mean, line["memory"])

    def to_dict(self) -> dict[str, Any]:
        """As a line of ranks.jsonl: seconds are means, null where they are not measured."""
        seconds = {
            kind: [None if math.isnan(value) else value for value in values]
            for kind, values in self.mean.items()
        }
        return {"step": self.step, "steps": self.steps, "seconds": seconds, "memory": list(self.memory)}


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow in a kind of work: its seconds a step, and the median of the ranks it was compared to."""

    rank: int
    kind: str
    seconds: float
    others: float

    def in_words(self, host: str) -> str:
        times = f"{self.seconds / self.others:.1f} times" if self.others > 0 else "without"
        return (
            f"rank {self.rank} on {host} is slow in {self.kind}: {self.seconds * 1e3:.1f} ms a step, {times} the "
            f"{self.others * 1e3:.1f} ms of the other ranks"
        )


def stragglers(
    reading: Reading, stages: Sequence[int] | None = None, cost: Sequence[float] | None = None
) -> list[Straggler]:
    """The ranks that are slow in work of their own; what ranks wait for each other says nothing about them.

    stages   of every rank, the place in the pipeline; compute is compared with the ranks of the same one
    cost     of every rank's stages; a place that has one rank is compared with all, and must be slow for its cost too
    A rank counts as slow at SLOW times the median of the others, if that is NOTICED of a step more; its usual steps
    must be so, three of four.
    """
    total = statistics.fmean(sum(step_of(reading, rank).values()) for rank in range(reading.ranks))
    found = []
    for kind in OWN:
        seconds = reading.usual[kind]
        for rank, own in enumerate(seconds):
            others = [each for each in range(reading.ranks) if each != rank]
            scaled = False
            if kind != "data" and stages is not None:
                same = [each for each in others if stages[each] == stages[rank]]
                scaled, others = not same, same or others
            if not others or math.isnan(own):
                continue
            middle = statistics.median(seconds[each] for each in others)
            slow = own >= SLOW * middle and own - middle >= NOTICED * total
            if slow and scaled and cost is not None:
                for_cost = statistics.median(seconds[each] / cost[each] for each in others)
                slow = own / cost[rank] >= SLOW * for_cost
            if slow:
                found.append(Straggler(rank, kind, own, middle))
    return found


def lower_quartile(values: Sequence[float]) -> float:
    """Of the values that are there, one that a quarter of them are not above; of fewer than five, the least."""
    return sorted(values)[(len(values) - 1) // 4]


def step_of(reading: Reading, rank: int) -> dict[str, float]:
    """A rank's mean seconds of a step by kind, those that are measured."""
    return {kind: each[rank] for kind, each in reading.mean.items() if not math.isnan(each[rank])}


def verdict(readings: Sequence[Reading]) -> tuple[str, dict[str, float]]:
    """What bounds a run, and the shares of a step that say so; ("not measured", ...) where waits are not.

    communication   the waits of the rank that waited least: transfers, and a pipeline's bubble
    slower_ranks    what ranks waited beyond that, in the mean: for ranks that came later
    """
    steps = sum(reading.steps for reading in readings)
    if not steps:
        return "not measured", {}
    every: dict[str, list[float]] = {
        kind: [
            sum(each.mean[kind][rank] * each.steps for each in readings) / steps
            for rank in range(readings[0].ranks)
        ]
        for kind in KINDS
    }
    mean = {kind: statistics.fmean(values) for kind, values in every.items()}
    total = sum(value for value in mean.values() if not math.isnan(value))
    if any(math.isnan(mean[kind]) for kind in KINDS if kind not in ("data",)):
        return "not measured", {"data": mean["data"] / total if total else 0.0}
    waited = [sum(every[kind][rank] for kind in WAITS) for rank in range(readings[0].ranks)]
    shares = {kind: value / total for kind, value in mean.items()}
    shares |= {
        "communication": min(waited) / total,
        "slower_ranks": (statistics.fmean(waited) - min(waited)) / total,
    }
    of = {
        "compute": shares["compute"] + shares["optimizer"],
        "communication": shares["communication"],
        "slower ranks": shares["slower_ranks"],
        "data": shares["data"],
        "other work": shares[OTHER] + shares["norm"],
    }
    return max(of, key=of.__getitem__), shares


def in_words(bound: str, shares: Mapping[str, float]) -> str:
    """A verdict with its evidence, in a line."""
    if bound == "not measured":
        told = f"; reading data took {shares['data']:.0%}" if "data" in shares else ""
        return "what bounds a step is not measured on this device, where kernels wait" + told
    waits = ", ".join(f"{kind[:2]} {shares[kind]:.0%}" for kind in WAITS if shares[kind] >= 0.005)
    waited = sum(shares[kind] for kind in WAITS)
    return (
        f"bound by {bound}: of a step, compute {shares['compute'] + shares['optimizer']:.0%}, waits {waited:.0%}"
        + (f" ({waits}; {shares['slower_ranks']:.0%} for slower ranks)" if waits else "")
        + f", data {shares['data']:.0%}, norm {shares['norm']:.0%}, other {shares[OTHER]:.0%}"
    )


# -- losses ------------------------------------------------------------------------------------------------------------


class Spikes:
    """Notes a loss that stands out of the last ones: more than `limit` deviations above their median.

    The deviation is 1.4826 times the median distance from the median, that of a normal distribution, and at least one
    percent of the median. Of losses that stay high, the first is noted.
    """

    def __init__(self, window: int = 64, least: int = 16, limit: float = 6.0) -> None:
        self.recent: deque[float] = deque(maxlen=window)
        self.least, self.limit, self._high = least, limit, False

    def note(self, step: int, loss: float) -> str | None:
        """A line about the loss of a step where it is a spike."""
        told = None
        if len(self.recent) >= self.least:
            middle = statistics.median(self.recent)
            deviation = max(
                1.4826 * statistics.median(abs(each - middle) for each in self.recent), 0.01 * abs(middle)
            )
            high = loss - middle > self.limit * deviation
            if high and not self._high:
                told = (
                    f"step {step + 1}: the loss jumped to {loss:.4g}, {(loss - middle) / deviation:.0f} deviations "
                    f"above {middle:.4g}, the median of the last {len(self.recent)} steps"
                )
            self._high = high
        if math.isfinite(loss):
            self.recent.append(loss)
        return told


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has had: of the GPU's memory, or resident on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0


# -- a rank ------------------------------------------------------------------------------------------------------------


class Watch:
    """This rank's times, and every so many steps those of all ranks. `begin`, `computed` and `step` in every step.

    every     steps between two looks at all ranks, which are collective; the last step of a run is one in any case
    folder    where rank 0 writes ranks.jsonl; None: nowhere
    tell      called on rank 0 with a line: a rank that is slow, a loss that jumps
    readings  of all ranks so far. The first step, which warms up, is in none
    """

    def __init__(
        self,
        world: World,
        every: int = 10,
        folder: Path | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.world, self.every, self.folder = world, every, folder
        self._tell = tell if world.rank == 0 else lambda line: None
        self.measured = world.device.type == "cpu"
        self.clocks, self.spikes, self.readings = Clocks(), Spikes(), list[Reading]()
        self._rows: list[list[float]] = []
        self._warm, self._named = False, set[tuple[int, str]]()
        self._cost = 1.0
        self._hosts: list[str] = []
        self._before = self.clocks.read()
        self._waited = self._slept = world.wait_seconds() or 0.0

    def attach(
        self, model: nn.Module, pipeline: Pipeline | None = None, batches: Batches | FromLoader | None = None
    ) -> None:
        """Time what these wait for and do. Before the first step."""
        if batches is not None:
            batches.clocks = self.clocks
        if not self.measured:
            return
        if pipeline is not None:
            pipeline.clocks = self.clocks
            if pipeline.cost is not None:
                self._cost = sum(pipeline.cost[stage] for stage in pipeline.here)
        if self.world.dp > 1:
            mesh = self.world.shard_mesh
            time_fsdp(model, self.clocks, copies=mesh is not None and mesh.ndim > 1)

    def begin(self) -> None:
        """A step begins: what follows is compute, but for what says that it is something else."""
        self.clocks.base("compute")
        self._waited = self.world.wait_seconds() or 0.0

    def computed(self) -> None:
        """Forward and backward are done."""
        self.clocks.base(OTHER)
        self._slept = (self.world.wait_seconds() or 0.0) - self._waited

    def step(self, step: int, loss: float, last: bool = False) -> dict[str, float | None]:
        """A step is done: its seconds of every kind since the one before, and the most memory. Collective at times."""
        now = self.clocks.read()
        seconds = {kind: now.get(kind, 0.0) - self._before.get(kind, 0.0) for kind in KINDS}
        self._before = now
        seconds["compute"] -= self._slept
        seconds["tp_wait"] = self._slept
        memory = peak_memory(self.world.device)
        if self._warm:
            self._rows.append([seconds[kind] if self._sees(kind) else math.nan for kind in KINDS])
        self._warm = True
        if self._rows and (last or len(self._rows) == self.every):
            self._look(step, memory)
        if (line := self.spikes.note(step, loss)) is not None:
            self._tell(line)
        numbers: dict[str, float | None] = {
            f"{kind}_seconds": seconds[kind] if self._sees(kind) else None for kind in KINDS
        }
        return numbers | {"peak_memory": memory}

    def verdict(self) -> str:
        """What bounds the run, with its evidence."""
        return in_words(*verdict(self.readings))

    def _sees(self, kind: str) -> bool:
        return self.measured or kind == "data"

    def _look(self, step: int, memory: int) -> None:
        """Gather all ranks' times since the last look; write them, and name who is slow. Collective."""
        columns = list(zip(*self._rows, strict=True))
        own = [*map(statistics.fmean, columns), *map(lower_quartile, columns), memory, self._cost]
        every = list(zip(*self.world.gather(own), strict=True))
        count = len(KINDS)
        reading = Reading(
            step, len(self._rows), dict(zip(KINDS, every[:count], strict=True)),
            dict(zip(KINDS, every[count : 2 * count], strict=True)), every[-2],
        )  # fmt: skip
        self._rows = []
        self.readings.append(reading)
        if not self._hosts:
            self._hosts = self.world.gather_objects(socket.gethostname())
        if self.folder is not None and self.world.rank == 0:
            with open(self.folder / RANKS, "a") as file:
                file.write(json.dumps(reading.to_dict() | {"hosts": self._hosts, "time": time.time()}) + "\n")
        places = [rank // (self.world.dp * self.world.tp) for rank in range(self.world.size)]
        found = stragglers(reading, places if self.world.pp > 1 else None, every[-1])
        for each in found:
            if (each.rank, each.kind) not in self._named:
                self._tell(f"step {step + 1}: {each.in_words(self._hosts[each.rank])}")
        self._named = {(each.rank, each.kind) for each in found}
