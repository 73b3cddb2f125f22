"""`fusedtp report runs/NAME`: the run as one self-contained HTML page, without scripts or network access.

It reads the files written so far, so it works for running, failed and finished runs:

    metrics.jsonl      curves of loss, speed, learning rate, norm, memory
    ranks.jsonl        each rank's time by kind, and what bounds a step
    pipeline.json      a recorded step of a pipeline, as a Gantt chart
    saves.jsonl        checkpoints
    incidents.jsonl, hang.json, config.json, versions.json, summary.json

Charts are SVG by matplotlib; the colours of text and axes follow the reader's light or dark colour scheme.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

import tyro
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from fusedtp.commands.results import METRICS, duration, json_lines, pipeline_in_words
from fusedtp.commands.run import INCIDENTS, PIPELINE, SAVES
from fusedtp.train.checkpoint import as_bytes, steps_in
from fusedtp.train.config import CHECKPOINTS, CONFIG
from fusedtp.train.pulse import HANG
from fusedtp.train.watch import KINDS, RANKS, WAITS, Reading, in_words, verdict

REPORT = "report.html"
COLOURS = {
    "compute": "#4c78d8", "tp_wait": "#e8a513", "pp_wait": "#f0654f", "dp_wait": "#a463f2", "data": "#3ca951",
    "optimizer": "#45b5a5", "norm": "#c2855f", "other": "#9498a0",
}  # fmt: skip
PASSES = {  # all of them are compute, so all are blue
    "F": ("forward", "#7aa5f5"), "B": ("backward", "#3457b5"), "I": ("backward of inputs", "#2f7fa8"),
    "W": ("backward of weights", "#8a8fd0"),
}  # fmt: skip
RUN, VALIDATION = "#1192c8", "#d02670"
INK = "#818283"  # of text and axes in a drawing; the page's own colour takes its place
LOOK: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "fusedtp", "text.parse_math": False, "font.size": 11, "text.color": INK,
    "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "grid.color": INK,
    "grid.alpha": 0.3, "grid.linewidth": 0.6, "axes.grid": True, "axes.axisbelow": True, "xtick.bottom": False,
    "ytick.left": False, "axes.formatter.limits": (-4, 6), "axes.formatter.useoffset": False,
    **{f"axes.spines.{side}": False for side in ("left", "top", "right")},
}  # fmt: skip
NOT_SAID = ("Creator", "Date", "Format", "Type")  # without them a drawing has no metadata, which name a URL
MOST_POINTS = 2000  # per curve

# -- charts ------------------------------------------------------------------------------------------------------------

Points = Sequence[tuple[float, Any]]


def svg(label: str, width: float, height: float, draw: Callable[[Axes], None], legend: int = 4) -> str:
    """A drawing of this size in inches. legend: its columns."""
    with rc_context(LOOK):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(axes := figure.subplots())
        if axes.get_legend_handles_labels()[1]:
            figure.legend(loc="outside upper left", ncols=legend, frameon=False, handlelength=1, columnspacing=1)
        file = StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(NOT_SAID))
    _, start, rest = file.getvalue().partition("<svg")
    text = start + re.sub(r' xmlns[:a-z]*="[^"]*"|(?<=<g) id="[^"]*"|<style.*?</style>', "", rest, flags=re.DOTALL)
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1).replace(INK, "currentColor")


def chart(title: str, unit: str, curves: Mapping[str, tuple[Points, Any]], form: Any = None, zero: bool = True) -> str:
    """A figure of curves over steps, name -> (points, colour); a note if there are no points. zero: y begins at 0."""
    found = {name: thinned(points) for name, (points, _) in curves.items()}
    if not any(found.values()):
        return f'<figure><figcaption>{escape(title)}</figcaption><p class="none">nothing measured</p></figure>'

    def draw(axes: Axes) -> None:
        for name, points in found.items():
            if points:
                (line,) = axes.plot(*zip(*points), color=curves[name][1], linewidth=1.2, clip_on=False)
                line.set(label=name or None, marker="o" if len(points) < 20 else "", markersize=3)
        axes.set(xlabel="step", ylabel=unit)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if form is not None:
            axes.yaxis.set_major_formatter(form)
        if zero:
            axes.set_ylim(bottom=0)

    return f"<figure><figcaption>{escape(title)}</figcaption>{svg(title, 6.2, 3, draw)}</figure>"


def thinned(points: Points) -> Points:
    """The finite points, at most MOST_POINTS: of a longer curve the lowest and the highest of each of equal parts."""
    points = [(x, y) for x, y in points if isinstance(y, (int, float)) and math.isfinite(y)]
    size = -(-2 * len(points) // MOST_POINTS)
    parts = [points[i : i + size] for i in range(0, len(points), max(1, size))]
    kept = {end(part, key=lambda point: point[1]) for part in parts for end in (min, max)}
    return sorted(kept) if size > 2 else points


# -- ranks and pipelines -----------------------------------------------------------------------------------------------


def bars(readings: Sequence[Reading], hosts: Sequence[str]) -> str:
    """A bar per rank: its mean time per step by kind, over all readings; and a table of them."""
    steps, ranks = sum(reading.steps for reading in readings), range(readings[-1].ranks)
    means = {
        kind: [sum(each.mean[kind][rank] * each.steps for each in readings) / steps for rank in ranks] for kind in KINDS
    }
    names = [f"rank {rank}" + (f"\n{hosts[rank]}" if rank < len(hosts) else "") for rank in ranks]
    whole = [sum(row[rank] for row in means.values() if not math.isnan(row[rank])) for rank in ranks]
    used = {kind: row for kind, row in means.items() if any(value > 0.002 * max(whole) for value in row)}

    def draw(axes: Axes) -> None:
        left = [0.0 for _ in ranks]
        for kind, row in used.items():
            row = [0.0 if math.isnan(value) else value for value in row]
            axes.barh(names, row, 0.7, left, color=COLOURS[kind], label=kind.replace("_", " "), clip_on=False)
            left = [begin + value for begin, value in zip(left, row)]
        axes.set(xlabel="seconds per step", ylim=(len(ranks) - 0.5, -0.5))
        axes.grid(axis="y", visible=False)

    head = "".join(f"<th>{kind.replace('_', ' ')}" for kind in used)
    cells = [
        f"<tr><td>{rank}"
        + "".join(f"<td>{'not measured' if math.isnan(row[rank]) else duration(row[rank])}" for row in used.values())
        for rank in ranks
    ]
    numbers = f"<details><summary>Numbers</summary>{_table(f'<th>rank{head}', cells)}</details>"
    return f'<div class="scroll">{svg("time of a step", 12, 1 + 0.5 * len(ranks), draw, len(used))}</div>{numbers}'


def waiting(reading: Reading, kind: str) -> float:
    """Mean share of a step that ranks spent in this kind of wait; NaN if it is not measured."""
    total = sum(sum(value for value in values if not math.isnan(value)) for values in reading.mean.values())
    return sum(reading.mean[kind]) / total if total else math.nan


def gantt(recorded: Mapping[str, Any]) -> str:
    """The passes of a pipeline step: a lane per rank, a box per pass with its microbatch; later stages are paler."""
    actions = recorded["actions"]
    if not actions:
        return '<p class="none">no pass was recorded</p>'
    begin, end = min(action[4] for action in actions), max(action[5] for action in actions)
    ranks = max(int(action[0]) for action in actions) + 1
    of_rank = {rank: sorted({int(a[1]) for a in actions if int(a[0]) == rank}) for rank in range(ranks)}

    ordered = sorted(actions, key=lambda action: action[1])  # the legend has the colours of the first stage

    def draw(axes: Axes) -> None:
        for kind, (name, colour) in PASSES.items():
            for n, (rank, stage, _, microbatch, since, until) in enumerate(a for a in ordered if a[2] == kind):
                pale = 1.0 - 0.45 * of_rank[rank].index(stage) / max(1, len(of_rank[rank]) - 1)
                x, wide = 1e3 * (since - begin), 1e3 * (until - since)
                label = None if n else name
                axes.barh(rank, wide, 0.8, x, color=colour, alpha=pale, label=label, ec="#fff", lw=0.3, clip_on=False)
                if until - since > 0.015 * (end - begin):
                    axes.text(x + wide / 2, rank, str(microbatch), color="#fff", ha="center", va="center", size=9)
        axes.set(xlabel="ms", xlim=(0, 1e3 * (end - begin) or 1), ylim=(ranks - 0.5, -0.5))
        axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        axes.grid(axis="y", visible=False)

    return (
        f"<p>{escape(pipeline_in_words(recorded))}. Idle ranks wait for others, send and receive. Numbers are "
        f'microbatches.</p><div class="scroll">{svg("a step of the pipeline", 12, 1 + 0.5 * ranks, draw)}</div>'
    )


# -- the page ----------------------------------------------------------------------------------------------------------


def page(folder: Path) -> str:
    """The HTML of a run's folder. Raises ValueError if it holds no run."""
    config = _json(folder / CONFIG)
    records = json_lines(folder / METRICS)
    if not config and not records:
        raise ValueError(f"{folder} holds no run: it has neither {CONFIG} nor {METRICS}")
    steps = [record for record in records if "val_loss" not in record]
    readings, hosts = read_ranks(folder)
    summary = _json(folder / "summary.json")
    versions = _json(folder / "versions.json")
    name = folder.resolve().name
    sections = [
        f'<div class="tiles">{_tiles(steps, records, summary, config, readings)}</div>',
        f'<section><h2>Curves</h2><div class="grid">{"".join(_charts(steps, records, readings))}</div></section>',
    ]
    bound = ""
    if readings:
        bound = in_words(*verdict(readings))
        sections.append(
            f"<section><h2>Time of a step, by rank</h2><p>{escape(bound[0].upper() + bound[1:])}.</p>"
            f"{bars(readings, hosts)}</section>"
        )
    if recorded := _json(folder / PIPELINE):
        sections.append(f"<section><h2>A step of the pipeline</h2>{gantt(recorded)}</section>")
    sections.append(f"<section><h2>Incidents</h2>{_incidents(folder)}</section>")
    sections.append(f"<section><h2>Checkpoints</h2>{_checkpoints(folder)}</section>")
    sections.append(f"<section><h2>Configuration and versions</h2>{_settings(config, versions)}</section>")
    where = ", ".join(
        str(each) for each in (summary.get("layout"), summary.get("device"), config.get("run", {}).get("dtype")) if each
    )
    written = time.strftime("%Y-%m-%d %H:%M:%S")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><header><h1>{escape(name)}</h1>"
        f"<p>{escape(_state(steps, summary, config))}{' &middot; ' + escape(where) if where else ''} &middot; "
        f"report of {written}</p></header>{''.join(sections)}</body></html>\n"
    )


