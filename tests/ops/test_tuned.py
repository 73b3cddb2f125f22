"""Tuned configurations: a lookup never raises, ranks agree, and a table is accepted as a whole or not at all."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.bench import tables
from fusedtp.checks.lint import _view
from fusedtp.ops import measured
from fusedtp.ops.all_gather_matmul import plan_all_gather_matmul, with_senders
from fusedtp.ops.all_gather_wgrad import plan_all_gather_wgrad
from fusedtp.ops.launch import tuned
from fusedtp.ops.launch.config import ALL_REGISTERS, HOST, Config, tiles
from fusedtp.ops.matmul_all_reduce import plan_few_rows, plan_one_shot, plan_two_shot
from fusedtp.ops.matmul_reduce_scatter import plan_matmul_reduce_scatter, reduction
from fusedtp.ops.rows import Rows
from tests.ops.tables import (
    FILE,
    H200,
    TILE,
    configs,
    entries,
    entry,
    holding,
    tables_in,
    write_configurations,
)

pytestmark = pytest.mark.filterwarnings("ignore:kernels run in their default configuration")
FLOAT = torch.float32
MATMUL = dict(rows=64, cols=64, k=64, even=1)
extents = st.one_of(st.integers(0, 200), st.integers(0, 1 << 40))


@pytest.fixture
def empty(tmp_path: Path) -> Any:
    with tables_in(tmp_path):
        yield tmp_path


@pytest.mark.slow
@settings(max_examples=50)
@given(
    st.sampled_from(list(tuned.KERNELS)),
    st.builds(dict, rows=extents, cols=extents, k=extents, even=st.booleans(), world=st.integers(1, 64)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8]),
    entries(),
    st.sampled_from([H200, HOST, replace(H200, name=""), replace(H200, programs=16, shared_gpu=True)]),
)
def test_a_lookup_never_raises_and_finds_what_was_written(tmp_path_factory, kernel, at, dtype, table, machine):
    folder = tmp_path_factory.mktemp("tables")
    write_configurations(folder, table)
    with tables_in(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = tuned.lookup(kernel, machine, dtype, **at)
        key = kernel, str(dtype).removeprefix("torch."), tuned.shape_class(kernel, machine, **at)
        written = {tuned.key_of(one): one["config"] for one in table} if machine.name == H200.name else {}
        assert found == written.get(key, {})
        for one in table:  # every entry is found by the extents of its own class
            own = {axis: n for axis, n in one["class"].items() if axis != "programs"}
            assert tuned.lookup(one["kernel"], H200, getattr(torch, one["dtype"]), **own) == one["config"]


@given(st.sampled_from(("rows", "cols", "k")), st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_a_class_is_a_range_of_extents(axis, a, b):
    """Buckets are monotonic, contain the number that names them, and span at most a factor of two."""
    low, high = (tuned.bucket(axis, n) for n in sorted((a, b)))
    assert low <= high and tuned.bucket(axis, low) == low
    if axis != "rows" or a <= tuned.MOST_ROWS:
        assert a <= tuned.bucket(axis, a) < max(2, 2 * a)
    else:
        assert tuned.bucket(axis, a) == tuned.MOST_ROWS


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    """A table with a different configuration for every class of small extents."""
    random, table = Random(0), []
    for kernel in ("all_gather", "all_gather_matmul", "matmul_reduce_scatter", "two_shot", "one_shot", "few_rows"):
        axes = tuned.KERNELS[kernel].axes
        for rows, other, even, world in product((0, 1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, 16, 32, 64), (0, 1), (2, 3)):
            values = TILE | dict(group=random.randint(1, 9), chunk=random.randint(1, 200))
            values |= {name: random.choice((16, 32, 64)) for name in ("block_m", "block_n")}
            values["send_programs"] = random.randint(1, 300)
            values = {name: n for name, n in values.items() if name in tuned.KERNELS[kernel].sets}
            at = dict(rows=rows, cols=other, k=other, even=even, world=world)
            table.append(entry(kernel, values, **{axis: n for axis, n in at.items() if axis in axes}))
    folder = tmp_path_factory.mktemp("full")
    write_configurations(folder, table)
    return folder


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 60), min_size=2, max_size=3),
    st.lists(st.integers(1, 64), min_size=3, max_size=3),
    st.lists(st.integers(1, 64), min_size=3, max_size=3),
    st.integers(1, 64),
    st.booleans(),
)
def test_ranks_agree_on_what_travels(full, sizes, ns, ks, shared, shared_gpu):
    """Ranks differ in N of a gather, or K of a reduction, but agree on chunks and on the tiles that are sent."""
    world = len(sizes)
    rows, view, machine = Rows(tuple(sizes)), _view(world), replace(H200, shared_gpu=shared_gpu)
    with tables_in(full), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gathers, reductions = set(), set()
        for rank, (n, k) in enumerate(zip(ns[:world], ks[:world])):
            x, w = torch.empty(sizes[rank], shared), torch.empty(n, shared)
            at = view, rank, world
            launch = plan_all_gather_matmul(*at, x, [w], [None], rows, 1, False, None, machine)[0]
            wgrad = plan_all_gather_wgrad(*at, x, [torch.empty(sum(sizes), n)], rows, 1, None, machine)[0]
            gathers.add((launch.args["chunk_rows"], wgrad.args["chunk_rows"]))
            x, w = torch.empty(sum(sizes), k), torch.empty(shared, k)
            one = plan_matmul_reduce_scatter(*at, [x], [w], None, rows, 1, None, machine)[0]
            two = plan_two_shot(*at, x, w, None, 1, None, machine)[0]
            few = plan_few_rows(*at, x, w, None, 1, None, machine)[0]
            assert few.args["BLOCK_M"] >= sum(sizes)
            cut = ("BLOCK_M", "BLOCK_N", "GROUP", "group")
            at_once = plan_one_shot(*at, x, w, None, 1, None, machine)[0]
            programs = at_once.programs  # each program has a flag
            agreed = *(launch.args[name] for launch in (one, two, few) for name in cut), programs
            reductions.add((*agreed, *(at_once.args[name] for name in cut[:-1])))
            if shared_gpu:
                assert max(launch.programs, one.programs, few.programs, programs) <= machine.programs
        assert tuned.digest(machine) and any("default" not in line for line in tuned.report())
        assert len(gathers) == len(reductions) == 1


@settings(max_examples=60)
@given(st.integers(0, 5000), st.integers(1, 5000), st.integers(2, 200), configs("matmul_reduce_scatter"))
def test_tuned_chunks_never_need_more_flags_than_there_are(tmp_path_factory, owned, n, flags, values):
    with holding("matmul_reduce_scatter", values):
        config = reduction(H200, FLOAT, owned, n, flags, kernel="matmul_reduce_scatter", world_size=4, owners=4)
        tiled = -(-owned // config.block_m) * -(-n // config.block_n)
        assert (config.block_m, config.block_n) == (values["block_m"], values["block_n"])
        assert -(-tiled // config.chunk) <= flags and config.chunk >= values["chunk"]
    with holding("all_gather", {"chunk": values["chunk"], "send_programs": values["send_programs"]}):
        config = with_senders(Config(16, 16, 16), H200, Rows((owned, 3)), flags, FLOAT, 8)
        assert -(-max(owned, 3) // config.chunk) <= flags and config.chunk >= values["chunk"]
        assert 1 <= config.send_programs < H200.programs
        assert config.send_programs + config.other_programs == H200.programs


def test_what_a_table_says_is_launched(empty: Path):
    values = TILE | {"group": 3, "max_registers": 128}
    at = dict(rows=64, cols=64, k=16, even=1, world=2)
    split = {"chunk": 7, "send_programs": 5}
    table = [entry("all_gather_matmul", values, **at), entry("all_gather", split, rows=32, k=16, world=2)]
    write_configurations(empty, table)
    x, w = torch.empty(32, 16), torch.empty(64, 16)
    launch = plan_all_gather_matmul(_view(2), 0, 2, x, [w], [None], Rows((32, 32)), 1, False, None, H200)[0]
    want = Config(**values, chunk=7, send_programs=5, other_programs=H200.programs - 5)
    assert launch.config == want
    assert launch.options == {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True, "maxnreg": 128}
    assert launch.args["chunk_rows"] == 7 and launch.args["GROUP"] == 3
    given = Config(16, 16, 16)
    assert (
        plan_all_gather_matmul(_view(2), 0, 2, x, [w], [None], Rows((32, 32)), 1, False, given, H200)[0].config is given
    )
    assert tuned.digest(H200) > 0 == tuned.digest(HOST)
    assert all(FILE in line and "default" not in line for line in tuned.report())
    assert tuned.summary().startswith("configurations of kernels so far: 2 tuned, 0 default")


def test_without_a_table_the_default_is_taken_and_said_once(empty: Path, monkeypatch):
    with pytest.warns(UserWarning, match=r"default configuration.*matmul float32 rows 64.*bench tune") as seen:
        for k in (64, 4096):
            assert tuned.lookup("matmul", H200, FLOAT, **MATMUL | {"k": k}) == {}
    assert len(seen) == 1 and len(tuned.report()) == 2 and tuned.digest(H200) == 0
    assert all("default" in line and FILE in line for line in tuned.report())
    assert tuned.summary().startswith("configurations of kernels so far: 0 tuned, 2 default")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned.forget()
        tuned.lookup("matmul", HOST, FLOAT, **MATMUL)  # the interpreter
        tuned.lookup("matmul", replace(H200, name=""), FLOAT, **MATMUL)  # an absent GPU
        tuned.forget()
        assert tuned.summary() == "" and tuned.report() == []
        monkeypatch.setenv("RANK", "3")
        tuned.lookup("matmul", H200, FLOAT, **MATMUL)


def test_a_folder_that_is_none_is_told(tmp_path: Path):
    with (
        tables_in(tmp_path / "nowhere"),
        pytest.warns(UserWarning, match=r"FUSEDTP_TABLES is '.*nowhere', which is not a folder"),
    ):
        assert tuned.lookup("matmul", H200, FLOAT, **MATMUL) == {}


def test_the_default_of_a_class_is_what_tiles_gives(empty: Path):
    default = tiles(H200, torch.bfloat16, 64, 64)
    assert default.max_registers == ALL_REGISTERS
    assert tuned.tile(default, {}) is default
    assert tuned.tile(default, TILE) == Config(**TILE)  # nothing is taken from an entry for another tile
    by_tma = replace(default, tma=True)
    assert tuned.tile(by_tma, TILE).tma and not tuned.tile(by_tma, TILE | {"tma": 0}).tma


BAD = {
    "another GPU": (None, "field 'machine' is 'nvidia-a100"),
    "an unknown kernel": (entry("gemm", TILE, **MATMUL), r"field 'kernel' is 'gemm'"),
    "an unknown dtype": (entry("matmul", TILE, "int4", **MATMUL), "field 'dtype' is 'int4'"),
    "a class without K": (entry("matmul", TILE, rows=64, cols=64, even=1), "field 'class' must give rows, cols, k"),
    "a class that is no class": (entry("matmul", TILE, **MATMUL | {"k": 60}), "class.k must be a power of two"),
    "an unknown field": (entry("matmul", TILE | {"clusters": 2}, **MATMUL), "config.clusters is not a field"),
    "a tile of 48": (entry("matmul", TILE | {"block_m": 48}, **MATMUL), "config.block_m must be a power of two"),
    "a tile of 1024": (entry("matmul", TILE | {"block_n": 1024}, **MATMUL), "config.block_n must be a whole"),
    "half a warp": (entry("matmul", TILE | {"num_warps": 0.5}, **MATMUL), "config.num_warps must be a whole"),
    "a truth": (entry("matmul", TILE | {"num_stages": True}, **MATMUL), "config.num_stages must be a whole"),
    "no tile": (entry("matmul", {"block_m": 64}, **MATMUL), "config.block_n is missing"),
    "more shared memory than there is": (
        entry("matmul", TILE | {"block_m": 256, "block_n": 256, "block_k": 128}, **MATMUL),
        "num_stages 3 needs 524288 bytes of shared memory; there are 232448",
    ),
    "more registers than there are": (
        entry("matmul", TILE | {"num_warps": 16, "max_registers": 255}, **MATMUL),
        "max_registers 255: 512 threads",
    ),
    "TMA on a GPU without": (entry("matmul", TILE | {"tma": 1}, "bfloat16", **MATMUL), "config.tma needs sm_90"),
    "warps of their own for no TMA": (
        entry("matmul", TILE | {"specialized": 1}, "bfloat16", **MATMUL), "config.specialized needs tma and sm_100",
    ),
    "parts of K": (entry("matmul", TILE | {"splits": 2}, **MATMUL), "config.splits is not a field"),
    "a chunk for a kernel without": (entry("matmul", TILE | {"chunk": 2}, **MATMUL), "config.chunk is not a field"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_one_bad_entry_puts_the_table_aside(what: str, empty: Path):
    """A warning names the file and the field; the valid entry beside it is ignored too."""
    bad, told = BAD[what]
    good = entry("matmul", TILE, **MATMUL)
    path = write_configurations(empty, [good, bad] if bad else [good], "nvidia-h200" if bad else "nvidia-a100")
    with pytest.warns(UserWarning) as seen:
        assert tuned.lookup("matmul", H200, FLOAT, **MATMUL) == {}
    messages = [str(each.message) for each in seen if "is ignored" in str(each.message)]
    assert len(messages) == 1 and str(path) in messages[0] and told in messages[0], messages
    assert tuned.digest(H200) == 0


def rewritten(path: Path, digest: bool, **changes: Any) -> None:
    body = json.loads(path.read_text()) | changes
    rest = {name: value for name, value in body.items() if name != "digest"}
    path.write_text(json.dumps(body | ({"digest": measured.digest_of(rest)} if digest else {})))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"format": 3}, "field 'format' is 3, newer than this version of fusedtp, which reads"),
        ({"format": 0}, "field 'format' is 0, unknown to this version"),
        ({"format": None}, "field 'format' is missing"),
        ({"more": 1}, "fields are missing or unknown: 'more'"),
        ({"format": 1}, "field 'format' is 1, unknown to this version"),
        ({"tables": []}, "field 'tables' is not an object"),
        ({"tables": {"x": []}}, "table 'x' must have exactly the fields measured, entries"),
        ({"tables": {"x": {"measured": {}, "entries": {}}}}, "field 'entries' of table 'x' is not a list"),
        ({"tables": {"x": {"measured": {}, "entries": [1]}}}, "field 'entries' of table 'x' is not a list"),
    ],
)
def test_a_table_of_another_format_is_put_aside(changes, told, empty: Path):
    rewritten(write_configurations(empty, []), True, **changes)
    with pytest.warns(UserWarning, match=told):
        assert tuned.lookup("matmul", H200, FLOAT, **MATMUL) == {}


def test_an_edited_table_is_put_aside(empty: Path):
    path = write_configurations(empty, [entry("matmul", TILE, **MATMUL)])
    edited = [entry("matmul", TILE | {"num_stages": 2}, **MATMUL)]
    rewritten(path, False, tables={tuned.table_name(): {"measured": {}, "entries": edited}})
    with pytest.warns(UserWarning, match="field 'digest' does not match the content"):
        assert tuned.lookup("matmul", H200, FLOAT, **MATMUL) == {}


@pytest.mark.parametrize("data", [b"", b"{", b"null", b"[" * 100_000, b"\xff\xfe", b'{"format": ' + b"9" * 5000 + b"}"])
def test_what_is_no_json_is_put_aside(data: bytes, empty: Path):
    (empty / FILE).write_bytes(data)
    with pytest.warns(UserWarning, match=r"nvidia-h200.*is ignored"):
        assert tuned.lookup("matmul", H200, FLOAT, **MATMUL) == {}


def damage(draw: st.DrawFn, data: bytes) -> bytes:
    at, count = draw(st.integers(0, len(data) - 1)), draw(st.integers(0, 8))
    return data[:at] + draw(st.binary(max_size=8)) + data[at + count :]


@settings(max_examples=60)
@given(st.data())
def test_damage_gives_the_default_or_changes_nothing(tmp_path_factory, data):
    """Bytes replaced, lost or added. The table may be used only if its content is unchanged (e.g. an extra blank)."""
    folder, good = tmp_path_factory.mktemp("tables"), entry("matmul", TILE, **MATMUL)
    path = write_configurations(folder, [good])
    before = json.loads(path.read_bytes())
    path.write_bytes(damage(data.draw, path.read_bytes()))
    with tables_in(folder), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = tuned.lookup("matmul", H200, FLOAT, **MATMUL)
    if found:
        assert found == TILE and json.loads(path.read_bytes()) == before
    else:
        assert sum("is ignored" in str(each.message) for each in seen) == 1


def both_found() -> tuple[str, bool]:
    """The engine from the table of engines, and whether the table of configurations has its entry."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        key = measured.Key("matmul_all_reduce", "float32", 2, "processes")
        engine = measured.find(H200.name, key, 5, 8).engine
        return engine, tuned.lookup("matmul", H200, FLOAT, **MATMUL) == TILE


