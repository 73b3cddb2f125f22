"""The tuner: its candidates fit the machine, it finds the fastest one, and launchers read what it writes."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import pairwise
from math import log2
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp import VirtualWorld
from fusedtp.bench import tune
from fusedtp.bench.options import Plan
from fusedtp.bench.rank import Rank
from fusedtp.bench.tune import FINALISTS, Job, candidates, halving, launch_of, reduction_kernel, refinements
from fusedtp.checks.lint import _view, machine_of
from fusedtp.lint import TARGETS
from fusedtp.ops import measured
from fusedtp.ops.launch import tuned
from fusedtp.ops.launch.config import HOST
from fusedtp.ops.launch.operands import local_config, with_tile
from fusedtp.ops.matmul_all_reduce import plan_two_shot
from tests.ops.tables import H200, holding, tables_in

pytestmark = pytest.mark.filterwarnings("ignore:kernels run in their default configuration")
MACHINES = [HOST, H200, *(machine_of(target) for target in TARGETS.values())]
SIZES = st.one_of(st.integers(1, 100), st.integers(1, 1 << 16))


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    kernel = draw(st.sampled_from(list(tuned.KERNELS)))
    ranks = 1 if kernel == "matmul" else draw(st.integers(2, 8))
    return Job(kernel, draw(st.sampled_from(tuned.DTYPES)), ranks, *draw(st.tuples(SIZES, SIZES, SIZES)))


@pytest.mark.parametrize("target", list(TARGETS))
def test_the_default_of_a_two_shot_all_reduce_is_what_the_launcher_takes(target):
    job, machine = Job("two_shot", "bfloat16", 8, 8192, 4096, 64), machine_of(TARGETS[target])
    x, weight = (torch.empty(extent, 64, dtype=torch.bfloat16, device="meta") for extent in (8192, 4096))
    launched = plan_two_shot(_view(8), 1, 8, x, weight, None, 12345, None, machine)[0].config
    assert job.default(machine).items() <= asdict(launched).items()


@settings(max_examples=60)
@given(jobs(), st.sampled_from(MACHINES), st.integers(0, 60))
def test_what_is_tried_fits_the_machine(job, machine, limit):
    """The default comes first and nothing repeats. A table with any of the candidates is valid."""
    found = candidates(job, machine, limit)
    assert found[0] == job.default(machine) and len(found) <= limit + 1
    found += refinements(job, machine, found[-1])
    at = dict(
        zip(
            tuned.KERNELS[job.kernel].axes,
            tuned.shape_class(job.kernel, machine, **job.extents),
            strict=True,
        )
    )
    for values in found:
        one = {"kernel": job.kernel, "dtype": job.dtype, "class": at, "config": values}
        assert tuned.faults(one, machine) == []
    assert len({tuple(sorted(values.items())) for values in found}) == len(found)


@pytest.mark.parametrize("machine", [machine for machine in MACHINES if machine is not HOST])
@pytest.mark.parametrize("rows", [16, 8192])
def test_tuning_a_matmul_begins_where_its_launcher_does(machine, rows):
    """It varies only what it may: TMA, warp specialization, halves."""
    job, bf16 = Job("matmul", "bfloat16", 1, rows, 4096, 4096), torch.bfloat16
    default = local_config(machine, bf16, "ieee", rows, 4096)
    values = job.default(machine)
    assert with_tile(default, values) == default
    others = [each for each in refinements(job, machine, values) if each["group"] == values["group"]]
    toggled = {name for each in others for name in each if each[name] != values[name]}
    assert toggled == {"halves"} | ({"tma"} if default.tma and not default.specialized else set()) | (
        {"specialized"} if default.specialized else set()
    )
    found = candidates(job, machine, 1000)
    assert {each["tma"] for each in found} == {int(default.tma)}


@pytest.mark.parametrize("kernel", [kernel for kernel in tuned.KERNELS if kernel != "matmul"])
def test_a_job_asks_for_what_its_launcher_asks_for(kernel):
    """If a table has one entry, for this job's class only, the launch uses it."""
    job = Job(kernel, "float32", 2, 60, 48, 80)
    rank = mock.Mock(rank=1, device=torch.device("cpu"), comm=None)
    values = candidates(job, H200, 1)[1]
    with mock.patch.object(tuned, "lookup", wraps=tuned.lookup) as lookup, holding(kernel, values):
        launch = launch_of(rank, H200, job)
    asked = [(call.args[0], call.kwargs) for call in lookup.call_args_list if call.args[0] == kernel]
    assert asked == [(kernel, job.extents)]
    assert {name: getattr(launch.config, name) for name in values if name != "other_programs"} == {
        name: value for name, value in values.items() if name != "other_programs"
    }


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.booleans())
def test_halving_finds_the_fastest_and_samples_in_turn(times, keep):
    order: list[int] = []

    def sample(i: int) -> float:
        order.append(i)
        return float(times[i])

    found = halving(len(times), sample, keep=(0,) if keep else ())
    assert min(found, key=lambda i: (found[i], i)) == min(range(len(times)), key=lambda i: (times[i], i))
    assert found == {i: times[i] for i in found} and (0 in found or not keep)
    assert len(found) <= FINALISTS + keep
    assert order[: 2 * len(times)] == [*range(len(times)), *reversed(range(len(times)))]
    counts = sorted(order.count(i) for i in range(len(times)))
    assert all(b >= a for a, b in pairwise(counts)) and counts[-1] >= (6 if len(times) > FINALISTS + 1 else 2)


