"""The ranks of a job: where they run, and that none continues before all have arrived."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from fusedtp.commands import launch
from fusedtp.train.mesh import World, placement, world_of
from tests.harness import pool


def arrive_one_by_one(group, folder: Path) -> list[int]:
    """Each rank arrives some time after the rank before it. Returns which ranks had arrived when it continued."""
    rank, size = group.rank(), group.size()
    world = World(tp=size, rank=rank, host_group=dist.new_group(backend="gloo"))
    while rank and not (folder / str(rank - 1)).exists():
        time.sleep(0.01)
    time.sleep(0.2)  # time in which an earlier rank would continue if it did not wait
    (folder / str(rank)).touch()
    world.wait_for_all()
    return [other for other in range(size) if (folder / str(other)).exists()]


def test_no_rank_goes_on_before_all_have_arrived(tmp_path):
    with pool.World(3) as ranks:
        assert ranks.run(arrive_one_by_one, tmp_path) == [[0, 1, 2]] * 3


def test_the_placement_names_ranks_and_machines():
    assert placement(World(), World().machines()) == [f"rank 0, pp 0, dp 0, tp 0 on {os.uname().nodename}"]
    two = ["a"] * 8 + ["b"] * 8
    assert placement(World(2, 4, pp=2), two) == [
        "rank 0-7, pp 0, dp 0-1, tp 0-3 on a",
        "rank 8-15, pp 1, dp 0-1, tp 0-3 on b",
    ]
    assert placement(World(2, 2, pp=1), ["a", "a", "b", "b"]) == [
        "rank 0-1, pp 0, dp 0, tp 0-1 on a",
        "rank 2-3, pp 0, dp 1, tp 0-1 on b",
    ]
    assert placement(World(1, 2, pp=2), ["a"] * 4) == [
        "rank 0-1, pp 0, dp 0, tp 0-1 on a",
        "rank 2-3, pp 1, dp 0, tp 0-1 on a",
    ]


def test_tensor_parallelism_across_machines_is_said():
    *lines, warning = placement(World(2, 4), ["a"] * 6 + ["b"] * 2)
    assert lines == ["rank 0-5, pp 0, dp 0-1, tp 0-3 on a", "rank 6-7, pp 0, dp 1, tp 2-3 on b"]
    assert warning.startswith("tensor-parallel ranks 4-7 span several machines")


class Started(Exception):
    """Raised in place of starting NCCL."""


def joined(monkeypatch: pytest.MonkeyPatch, store: Any, rank: int, uuids: list[str], local_ranks: int = 2) -> dict:
    """The arguments with which a rank that sees these GPUs would start its process groups."""

    def start(_backend: str, **arguments: Any) -> None:
        raise Started(arguments)

    names = {"RANK": rank, "LOCAL_RANK": rank % local_ranks, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": local_ranks}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
    chosen: list[int] = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(uuids))
    monkeypatch.setattr("torch.cuda.set_device", lambda device: chosen.append(device.index))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda i: SimpleNamespace(uuid=uuids[i]))
    monkeypatch.setattr(dist, "rendezvous", lambda url: iter([(store, rank, 4)]))
    monkeypatch.setattr(dist, "init_process_group", start)
    with pytest.raises(Started) as told, world_of(2, 2, "cuda"):
        pass
    (arguments,) = told.value.args
    assert chosen == [arguments["device_id"].index]
    return arguments


def test_a_rank_that_sees_one_gpu_uses_it_and_joins_by_the_store_that_it_was_claimed_in(monkeypatch):
    store = dist.HashStore()
    for rank, uuid in enumerate("abcd"):
        arguments = joined(monkeypatch, store, rank, [uuid])
        assert (arguments["device_id"].index, arguments["rank"], arguments["world_size"]) == (0, rank, 4)
        arguments["store"].set("key", str(rank))
        assert store.get("default_pg/key") == str(rank).encode(), "as torch itself names it"


@pytest.mark.parametrize("local_ranks, uuids, index", [(2, ["a", "b"], 1), (1, ["a"], 0)])
def test_ranks_that_see_all_gpus_of_their_machine_take_theirs_and_claim_none(monkeypatch, local_ranks, uuids, index):
    arguments = joined(monkeypatch, None, 3, uuids, local_ranks)
    assert arguments["device_id"].index == index and arguments.keys() == {"device_id"}


def test_ranks_of_one_machine_that_see_the_same_gpu_are_refused(monkeypatch):
    store = dist.HashStore()
    for rank, uuid in enumerate("ab"):
        joined(monkeypatch, store, rank, [uuid])
    with pytest.raises(ValueError, match=r"ranks 0 and 2 see one GPU each, and it is the same one \(a\)"):
        joined(monkeypatch, store, 2, ["a"])
    monkeypatch.setattr("fusedtp.train.mesh.host_identity", lambda: "another host")
    joined(monkeypatch, store, 3, ["a"])


@pytest.mark.parametrize("torchrun", [False, True])
def test_a_rank_of_another_launcher_than_torchrun_prints_its_error(monkeypatch, tmp_path, capsys, torchrun):
    """torchrun prints what its ranks record in a file; srun would end without a word."""

    def refuse(*_: Any) -> None:
        raise ValueError("ranks 0 and 2 see\none GPU")

    for name, value in {"RANK": 2, "LOCAL_RANK": 2, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(launch, "world_of", refuse)
    config = launch.parse(["--device", "cpu", "--tp", "4", "--runs", str(tmp_path)])
    assert launch.run_rank(config, 1, 4, config) == launch.FAILED
    told = "fusedtp train: error: ranks 0 and 2 see one GPU\n"
    assert capsys.readouterr().err == ("" if torchrun else told)
