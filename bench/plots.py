"""Pictures of a result: a roofline, fused against unfused over tokens, and where they cross."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch

from .rows import Row

Lines = dict[str, list[tuple[float, float]]]  # label -> (x, y)


def draw(path: Path, about: Mapping[str, Any], roofs: Mapping[str, Any], rows: Sequence[Row]) -> list[Path]:
    """Write <stem>-roofline.png, <stem>-tokens.png and <stem>-crossover.png, as far as there are rows for them."""
    subtitle = f"{about.get('gpu') or about['cpu']}, torch {about['torch']}, commit {about['commit'] or '-'}"
    written = []
    for kind, make in (("roofline", roofline), ("tokens", over_tokens), ("crossover", crossover)):
        figure = make(rows, roofs)
        if figure is not None:
            figure.suptitle(f"{path.stem}: {subtitle}", fontsize=9)
            target = path.with_name(f"{path.stem}-{kind}.png")
            figure.savefig(target, dpi=120)
            plt.close(figure)
            written.append(target)
    return written


def intensity(row: Row) -> float | None:
    """FLOP per byte, with every operand and result moved once; None for rows without flops or K and N."""
    if row.flops is None or not all(isinstance(row.shape.get(name), int) for name in "TKN"):
        return None
    t, k, n = (int(row.shape[name]) for name in "TKN")
    itemsize = getattr(torch, row.dtype).itemsize
    return row.flops / (row.ranks * itemsize * (t * k + n * k + t * n))


def roofline(rows: Sequence[Row], roofs: Mapping[str, Any]) -> Any:
    """Rates of matmuls against their intensity, under the roofs of the same run."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        x, rate = intensity(row), row.rate
        if x is not None and rate is not None:
            points.setdefault(f"{row.engine} {row.dtype}", []).append((x, rate / 1e12))
    if not points:
        return None
    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    xs = [x for line in points.values() for x, _ in line]
    span = [min(xs) / 2, max(xs) * 2]
    for world, reached in roofs.items():
        for name, rate in reached.items():
            if name != "copy":
                roof = [min(rate, x * reached["copy"]) / 1e12 for x in span]
                knee = rate / reached["copy"]
                inside = span[0] < knee < span[1]
                axis.plot(
                    [span[0], knee, span[1]] if inside else span,
                    [roof[0], rate / 1e12, roof[1]] if inside else roof,
                    linewidth=0.9, linestyle="--", label=f"roof {name}, {world}",
                )  # fmt: skip
    for label, line in sorted(points.items()):
        axis.scatter([x for x, _ in line], [y for _, y in line], s=14, label=label)
    axis.set(xscale="log", yscale="log", xlabel="FLOP / byte", ylabel="TFLOP/s, all ranks")
    axis.legend(fontsize=6)
    return figure


def fused_lines(rows: Sequence[Row]) -> dict[str, Lines]:
    """Title -> engine -> (T, ms), of rows that have communication in them."""
    found: dict[str, Lines] = {}
    for row in rows:
        if row.seconds is None or row.t_comm is None:
            continue
        shape = " ".join(f"{name}={value}" for name, value in row.shape.items() if name != "T")
        title = f"{row.suite} {shape} {row.dtype}"
        point = (float(row.shape["T"]), 1e3 * row.seconds.median)
        found.setdefault(title, {}).setdefault(row.engine, []).append(point)
    return found


def _panels(lines: dict[str, Lines], ylabel: str) -> Any:
    count = len(lines)
    columns = min(3, count)
    figure, axes = plt.subplots(
        -(-count // columns), columns, figsize=(5 * columns, 3.2 * -(-count // columns)), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, (title, engines) in zip(axes.flat, lines.items()):
        for engine, line in engines.items():
            axis.plot(*zip(*sorted(line)), marker="o", markersize=3, label=engine)
        tokens = sorted({int(t) for line in engines.values() for t, _ in line})
        axis.set(xscale="log", xlabel="tokens", ylabel=ylabel)
        axis.minorticks_off()
        axis.set_xticks(tokens, [str(t) for t in tokens])
        axis.set_title(title, fontsize=7)
        axis.legend(fontsize=6)
    for axis in list(axes.flat)[count:]:
        axis.remove()
    return figure


def over_tokens(rows: Sequence[Row], roofs: Mapping[str, Any]) -> Any:
    """Milliseconds of every way, over tokens."""
    lines = fused_lines(rows)
    return _panels(lines, "ms") if lines else None


def ratios(rows: Sequence[Row]) -> dict[str, Lines]:
    """Title -> engine -> (T, time of the faster unfused way / time of this engine)."""
    found: dict[str, Lines] = {}
    for title, engines in fused_lines(rows).items():
        unfused: dict[float, float] = {}
        for engine, line in engines.items():
            if "+" in engine or engine.endswith("collective"):
                unfused |= {t: min(ms, unfused.get(t, ms)) for t, ms in line}
        for engine, line in engines.items():
            if (
                engine in ("fusedtp chunked", "fusedtp triton", "fusedtp triton-copy", "fusedtp auto")
                and unfused
            ):
                found.setdefault(title, {})[engine] = [(t, unfused[t] / ms) for t, ms in line if t in unfused]
    return found


def crossover(rows: Sequence[Row], roofs: Mapping[str, Any]) -> Any:
    """Time of what communicates first or last, over the time of ours: above 1 fusion wins."""
    found = ratios(rows)
    if not found:
        return None
    figure = _panels(found, "unfused / fused")
    for axis in figure.axes:
        axis.axhline(1.0, color="black", linewidth=0.8)
    return figure