def test_halving_forgives_a_slow_sample():
    slow = iter([9.0])
    found = halving(3, lambda i: next(slow, 1.0) if i == 1 else 2.0, rounds=3)
    assert found == {0: 2.0, 1: 1.0, 2: 2.0}


def cost(values: dict[str, int]) -> float:
    """Smallest for tiles of 128 x 64 x 64 that are walked four rows at a time."""
    wanted = {"block_m": 128, "block_n": 64, "block_k": 64, "num_stages": 2, "group": 4}
    return 1.0 + sum(abs(log2(values[name] / n)) for name, n in wanted.items())


@pytest.mark.parametrize(("gain", "stages"), [(1.0, 3), (1e-4, None)])
def test_all_ranks_find_the_cheapest_that_is_not_refused(gain, stages, monkeypatch):
    """Two threads share the held values. Two stages are refused, and the default stays if the gain is too small."""
    job = Job("matmul_reduce_scatter", "bfloat16", 2, 2000, 512, 512)
    held: list[dict[str, int]] = []

    def once(rank, way, calls=1):
        rank.comm.world.barrier()
        held.append(dict(tuned._tried["matmul"]))
        return 1e-3 * cost(dict(tuned._tried[job.kernel])) ** gain

    monkeypatch.setattr(tune, "machine_of", lambda *_: H200)
    monkeypatch.setattr(tune, "_refuses", lambda rank, machine, job, values: values["num_stages"] == 2)
    monkeypatch.setattr(tune, "way_of", lambda rank, job: lambda: None)
    monkeypatch.setattr(Rank, "once", once)

    def body(group):
        rank = Rank(Plan(world="virtual"), group)
        return [tune.tune(rank, [job], 12, {"matmul": {"block_m": 16 << i}}) for i in range(2)]

    found = VirtualWorld(2).run(body)
    assert found[0] == found[1] and found[0][0] == found[0][1] and not tuned._tried
    assert {each["block_m"] for each in held} == {16, 32}
    winner, default = found[0][0], job.default(H200)
    if stages is None:
        assert winner.values == default and winner.seconds == winner.default_seconds
    else:
        want = dict(block_m=128, block_n=64, block_k=64, num_stages=stages, group=4)
        assert {name: winner.values[name] for name in want} == want
        assert winner.seconds == pytest.approx(1e-3 * cost(winner.values))
        assert winner.default_seconds == pytest.approx(1e-3 * cost(default))


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--shapes", "gpt5"], "--shapes 'gpt5' is not one of llama3-8b"),
        (["--dtype", "int4,float32"], "--dtype 'int4' is not one of"),
        (["--kernels", "gemm"], "--kernels 'gemm' is not one of matmul"),
        (["--tokens", "0,x"], "--tokens '0' is not a positive whole number; --tokens 'x'"),
        (["--tp", ","], "--tp is empty"),
        (["--candidates", "-1"], "--candidates -1 must not be negative"),
        (["--save", "--out", "x"], "--save and --out cannot be combined"),
        (["--save"], "--save is for tables of GPUs only"),
        (["--tp", "2", "--kernels", "matmul"], "none of these kernels runs on this number of ranks"),
    ],
)
def test_bad_input_is_refused(argv, told, capsys):
    assert tune.main(["--device", "cpu", *argv]) == 2
    assert told in capsys.readouterr().err


