"""What a run measures, and where it goes: metrics.jsonl, TensorBoard events, and the screen.

Every rank keeps the records of its steps; only rank 0 has sinks. A record is a flat dict with "step" and
either the step's numbers or "val_loss". A number that this device does not measure is None.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from fusedtp.train.config import TrainConfig
from fusedtp.train.world import World

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS = "metrics.jsonl"


class Sink(Protocol):
    def write(self, record: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class Metrics:
    """Times the steps of a loop and hands their records on. earlier: of the steps before a resumed run's first."""

    def __init__(
        self,
        world: World,
        sinks: tuple[Sink, ...] = (),
        earlier: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.world, self.sinks = world, sinks
        self.steps = [record for record in earlier if "val_loss" not in record]
        self.validations = [record for record in earlier if "val_loss" in record]
        self._mark = (time.perf_counter(), world.wait_seconds())

    def step(self, step: int, tokens: int, **numbers: Any) -> None:
        """Record a step of so many tokens, which began when the previous record was made."""
        (begin, before), self._mark = self._mark, (time.perf_counter(), self.world.wait_seconds())
        end, waited = self._mark
        seconds = end - begin
        numbers |= {
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "wait_share": None if waited is None or before is None else (waited - before) / seconds,
        }
        self.steps.append({"step": step, **numbers})
        self._write(self.steps[-1])

    def validation(self, step: int, loss: float) -> None:
        """Record a validation loss; the time it took belongs to no step."""
        self.validations.append({"step": step, "val_loss": loss})
        self._write(self.validations[-1])
        self._mark = (time.perf_counter(), self.world.wait_seconds())

    def _write(self, record: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.write(record)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for sink in self.sinks:
            sink.close()


def screen(quiet: bool) -> Console:
    """The terminal, or a log of fixed width."""
    return Console(quiet=quiet, width=None if sys.stdout.isatty() else 110)


def sinks_for(
    config: TrainConfig,
    world: World,
    console: Console,
    earlier: Sequence[dict[str, Any]] = (),
    first: int = 0,
) -> tuple[Sink, ...]:
    """All sinks on rank 0, none elsewhere. earlier: records to keep; first: the step that is trained next."""
    if world.rank:
        return ()
    folder = config.run.folder
    return (
        JsonLines(folder / METRICS, earlier),
        Events(folder / "tensorboard", first),
        Screen(config.optim.steps, console),
    )


def records_of(folder: Path) -> list[dict[str, Any]]:
    """What JsonLines has written."""
    return json_lines(folder / METRICS)


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of lines; a last line that a kill has cut is left out. None where there is no file."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


class JsonLines:
    """One JSON object a line, readable while the run goes on; null for what is not finite."""

    def __init__(self, path: Path, earlier: Sequence[dict[str, Any]] = ()) -> None:
        draft = path.with_suffix(".draft")
        draft.write_text("".join(map(_line, earlier)))
        draft.rename(path)
        self.file = open(path, "a", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        self.file.write(_line(record))

    def close(self) -> None:
        self.file.close()


def _line(record: dict[str, Any]) -> str:
    """JSON has no NaN and no infinity."""
    fine = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(fine) + "\n"


class Events:
    """TensorBoard events: a curve for every number."""

    def __init__(self, folder: Path, first: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=first or None)
        self.loads: list[dict[str, Any]] = []

    def write(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if name == "expert_load":
                self.loads.append(record)
            elif name != "step" and value is not None:
                self.writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        if self.loads:
            self.writer.add_figure("expert_load", heat_map(self.loads), self.loads[-1]["step"])
        self.writer.close()


class Screen:
    """A progress bar on a terminal; where there is none, a line for every tenth of the steps."""

    def __init__(self, steps: int, console: Console) -> None:
        self.steps, self.console = steps, console
        self.progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("train", total=steps, numbers="")
        self.progress.start()

    def write(self, record: dict[str, Any]) -> None:
        step = record["step"] + 1
        if "val_loss" in record:
            self.console.print(f"step {step}: validation loss {record['val_loss']:.3f} nats", highlight=False)
            return
        numbers = f"loss {record['loss']:.3f}  {record['tokens_per_second']:,.0f} tokens/s"
        if record["wait_share"] is not None:
            numbers += f"  waiting {record['wait_share']:.0%}"
        if "max_violation" in record:
            numbers += f"  busiest expert {1 + record['max_violation']:.2f} x its share"
        if record.get("dropped_share"):
            numbers += f"  dropped {record['dropped_share']:.1%}"
        if record.get("expert_rounds", 1) > 1:
            numbers += f"  experts in {record['expert_rounds']} rounds"
        self.progress.update(self.task, completed=step, numbers=numbers)
        if not self.console.is_terminal and (step % max(1, self.steps // 10) == 0 or step == 1):
            self.console.print(f"step {step}/{self.steps}  {numbers}", highlight=False)

    def close(self) -> None:
        self.progress.stop()


# -- the load of experts, drawn ----------------------------------------------------------------------------------------


def heat_map(steps: Sequence[dict[str, Any]]) -> Figure:
    """Every layer's load over the steps: an expert's share of the choices, 1 where all are alike."""
    from matplotlib.figure import Figure

    load = torch.tensor(
        [record["expert_load"] for record in steps], dtype=torch.float64
    )  # [steps, layers, E]
    share: Tensor = load / load.mean(-1, keepdim=True).clamp(min=1e-30)
    layers = share.shape[1]
    figure = Figure(figsize=(8, 1 + 1.5 * layers), layout="constrained")
    every = figure.subplots(layers, 1, sharex=True, squeeze=False)[:, 0]
    for layer, axes in enumerate(every):
        image = axes.imshow(
            share[:, layer].t().numpy(), aspect="auto", interpolation="nearest", cmap="coolwarm", vmin=0, vmax=2,
            extent=(0.5, len(steps) + 0.5, share.shape[2] - 0.5, -0.5),
        )  # fmt: skip
        axes.set_ylabel(f"layer {layer}\nexpert")
    every[-1].set_xlabel("step")
    figure.colorbar(image, ax=list(every), label="load / even share", extend="max")
    return figure


def plot_experts(path: Path, steps: Sequence[dict[str, Any]]) -> None:
    """The heat map as a PNG."""
    heat_map(steps).savefig(path, dpi=120)
