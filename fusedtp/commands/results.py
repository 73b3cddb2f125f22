"""The outputs of a run: metrics.jsonl, TensorBoard events, the screen, plots, and a summary.

Every rank keeps the records of its steps; only rank 0 has sinks. A record is a flat dict with "step" and
either the step's numbers or "val_loss". A number that is not measured on this device is None.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor

from fusedtp.commands.verify import Verification
from fusedtp.train.bubbles import measured
from fusedtp.train.config import TrainConfig
from fusedtp.train.loop import Metrics, Sink
from fusedtp.train.mesh import World
from fusedtp.train.stages import Action
from fusedtp.train.watch import Lines, line_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.utils.tensorboard import SummaryWriter

METRICS = "metrics.jsonl"
EVENTS_AGAIN = 60.0  # seconds until the next try after TensorBoard's events could not be written


def screen(quiet: bool) -> Console:
    """A console for the terminal, or with a fixed width for a log."""
    return Console(quiet=quiet, width=None if sys.stdout.isatty() else 110)


def sinks_for(
    config: TrainConfig,
    world: World,
    console: Console,
    earlier: Sequence[dict[str, Any]] = (),
    first: int = 0,
) -> tuple[Sink, ...]:
    """All sinks on rank 0, none on other ranks. earlier: records to keep; first: the next step to train."""
    if world.rank:
        return ()
    folder = config.run.folder
    return (
        JsonLines(folder / METRICS, earlier),
        Events(folder / "tensorboard", first),
        Screen(config.optim.steps, console),
    )


def records_of(folder: Path) -> list[dict[str, Any]]:
    """The records that JsonLines has written."""
    return [record for record in json_lines(folder / METRICS) if isinstance(record.get("step"), int)]


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of lines; skips lines that a kill or a full disk has cut. Empty if there is no file."""
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            made = json.loads(line)
        except ValueError:
            continue
        if isinstance(made, dict):
            found.append(made)
    return found


class JsonLines:
    """One JSON object per line, readable during the run; null for numbers that are not finite."""

    def __init__(self, path: Path, earlier: Sequence[dict[str, Any]] = ()) -> None:
        draft = path.with_suffix(".draft")
        try:
            draft.write_text("".join(map(line_of, earlier)))
            draft.rename(path)
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}") from error
        self._lines = Lines(path)

    def write(self, record: dict[str, Any]) -> None:
        self._lines.append(record)

    def close(self) -> None:
        """Nothing to do: no file is kept open."""


class Events:
    """TensorBoard events: a curve for every number. If writing fails, the events are lost and the run continues."""

    def __init__(self, folder: Path, first: int = 0) -> None:
        self.folder, self.first = folder, first
        self.loads: list[dict[str, Any]] = []
        self.writer: SummaryWriter | None = None
        self._failed = -math.inf  # time of the last failure
        self._try(lambda writer: writer.flush())

    def write(self, record: dict[str, Any]) -> None:
        if "expert_load" in record:
            self.loads.append(record)
        numbers = {name: value for name, value in record.items() if name not in ("step", "expert_load")}

        def add(writer: SummaryWriter) -> None:
            for name, value in numbers.items():
                if value is not None:
                    writer.add_scalar(name, value, record["step"])

        self._try(add)

    def close(self) -> None:
        def end(writer: SummaryWriter) -> None:
            if self.loads:
                writer.add_figure("expert_load", heat_map(self.loads), self.loads[-1]["step"])
            writer.close()

        self._try(end)

    def _try(self, action: Callable[[SummaryWriter], None]) -> None:
        """Call `action` with a writer; EVENTS_AGAIN after a failure, with a new one, since its thread has ended."""
        from torch.utils.tensorboard import SummaryWriter

        if self.writer is None and time.monotonic() - self._failed < EVENTS_AGAIN:
            return
        try:
            if self.writer is None:
                self.writer = SummaryWriter(str(self.folder), purge_step=self.first or None)
            action(self.writer)
            self.first = 0
        except OSError as error:
            if self._failed == -math.inf:
                why = f"{self.folder} could not be written: {error.strerror or error}"
                print(f"{why}; its curves lack some steps, but {METRICS} has the same numbers", file=sys.stderr)
            self.writer, self._failed = None, time.monotonic()


class Screen:
    """A progress bar on a terminal; otherwise a line for every tenth of the steps."""

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


def pipeline_in_words(recorded: Mapping[str, Any]) -> str:
    """For example: step 3, 1f1b, 2 stages on 2 ranks: 812 ms, idle 42%; its order of passes alone 20%.

    recorded: the contents of pipeline.json. Files of older runs lack the last share.
    """
    actions = [Action(*each) for each in recorded["actions"]]
    stages, ranks = (len({action[place] for action in actions}) for place in (1, 0))
    idle, seconds = measured(actions)
    words = (
        f"step {recorded['step'] + 1}, {recorded['schedule']}, {stages} stages on {ranks} ranks: "
        f"{duration(seconds)}, idle {idle:.0%}"
    )
    return words + (f"; its order of passes alone {recorded['ideal']:.0%}" if "ideal" in recorded else "")


