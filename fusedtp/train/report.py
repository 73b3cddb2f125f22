"""What a run leaves: summary.json, loss.png, and a small table and the sample on the screen."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fusedtp.train.config import TrainConfig
from fusedtp.train.metrics import Metrics
from fusedtp.train.verify import Verification
from fusedtp.train.world import World


def summarize(
    config: TrainConfig,
    world: World,
    metrics: Metrics,
    engines: dict[str, dict[str, int]],
    parameters: int,
    verification: Verification | None,
) -> dict[str, Any]:
    """The run in numbers. tokens_per_second and wait_share leave out the first step, which warms up.

    wait_share is None where waiting is not measured.
    """
    steps, tokens = metrics.steps[1:] or metrics.steps, config.data.batch * config.data.length
    seconds = sum(record["seconds"] for record in steps)
    measured = all(record["wait_share"] is not None for record in steps)
    return {
        "loss_first": metrics.steps[0]["loss"],
        "loss_last": metrics.steps[-1]["loss"],
        "val_loss": metrics.validations[-1]["val_loss"],
        "max_loss_difference": verification and verification.max_loss_difference,
        "max_grad_norm_difference": verification and verification.max_grad_norm_difference,
        "verified": verification and verification.passed,
        "verified_steps": verification and verification.steps,
        "tokens_per_second": tokens * len(steps) / seconds,
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
    """Such as: 2 pipeline x 1 data parallel x 2 tensor parallel."""
    pipeline = f"{world.pp} pipeline x " if world.pp > 1 else ""
    return f"{pipeline}{world.dp} data parallel x {world.tp} tensor parallel"


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def plot(path: Path, metrics: Metrics, unit: str = "byte") -> None:
    """Training and validation loss against steps, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        [r["step"] + 1 for r in metrics.steps], [r["loss"] for r in metrics.steps], lw=1, label="training"
    )
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


def show(
    console: Console, summary: dict[str, Any], verification: Verification | None, unit: str = "byte"
) -> None:
    """The table at the end of a run."""
    table = Table(show_header=False, title="training run", title_justify="left")
    waiting = summary["wait_share"]
    rows = {
        "loss": f"{summary['loss_first']:.3f} -> {summary['loss_last']:.3f} nats/{unit}",
        "validation loss": f"{summary['val_loss']:.3f} nats/{unit}",
        "speed": f"{summary['tokens_per_second']:,.0f} tokens/s",
        "waiting for peers": f"{waiting:.0%} of a step" if waiting is not None else "not measured",
        "ranks": f"{summary['layout']}, {summary['device']}, {summary['dtype']}",
    }
    if summary["skipped"] is not None:
        rows["fp16"] = (
            f"loss scale {summary['loss_scale']:g}, {summary['skipped']} steps left out: they overflowed"
        )
    rows |= {
        name: ", ".join(f"{engine} x {count:,}" for engine, count in engines.items())
        for name, engines in summary["engines"].items()
    }
    if verification is not None:
        rows |= {f"against one process ({verification.steps} steps)": verification.in_words()}
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def show_sample(console: Console, prompt: str, written: str) -> None:
    """A held-out prompt and what the model made of it."""
    text = Text(_printable(prompt), style="dim")
    text.append(_printable(written), style="bold")
    console.print(Panel(text, title="prompt from held-out text (dim) and sample", title_align="left"))


def _printable(text: str) -> str:
    """The end of a file as a line's end; what a terminal would act on as a question mark."""
    characters = text.replace("\0", "\n")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in characters)
