"""The crossover table: thresholds follow from the medians, a lookup never raises, and `auto` follows the table."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusedtp
from fusedtp.bench import tables
from fusedtp.ops import engines, measured
from fusedtp.ops.measured import ENGINES, MARGIN, Key, at, find, fit
from fusedtp.ops.rows import Rows
from tests.ops.tables import tables_in

SECONDS = st.one_of(st.sampled_from([1.0, 1.01, 1.03, 2.0]), st.floats(1e-6, 1.0))
TIMES = st.dictionaries(
    st.integers(1, 1 << 20),
    st.tuples(SECONDS, SECONDS, SECONDS).map(lambda s: dict(zip(ENGINES, s, strict=True))),
    min_size=1,
    max_size=8,
)
CPU = measured.kind_of(torch.device("cpu"))
KEY = Key("all_gather_matmul", "float32", 2, "virtual")


def entry(steps: list[list[Any]], key: Key = KEY, width: int = 8, **more: Any) -> dict[str, Any]:
    return key._asdict() | {"width": width, "engines": steps, **more}


def write(folder: Path, entries: list[dict[str, Any]], machine: str = CPU, name: str = "") -> Path:
    path = folder / measured.file_of(name or machine)
    tables.write(path, machine, "engines", {}, entries, {})
    return path


@given(TIMES, st.data())
def test_an_engine_is_taken_from_where_it_wins_for_good(times, data):
    """For any row count: the last engine that, from some row count up to this one, beats all earlier ones."""
    if data.draw(st.booleans()):  # an engine that could not run at one size
        del times[data.draw(st.sampled_from(sorted(times)))][data.draw(st.sampled_from(ENGINES[1:]))]
    steps = fit(times, ENGINES)
    rows = sorted(times)
    begins = {ENGINES[0]: 0}
    for i, name in enumerate(ENGINES):
        wins = [
            name in times[t] and all(times[t][name] * (1 + MARGIN) < times[t][e] for e in ENGINES[:i] if e in times[t])
            for t in rows
        ]
        good = [t for j, t in enumerate(rows) if all(wins[j:])]
        if i and good:
            begins[name] = 0 if good[0] == rows[0] else good[0]
    assert steps[0][0] == 0 and [t for t, _ in steps] == sorted({t for t, _ in steps})
    for t in (0, rows[0], *rows, *(t + 1 for t in rows), 1 << 30):
        want = [name for name in ENGINES if name in begins and begins[name] <= t][-1]
        assert at(steps, t)[1] == want
        assert at(steps, t)[0] == begins[want]
    faster = {t: {name: s / 2 for name, s in known.items()} for t, known in times.items()}
    assert fit(faster, ENGINES) == steps


def test_noise_delays_a_crossover_but_makes_no_engine_come_and_go():
    clean = {t: {"collective": 2.0, "triton": 1.0 if t >= 64 else 3.0} for t in (16, 32, 64, 128, 256)}
    names = ("collective", "triton")
    assert fit(clean, names) == [(0, "collective"), (64, "triton")]
    assert fit(clean | {128: {"collective": 2.0, "triton": 1.97}}, names) == [
        (0, "collective"),
        (256, "triton"),
    ]
    assert fit(clean | {16: {"collective": 2.0, "triton": 1.0}}, names) == [(0, "collective"), (64, "triton")]
    assert fit({t: {"collective": 2.0, "triton": 1.0} for t in (16, 32)}, names) == [(0, "triton")]
    assert fit({16: {"collective": 1.0, "triton": 0.99}}, names) == [(0, "collective")]


KEYS = st.builds(
    Key, st.sampled_from(measured.FUSED), st.sampled_from(measured.DTYPES), st.integers(2, 4),
    st.sampled_from(measured.RANKS),
)  # fmt: skip
STEPS = st.lists(st.integers(1, 5000), max_size=3, unique=True).flatmap(
    lambda rows: st.tuples(*(st.sampled_from(ENGINES[:2]) for _ in range(len(rows) + 1))).map(
        lambda names: [list(step) for step in zip([0, *sorted(rows)], names, strict=True)]
    )
)
WIDTHS = st.one_of(st.integers(1, 40), st.integers(1, 1 << 40))


@settings(max_examples=50)
@given(
    st.lists(st.tuples(KEYS, STEPS, WIDTHS), max_size=5),
    KEYS,
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 40),
)
def test_a_lookup_never_raises_and_finds_what_was_written(tmp_path_factory, drawn, key, rows, width):
    folder = tmp_path_factory.mktemp("tables")
    table = {(k, w): entry(steps, k, w) for k, steps, w in drawn}
    write(folder, list(table.values()))
    with tables_in(folder):
        found = find(CPU, key, rows, width)
        known = [w for k, w in table if k == key and width and max(w, width) <= 4 * min(w, width)]
        assert bool(found.engine) == bool(known)
        for k, w in table:
            found = find(CPU, k, rows, w)
            begin, engine = at(table[k, w]["engines"], rows)
            assert found.engine == engine and found.transport == "programs"
            assert found.reason == f"{rows} rows, at least {begin}: measured crossover of {CPU}, width {w}"
        assert find("nvidia-h9", key, rows, width) == measured.NOTHING


def test_the_nearer_width_holds_within_a_factor_of_four(tmp_path):
    write(tmp_path, [entry([[0, "chunked"]], width=1024), entry([[0, "collective"]], width=8192)])
    with tables_in(tmp_path):
        got = {width: find(CPU, KEY, 5, width).engine for width in (255, 256, 2048, 2896, 2897, 8192, 32768, 32769)}
    assert got == {
        255: "", 256: "chunked", 2048: "chunked", 2896: "chunked", 2897: "collective", 8192: "collective",
        32768: "collective", 32769: "",
    }  # fmt: skip


def _gather(group: Any, rows: int) -> tuple[dict, str]:
    x, w = torch.ones(rows, 8), torch.ones(4, 8)
    fusedtp.all_gather_matmul(x, [w], group)
    comm = fusedtp.comm.communicator(group)
    choice = engines.choose(comm, "auto", Rows((rows, rows)), x.dtype, "all_gather_matmul", 8)
    return engines.calls(comm)["all_gather_matmul"], choice.reason


def test_auto_does_what_the_table_of_this_machine_says(tmp_path):
    write(tmp_path, [entry([[0, "collective"], [6, "chunked"]])])
    with tables_in(tmp_path):
        for rows, engine in ((1, "collective"), (3, "chunked")):
            counts, reason = fusedtp.VirtualWorld(2).run(lambda group, rows=rows: _gather(group, rows))[1]
            assert counts == {engine: 1}
            assert f"measured crossover of {CPU}" in reason
    with tables_in(tmp_path / "none"), pytest.warns(UserWarning, match="not a folder"):
        counts, reason = fusedtp.VirtualWorld(2).run(lambda group: _gather(group, 1))[0]
    assert counts == {"chunked": 1} and reason == "CPU ranks read their peers' shards in place"


@pytest.mark.parametrize(
    ("rows", "dtype", "width", "want"),
    [
        (
            512,
            torch.bfloat16,
            8192,
            ("collective", "512 rows, at least 0: measured crossover of nvidia-h200"),
        ),
        (
            1024,
            torch.bfloat16,
            8192,
            ("triton", "1024 rows, at least 1024: measured crossover of nvidia-h200"),
        ),
        (
            1024,
            torch.bfloat16,
            64,
            ("collective", "1024 rows, fewer than 2048 (not in the crossover table of nvi"),
        ),
        (
            4096,
            torch.float16,
            8192,
            ("triton", "4096 rows, at least 2048 (not in the crossover table of nvidia-h20"),
        ),
        (4096, torch.float64, 8192, ("chunked", "the Triton kernels do not support fp64")),
    ],
)
def test_auto_on_a_gpu(rows, dtype, width, want, tmp_path):
    """On an absent GPU: the table's engine if it can run; else the default, with a reason."""
    key = Key("all_gather_matmul", "bfloat16", 8, "processes")
    steps, by = [[0, "collective"], [1024, "triton"]], [[0, "programs"], [1024, "copy"]]
    table = [entry(steps, key, 8192, transports=by), entry(steps, key._replace(dtype="float64"), 8192)]
    write(tmp_path, table, "nvidia-h200")
    comm = SimpleNamespace(
        world_size=8,
        has_workspace=True,
        differences={},
        device=torch.device("cuda", 0),
        world=SimpleNamespace(shares_process=False),
    )
    asked = comm, "auto", Rows((rows // 8,) * 8), dtype
    with (
        tables_in(tmp_path),
        mock.patch.object(engines, "kind_of", lambda device: "nvidia-h200"),
        mock.patch.object(engines, "has_triton", lambda: True),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)),
    ):
        got = engines.choose(*asked, "all_gather_matmul", width)
        assert got.engine == want[0] and got.reason.startswith(want[1]), got
        assert got.reason.endswith("rows by the copy engine") == (got.transport == "copy" and got.engine == "triton")
        assert got.transport == ("copy" if "measured" in got.reason and rows >= 1024 else "programs")
        assert "no crossover table" in engines.choose(*asked).reason or dtype == torch.float64  # a token mover


