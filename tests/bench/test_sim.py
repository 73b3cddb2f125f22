"""`fusedtp bench sim` compiles from scratch, runs every way, and writes what its table shows."""

import json

import pytest

from fusedtp.bench import machine, sim


@pytest.mark.slow
def test_a_kernel_is_compiled_and_run_in_every_way(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(machine, "folder_of", lambda about, save: tmp_path)
    words = ["--kernels", "moe_dispatch", "--world-size", "2", "--rounds", "1", "--schedules", "2"]
    assert sim.main(words) == 0
    written = json.loads((tmp_path / "sim.json").read_text())
    (row,) = written["kernels"].values()
    assert row.keys() == {"compile", *sim.WAYS, "schedules_per_second"} and min(row.values()) > 0
    shown = capsys.readouterr().out
    assert "moe_dispatch" in shown and f"{row['warp by warp']:.2f} s" in shown
    assert row["compile"] > row["lockstep"], "kernels came from a cache"


def test_a_kernel_that_there_is_not_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"no case is called 'gather': it must be one of all_gather_matmul"):
        sim.main(["--kernels", "gather"])


@pytest.mark.slow
def test_single_calls_are_run_alone_and_their_memory_is_counted() -> None:
    found = sim.in_a_process("a two-shot all-reduce of 512 elements", sim.Options(rounds=1, schedules=2))
    assert min(found.values()) > 0
    rates = {name for name in found if name.endswith("schedules/s")}
    assert rates == {f"{way}, schedules/s" for way in (*sim.WAYS, "mixed")}
    assert found["process, MB"] > 100, "not of the whole process"
    tensors = {name: sim.one_call(name, "sm_90")[1] for name in sim.ONE_CALL}  # checks that every case can be built
    assert min(tensors.values()) > 0
    assert tensors["a two-shot all-reduce of 262,144 elements"] > 8 * 4 * 262_144 / 1e6
