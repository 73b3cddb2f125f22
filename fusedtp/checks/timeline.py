"""Draws a trace as one self-contained HTML file, with a row for each rank and program.

If the trace has simulated time, the axis is time. Otherwise every moment takes one unit: then only order and waits are
meaningful, not lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from string import Template

from fusedtp.sim.faults import Fault, Moment, place_of

KINDS = {
    "alive": "ready, or not chosen to run",
    "computed": "computed on its own memory",
    "copied": "copied: to or from another rank, or by a copy engine",
    "signalled": "wrote or read a flag",
    "waited": "waited",
}
ROW, HEIGHT, AXIS = 20, 14, 26  # pixels: a row, its bar, the axis at the bottom
RANK, CHARACTER = 58, 7.3  # pixels: the column of rank names, a character of the row names
TICKS = 10  # maximum


@dataclass(frozen=True)
class Segment:
    """A time span of one program. kind: a key of KINDS."""

    rank: int
    launch: str
    program: int
    kind: str
    begin: float
    end: float
    what: str
    faulty: bool = False

    @property
    def lane(self) -> tuple[int, int, str]:
        return self.rank, self.program, self.launch


def segments(moments: Sequence[Moment], fault: Fault | None = None) -> list[Segment]:
    """The time spans of every program; consecutive spans of one kind are merged."""
    timed = any(moment.end > moment.begin for moment in moments)
    final = max((m.end for m in moments), default=0.0) if timed else float(len(moments))
    found: list[Segment] = []
    born: dict[tuple[int, int, str], float] = {}
    asleep: dict[tuple[int, int, str], tuple[float, Moment]] = {}

    def close(lane: tuple[int, int, str], end: float) -> None:
        if lane in asleep:
            begin, moment = asleep.pop(lane)
            found.append(_segment(moment, "waited", begin, end))

    for number, moment in enumerate(moments):
        lane = moment.rank, moment.program, moment.launch
        begin, end = (moment.begin, moment.end) if timed else (float(number), float(number + 1))
        if moment.kind == "start":
            born[lane] = begin
        elif moment.kind == "wait":
            if timed and end > begin:
                found.append(_segment(moment, "waited", begin, end))
            else:
                asleep.setdefault(lane, (begin, moment))
        elif moment.kind in ("wake", "end"):
            close(lane, begin)
            if moment.kind == "end":
                found.append(_segment(moment, "alive", born.pop(lane, 0.0), end))
        else:
            born.setdefault(lane, begin)
            faulty = fault is not None and any(moment.shows(access) for access in fault.accesses)
            found.append(replace(_segment(moment, _kind(moment), begin, end), faulty=faulty))
    for lane in list(asleep):
        close(lane, final)
    for (rank, program, launch), begin in born.items():
        found.append(Segment(rank, launch, program, "alive", begin, final, "has not ended"))
    return _merged(found)


def _segment(moment: Moment, kind: str, begin: float, end: float) -> Segment:
    done = f"{moment.what} {place_of(moment.tensor, moment.first, moment.last)}".rstrip()
    at = f", {moment.site}" if moment.site is not None and moment.site.line > 0 else ""
    return Segment(moment.rank, moment.launch, moment.program, kind, begin, end, done + at)


def _kind(moment: Moment) -> str:
    if moment.kind == "copy":
        return "copied"
    if moment.kind == "atomic":
        return "signalled"
    away = moment.tensor and not moment.tensor.endswith(f" of rank {moment.rank}")
    return "copied" if away else "computed"


def _merged(found: Sequence[Segment]) -> list[Segment]:
    """Sorts segments by begin and merges adjacent ones of a program and kind; keeps the first and last description."""
    last: dict[tuple[int, int, str], int] = {}
    kept: list[Segment] = []
    for segment in sorted(found, key=lambda s: (s.kind != "alive", s.begin)):
        at = last.get(segment.lane)
        if at is not None and _continues(kept[at], segment):
            before = kept[at]
            what = f"{before.what.split(' ... ')[0]} ... {segment.what}"
            kept[at] = replace(segment, begin=before.begin, what=what)
        else:
            last[segment.lane] = len(kept)
            kept.append(segment)
    return kept


def _continues(before: Segment, after: Segment) -> bool:
    plain = after.kind not in ("alive", "waited") and not (before.faulty or after.faulty)
    return plain and (before.kind, before.end) == (after.kind, after.begin)


def html(moments: Sequence[Moment], *, title: str = "timeline", fault: Fault | None = None) -> str:
    """A page that draws a trace; `fault` is marked in it."""
    drawn = segments(moments, fault)
    lanes = _lanes(drawn)
    end = max((segment.end for segment in drawn), default=1.0) or 1.0
    timed = any(moment.end > moment.begin for moment in moments)
    bars = "".join(_bar(segment, lanes[segment.lane], end, timed) for segment in drawn)
    height = len(lanes) * ROW
    if fault is not None:
        words = f"<title>{escape(str(fault))}</title>"
        bars += f'<line x1="100%" x2="100%" y1="0" y2="{height}" class="mark">{words}</line>'
    legend = "".join(f'<span><i class="{kind}"></i>{escape(words)}</span>' for kind, words in KINDS.items())
    if any(segment.faulty for segment in drawn):
        legend += '<span><i class="fault"></i>the first access of the fault</span>'
    longest = max((len(f"{launch} {program}") for _, program, launch in lanes), default=0)
    return PAGE.substitute(
        title=escape(title), legend=legend, labels=_labels(lanes),
        bars=_rules(lanes) + _axis(end, height, timed) + bars, height=height + AXIS,
        left=round(RANK + CHARACTER * longest),
        fault=f"<pre>{escape(str(fault))}</pre>" if fault is not None else "<p>No fault.</p>",
        axis="simulated time in microseconds" if timed else
        "moments in the order of this schedule; how long something took cannot be read from it",
    )  # fmt: skip


def _lanes(drawn: Sequence[Segment]) -> dict[tuple[int, int, str], int]:
    """The row of each program: by rank, then by time of the first launch."""
    first: dict[tuple[int, str], float] = {}
    for segment in drawn:
        key = segment.rank, segment.launch
        first[key] = min(segment.begin, first.get(key, segment.begin))
    found = {segment.lane for segment in drawn}
    ordered = sorted(found, key=lambda lane: (lane[0], first[lane[0], lane[2]], lane[2], lane[1]))
    return {lane: i for i, lane in enumerate(ordered)}


def _labels(lanes: dict[tuple[int, int, str], int]) -> str:
    words = []
    known: set[int] = set()
    for (rank, program, launch), row in lanes.items():
        y = row * ROW + HEIGHT
        if rank not in known:
            words.append(f'<text x="0" y="{y}" class="rank">rank {rank}</text>')
        known.add(rank)
        words.append(f'<text x="{RANK}" y="{y}">{escape(launch)} {program}</text>')
    return "".join(words)


def _rules(lanes: dict[tuple[int, int, str], int]) -> str:
    """Lines between ranks."""
    ranks = [rank for rank, _, _ in lanes]
    between = [row for row in range(1, len(ranks)) if ranks[row] != ranks[row - 1]]
    return "".join(
        f'<line x1="0" x2="100%" y1="{row * ROW - 1}" y2="{row * ROW - 1}" class="rule"/>' for row in between
    )


def _axis(end: float, height: int, timed: bool) -> str:
    """Tick lines at round numbers, with the numbers below."""
    step = 10.0 ** math.floor(math.log10(end / TICKS))
    step *= next(factor for factor in (1, 2, 5, 10) if end / (factor * step) <= TICKS)
    step = step if timed else max(step, 1.0)
    found = []
    for i in range(int(end / step) + 1):
        x, number = 100 * i * step / end, i * step * (1e6 if timed else 1)
        anchor = "start" if i == 0 else "end" if x > 97 else "middle"
        found.append(f'<line x1="{x:.3f}%" x2="{x:.3f}%" y1="0" y2="{height + 4}" class="tick"/>')
        found.append(f'<text x="{x:.3f}%" y="{height + 18}" text-anchor="{anchor}">{number:.6g}</text>')
    return "".join(found)


def _bar(segment: Segment, lane: int, end: float, timed: bool) -> str:
    x, width = 100 * segment.begin / end, max(100 * (segment.end - segment.begin) / end, 0.02)
    who = f"rank {segment.rank}, {segment.launch} {segment.program}"
    begin, until = (f"{1e6 * at:.6g} us" if timed else f"moment {at:g}" for at in (segment.begin, segment.end))
    words = f"{who}, {begin} to {until}: {segment.what}"
    kind = f"{segment.kind} fault" if segment.faulty else segment.kind
    return (
        f'<rect class="{kind}" x="{x:.3f}%" y="{lane * ROW + 2}" width="{width:.3f}%" height="{HEIGHT}">'
        f"<title>{escape(words)}</title></rect>"
    )


PAGE = Template(
    """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>$title</title><style>
