"""A fault's report and a trace's timeline: complete, in order, and true when replayed."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.checks.timeline import KINDS, html, segments
from fusedtp.sim import Access, Case, Fault, Moment, Schedule, SimulationFault, Site, explore
from fusedtp.sim.explore import trace
from fusedtp.sim.report import ROWS, interleaving, relevant, replay, report
from tests.sim import exchange

FILE = Path(exchange.__file__)
FAULTY = {
    "case_relaxed": ("ring_run", {"sem": "relaxed"}),
    "case_early": ("ring_run", {"wait": False}),
    "case_past": ("ring_run", {"shift": 1}),
    "case_copies": ("streams_run", {"second": "copies"}),
    "case_unanswered": ("unanswered_run", {}),
}


def explored(maker: str, options: dict) -> Fault | None:
    return explore(Case(maker, lambda: getattr(exchange, maker)(**options)), 60).fault


@pytest.fixture(scope="module")
def faults(impatient) -> dict[str, Fault]:
    return {name: explored(*how) for name, how in FAULTY.items()}


@pytest.fixture(params=FAULTY)
def fault(request, faults) -> Fault:
    return faults[request.param]


def test_a_report_names_both_ends_with_their_source_and_values(fault):
    text = report(fault, name="x.py::case")
    ends = (*fault.accesses, *fault.waits)
    assert ends and fault.rule in text
    for end in ends:
        assert f"rank {end.rank}, {end.launch}, program {end.program}: " in text
        assert end.tensor in text or fault.rule == "out of bounds"
        if end.site.line:
            assert f"{FILE.name}:{end.site.line}" in text
            assert FILE.read_text().splitlines()[end.site.line - 1].strip() in text
    for access in fault.accesses:
        span = (
            [hex(access.first[0])]
            if fault.rule == "out of bounds"
            else [str(list(access.first)), str(list(access.last))]
        )
        assert all(index in text for index in span) and access.value in text
    for wait in fault.waits:
        assert f"sees {wait.seen}" in text and wait.last_writer in text


def test_the_table_shows_the_ends_of_the_fault_and_what_ordered_the_programs_in_time(fault):
    rows = relevant(fault)
    assert 0 < len(rows) <= ROWS and rows == sorted(rows, key=lambda m: m.step)
    shown = {(m.rank, m.program, m.tensor) for m in rows}
    for end in (*fault.accesses, *fault.waits):
        assert (end.rank, end.program, end.tensor) in shown
    drawn = interleaving(rows)
    heads = [line for line in drawn.splitlines() if "step" in line]
    assert re.findall(r"rank \d+", heads[0]) == [f"rank {rank}" for rank in sorted({m.rank for m in rows})]
    steps = [int(cell) for cell in re.findall(r"^\|\s*(\d+) \|", drawn, re.MULTILINE)]
    assert steps == [m.step for m in rows]


@pytest.mark.parametrize("name", ["case_relaxed", "case_copies"])
def test_the_trace_has_the_first_access_of_a_race_at_its_step(name, faults):
    first, second = faults[name].accesses
    assert first.step < second.step and any(moment.shows(first) for moment in faults[name].trace)


@st.composite
def traces(draw) -> Fault:
    """A race with any number of other accesses and polls after its first access."""
    site = Site(str(FILE), 1, "kernel", 1)
    race = [
        Access(rank, "kernel", 0, site, "store", "box of rank 0", (0,), (3,), step) for rank, step in ((0, 0), (1, 999))
    ]
    moments = [Moment(0, 0, "kernel", 0, "store", site, kind="store", tensor="box of rank 0", first=(0,), last=(3,))]
    for step in range(1, draw(st.integers(1, 60))):
        kind = draw(st.sampled_from(["load", "store", "atomic", "wait", "wake"]))
        tensor = draw(st.sampled_from(["box of rank 0", "flag of rank 0", "other of rank 0"]))
        what = {"atomic": "atomic_add (acquire, sys) reads 0", "wait": "waits, sees 0"}.get(kind, kind)
        rank = draw(st.integers(0, 2))
        moments.append(Moment(step, rank, "kernel", 0, what, site, kind=kind, tensor=tensor, first=(0,), last=(0,)))
    return Fault("write-write race", "not ordered", tuple(race), trace=tuple(moments))


@pytest.mark.slow
@settings(max_examples=80)
@given(traces())
def test_a_long_trace_keeps_both_accesses_and_nothing_beside_the_point(fault):
    rows = relevant(fault)
    assert 2 <= len(rows) <= ROWS
    assert (rows[0].step, rows[-1].step) == (0, 999)
    for row in rows:
        of_a_program = row.rank in (0, 1) and row.kind in ("atomic", "wait")
        assert of_a_program or row.tensor == "box of rank 0"
    for before, after in itertools.pairwise(rows):
        polled = before.kind == "atomic" and after.kind == "wait" and before[1:4] == after[1:4]
        assert not (polled and before.tensor == after.tensor), "a poll that ends in a wait is the wait"


def rerun(name: str, words: list[str]) -> str:
    """Execute the Python lines of a replay; what it raises."""
    lines = [line.strip() for line in words if line.startswith("  ")]
    try:
        exec("\n".join(lines), {})
    except SimulationFault as error:
        return f"{error.fault.rule}: {error.fault.message}"
    return "no fault"


def test_the_python_call_of_a_report_shows_the_same_fault_again(faults, tmp_path):
    cases = "\n".join(f"def {name}(): return {maker}(**{options})" for name, (maker, options) in FAULTY.items())
    path = tmp_path / "replayed.py"
    path.write_text(f"from tests.sim.exchange import *\n{cases}\n")
    for name, fault in faults.items():
        words = replay(fault, f"{path}::{name}", None)
        assert rerun(name, words) == f"{fault.rule}: {fault.message}"


def traced(maker: str, options: dict, schedule: Schedule) -> tuple[tuple[Moment, ...], Fault | None]:
    return trace(getattr(exchange, maker)(**options), schedule)


@pytest.mark.parametrize(
    ("maker", "options"),
    [("ring_run", {}), ("streams_run", {}), ("unanswered_run", {})],
    ids=lambda x: str(x),
)
def test_segments_tell_when_each_program_lived_waited_and_copied(impatient, maker, options):
    moments, fault = traced(maker, options, Schedule("round_robin", 0))
    drawn = segments(moments, fault)
    lanes = {(m.rank, m.program, m.launch) for m in moments}
    assert {s.lane for s in drawn if s.kind == "alive"} == lanes
    for segment in drawn:
        assert segment.kind in KINDS and 0 <= segment.begin < segment.end <= len(moments)
    for lane in lanes:  # nobody does two things at a time
        busy = sorted((s.begin, s.end) for s in drawn if s.lane == lane and s.kind != "alive")
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(busy))
    kinds = {s.kind for s in drawn}
    assert {"signalled"} <= kinds and ("copied" in kinds or maker == "unanswered_run")
    if fault is not None:  # who waits for ever waits until the end
        assert max(s.end for s in drawn if s.kind == "waited") == len(moments)


class Reader(HTMLParser):
    """Counts bars, and resources that would be loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.bars: list[str] = []
        self.loads: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "input", "line"):
            self.open.append(tag)
        if tag == "rect":
            self.bars.append(dict(attrs)["class"])
        self.loads += [value for key, value in attrs if key in ("src", "href")]

    def handle_endtag(self, tag):
        if tag != "line":
            assert self.open.pop() == tag


