"""The actions of one pipeline step: when each rank ran which pass of which stage and microbatch.

    with recording(stages, mesh, device) as timeline:     stages: torch's PipelineStage, of this rank
        schedule.step(...)
    timeline.gathered()                                   every rank's actions

torch's schedules call three methods of a stage, one a pass. `recording` puts a clock around them on these instances and
takes it away again, so that other steps run as they always do. Send and receive are outside of the methods: time
between two actions of a rank is what it waited, sent and received.

Ranks meet in a barrier before the recorded step, and seconds count from there. On a CPU the clock is the host's, the
same for all ranks of a machine. On a GPU, events are recorded on the stream that computes, and read after the step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"  # B is I and W in one
PASSES = {  # torch's methods; backward_one_chunk(full_backward=False) is I
    "forward_one_chunk": FORWARD,
    "backward_one_chunk": BACKWARD,
    "backward_weight_one_chunk": WEIGHT,
}

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # the same for all processes that share CLOCK_MONOTONIC


class Action(NamedTuple):
    """A pass of a stage. rank: of the pipeline. kind: F, B, I or W. begin, end: seconds since the step began."""

    rank: int
    stage: int
    kind: str
    microbatch: int
    begin: float
    end: float


class Timeline:
    """What this rank does, from `start` on."""

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self.mesh, self.device = mesh, device
        self._marks: list[tuple[int, str, int, Any, Any]] = []
        self._start: Any = None

    def start(self) -> None:
        """Meet the other ranks; time counts from here. Collective."""
        group = self.mesh.get_group()
        dist.barrier(group)
        self._start = self._now()
        if self.device.type != "cuda":
            every: list[Any] = [None] * self.mesh.size()
            machine = BOOT_ID.read_text()
            dist.all_gather_object(every, (machine, self._start), group=group)
            self._start = max(start for where, start in every if where == machine)

    def timed(self, stage: int, name: str, method: Any, microbatch: int, *args: Any, **options: Any) -> Any:
        """Call a method of a stage."""
        begin = self._now()
        result = method(microbatch, *args, **options)
        kind = INPUT if options.get("full_backward") is False else PASSES[name]
        self._marks.append((stage, kind, microbatch, begin, self._now()))
        return result

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _seconds(self, mark: Any) -> float:
        if self.device.type != "cuda":
            return float(mark - self._start)
        return float(self._start.elapsed_time(mark)) / 1e3

    def actions(self) -> list[Action]:
        """Of this rank, in their order."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        rank = self.mesh.get_local_rank()
        return [
            Action(rank, stage, kind, microbatch, self._seconds(begin), self._seconds(end))
            for stage, kind, microbatch, begin, end in self._marks
        ]

    def gathered(self) -> list[Action]:
        """Of all ranks of the pipeline. Collective."""
        every: list[Any] = [None] * self.mesh.size()
        dist.all_gather_object(every, self.actions(), group=self.mesh.get_group())
        return [action for part in every for action in part]


@contextmanager
def recording(stages: Sequence[Any], mesh: DeviceMesh, device: torch.device) -> Iterator[Timeline]:
    """Within, the passes of these stages are timed. Collective over the pipeline's mesh."""
    timeline = Timeline(mesh, device)
    for stage in stages:
        for name in PASSES:
            setattr(stage, name, partial(timeline.timed, stage.stage_index, name, getattr(stage, name)))
    try:
        timeline.start()
        yield timeline
    finally:
        for stage in stages:
            for name in PASSES:
                delattr(stage, name)  # the class's method is there again
