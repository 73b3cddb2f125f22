"""Prints a result: a table per case, with rich if it is installed, else plain; and draws pictures with matplotlib."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from .rows import Row

COLUMNS = (
    "engine",
    "ms",
    "TFLOP/s",
    "GB/s",
    "roof",
    "hidden",
    "/ slower",
    "/ plain",
    "gain",
    "host us",
    "peak MB",
    "error",
    "note",
)

OURS = tuple(f"fusedtp {engine}" for engine in ("chunked", "triton", "triton-copy", "multimem", "auto"))
ABOVE_ROOF = " !"  # marks an impossible share


def cells(row: Row) -> list[str]:
    """The cells of one row, in the order of COLUMNS."""
    rate, flops = row.rate, row.flops is not None

    def number(value: float | None, text: str) -> str:
        return "" if value is None else format(value, text)

    return [
        row.engine,
        "" if row.seconds is None else str(row.seconds),
        number(rate / 1e12 if rate is not None and flops else None, ".4g"),
        number(rate / 1e9 if rate is not None and not flops else None, ".4g"),
        number(row.roof_share, ".0%") + (ABOVE_ROOF if row.above_roof else ""),
        number(row.hidden_share, ".0%"),
        number(row.over_slower, ".3f"),
        number(row.overhead, ".3f"),
        number(row.gain, ".3f"),
        number(None if row.host_seconds is None else 1e6 * row.host_seconds, ".0f"),
        number(None if row.peak_bytes is None else row.peak_bytes / 1e6, ".4g"),
        number(row.error_share, ".2f"),
        row.note,
    ]


def headline(row: Row) -> str:
    """The common title of the rows of one case."""
    shape = " ".join(f"{name}={value}" for name, value in row.shape.items())
    return f"{row.suite}: {shape} {row.dtype}, {row.world} x {row.ranks}"


def show(about: Mapping[str, Any], roofs: Mapping[str, Mapping[str, float]], rows: Sequence[Row]) -> None:
    """Print the machine, the roofs and every case's rows."""
    keep = ("gpu", "cpu", "cores", "torch", "triton", "commit", "command")
    print(", ".join(f"{name} {about[name]}" for name in keep if about.get(name)))
    for world, reached in roofs.items():
        rates = [
            f"{name} {rate / 1e12:.4g} TFLOP/s" if name != "copy" else f"copy {rate / 1e9:.4g} GB/s (read + written)"
            for name, rate in reached.items()
        ]
        print(f"roofs, {world}: {', '.join(rates)}")
    for title, group in groupby(rows, headline):
        lines = [cells(row) for row in group]
        used = [i for i in range(len(COLUMNS)) if any(line[i] for line in lines)]
        table(title, [COLUMNS[i] for i in used], [[line[i] for i in used] for line in lines])
    above = Counter((row.dtype, row.flops is not None) for row in rows if row.above_roof)
    for (dtype, multiplies), n in sorted(above.items()):
        slow = f", or torch.matmul is slow here in {dtype}" if multiplies else ""
        print(
            f"note: {n} row{'s' * (n > 1)} in {dtype} above the roof, marked{ABOVE_ROOF}: "
            f"the roof's sample was disturbed by other load{slow}; measure again"
        )


def table(title: str, header: list[str], lines: list[list[str]], wide: Sequence[str] = ("note",)) -> None:
    """Print a table. `wide` columns may be wrapped. The first column and `wide` ones are left-aligned."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain_table(title, header, lines))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    made = Table(title=title, title_justify="left")
    for name in header:
        left = name == header[0] or name in wide
        made.add_column(name, justify="left" if left else "right", no_wrap=name not in wide)
    for line in lines:
        made.add_row(*line)
    console.print(made)


@contextmanager
def progress(total: int, shown: bool) -> Iterator[Callable[[str], None]]:
    """Yields a function to call with the name of each of `total` steps as it begins. Shows nothing without rich."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda name: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as bar:
        task, begun = bar.add_task("", total=total), iter([0, *([1] * total)])
        yield lambda name: bar.update(task, description=name, advance=next(begun))


def plain_table(title: str, header: list[str], lines: list[list[str]]) -> str:
    """The same table, aligned with spaces."""
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    text = [title]
    for line in [header, *lines]:
        text.append("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    return "\n".join(text) + "\n"


def draw(path: Path, about: Mapping[str, Any], roofs: Mapping[str, Any], rows: Sequence[Row]) -> list[Path]:
    """Draw pictures next to `path`; none without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no pictures: matplotlib is not installed")
        return []
    matplotlib.use("Agg")
    return _draw(path, about, roofs, rows)


# -- pictures: a roofline, fused against unfused over tokens, and their crossover -------------------------------------


Lines = dict[str, list[tuple[float, float]]]  # label -> (x, y)


def _draw(path: Path, about: Mapping[str, Any], roofs: Mapping[str, Any], rows: Sequence[Row]) -> list[Path]:
    """Write <stem>-roofline.png, <stem>-tokens.png and <stem>-crossover.png, if there are rows for them."""
    import matplotlib.pyplot as plt

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
    """FLOPs per byte, with every operand and result moved once; None for rows without FLOPs or without T, K and N."""
    if row.flops is None or not all(isinstance(row.shape.get(name), int) for name in "TKN"):
        return None
    t, k, n = (int(row.shape[name]) for name in "TKN")
    itemsize = getattr(torch, row.dtype).itemsize
    return row.flops / (row.ranks * itemsize * (t * k + n * k + t * n))


def roofline(rows: Sequence[Row], roofs: Mapping[str, Any]) -> Any:
    """Rates of matmuls over their arithmetic intensity, with the roofs of the same run."""
    import matplotlib.pyplot as plt

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
    """Title -> engine -> (T, ms), for rows with communication."""
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
    import matplotlib.pyplot as plt

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
    """Milliseconds of every way over tokens."""
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
            if engine in OURS and unfused:
                found.setdefault(title, {})[engine] = [(t, unfused[t] / ms) for t, ms in line if t in unfused]
    return found


def crossover(rows: Sequence[Row], roofs: Mapping[str, Any]) -> Any:
    """Time of the unfused way over our time: above 1, fusion wins."""
    found = ratios(rows)
    if not found:
        return None
    figure = _panels(found, "unfused / fused")
    for axis in figure.axes:
        axis.axhline(1.0, color="black", linewidth=0.8)
    return figure