def duration(seconds: float) -> str:
    """For example 1 h 02 min, 3 min 20 s, 4.2 s, 12 ms."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60):02} s"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


# -- the end of a run --------------------------------------------------------------------------------------------------


def summarize(
    config: TrainConfig,
    world: World,
    metrics: Metrics,
    engines: dict[str, dict[str, int]],
    parameters: int,
    verification: Verification | None,
) -> dict[str, Any]:
    """The contents of summary.json. tokens_per_second and wait_share exclude the first step, which warms up.

    wait_share is None if waiting is not measured.
    """
    steps, tokens = metrics.steps[1:] or metrics.steps, config.data.batch * config.data.length
    seconds = sum(record["seconds"] for record in steps)
    measured = all(record["wait_share"] is not None for record in steps)
    return {
        "loss_first": metrics.steps[0]["loss"],
        "loss_last": metrics.steps[-1]["loss"],
        "val_loss": metrics.validations[-1]["val_loss"] if metrics.validations else None,
        "max_loss_difference": verification and verification.max_loss_difference,
        "max_grad_norm_difference": verification and verification.max_grad_norm_difference,
        "verified": verification and verification.passed,
        "verified_steps": verification and verification.steps,
        "tokens_per_second": sum(record["tokens_per_second"] * record["seconds"] for record in steps) / seconds,
        "wait_share": (
            sum(record["wait_share"] * record["seconds"] for record in steps) / seconds if measured else None
        ),
        "seconds": sum(record["seconds"] for record in metrics.steps),
        "steps": len(metrics.steps),
        "tokens_per_step": tokens,
        "parameters": parameters,
        "world_size": world.size,
        "pp": world.pp,
        "dp": world.dp,
        "tp": world.tp,
        "layout": layout_in_words(world),
        "device": world.device.type,
        "dtype": config.run.dtype,
        "loss_scale": metrics.steps[-1].get("loss_scale"),
        "skipped": sum(record["grad_norm"] in (None, math.inf) for record in metrics.steps)
        if config.run.dtype == "fp16"
        else None,
        "engines": engines,
    }


def layout_in_words(world: World) -> str:
    """For example: 2 pipeline x 1 data parallel x 2 tensor parallel."""
    pipeline = f"{world.pp} pipeline x " if world.pp > 1 else ""
    return f"{pipeline}{world.dp} data parallel x {world.tp} tensor parallel"


def write_json(path: Path, value: Any) -> None:
    """Write a file atomically: after a kill, the old contents are still there."""
    draft = path.with_name(f"{path.name}.draft")
    with open(draft, "w") as file:
        file.write(json.dumps(value, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def plot_losses(path: Path, metrics: Metrics, unit: str = "byte") -> None:
    """Training and validation loss against steps, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([r["step"] + 1 for r in metrics.steps], [r["loss"] for r in metrics.steps], lw=1, label="training")
    if metrics.validations:
        axes.plot(
            [r["step"] + 1 for r in metrics.validations],
            [r["val_loss"] for r in metrics.validations],
            "o-",
            ms=4,
            label="held out",
        )
    axes.set(xlabel="step", ylabel=f"loss (nats/{unit})")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def show(console: Console, summary: dict[str, Any], verification: Verification | None, unit: str = "byte") -> None:
    """The table at the end of a run."""
    table = Table(show_header=False, title="training run", title_justify="left")
    waiting = summary["wait_share"]
    rows = {
        "loss": f"{_nats(summary['loss_first'])} -> {_nats(summary['loss_last'])} nats/{unit}",
        "validation loss": f"{_nats(summary['val_loss'])} nats/{unit}",
        "speed": f"{summary['tokens_per_second']:,.0f} tokens/s",
        "waiting for peers": f"{waiting:.0%} of a step" if waiting is not None else "not measured",
        "ranks": f"{summary['layout']}, {summary['device']}, {summary['dtype']}",
    }
    if summary["skipped"] is not None:
        rows["fp16"] = f"loss scale {summary['loss_scale']:g}, {summary['skipped']} steps skipped because of overflow"
    rows |= {
        name: ", ".join(f"{engine} x {count:,}" for engine, count in engines.items())
        for name, engines in summary["engines"].items()
    }
    if verification is not None:
        rows |= {f"against one process ({verification.steps} steps)": verification.in_words()}
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def _nats(loss: float | None) -> str:
    """A loss as text; None (not finite, or its line was lost) as a question mark."""
    return "?" if loss is None else f"{loss:.3f}"


def show_sample(console: Console, prompt: str, written: str) -> None:
    """Print a held-out prompt and the model's continuation."""
    text = Text(_printable(prompt), style="dim")
    text.append(_printable(written), style="bold")
    console.print(Panel(text, title="prompt from held-out text (dim) and sample", title_align="left"))


def _printable(text: str) -> str:
    """NUL (the end of a document) becomes a newline, and control characters become U+FFFD."""
    characters = text.replace("\0", "\n")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in characters)


# -- plots of the expert load -----------------------------------------------------------------------------------------


def heat_map(steps: Sequence[dict[str, Any]]) -> Figure:
    """Each layer's load over the steps: an expert's share of the choices, relative to an even share (1)."""
    from matplotlib.figure import Figure

    load = torch.tensor([record["expert_load"] for record in steps], dtype=torch.float64)  # [steps, layers, E]
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
