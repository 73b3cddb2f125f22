"""What `crossover` found, for people: a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .output import table

COLORS = {"collective": "tab:gray", "chunked": "tab:blue", "triton": "tab:orange", "triton copy": "tab:red"}


def show(entries: Sequence[dict[str, Any]], title: str) -> None:
    """Print what was found."""
    lines = []
    for entry in entries:
        steps = ", ".join(f"{rows} {engine}" for rows, engine in entry["engines"])
        times = "; ".join(
            f"{rows}: " + ", ".join(f"{engine} {1e3 * s:.3g}" for engine, s in known.items())
            for rows, known in entry["seconds"]
        )
        where = f"{entry['world']} {entry['ranks']}"
        lines.append([entry["operation"], entry["dtype"], where, str(entry["width"]), steps, times])
    header = ["operation", "dtype", "ranks", "width", "from rows on", "ms of each engine"]
    table(title, header, lines, wide=header[4:])


def draw(path: Path, entries: Sequence[dict[str, Any]], title: str) -> None:
    """A picture an entry: time over tokens as a share of collective's, and where the engine changes."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    height = -(-len(entries) // 2)
    figure, axes = plt.subplots(height, 2, figsize=(10, 2.6 * height), squeeze=False, layout="constrained")
    for axis, entry in zip(axes.flat, entries):
        rows = [at for at, _ in entry["seconds"]]
        for engine in dict.fromkeys(name for _, known in entry["seconds"] for name in known):
            share = [known[engine] / known["collective"] for _, known in entry["seconds"]]
            axis.plot(rows, share, marker=".", label=engine, color=COLORS[engine])
        ends = [begin for begin, _ in entry["engines"][1:]] + [rows[-1]]
        for (begin, engine), end in zip(entry["engines"], ends, strict=True):
            axis.axvspan(max(begin, rows[0]), end, color=COLORS[engine], alpha=0.08)
        axis.set(xscale="log", xlabel="tokens", ylabel="time / collective")
        axis.set_title(
            f"{entry['operation']} {entry['dtype']}, width {entry['width']}, {entry['world']} ranks",
            fontsize=8,
        )
        axis.legend(fontsize=7)
    for axis in axes.flat[len(entries) :]:
        axis.axis("off")
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)
