"""fusedtp report: one self-contained page about a run that is finished, still running, or failed."""

import json
import math
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp import cli
from fusedtp.commands.report import MOST_POINTS, chart, page, thinned
from fusedtp.commands.results import duration
from fusedtp.train.watch import KINDS, Reading

VOID = {"meta"}
OPTIONAL_END = {"tr", "td", "th", "thead", "tbody"}


class Outline(HTMLParser):
    """Checks that tags close. Collects the text, the tags and their references."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text, self.tags, self.attributes = "", list[str](), list[tuple[str, str | None]]()
        self.feed(source)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID | OPTIONAL_END:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID | OPTIONAL_END:
            assert self.open.pop() == tag, tag

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data + "\n"


def write_lines(path: Path, *lines: dict) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def reading(step: int, compute: tuple[float, float] = (0.3, 0.1)) -> dict:
    seconds = {kind: [0.01, 0.02] for kind in KINDS} | {"compute": list(compute), "pp_wait": [0.1, 0.3]}
    return Reading(step, 10, seconds, seconds, [1e9, 2e9]).to_dict() | {"hosts": ["box-a", "box-b"]}


def written(folder: Path) -> Path:
    """The files of an unfinished run of two pipeline ranks: everything except the summary."""
    folder.mkdir()
    steps = [
        {
            "step": n,
            "loss": 3.0 - n / 10,
            "tokens_per_second": 1000.0 + n,
            "lr": 1e-3,
            "grad_norm": 1.0,
            "seconds": 0.5,
        }
        for n in range(20)
    ]
    steps[7]["grad_norm"] = None
    write_lines(folder / "metrics.jsonl", *steps[:10], {"step": 9, "val_loss": 2.25}, *steps[10:])
    write_lines(folder / "ranks.jsonl", reading(9), reading(19))
    write_lines(
        folder / "incidents.jsonl",
        {"time": 0.0, "what": "step 8: the loss is nan; <b>it began</b> in layers.1"},
        {"time": 1.0, "what": "rank 0, exit code 1: step 8: the loss is nan; <b>it began</b> in layers.1"},
    )
    write_lines(
        folder / "saves.jsonl",
        {"step": 10, "bytes": 3_200_000, "seconds": 0.5, "blocked": 0.012, "time": 0.0},
    )
    passes = [
        [0, 0, "F", 0, 0.0, 0.1],
        [1, 1, "F", 0, 0.1, 0.2],
        [1, 1, "B", 0, 0.2, 0.4],
        [0, 0, "B", 0, 0.4, 0.6],
    ]
    recorded = {"step": 2, "schedule": "1f1b", "idle": 0.5, "ideal": 0.25, "actions": passes}
    (folder / "pipeline.json").write_text(json.dumps(recorded))
    (folder / "config.json").write_text(json.dumps({"optim": {"steps": 50, "lr": 0.125}, "run": {"dtype": "bf16"}}))
    (folder / "versions.json").write_text(json.dumps({"packages": {"torch": "2.99"}}))
    return folder


def test_a_page_says_what_the_run_wrote_and_loads_nothing(tmp_path, capsys):
    folder = written(tmp_path / "night")
    assert cli.main(["report", str(folder)]) == 0
    source = (folder / "report.html").read_text()
    found = Outline(source)
    assert not {"script", "link", "img", "iframe"} & set(found.tags)
    assert not [value for name, value in found.attributes if name in ("src", "href")]
    assert "http" not in source and "@import" not in source and "url(" not in source.replace("url(#", "")
    for said in (
        "night", "not finished: step 20 of 50", "3.000", "1.100", "2.250", "steps skipped", "rank 1", "box-b",
        "step 3, 1f1b, 2 stages on 2 ranks: 600 ms, idle 50%; its order of passes alone 25%. Idle",
        "3.2 MB", "12 ms", "removed", "0.125", "2.99", "bf16",
    ):  # fmt: skip
        assert said in found.text, said
    assert "<b>it began</b>" in found.text and found.text.count("it began") == 1  # escaped, and shown once


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["metrics.jsonl", "ranks.jsonl", "pipeline.json", "config.json", "versions.json"])
def test_what_a_run_has_not_written_is_left_out(tmp_path, missing):
    folder = written(tmp_path / "run")
    (folder / missing).unlink()
    found = Outline(page(folder))
    assert ("A step of the pipeline" in found.text) == (missing != "pipeline.json")
    assert ("Time of a step, by rank" in found.text) == (missing != "ranks.jsonl")


def test_a_pipelines_step_of_an_older_run_is_shown_without_its_theory(tmp_path):
    folder = written(tmp_path / "run")
    recorded = json.loads((folder / "pipeline.json").read_text())
    del recorded["idle"], recorded["ideal"]
    (folder / "pipeline.json").write_text(json.dumps(recorded))
    assert "step 3, 1f1b, 2 stages on 2 ranks: 600 ms, idle 50%. Idle" in Outline(page(folder)).text


def test_lines_that_a_kill_has_cut_and_steps_that_were_lost_do_not_count(tmp_path):
    folder = written(tmp_path / "run")
    write_lines(folder / "ranks.jsonl", reading(9), reading(19, compute=(9.0, 9.0)), reading(14), reading(19))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 20, "lo')
    found = Outline(page(folder))
    assert "not finished: step 20 of 50" in found.text
    assert "compute 44%" in found.text  # 0.2 + 0.015 of 0.2 + 0.2 + 6 x 0.015, the means over two ranks


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path)]) == 1
    assert "holds no run" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_times_that_are_not_measured_say_so(tmp_path):
    folder = written(tmp_path / "run")
    line = reading(9)
    line["seconds"] |= {kind: [None, None] for kind in KINDS if kind != "data"}
    write_lines(folder / "ranks.jsonl", line)
    assert "is not measured on this device" in Outline(page(folder)).text


# -- pictures ----------------------------------------------------------------------------------------------------------

values = st.floats(-1e6, 1e6) | st.just(math.nan) | st.just(math.inf) | st.none()


@pytest.mark.slow
@settings(max_examples=10)
@given(st.lists(st.tuples(st.integers(0, 10**6), values), max_size=50), st.booleans())
def test_every_curve_is_drawn_whatever_its_points(points, zero):
    source = chart("a < b", "x & y", {"c < d": (points, "red"), "e": (points[:1], "blue")}, zero=zero)
    found = Outline(source)
    drawn = any(y is not None and math.isfinite(y) for _, y in points)
    assert "a < b" in found.text and ("nothing measured" in found.text) == (not drawn) == ("svg" not in found.tags)
    assert not drawn or ("c < d" in found.text and "x & y" in found.text)


def test_names_are_escaped_in_drawings_and_taken_literally(tmp_path):
    folder = written(tmp_path / "<b>night")
    write_lines(folder / "ranks.jsonl", reading(9) | {"hosts": ["<script>", "a $x^2$ & b"]})
    source = page(folder)
    found = Outline(source)
    assert {"<b>night", "<script>", "a $x^2$ & b"} <= {line.strip() for line in found.text.splitlines()}
    assert "script" not in found.tags


def test_a_long_curve_keeps_its_extremes_and_a_page_stays_small():
    points = [(n, float(n % 7)) for n in range(5 * MOST_POINTS + 3)]
    points[777] = (777, 99.0)
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS and kept == sorted(kept) and set(kept) <= set(points)
    assert max(y for _, y in kept) == 99 and min(y for _, y in kept) == 0
    assert thinned(points[:MOST_POINTS]) == points[:MOST_POINTS]
    assert len(chart("a", "b", {"": (points, "red")})) < 80 * MOST_POINTS


def test_times_are_short():
    assert [duration(x) for x in (0.0123, 4.25, 200, 3725)] == ["12 ms", "4.2 s", "3 min 20 s", "1 h 02 min"]