BAD = {
    "another machine": (None, "field 'machine' is 'nvidia-h200'; it must be"),
    "an engine": (entry([[0, "magic"]]), "engines: 'magic' is not one of collective, chunked"),
    "an engine for GPUs": (entry([[0, "triton"]]), "engines: 'triton' is not one of collective, chunked"),
    "no engine": (entry([]), "field 'engines' must be a non-empty list of pairs"),
    "an odd step": (entry([[0]]), "field 'engines' must be a non-empty list of pairs"),
    "rows that fall": (
        entry([[0, "chunked"], [9, "collective"], [8, "chunked"]]),
        "engines: rows must start at 0 and increase",
    ),
    "rows from 1": (entry([[1, "chunked"]]), "engines: rows must start at 0 and increase"),
    "rows of -1": (entry([[-1, "chunked"]]), "engines: rows must be a whole number"),
    "an operation": (entry([[0, "chunked"]], KEY._replace(operation="x")), "field 'operation' is 'x'"),
    "a dtype": (entry([[0, "chunked"]], KEY._replace(dtype=["x"])), r"field 'dtype' is ['x']"),
    "one rank": (
        entry([[0, "chunked"]], KEY._replace(world=1)),
        "field 'world' must be a whole number from 2",
    ),
    "a width of 0": (entry([[0, "chunked"]], width=0), "field 'width' must be a whole number from 1"),
    "a transport": (
        entry([[0, "chunked"]], transports=[[0, "carrier pigeon"]]),
        "transports: 'carrier pigeon'",
    ),
    "a field more": (entry([[0, "chunked"]], speed=1), "unknown field 'speed'"),
}