def read_ranks(folder: Path) -> tuple[list[Reading], list[str]]:
    """(readings of all ranks, their hosts); drops those of repeated steps and of another number of ranks."""
    found: list[Reading] = []
    hosts: list[str] = []
    for line in json_lines(folder / RANKS):
        reading = Reading.from_dict(line)
        found = [each for each in found if each.step < reading.step and each.ranks == reading.ranks]
        found.append(reading)
        hosts = line.get("hosts", [])
    return found, hosts


def _state(steps: Sequence[Any], summary: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    asked = config.get("optim", {}).get("steps")
    done = steps[-1]["step"] + 1 if steps else 0
    if summary:
        return f"finished after {done} steps"
    return f"not finished: step {done}" + (f" of {asked}" if asked else "")


def _tiles(
    steps: Sequence[Any],
    records: Sequence[Any],
    summary: Mapping[str, Any],
    config: Mapping[str, Any],
    readings: Sequence[Reading],
) -> str:
    validations = [record["val_loss"] for record in records if "val_loss" in record]
    speeds = sorted(record["tokens_per_second"] for record in steps[1:] or steps)
    found = []
    if steps:
        first, last = steps[0]["loss"], steps[-1]["loss"]
        found.append(("loss", f"{_number(first)} &rarr; {_number(last)}"))
    if validations:
        found.append(("validation loss", _number(validations[-1])))
    if speeds:
        found.append(("tokens per second, median", f"{speeds[len(speeds) // 2]:,.0f}"))
        found.append(("time in steps", duration(sum(record["seconds"] for record in steps))))
    if readings:
        found.append(("peak memory of a rank", as_bytes(int(max(readings[-1].memory)))))
    if summary.get("parameters"):
        found.append(("parameters", f"{summary['parameters']:,}"))
    if summary.get("verified") is not None:
        found.append(("equal to one process", "yes" if summary["verified"] else "NO"))
    left_out = sum(record.get("grad_norm") is None for record in steps)
    if left_out:
        found.append(("steps skipped", str(left_out)))
    return "".join(f"<div><b>{value}</b><span>{escape(name)}</span></div>" for name, value in found)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3f}"