def test_a_table_that_is_none_is_not_written_over(tmp_path: Path):
    path = tmp_path / measured.file_of(HOST.name)
    path.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        tune.kept(path, HOST)
    assert tune.kept(tmp_path / "none.json", HOST) == ({}, [])


def test_jobs_of_a_model_cover_every_kernel():
    model = "llama3-70b"
    found = [job for ranks in (1, 8) for rows in (8, 128, 8192) for job in tune.jobs_of(model, "bfloat16", ranks, rows)]
    assert {job.kernel for job in found} == set(tuned.KERNELS)
    by_class = tune.classes(found, H200)
    assert sorted(map(str, found)) == sorted(str(job) for of in by_class.values() for job in of)
    assert reduction_kernel(8, 8192, "bfloat16") == "one_shot" != reduction_kernel(8192, 8192, "bfloat16")
    rows_of = {(job.n, job.k) for job in found if job.kernel == "matmul_reduce_scatter"}
    assert rows_of == {(8192, 1024), (8192, 3584)}


def test_a_transport_is_tuned_with_the_best_tile_of_its_matmul():
    job = Job("all_gather", "float32", 2, 640, 64, 64)
    for rows, kernel in ((640, "all_gather_matmul"), (64, "all_gather_wgrad")):  # others have none for few rows
        of = replace(job, rows=rows)
        key = next(iter(tune.classes([replace(of, kernel=kernel)], H200)))
        assert tune.held_beside(of, H200, {key: {"block_m": 16}}) == {kernel: {"block_m": 16}}
    assert tune.held_beside(job, HOST, {key: {"block_m": 16}}) == {}
    assert tune.held_beside(replace(job, kernel="two_shot"), H200, {key: {"block_m": 16}}) == {}


@pytest.mark.slow
def test_a_table_of_the_interpreter_is_tuned_kept_and_read(tmp_path: Path, capsys):
    """Without mocks: two ranks interpret kernels, a second run measures nothing, and the library reads the winners."""
    argv = ["--device", "cpu", "--out", str(tmp_path), "--tp", "2", "--tokens", "8", "--candidates", "1"]
    argv += ["--kernels", "all_gather"]
    with mock.patch.dict("os.environ", TRITON_INTERPRET="1"):
        assert tune.main(argv) == 0
    path = tmp_path / measured.file_of(HOST.name)
    _, entries = tune.kept(path, HOST)
    assert {entry["kernel"] for entry in entries} == {"all_gather"}
    assert all(0 < entry["seconds"] <= entry["default_seconds"] for entry in entries)
    with tables_in(tmp_path):
        for entry in entries:
            at = {axis: n for axis, n in entry["class"].items() if axis != "programs"}
            assert tuned.lookup(entry["kernel"], HOST, torch.float32, **at) == entry["config"]
    plan = tune.plan_of(tune.TuneOptions(device="cpu", out=tmp_path, tp="2", tokens="8"), argv)
    done = [job for job in plan.jobs if job.kernel == "all_gather"]
    assert set(tune.classes(done, HOST)) == {tuned.key_of(entry) for entry in entries}
    assert str(path) in capsys.readouterr().out
