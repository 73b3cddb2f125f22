"""The ranks of a job: where they run, and that none continues before all have arrived."""

import os
import time
from pathlib import Path

import torch.distributed as dist

from fusedtp.train.mesh import World, placement
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