def _charts(steps: Sequence[Any], records: Sequence[Any], readings: Sequence[Reading]) -> list[str]:
    def of(name: str) -> list[tuple[float, Any]]:
        return [(record["step"] + 1, record.get(name)) for record in steps]

    validation = [(record["step"] + 1, record["val_loss"]) for record in records if "val_loss" in record]
    ranks = readings[-1].ranks if readings else 0
    shown = range(ranks) if ranks <= 8 else ()
    waits = {kind[:2]: ([(each.step + 1, waiting(each, kind)) for each in readings], COLOURS[kind]) for kind in WAITS}
    tones = colormaps["viridis"]
    memory = {
        f"rank {rank}": ([(each.step + 1, each.memory[rank]) for each in readings], tones(0.1 + 0.75 * rank / ranks))
        for rank in shown
    }
    if ranks > 8:
        memory = {
            "most": ([(each.step + 1, max(each.memory)) for each in readings], tones(0.1)),
            "least": ([(each.step + 1, min(each.memory)) for each in readings], tones(0.7)),
        }
    losses = {"training": (of("loss"), RUN), "validation": (validation, VALIDATION)}
    return [
        chart("Loss", "nats", losses, zero=False),
        chart("Speed", "tokens per second", {"": (of("tokens_per_second"), RUN)}, EngFormatter(sep="")),
        chart("Learning rate", "", {"": (of("lr"), RUN)}),
        chart("Norm of the gradients", "", {"": (of("grad_norm"), RUN)}),
        chart(
            "Waiting for other ranks",
            "share of a step",
            {name: curve for name, curve in waits.items() if any(y for _, y in curve[0])},
            PercentFormatter(1.0),
        ),
        chart("Peak memory of each rank", "", memory, EngFormatter("B")),
    ]