def test_both_tables_of_a_machine_stand_in_one_file(empty: Path, monkeypatch):
    """Writing one keeps the other; a bad entry in one disables only that one; a damaged file disables both."""
    engines = {
        "operation": "matmul_all_reduce",
        "dtype": "float32",
        "world": 2,
        "ranks": "processes",
        "width": 8,
    }
    path, good = empty / FILE, engines | {"engines": [[0, "triton"]]}
    write_configurations(empty, [entry("matmul", TILE, **MATMUL)])
    for steps, want in (([[0, "magic"]], ("", True)), ([[0, "triton"]], ("triton", True))):
        others, _ = tables.kept(path, H200.name, "engines", lambda entry: [])
        tables.write(path, H200.name, "engines", {}, [engines | {"engines": steps}], others)
        tuned.forget()
        assert both_found() == want
    others, _ = tables.kept(path, H200.name, tuned.table_name(), lambda entry: [])
    tables.write(path, H200.name, tuned.table_name(), {}, [entry("matmul", TILE | {"part": 3}, **MATMUL)], others)
    tuned.forget()
    assert both_found() == ("triton", False)
    path.write_bytes(path.read_bytes()[:-3])
    tuned.forget()
    assert both_found() == ("", False)
    shipped = empty / "shipped"  # a table missing from the user's file is read from the shipped one
    monkeypatch.setattr(measured, "SHIPPED", shipped)
    tables.write(shipped / FILE, H200.name, "engines", {}, [good], {})
    write_configurations(empty, [entry("matmul", TILE, **MATMUL)])
    tuned.forget()
    assert both_found() == ("triton", True)
