"""Ranks interpret the fused kernels with a configuration table: results are right, differing tables are reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fusedtp
from fusedtp.bench import tables
from fusedtp.comm import communicator
from fusedtp.ops import measured
from fusedtp.ops.launch import tuned
from fusedtp.ops.launch.config import HOST
from tests.harness import PerRank, world
from tests.ops.tables import TILE, entry, interpreters, tables_in

ROWS, N, K = (5, 3), 24, 40
SPLIT = {"chunk": 2, "send_programs": 2}


def table(folder: Path, block_n: int) -> Path:
    """A table for the calls below: small tiles, several per chunk, and an odd number of programs."""
    folder.mkdir()
    tile = TILE | {"block_m": 16, "block_n": block_n, "block_k": 16, "group": 2}
    at = dict(rows=8, even=0, programs=HOST.programs)
    gather = dict(rows=8, world=2, programs=HOST.programs, k=64)
    scatter = at | {"cols": 32, "world": 2}
    interpreters(
        folder,
        [
            entry("all_gather_matmul", tile, **at, cols=32, k=64, world=2),
            entry("all_gather_wgrad", tile, **at | {"rows": 32, "cols": 64, "k": 8, "world": 2}),
            entry("all_gather", {"chunk": 3, "send_programs": 2}, **gather),
            entry("few_rows", tile | SPLIT, **scatter),
            entry("one_shot", tile | {"send_programs": 2}, **scatter),
        ],
    )
    return folder


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def calls(group, folder: Path) -> tuple[list[bool], list[str]]:
    """Whether each operation equals the single-device result, and the sources of the configurations."""
    r, engine = group.rank(), "triton"
    x, w, dy = numbers(0, sum(ROWS), K), numbers(1 + r, N, K), numbers(3 + r, sum(ROWS), N)
    xs, ws = [numbers(5 + q, sum(ROWS), K) for q in range(2)], [numbers(7 + q, N, K) for q in range(2)]
    mine = x.split(ROWS)[r]
    total = sum(a @ b.T for a, b in zip(xs, ws, strict=True))
    with tables_in(folder):
        found = [
            torch.equal(fusedtp.all_gather_matmul(mine, [w], group, sizes=ROWS, engine=engine)[0], x @ w.T),
            torch.equal(fusedtp.all_gather_wgrad(mine, [dy], group, sizes=ROWS, engine=engine)[0], dy.T @ x),
            torch.equal(
                fusedtp.matmul_reduce_scatter(xs[r], ws[r], group, sizes=ROWS, engine=engine),
                total.split(ROWS)[r],
            ),
            torch.equal(fusedtp.matmul_all_reduce(xs[r], ws[r], group, engine=engine), total),
        ]
        return found, tuned.report()


def first_call(group, folder: Path) -> str:
    with tables_in(folder), pytest.raises(fusedtp.SignatureMismatch) as raised:
        fusedtp.all_gather_matmul(numbers(0, 4, K), [numbers(1, N, K)], group, engine="triton")
    return str(raised.value)


def test_ranks_with_one_table_compute_by_it(tmp_path):
    folder = table(tmp_path / "one", 32)
    for found, report in world(2).run(calls, folder):
        assert found == [True] * 4
        assert len(report) == 5 and not any("default" in line for line in report), report


def test_ranks_with_two_tables_are_told_which_field_differs(tmp_path):
    folders = [table(tmp_path / "one", 32), table(tmp_path / "two", 16)]
    for message in world(2).run(first_call, PerRank(folders)):
        assert "tables is" in message and "FUSEDTP_TABLES" in message, message
        assert "rank 0" in message and "rank 1" in message
    for found, _ in world(2).run(calls, folders[0]):  # the group stays usable
        assert found == [True] * 4


def engines_in(folder: Path, steps: list[list]) -> Path:
    """A table of engines for two CPU ranks."""
    folder.mkdir()
    machine = measured.kind_of(torch.device("cpu"))
    entry = dict(operation="all_gather_matmul", dtype="float32", world=2, ranks="processes", width=K, engines=steps)
    tables.write(folder / measured.file_of(machine), machine, "engines", {}, [entry], {})
    return folder


def in_a_new_group(group, folder: Path) -> tuple[list[str], int]:
    """What `auto` and an engine by name do in a group that is made with these tables, and how many calls began."""
    told, x, w = [], numbers(0, 8, K), numbers(1 + group.rank(), N, K)
    with tables_in(folder):
        for engine in ("auto", "collective"):
            try:
                (y,) = fusedtp.all_gather_matmul(x.chunk(2)[group.rank()], [w], group, engine=engine)
                told.append("right" if torch.equal(y, x @ w.T) else "wrong")
            except ValueError as error:
                told.append(f"{type(error).__name__}: {error}")
        return told, communicator(group).begun


def test_ranks_with_one_table_of_engines_choose_by_it(tmp_path):
    folders = [engines_in(tmp_path / name, [[0, "chunked"], [1000, "collective"]]) for name in ("one", "copy")]
    assert world(2).run(in_a_new_group, PerRank(folders), fresh=True) == [(["right"] * 2, 2)] * 2


@pytest.mark.parametrize("second", ["another", "none"])
def test_ranks_with_two_tables_of_engines_are_told_before_they_choose(tmp_path, second):
    """For these few rows both tables have the same engine: ranks should not learn of it when a batch is larger."""
    folders = [engines_in(tmp_path / "one", [[0, "chunked"], [1000, "collective"]]), tmp_path / second]
    if second == "another":
        engines_in(folders[1], [[0, "chunked"]])
    folders[1].mkdir(exist_ok=True)
    for (auto, named), begun in world(2).run(in_a_new_group, PerRank(folders), fresh=True):
        assert auto.startswith("ValueError") and "the table of engines" in auto and "FUSEDTP_TABLES" in auto, auto
        assert f"{folders[0]}/" in auto and "on rank 0" in auto and "on rank 1" in auto, auto
        assert named == "right" and begun == 2
