"""Monitors a run: each rank's time by kind, stragglers, whether communication or compute bounds it, and loss spikes.

    watch = Watch(world, every=10, folder=runs / "main")      folder: rank 0 writes ranks.jsonl there
    watch.attach(model, pipeline, batches)                    time their communication and reading
    for step in ...:
        watch.begin()
        ... forward and backward
        watch.computed()
        with watch.clocks("norm"):                            clip; reduce norm and loss over ranks
        with watch.clocks("optimizer"):                       optimizer.step()
        numbers = watch.step(step, loss)                      this rank's seconds by kind, for its metrics
    print(watch.verdict())

| kind | what a rank did |
|---|---|
| compute | forward and backward, except for the following kinds |
| tp_wait | waited in fused operations and their plain collectives for the peers of its layers |
| pp_wait | inside a pipeline schedule but outside of its passes: bubble, sends, receives |
| dp_wait | FSDP2's all-gathers, reduce-scatters and all-reduces |
| data | read batches |
| norm | clipped, and reduced norm and loss over ranks; remaining waits for slower ranks show up here |
| optimizer | updated parameters |
| other | everything else: saving, writing metrics |

They add up to the step. Times are host times. On GPU the kernels wait, which the host cannot see: only data is measured
there, and all other kinds are None.

Note [Not finite]
How a step with a loss or gradients that are not finite is handled, and how its origin is found. A step can be skipped
only while all parameters are finite. Otherwise the run ends, before bad checkpoints replace good ones.

The gradient norm and the mean loss are the same on all ranks, so all ranks take the same branch. The step is repeated
with the same samples and the same random numbers, and hooks check the output of every module:

    a parameter was not finite before the step             report it, with the ranks that hold it
    else a module's output is not finite, its inputs are   report the first one in the forward pass, with its ranks
    else a gradient is not finite                          report the first one in the backward pass
    else                                                   the error did not repeat: hardware, or a race

This costs nothing until a step is bad. Source: Megatron repeats suspicious steps too (`rerun_state_machine`); here,
hooks provide the names.
"""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fusedtp.train.clocks import OTHER, Clocks, time_fsdp
from fusedtp.train.data import Batches, FromLoader
from fusedtp.train.mesh import World
from fusedtp.train.stages import Pipeline

RANKS = "ranks.jsonl"  # in a run's folder
WAITS = ("tp_wait", "pp_wait", "dp_wait")
OWN = ("compute", "data", "optimizer")  # a rank's own work; stragglers are slow in one of these kinds
KINDS = (OWN[0], *WAITS, *OWN[1:], "norm", OTHER)
SLOW = 2.0  # a rank is slow from this multiple of the other ranks' median,
NOTICED = 0.1  # if it also exceeds that median by this share of a step
LEAST_STEPS = 4  # steps needed to detect stragglers, unless Watch.every is smaller


