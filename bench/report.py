"""Results as tables, a picture and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

from .ops import Result
from .sample import Spread

WAYS = ("torch", "collective", "ours", "ceiling", "single, 1 thread", "single, 2 threads")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def print_ops(console: Console, result: Result) -> None:
    """One row a case, then the three figures that sum them up, then memory."""
    table = _table(
        "Operations: ms, median +- half the interquartile range",
        "",
        "bare",
        "gloo",
        "ours",
        "gloo / ours",
        "removed",
    )
    for row in result.rows:
        table.add_row(
            row.case.label,
            str(row.bare),
            str(row.gloo),
            str(row.ours),
            f"{row.ratio:.2f}",
            f"{row.share:.2f}",
        )
    console.print(table)
    console.print(
        f"share of gloo's overhead removed: median {result.median_share:.2f}, least {result.least_share:.2f}; "
        f"geometric mean of gloo / ours {result.mean_ratio:.2f}"
    )
    console.print(
        f"symmetric memory of the group: {result.symmetric_bytes / 1e6:.1f} MB a rank; bound (twice the largest "
        f"gathered or scattered tensor, and flags): {result.bound_bytes / 1e6:.1f} MB"
    )


def print_steps(console: Console, steps: list[dict[str, Any]]) -> None:
    """One row a way, one column a dtype."""
    table = _table(
        "Training step: s, median +- half the interquartile range", "", *(step["dtype"] for step in steps)
    )
    for way in WAYS:
        cells = []
        for step in steps:
            spread = Spread(**step["seconds"][way])
            cells.append(f"{spread.median:.3f} +-{(spread.high - spread.low) / 2:.3f}")
        table.add_row(way, *cells)
    gaps = [gap(step) for step in steps]
    table.add_section()
    for name in gaps[0]:
        table.add_row(name, *(f"{values[name]:.2f}" for values in gaps))
    console.print(table)


def gap(step: dict[str, Any]) -> dict[str, float]:
    """How much of the way from torch to the ceiling ours goes, and which part of that is fusion."""
    t = {way: spread["median"] for way, spread in step["seconds"].items()}
    whole = t["torch"] - t["ceiling"]
    return {
        "torch / ours": t["torch"] / t["ours"],
        "torch / ceiling": t["torch"] / t["ceiling"],
        "gap closed": (t["torch"] - t["ours"]) / whole,
        "  by chunked instead of collective": (t["collective"] - t["ours"]) / whole,
        "  by our layers on collective instead of torch's": (t["torch"] - t["collective"]) / whole,
    }


def save_json(path: Path, machine: dict[str, Any], ops: Result | None, steps: list[dict[str, Any]]) -> None:
    """Everything, for later comparison."""
    whole = {
        "machine": machine,
        "operations": ops.as_dict() if ops is not None else None,
        "training_step": [{**step, "gap": gap(step)} for step in steps],
    }
    path.write_text(json.dumps(whole, indent=1) + "\n")


def save_picture(
    path: Path, machine: dict[str, Any], ops: Result | None, steps: list[dict[str, Any]]
) -> None:
    """Time over the bare matmuls (above) and the training step (below)."""
    parts = [part for part in (ops, steps) if part]
    height = 1.5 + (0.32 * len(ops.rows) if ops else 0) + (2.2 if steps else 0)
    figure, axes = plt.subplots(
        len(parts), 1, figsize=(9, height), squeeze=False, layout="constrained",
        height_ratios=[0.32 * len(ops.rows) if part is ops and ops else 2.2 for part in parts],
    )  # fmt: skip
    each = iter(axes[:, 0])
    if ops:
        _draw_ops(next(each), ops)
    if steps:
        _draw_steps(next(each), steps)
    figure.suptitle(f"{machine['cpu']}, {machine['ranks']} ranks, torch {machine['torch']}", fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_ops(axis: Any, ops: Result) -> None:
    places = range(len(ops.rows))
    for way, shift, color in (("gloo", -0.2, "tab:gray"), ("ours", 0.2, "tab:blue")):
        times = [getattr(row, way).median / row.bare.median for row in ops.rows]
        axis.barh([p + shift for p in places], times, 0.38, label=way, color=color)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_yticks(list(places), [row.case.label for row in ops.rows], fontsize=7)
    axis.set(xlim=(0.8, None), xlabel="time / time of the bare matmuls")
    axis.invert_yaxis()
    axis.legend(fontsize=8)


def _draw_steps(axis: Any, steps: list[dict[str, Any]]) -> None:
    ways = [way for way in WAYS if way in steps[0]["seconds"]]
    for i, step in enumerate(steps):
        spreads = [step["seconds"][way] for way in ways]
        axis.barh(
            [p + 0.4 * (i - 0.5) for p in range(len(ways))],
            [s["median"] for s in spreads],
            0.38,
            xerr=[[s["median"] - s["low"] for s in spreads], [s["high"] - s["median"] for s in spreads]],
            label=step["dtype"],
        )
    axis.set_yticks(range(len(ways)), ways, fontsize=8)
    axis.set_xlabel("seconds a training step")
    axis.invert_yaxis()
    axis.legend(fontsize=8)
