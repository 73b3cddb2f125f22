"""A result for people: a table a suite, by rich where it is installed, else plain; and pictures (plots.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

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

ABOVE_ROOF = " !"  # after a share that cannot be


def cells(row: Row) -> list[str]:
    """One row, as COLUMNS."""
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
        "; ".join(
            filter(None, ("" if row.link_gbps is None else f"link {row.link_gbps:.1f} GB/s", row.note))
        ),
    ]


def headline(row: Row) -> str:
    """What the rows of one case have in common."""
    shape = " ".join(f"{name}={value}" for name, value in row.shape.items())
    return f"{row.suite}: {shape} {row.dtype}, {row.world} x {row.ranks}"


def show(about: Mapping[str, Any], roofs: Mapping[str, Mapping[str, float]], rows: Sequence[Row]) -> None:
    """Print the machine, the roofs and every case's rows."""
    keep = ("gpu", "cpu", "cores", "torch", "triton", "commit", "command")
    print(", ".join(f"{name} {about[name]}" for name in keep if about.get(name)))
    for world, reached in roofs.items():
        rates = [
            f"{name} {rate / 1e12:.4g} TFLOP/s"
            if name != "copy"
            else f"copy {rate / 1e9:.4g} GB/s (read + written)"
            for name, rate in reached.items()
        ]
        print(f"roofs, {world}: {', '.join(rates)}")
    for title, group in groupby(rows, headline):
        lines = [cells(row) for row in group]
        used = [i for i in range(len(COLUMNS)) if any(line[i] for line in lines)]
        table(title, [COLUMNS[i] for i in used], [[line[i] for i in used] for line in lines])
    for row in rows:
        if row.above_roof:
            slow = "" if row.flops is None else f", or torch.matmul is slow here in {row.dtype}"
            print(
                f"note: {row.key}: {row.roof_share:.0%} of the roof, marked{ABOVE_ROOF}: "
                f"the roof's sample was disturbed by other load{slow}; measure again"
            )


def table(title: str, header: list[str], lines: list[list[str]], wide: Sequence[str] = ("note",)) -> None:
    """Print one. `wide` columns may be wrapped; those of words, the first and `wide` ones, are set to the left."""
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
    """Yields what to call with the name of each of `total` steps as it begins. Without rich it says nothing."""
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
    """The same in spaces."""
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    text = [title]
    for line in [header, *lines]:
        text.append("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    return "\n".join(text) + "\n"


def draw(path: Path, about: Mapping[str, Any], roofs: Mapping[str, Any], rows: Sequence[Row]) -> list[Path]:
    """Pictures beside `path`; none without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no pictures: matplotlib is not installed")
        return []
    matplotlib.use("Agg")
    from . import plots

    return plots.draw(path, about, roofs, rows)
