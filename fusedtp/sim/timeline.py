"""A trace as a picture: one HTML file, nothing loaded from elsewhere, a row for each rank and program.

Where the trace carries simulated time the axis is time. Where it does not, every moment takes one unit: only order
and waiting mean something there, lengths do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from string import Template

from .faults import Access, Fault, Moment

KINDS = {
    "alive": "ready, or not chosen to run",
    "computed": "computed on its own memory",
    "copied": "copied: to or from another rank, or by a copy engine",
    "signalled": "wrote or read a flag",
    "waited": "waited",
}
ROW, LABEL, HEIGHT = 18, 190, 13  # pixels: a row, its name, a bar


@dataclass(frozen=True)
class Segment:
    """A stretch of one program's life. kind: a key of KINDS."""

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
    """What every program did from when to when; stretches of one kind that follow one another are one."""
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
            found.append(
                replace(_segment(moment, _kind(moment), begin, end), faulty=_at_fault(moment, fault))
            )
    for lane in list(asleep):
        close(lane, final)
    for (rank, program, launch), begin in born.items():
        found.append(Segment(rank, launch, program, "alive", begin, final, "has not ended"))
    return _merged(found)


def _segment(moment: Moment, kind: str, begin: float, end: float) -> Segment:
    span = ""
    if moment.tensor:
        last = f" to {list(moment.last)}" if moment.last != moment.first else ""
        span = f" {moment.tensor} {list(moment.first)}{last}"
    at = f", {moment.site}" if moment.site is not None and moment.site.line > 0 else ""
    return Segment(moment.rank, moment.launch, moment.program, kind, begin, end, f"{moment.what}{span}{at}")


def _kind(moment: Moment) -> str:
    if moment.kind == "copy":
        return "copied"
    if moment.kind == "atomic":
        return "signalled"
    away = moment.tensor and not moment.tensor.endswith(f" of rank {moment.rank}")
    return "copied" if away else "computed"


def _at_fault(moment: Moment, fault: Fault | None) -> bool:
    return fault is not None and any(_same(moment, access) for access in fault.accesses)


def _same(moment: Moment, access: Access) -> bool:
    return (moment.step, moment.rank, moment.program, moment.site, moment.tensor) == (
        access.step, access.rank, access.program, access.site, access.tensor
    )  # fmt: skip


def _merged(found: Sequence[Segment]) -> list[Segment]:
    """In order of their begin; touching ones of a program and kind joined, with the first and the last thing done."""
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
    lanes = {lane: i for i, lane in enumerate(sorted({segment.lane for segment in drawn}))}
    end = max((segment.end for segment in drawn), default=1.0) or 1.0
    timed = any(moment.end > moment.begin for moment in moments)
    labels = "".join(
        f'<text x="0" y="{i * ROW + 12}">rank {rank}, {escape(launch)} {program}</text>'
        for (rank, program, launch), i in lanes.items()
    )
    lines = "".join(
        f'<line x1="0" x2="100%" y1="{i * ROW - 1}" y2="{i * ROW - 1}" class="rank"/>'
        for lane, i in lanes.items()
        if i and list(lanes)[i - 1][0] != lane[0]
    )
    bars = "".join(_bar(segment, lanes[segment.lane], end) for segment in drawn)
    if fault is not None:
        bars += f'<line x1="100%" x2="100%" y1="0" y2="100%" class="mark"><title>{escape(str(fault))}</title></line>'
    legend = "".join(f'<span><i class="{kind}"></i>{escape(words)}</span>' for kind, words in KINDS.items())
    return PAGE.substitute(
        title=escape(title), legend=legend, labels=labels, bars=lines + bars, height=len(lanes) * ROW + 4, left=LABEL,
        fault=f"<pre>{escape(str(fault))}</pre>" if fault is not None else "<p>No fault.</p>",
        axis="simulated time" if timed else "order of events in this schedule; lengths mean nothing",
    )  # fmt: skip


def _bar(segment: Segment, lane: int, end: float) -> str:
    x, width = 100 * segment.begin / end, max(100 * (segment.end - segment.begin) / end, 0.02)
    who = f"rank {segment.rank}, {segment.launch} {segment.program}"
    words = f"{who}, {segment.begin:g} to {segment.end:g}: {segment.what}"
    kind = f"{segment.kind} fault" if segment.faulty else segment.kind
    return (
        f'<rect class="{kind}" x="{x:.3f}%" y="{lane * ROW + 1}" width="{width:.3f}%" height="{HEIGHT}">'
        f"<title>{escape(words)}</title></rect>"
    )


PAGE = Template(
    """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>$title</title><style>
:root { color-scheme: light dark; --ink: #1c2126; --paper: #fff; --rule: #c9d0d6; --alive: #e9edf0;
  --computed: #3b76b5; --copied: #d98a1f; --signalled: #4b9a5d; --waited: #b9a6cf; --fault: #cc2936; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8eb; --paper: #15191d; --rule: #3c454d; --alive: #262d33;
  --computed: #6ba4e0; --copied: #eba94b; --signalled: #6fbf82; --waited: #6d5a86; --fault: #ff6b75; } }
body { font: 14px/1.4 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 1.5em; }
pre { white-space: pre-wrap; border-left: 3px solid var(--fault); padding-left: 1em; }
.legend span { margin-right: 1.5em; white-space: nowrap; }
.legend i { display: inline-block; width: 1em; height: 1em; margin-right: .4em; vertical-align: -2px; }
.chart { display: flex; margin-top: 1em; } .bars { flex: 1; overflow-x: auto; }
svg text { font-size: 11px; fill: var(--ink); } rect:hover { stroke: var(--ink); }
.alive { fill: var(--alive); background: var(--alive); }
.computed { fill: var(--computed); background: var(--computed); }
.copied { fill: var(--copied); background: var(--copied); }
.signalled { fill: var(--signalled); background: var(--signalled); }
.waited { fill: var(--waited); background: var(--waited); }
rect.fault { fill: var(--fault); } .mark { stroke: var(--fault); stroke-width: 3; } .rank { stroke: var(--rule); }
</style></head><body><h1>$title</h1>$fault
<p class="legend">$legend</p>
<label>zoom <input type="range" min="100" max="4000" value="100"
  oninput="document.getElementById('bars').style.width = this.value + '%'"></label>
<div class="chart"><svg width="$left" height="$height">$labels</svg>
<div class="bars"><svg id="bars" width="100%" height="$height">$bars</svg></div></div>
<p>Left to right: $axis. Hover over a bar to see what it was.</p>
</body></html>
"""
)