:root { color-scheme: light dark; --ink: #1c2126; --paper: #fff; --rule: #c9d0d6; --alive: #e9edf0;
  --computed: #3b76b5; --copied: #d98a1f; --signalled: #4b9a5d; --waited: #b9a6cf; --fault: #cc2936; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8eb; --paper: #15191d; --rule: #3c454d; --alive: #2b343b;
  --computed: #6ba4e0; --copied: #eba94b; --signalled: #6fbf82; --waited: #6d5a86; --fault: #ff6b75; } }
body { font: 14px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 1.5em; }
h1 { font-size: 1.4em; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--fault); padding-left: 1em; }
.legend { display: flex; flex-wrap: wrap; gap: .3em 1.5em; }
.legend i { display: inline-block; width: 1em; height: 1em; margin-right: .4em; vertical-align: -2px; }
label { display: flex; align-items: center; gap: .6em; }
.chart { display: flex; margin-top: 1em; } .chart > svg { flex: none; }
.bars { flex: 1; min-width: 0; overflow-x: auto; } #bars { display: block; }
svg text { font-size: 12px; fill: var(--ink); } text.rank { font-weight: 600; }
rect:hover { stroke: var(--ink); stroke-width: 1.5; }
.alive { fill: var(--alive); background: var(--alive); }
.computed { fill: var(--computed); background: var(--computed); }
.copied { fill: var(--copied); background: var(--copied); }
.signalled { fill: var(--signalled); background: var(--signalled); }
.waited { fill: var(--waited); background: var(--waited); }
rect.fault, i.fault { fill: var(--fault); background: var(--fault); } .mark { stroke: var(--fault); stroke-width: 4; }
.rule { stroke: var(--ink); opacity: .5; } .tick { stroke: var(--rule); }
</style></head><body><h1>$title</h1>$fault
<p class="legend">$legend</p>
<label>zoom <input type="range" min="100" max="4000" value="100" aria-label="zoom"
  oninput="document.getElementById('bars').style.width = this.value + '%'"></label>
<div class="chart"><svg width="$left" height="$height">$labels</svg>
<div class="bars"><svg id="bars" width="100%" height="$height">$bars</svg></div></div>
<p>From left to right $axis. Hover over a bar to see what it was.</p>
</body></html>
"""
)