def test_a_timeline_is_one_page_that_draws_every_segment_and_marks_the_fault(faults):
    fault = faults["case_relaxed"]
    page = html(fault.trace, title="<ring & co>", fault=fault)
    reader = Reader()
    reader.feed(page)
    assert not reader.open and not reader.loads and "http" not in page
    assert len(reader.bars) == len(segments(fault.trace, fault))
    assert sum("fault" in kinds for kinds in reader.bars) == 1  # the trace ends before the other access
    assert "&lt;ring &amp; co&gt;" in page and "<ring" not in page
    assert "prefers-color-scheme: dark" in page and fault.message in page.replace("&#x27;", "'")
    for words in KINDS.values():
        assert words in page


def test_a_timeline_of_simulated_time_draws_to_scale():
    moments = [
        Moment(0, 0, "k", 0, "starts", kind="start"),
        Moment(1, 0, "k", 0, "dot", begin=0.0, end=3.0, kind="load", tensor="x of rank 0"),
        Moment(2, 0, "k", 0, "wait", begin=3.0, end=4.0, kind="wait"),
        Moment(3, 0, "k", 0, "ends", begin=4.0, end=4.0, kind="end"),
    ]
    found = {s.kind: (s.begin, s.end) for s in segments(moments)}
    assert found == {"computed": (0.0, 3.0), "waited": (3.0, 4.0), "alive": (0.0, 4.0)}
    assert 'width="75.000%"' in html(moments)


@given(st.floats(1e-7, 1e4))
def test_the_axis_of_a_timeline_has_round_numbers_in_their_places(end):
    moments = [Moment(0, 0, "k", 0, "dot", begin=0.0, end=end, kind="load", tensor="x of rank 0")]
    ticks = re.findall(r'<text x="([\d.]+)%"[^>]*>([\d.e+-]+)</text>', html(moments))
    microseconds = [float(number) for _, number in ticks]
    assert 3 <= len(ticks) <= 11 and microseconds[0] == 0
    assert re.fullmatch(r"[125]\.0+e[+-]\d+", f"{microseconds[1]:.5e}"), microseconds
    for i, (x, number) in enumerate(ticks):
        assert float(number) == pytest.approx(i * microseconds[1], rel=1e-5)  # six digits are shown
        assert float(x) == pytest.approx(float(number) / (1e6 * end) * 100, abs=2e-3)


def test_a_timeline_names_each_rank_once_and_its_programs_in_order_of_launch():
    lanes = [(0, "zeroth", 0), (0, "first", 1), (0, "first", 0), (1, "a_kernel_with_a_long_name", 0)]
    moments = [Moment(i, rank, name, program, "starts", kind="start") for i, (rank, name, program) in enumerate(lanes)]
    page = html(moments)
    labels = re.findall(r'<text x="(\d+)" y="\d+"[^>]*>([^<]*)</text>', page)
    assert [words for _, words in labels] == [
        "rank 0", "zeroth 0", "first 0", "first 1", "rank 1", "a_kernel_with_a_long_name 0",
    ]  # fmt: skip
    (width,) = re.findall(r'<div class="chart"><svg width="(\d+)"', page)
    x, longest = labels[-1]
    assert int(x) + 7 * len(longest) < int(width), "a label of 12 pixels a character's height is cut"