# -- all ranks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """The ranks' times over some steps; `step` is the last of them.

    mean     kind -> mean seconds per step of every rank; NaN if not measured on this device
    usual    the same with the lower quartile over steps, which ignores steps with outside disturbances
    memory   peak memory of every rank in bytes
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
        """Inverse of to_dict; the means are used for `usual` too."""
        mean = {
            kind: [math.nan if value is None else float(value) for value in values]
            for kind, values in line["seconds"].items()
        }
        return Reading(line["step"], line["steps"], mean, mean, line["memory"])

    def to_dict(self) -> dict[str, Any]:
        """A line of ranks.jsonl: mean seconds, null if not measured."""
        seconds = {
            kind: [None if math.isnan(value) else value for value in values] for kind, values in self.mean.items()
        }
        return {"step": self.step, "steps": self.steps, "seconds": seconds, "memory": list(self.memory)}


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow in a kind of work: its seconds per step, and the median of the ranks it is compared with."""

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
    """The ranks that are slow in work of their own. Waits for other ranks do not identify a straggler.

    stages   pipeline rank of every rank; compute and optimizer are compared among ranks of the same pipeline rank
    cost     cost of every rank's stages; the only rank of a pipeline rank is compared with all ranks, and must be slow
             relative to its cost too
    A rank is slow if it takes at least SLOW times the median of the others and NOTICED of a step more, in three of four
    steps (lower quartile).
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
    """The lower quartile, always one of the values; the minimum of fewer than five values."""
    return sorted(values)[(len(values) - 1) // 4]


def step_of(reading: Reading, rank: int) -> dict[str, float]:
    """A rank's mean seconds per step by kind, without kinds that are not measured."""
    return {kind: each[rank] for kind, each in reading.mean.items() if not math.isnan(each[rank])}


def verdict(readings: Sequence[Reading]) -> tuple[str, dict[str, float]]:
    """(what bounds a run, shares of a step); ("not measured", ...) if waits are not measured, ("not known", {}) without
    readings.

    communication   waits of the rank that waited least: transfers, and the pipeline bubble
    slower_ranks    mean wait beyond that: for ranks that arrived later
    """
    steps = sum(reading.steps for reading in readings)
    if not steps:
        return "not known", {}
    every: dict[str, list[float]] = {
        kind: [
            sum(each.mean[kind][rank] * each.steps for each in readings) / steps for rank in range(readings[0].ranks)
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
    """The result of `verdict` as a line of text."""
    if bound == "not known":
        return "what bounds a step is not known: only the first step, the warm-up, was trained"
    if bound == "not measured":
        told = f"; reading data took {shares['data']:.0%}" if "data" in shares else ""
        return "what bounds a step is not measured on this device, because its kernels do the waiting" + told
    waits = ", ".join(f"{kind[:2]} {shares[kind]:.0%}" for kind in WAITS if shares[kind] >= 0.005)
    waited = sum(shares[kind] for kind in WAITS)
    if waits:
        waits = (
            f" ({waits}; {shares['communication']:.0%} for messages and bubbles, "
            f"{shares['slower_ranks']:.0%} for slower ranks)"
        )
    return (
        f"bound by {bound}: of a step, compute {shares['compute'] + shares['optimizer']:.0%}, waits {waited:.0%}{waits}"
        f", data {shares['data']:.0%}, norm {shares['norm']:.0%}, other {shares[OTHER]:.0%}"
    )


# -- losses ------------------------------------------------------------------------------------------------------------


class Spikes:
    """Detects loss spikes: losses more than `limit` deviations above the median of the recent losses.

    The deviation is 1.4826 times the median distance from the median (the standard deviation of a normal distribution),
    and at least one percent of the median. If the loss stays high, only the first spike is reported.
    """

    def __init__(self, window: int = 64, least: int = 16, limit: float = 6.0) -> None:
        self.recent: deque[float] = deque(maxlen=window)
        self.least, self.limit, self._high = least, limit, False

    def note(self, step: int, loss: float) -> str | None:
        """A message if the loss of this step is a spike."""
        told = None
        if len(self.recent) >= self.least:
            middle = statistics.median(self.recent)
            deviation = max(1.4826 * statistics.median(abs(each - middle) for each in self.recent), 0.01 * abs(middle))
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
    """Peak memory of this process in bytes: allocated GPU memory, or resident memory on CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0


# -- files of lines ----------------------------------------------------------------------------------------------------


class Lines:
    """A file of JSON objects, one per line.

    If it cannot be written, the run continues; stderr gets one message until writing works again.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._failed = path, False

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a line; it starts on a new line even if the last one was cut off."""
        try:
            with open(self.path, "ab+") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - 1, 0))
                begin = b"" if not size or file.read(1) == b"\n" else b"\n"
                file.write(begin + line_of(record).encode())
            self._failed = False
        except OSError as error:
            if not self._failed:
                print(f"{self.path} could not be written: {error.strerror}", file=sys.stderr)
            self._failed = True


def line_of(record: Mapping[str, Any]) -> str:
    """A record as a line of JSON; NaN and infinity, which JSON lacks, become null."""
    fine = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }
    return json.dumps(fine) + "\n"


# -- a rank ------------------------------------------------------------------------------------------------------------


class Watch:
    """Times this rank, and compares all ranks every few steps. Call `begin`, `computed` and `step` in every step.

    every     steps between comparisons of all ranks, which are collective; the last step of a run always has one
    folder    where rank 0 writes ranks.jsonl; None: nowhere
    tell      called on rank 0 with a message about a slow rank or a loss spike
    readings  readings of all ranks so far, without the first step, which warms up
    """

    def __init__(
        self,
        world: World,
        every: int = 10,
        folder: Path | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.world, self.every = world, every
        self._lines = None if folder is None else Lines(folder / RANKS)
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
        """Time the communication of these, and the reading of batches. Call before the first step."""
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
        """A step begins: book time as compute, except where another kind is given."""
        self.clocks.base("compute")
        self._waited = self.world.wait_seconds() or 0.0

    def computed(self) -> None:
        """Forward and backward are done."""
        self.clocks.base(OTHER)
        self._slept = (self.world.wait_seconds() or 0.0) - self._waited

    def step(self, step: int, loss: float, last: bool = False) -> dict[str, float | None]:
        """A step is done: its seconds by kind, and peak memory. Collective in steps that compare all ranks."""
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
        if not self._warm:
            return "no step was trained"
        return in_words(*verdict(self.readings))

    def _sees(self, kind: str) -> bool:
        return self.measured or kind == "data"

    def _look(self, step: int, memory: int) -> None:
        """Gather all ranks' times since the last call, write them, and report stragglers. Collective."""
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
        if self._lines is not None and self.world.rank == 0:
            self._lines.append(reading.to_dict() | {"hosts": self._hosts, "time": time.time()})
        places = [rank // (self.world.dp * self.world.tp) for rank in range(self.world.size)]
        found = []
        if reading.steps >= min(LEAST_STEPS, self.every):
            found = stragglers(reading, places if self.world.pp > 1 else None, every[-1])
        for each in found:
            if (each.rank, each.kind) not in self._named:
                self._tell(f"step {step + 1}: {each.in_words(self._hosts[each.rank])}")
        self._named = {(each.rank, each.kind) for each in found}


# -- numbers that are not finite ---------------------------------------------------------------------------------------

SKIPS_IN_A_ROW = 10  # consecutive skipped steps after which the run ends even with --on-nan skip


class NotFinite(RuntimeError):
    """A step's loss or gradients were not finite, and the run stops."""


@dataclass(frozen=True)
class Event:
    """A value that is not finite: a module's output, or the gradient of an output.

    order      position of the module call in that pass; the same on ranks with the same layers
    made       whether the module's inputs were finite, so that it made the value itself
    """

    order: int
    name: str
    microbatch: int
    made: bool = True


@dataclass
class Found:
    """The values that are not finite in a rank's part of the model."""

    rank: int
    host: str
    parameters: list[str] = field(default_factory=list)
    forward: Event | None = None
    backward: Event | None = None
    gradients: list[str] = field(default_factory=list)


def finite(value: Any) -> bool:
    """Whether all tensors of a nested value are finite; of a DTensor, only the local shard is checked."""
    tensors = [each for each in tree_leaves(value) if isinstance(each, Tensor) and each.is_floating_point()]
    return all(bool(_local(each).isfinite().all()) for each in tensors)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def find_not_finite(model: nn.Module, again: Callable[[], Any], rank: int = 0) -> Found:
    """Repeat a step's forward and backward, and find the first value on this rank that is not finite.

    Compiled blocks run eagerly. Gradients are cleared before and after. Collective if `again` is.
    """
    found = Found(rank, socket.gethostname())
    found.parameters = [name for name, p in model.named_parameters() if not finite(p.detach())]
    model.zero_grad()
    with _hooked(model, found), torch.random.fork_rng(), torch.compiler.set_stance("force_eager"):
        again()
    found.gradients = [name for name, p in model.named_parameters() if p.grad is not None and not finite(p.grad)]
    model.zero_grad()
    return found


@contextmanager
def _hooked(model: nn.Module, found: Found) -> Iterator[None]:
    """In this context, hooks record in `found` the first output and the first gradient that are not finite."""
    calls, orders = Counter[str](), Counter[str]()

    def after(name: str, module: nn.Module, args: Any, options: Any, output: Any) -> None:
        orders["forward"] += 1
        calls[name] += 1
        if found.forward is None and not finite(output):
            made = finite((args, options))
            found.forward = Event(orders["forward"], name, calls[name] - 1, made)
        for each in tree_leaves(output):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(partial(back, name, calls[name] - 1))

    def back(name: str, microbatch: int, gradient: Tensor) -> None:
        orders["backward"] += 1
        if found.backward is None and not finite(gradient):
            found.backward = Event(orders["backward"], name, microbatch)

    handles = [
        module.register_forward_hook(partial(after, name), with_kwargs=True)
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def where_not_finite(found: Sequence[Found]) -> str:
    """A message from the findings of all ranks: the module or parameter where it began, and the ranks."""
    if any(each.parameters for each in found):
        held = [f"{_first(each.parameters)} of rank {each.rank} ({each.host})" for each in found if each.parameters]
        return "parameters were not finite before the step: " + "; ".join(held)
    for direction, what in (("forward", "the output of"), ("backward", "the gradient that arrives at")):
        events = [(getattr(each, direction), each) for each in found]
        events = [(event, each) for event, each in events if event is not None]
        events = [(event, each) for event, each in events if event.made] or events
        if not events:
            continue
        first = min(event.order for event, _ in events)
        same = [(event, each) for event, each in events if event.order == first]
        ranks = ", ".join(f"{each.rank} ({each.host})" for _, each in same)
        of = "all ranks" if len(same) == len(found) > 1 else ("rank " if len(same) == 1 else "ranks ") + ranks
        event = same[0][0]
        return f"it began in {direction} with {what} {event.name}, microbatch {event.microbatch}, on {of}"
    if any(each.gradients for each in found):
        held = [f"{_first(each.gradients[::-1])} on rank {each.rank}" for each in found if each.gradients]
        return "every module's output is finite, but these gradients are not: " + "; ".join(held)
    return "the same step, repeated, is finite: an error of memory, of a link or of timing, not of the numbers"


def _first(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


class Guard:
    """Handles steps that are not finite. tell: called on rank 0 with a message for each skipped step."""

    def __init__(
        self,
        world: World,
        on_nan: Literal["stop", "skip"] = "stop",
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.world, self.on_nan = world, on_nan
        self._tell = tell if world.rank == 0 else lambda line: None
        self.skipped, self._row = 0, 0

    def takes(
        self,
        step: int,
        loss: float,
        norm: float,
        model: nn.Module,
        again: Callable[[], Any],
        scaled: bool = False,
    ) -> bool:
        """Whether the optimizer may take this step; if not, its gradients are cleared. Raises NotFinite to stop.

        loss, norm   mean loss and gradient norm over all ranks
        again        repeats the step's forward and backward
        scaled       fp16: if only gradients are not finite, leave the decision to the loss scale
        """
        if math.isfinite(loss) and (scaled or math.isfinite(norm)):
            self._row = 0
            return True
        self.skipped, self._row = self.skipped + 1, self._row + 1
        found = self.world.gather_objects(find_not_finite(model, again, self.world.rank))
        line = f"step {step + 1}: the loss is {loss:g}, the norm of the gradients {norm:g}; {where_not_finite(found)}"
        if self.on_nan == "skip" and any(each.parameters for each in found):
            raise NotFinite(
                line + "; skipping steps cannot repair parameters: resume an earlier checkpoint with --resume --step"
            )
        if self.on_nan == "stop":
            raise NotFinite(line + "; --on-nan skip would skip such steps")
        if self._row == SKIPS_IN_A_ROW:
            raise NotFinite(f"{line}; {SKIPS_IN_A_ROW} steps in a row were skipped")
        self._tell(line + "; the step was skipped")
        return False