def _incidents(folder: Path) -> str:
    found = json_lines(folder / INCIDENTS)
    rows = []
    for number, line in enumerate(found):
        following = found[number + 1]["what"] if number + 1 < len(found) else ""
        if line["what"] in following and line["what"] != following:
            continue  # the launcher records the message of a rank again
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line["time"]))
        rows.append(f"<tr><td class='when'>{when}<td>{escape(line['what'])}")
    told = _table("<th>time<th>what happened", rows) if rows else '<p class="none">none</p>'
    if hang := _json(folder / HANG):
        cells = [
            f"<tr><td>{each['rank']}<td>{escape(each['host'])}<td>{escape(each['kind'].replace('_', ' '))}"
            f"<td>{each['step'] + 1}<td>{duration(each['seconds'])}<td>{escape(each['call'])}<td>{each['calls']}"
            for each in hang["ranks"]
        ]
        head = "<th>rank<th>host<th>in<th>step<th>for<th>last call<th>number"
        told += f"<p>Where the ranks were when they timed out: {escape(hang['what'])}</p>{_table(head, cells)}"
    return told


def _checkpoints(folder: Path) -> str:
    saves = json_lines(folder / SAVES)
    kept = steps_in(folder / CHECKPOINTS)
    if not saves and not kept:
        return '<p class="none">none</p>'
    rows = [
        f"<tr><td>{each['step']}<td>{as_bytes(each['bytes'])}<td>{duration(each['seconds'])}"
        f"<td>{duration(each['blocked'])}<td>{'kept' if each['step'] in kept else 'removed'}"
        for each in saves
    ]
    rows += [f"<tr><td>{step}<td><td><td><td>kept" for step in kept if step not in {each["step"] for each in saves}]
    return _table("<th>step<th>size<th>until it was on disk<th>training waited<th>", rows)


