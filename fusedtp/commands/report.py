"""`fusedtp report runs/NAME`: the run as one self-contained HTML page, without scripts or network access.

It reads the files written so far, so it works for running, failed and finished runs:

    metrics.jsonl      curves of loss, speed, learning rate, norm, memory
    ranks.jsonl        each rank's time by kind, and what bounds a step
    pipeline.json      a recorded step of a pipeline, as a Gantt chart
    saves.jsonl        checkpoints
    incidents.jsonl, hang.json, config.json, versions.json, summary.json

Charts are SVG; colours follow the reader's light or dark colour scheme.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import tyro

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
PASSES = {
    "F": ("forward", "#4c78d8"), "B": ("backward", "#3ca951"), "I": ("backward of inputs", "#45b5a5"),
    "W": ("backward of weights", "#e8a513"),
}  # fmt: skip
MOST_POINTS = 400  # per curve; longer curves are drawn as means, in a band from minimum to maximum

# -- numbers -----------------------------------------------------------------------------------------------------------


def short(value: float) -> str:
    """A number with at most four digits, with k, M, G for thousands."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            scaled = value / (size if unit != "k" else 1e3)
            return f"{scaled:.4g}{unit}"
    return f"{value:.4g}"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers in a range."""
    rough = (high - low) / count
    if not rough > 1e-300:  # an empty range, or steps too small for a logarithm
        return [low]
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * each for each in (1, 2, 2.5, 5, 10) if size * each >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * n for n in range(first, math.floor(high / step + 1e-9) + 1)]


# -- curves ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """A curve of a chart. name: its name in the legend. dots: draw the points too."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str = COLOURS["compute"]
    dots: bool = False


def chart(title: str, curves: Sequence[Curve], form: Callable[[float], str] = short, zero: bool = False) -> str:
    """A figure of curves over steps, with a note if there are no points. zero: the y axis starts at 0."""
    curves = [Curve(c.name, [p for p in c.points if _finite(p[1])], c.colour, c.dots) for c in curves]
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return f'<figure><figcaption>{escape(title)}</figcaption><p class="none">nothing measured</p></figure>'
    width, height, left, right, top, bottom = 480, 220, 62, 12, 10, 28
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    margin = (y1 - y0) * 0.06 or abs(y1) * 0.1 or 1.0
    y0, y1 = (0.0 if zero else y0 - margin), y1 + margin
    span = (x1 - x0) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + (x - x0) / span * (width - left - right),
            height - bottom - (y - y0) / (y1 - y0) * (height - top - bottom),
        )

    parts = []
    for y in ticks(y0, y1):
        _, py = at(x0, y)
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{py:.1f}" y2="{py:.1f}"/>')
        parts.append(_text("tick", left - 6, py + 4, "end", form(y)))
    for x in (x for x in ticks(x0, x1, 5) if x == int(x)):
        px, _ = at(x, y0)
        parts.append(_text("tick", px, height - 8, "middle", short(x)))
    for curve in curves:
        mean, band = thinned(curve.points)
        if band:
            outline = [at(x, low) for x, low, _ in band] + [at(x, high) for x, _, high in reversed(band)]
            parts.append(f'<polygon points="{_path(outline)}" fill="{curve.colour}" opacity="0.2"/>')
        places = [at(x, y) for x, y in mean]
        parts.append(f'<polyline points="{_path(places)}" fill="none" stroke="{curve.colour}" stroke-width="1.8"/>')
        if curve.dots or len(places) == 1:
            parts += [
                f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{curve.colour}">'
                f"<title>step {x:g}: {escape(form(y))}</title></circle>"
                for (px, py), (x, y) in zip(places, mean, strict=True)
            ]
    names = legend([(curve.name, curve.colour) for curve in curves if curve.name])
    last = f" <b>{escape(form(curves[0].points[-1][1]))}</b>" if len(curves) == 1 else ""
    return f"<figure><figcaption>{escape(title)}{last}</figcaption>{_svg(width, height, title, parts)}{names}</figure>"