@pytest.mark.parametrize("what", BAD)
def test_one_bad_entry_puts_the_table_aside(what, tmp_path):
    bad, told = BAD[what]
    good = entry([[0, "collective"]])
    path = write(tmp_path, [good, bad] if bad else [good], CPU if bad else "nvidia-h200", CPU)
    with tables_in(tmp_path), pytest.warns(UserWarning) as seen:
        assert find(CPU, KEY, 5, 8) == measured.NOTHING == find(CPU, KEY, 6, 8)
    assert len(seen) == 1
    assert str(path) in str(seen[0].message) and told in str(seen[0].message), seen[0].message


@settings(max_examples=60)
@given(st.data())
def test_damage_gives_the_default_or_changes_nothing(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("tables")
    path = write(folder, [entry([[0, "collective"], [6, "chunked"]])])
    good = path.read_bytes()
    begin, count = data.draw(st.integers(0, len(good) - 1)), data.draw(st.integers(0, 8))
    path.write_bytes(good[:begin] + data.draw(st.binary(max_size=8)) + good[begin + count :])
    with tables_in(folder), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = find(CPU, KEY, 5, 8)
    if found.engine:
        assert found.engine == "collective" and json.loads(path.read_bytes()) == json.loads(good)
    else:
        assert found == measured.NOTHING and len(seen) == 1