def _settings(config: Mapping[str, Any], versions: Mapping[str, Any]) -> str:
    parts = []
    for name, values in [*config.items(), *[("versions", versions)]]:
        if not isinstance(values, Mapping) or not values:
            continue
        rows = [f"<tr><td>{escape(str(key))}<td>{escape(_plain(value))}" for key, value in _flat(values)]
        parts.append(f"<details><summary>{escape(name)}</summary>{_table('', rows)}</details>")
    return "".join(parts) or '<p class="none">not written yet</p>'


def _flat(values: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found = []
    for key, value in values.items():
        found += _flat(value, f"{before}{key}.") if isinstance(value, Mapping) else [(f"{before}{key}", value)]
    return found


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(head: str, rows: Sequence[str]) -> str:
    top = f"<thead><tr>{head}</thead>" if head else ""
    return f'<div class="scroll"><table>{top}<tbody>{"".join(rows)}</tbody></table></div>'


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


STYLE = """
:root{color-scheme:light dark;--ink:#1c2230;--soft:#5d6677;--line:#dfe3ea;--card:#fff;--ground:#f4f6f9}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--soft:#9aa4b5;--line:#333b4a;--card:#1b212c;--ground:#12161e}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1400px;padding:20px;background:var(--ground);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{margin:0;font-size:26px}h2{margin:0 0 10px;font-size:18px}header p{margin:2px 0 16px;color:var(--soft)}
section,.tiles>div,figure{background:var(--card);border:1px solid var(--line);border-radius:10px}
section{padding:16px;margin:16px 0}section section,section figure{border-color:var(--line)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px}
.tiles>div{padding:12px 14px}.tiles b{display:block;font-size:19px;font-weight:600}
.tiles span{color:var(--soft);font-size:13px}
div.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,380px),1fr));gap:14px}
figure{margin:0;padding:12px}figcaption{font-weight:600;margin-bottom:4px}
svg{display:block;width:100%;height:auto;color:var(--soft)}svg text{font-family:inherit!important}
.scroll{overflow-x:auto}.scroll svg{min-width:680px}
table{border-collapse:collapse;width:100%;font-size:14px}th{text-align:left;color:var(--soft);font-weight:500}
td,th{padding:5px 14px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}tr:last-child td{border-bottom:0}
td{overflow-wrap:anywhere}td.when{white-space:nowrap;color:var(--soft)}
details{margin:8px 0}summary{cursor:pointer;color:var(--soft)}.none{color:var(--soft);margin:0}
@media(max-width:600px){body{padding:10px}section{padding:12px}}
"""


# -- the command -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReportOptions:
    """Write a report of a run as one HTML page; the run may still be in progress."""

    run: tyro.conf.Positional[Path]
    """Folder of the run, such as runs/main."""
    out: Path | None = None
    """The file to write; default: report.html in that folder."""


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    options = tyro.cli(ReportOptions, prog="fusedtp report", args=argv)
    out = options.out or options.run / REPORT
    try:
        out.write_text(page(options.run))
    except (ValueError, OSError) as error:
        print(f"fusedtp report: error: {error}", file=sys.stderr)
        return 1
    print(f"written to {out}")
    return 0