def thinned(
    points: Sequence[tuple[float, float]],
) -> tuple[list[tuple[float, float]], list[tuple[float, float, float]]]:
    """(points, band): the points of a short curve and []; for a long one, means and (x, min, max) of equal parts."""
    if len(points) <= MOST_POINTS:
        return list(points), []
    size = -(-len(points) // MOST_POINTS)
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    middle = [part[len(part) // 2][0] for part in parts]
    mean = [sum(y for _, y in part) / len(part) for part in parts]
    band = [(x, min(y for _, y in part), max(y for _, y in part)) for x, part in zip(middle, parts, strict=True)]
    return list(zip(middle, mean, strict=True)), band


def legend(names: Sequence[tuple[str, str]]) -> str:
    if not names:
        return ""
    items = [f'<li><i style="background:{colour}"></i>{escape(name)}</li>' for name, colour in names]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    inside = "".join(parts)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">{inside}</svg>'


def _text(kind: str, x: float, y: float, anchor: str, text: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


# -- ranks and pipelines -----------------------------------------------------------------------------------------------


def bars(readings: Sequence[Reading], hosts: Sequence[str]) -> str:
    """A bar per rank: its mean time per step by kind, over all readings."""
    steps = sum(reading.steps for reading in readings)
    ranks = readings[-1].ranks
    table = [
        {
            kind: sum(each.mean[kind][rank] * each.steps for each in readings) / steps
            for kind in KINDS
            if not math.isnan(readings[-1].mean[kind][rank])
        }
        for rank in range(ranks)
    ]
    longest = max(sum(row.values()) for row in table) or 1.0
    used = [kind for kind in KINDS if any(row.get(kind, 0) > 0.002 * longest for row in table)]
    rows = []
    for rank, row in enumerate(table):
        pieces = [
            f'<span style="width:{100 * row[kind] / longest:.2f}%;background:{COLOURS[kind]}" '
            f'title="{kind.replace("_", " ")}: {duration(row[kind])}"></span>'
            for kind in used
            if row.get(kind)
        ]
        host = f" <small>{escape(hosts[rank])}</small>" if rank < len(hosts) else ""
        total = duration(sum(row.values()))
        bar = f'<div class="bar">{"".join(pieces)}</div>'
        rows.append(f'<div class="rank"><label>rank {rank}{host}</label>{bar}<em>{total}</em></div>')
    head = "".join(f"<th>{kind.replace('_', ' ')}" for kind in used)
    cells = [
        f"<tr><td>{rank}" + "".join(f"<td>{duration(row[kind]) if kind in row else 'not measured'}" for kind in used)
        for rank, row in enumerate(table)
    ]
    numbers = f"<details><summary>Numbers</summary>{_table(f'<th>rank{head}', cells)}</details>"
    return "".join(rows) + legend([(kind.replace("_", " "), COLOURS[kind]) for kind in used]) + numbers


def waiting(reading: Reading, kind: str) -> float:
    """Mean share of a step that ranks spent in this kind of wait; NaN if it is not measured."""
    total = sum(sum(value for value in values if not math.isnan(value)) for values in reading.mean.values())
    return sum(reading.mean[kind]) / total if total else math.nan


def gantt(recorded: Mapping[str, Any]) -> str:
    """The passes of a pipeline step: a lane per rank, a box per pass with its microbatch; later stages are paler."""
    actions = recorded["actions"]
    if not actions:
        return '<p class="none">no pass was recorded</p>'
    ranks = max(int(action[0]) for action in actions) + 1
    begin, end = min(action[4] for action in actions), max(action[5] for action in actions)
    span = (end - begin) or 1.0
    width, left, lane, top = 1000, 62, 34, 6
    height = top + ranks * lane + 24
    of_rank = {r: sorted({int(a[1]) for a in actions if int(a[0]) == r}) for r in range(ranks)}
    parts = []
    for rank in range(ranks):
        y = top + rank * lane
        parts.append(f'<rect class="lane" x="{left}" y="{y}" width="{width - left - 8}" height="{lane - 6}"/>')
        parts.append(_text("tick", left - 8, y + lane / 2 + 1, "end", f"rank {rank}"))
    scale = (width - left - 8) / span
    for rank, stage, kind, microbatch, since, until in actions:
        name, colour = PASSES[kind]
        x, wide = left + (since - begin) * scale, max(0.8, (until - since) * scale)
        y = top + int(rank) * lane
        pale = 1.0 - 0.45 * of_rank[int(rank)].index(int(stage)) / max(1, len(of_rank[int(rank)]) - 1)
        label = _text("box", x + wide / 2, y + lane / 2 + 1, "middle", str(microbatch)) if wide > 16 else ""
        told = f"rank {rank}, stage {stage}, {name} of microbatch {microbatch}: {duration(until - since)}"
        place = f'x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{lane - 6}" rx="2"'
        parts.append(f'<g><title>{told}</title><rect {place} fill="{colour}" opacity="{pale:.2f}"/>{label}</g>')
    for tick in ticks(0, span * 1e3, 8):
        x = left + tick / 1e3 * scale
        parts.append(_text("tick", x, height - 6, "middle", f"{tick:g}"))
    kinds = [PASSES[kind] for kind in PASSES if any(action[2] == kind for action in actions)]
    return (
        f"<p>{escape(pipeline_in_words(recorded))}. Idle ranks wait for others, send and receive. Numbers are "
        'microbatches, the axis is milliseconds.</p><div class="scroll">'
        f"{_svg(width, height, 'a step of the pipeline', parts)}</div>" + legend(kinds)
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
        found.append(("tokens per second, median", short(speeds[len(speeds) // 2])))
        found.append(("time in steps", duration(sum(record["seconds"] for record in steps))))
    if readings:
        found.append(("peak memory of a rank", as_bytes(int(max(readings[-1].memory)))))
    if summary.get("parameters"):
        found.append(("parameters", short(summary["parameters"])))
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
    colours = list(COLOURS.values())
    waits = [
        Curve(kind[:2], [(each.step + 1, waiting(each, kind)) for each in readings], COLOURS[kind]) for kind in WAITS
    ]
    memory = [
        Curve(
            f"rank {rank}",
            [(each.step + 1, each.memory[rank]) for each in readings],
            colours[rank % len(colours)],
        )
        for rank in shown
    ]
    if ranks > 8:
        memory = [
            Curve("most", [(each.step + 1, max(each.memory)) for each in readings]),
            Curve("least", [(each.step + 1, min(each.memory)) for each in readings], COLOURS["other"]),
        ]
    return [
        chart("Loss", [Curve("training", of("loss")), Curve("validation", validation, COLOURS["pp_wait"], dots=True)]),
        chart("Tokens per second", [Curve("", of("tokens_per_second"), COLOURS["data"])], zero=True),
        chart("Learning rate", [Curve("", of("lr"), COLOURS["dp_wait"])], zero=True),
        chart("Norm of the gradients", [Curve("", of("grad_norm"), COLOURS["tp_wait"])], zero=True),
        chart(
            "Waiting for other ranks",
            [curve for curve in waits if any(y for _, y in curve.points)],
            lambda value: f"{value:.0%}",
            zero=True,
        ),
        chart("Peak memory of each rank", memory, lambda value: as_bytes(int(value))),
    ]  # fmt: skip


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
:root{color-scheme:light dark;--ink:#1c2230;--soft:#5d6677;--line:#dfe3ea;--card:#fff;--ground:#f4f6f9;--lane:#edf0f5}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--soft:#9aa4b5;--line:#333b4a;--card:#1b212c;--ground:#12161e;
--lane:#262d3a}}
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
figcaption b{float:right;color:var(--soft);font-weight:500}
svg{display:block;width:100%;height:auto}svg text.tick{font-size:12px;fill:var(--soft)}
svg text.box{font-size:12px;fill:#fff}svg .grid{stroke:var(--line)}svg .lane{fill:var(--lane)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 16px;margin:8px 0 0;padding:0;font-size:13px}
.legend{color:var(--soft)}
.legend i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px}
.rank{display:grid;grid-template-columns:minmax(90px,auto) 1fr 70px;gap:10px;align-items:center;margin:6px 0}
.rank label small{color:var(--soft);display:block;line-height:1.1;overflow:hidden;text-overflow:ellipsis}
.rank em{font-style:normal;color:var(--soft);font-size:13px;white-space:nowrap}
.bar{display:flex;height:24px;border-radius:5px;overflow:hidden;background:var(--lane)}
.scroll{overflow-x:auto}.scroll svg{min-width:680px}
table{border-collapse:collapse;width:100%;font-size:14px}th{text-align:left;color:var(--soft);font-weight:500}
td,th{padding:5px 14px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}tr:last-child td{border-bottom:0}
td{overflow-wrap:anywhere}td.when{white-space:nowrap;color:var(--soft)}
details{margin:8px 0}summary{cursor:pointer;color:var(--soft)}.none{color:var(--soft);margin:0}
@media(max-width:600px){body{padding:10px}section{padding:12px}.rank{grid-template-columns:70px 1fr 56px}}
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
