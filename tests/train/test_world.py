"""The ranks of a job meet: none goes on before all have arrived."""

import time
from pathlib import Path

import torch.distributed as dist

from fusedtp.train.world import World
from tests.harness import pool


def arrive_one_by_one(group, folder: Path) -> list[int]:
    """Each rank arrives after the rank before it and some time more; returns which had arrived when it went on."""
    rank, size = group.rank(), group.size()
    world = World(tp=size, rank=rank, host_group=dist.new_group(backend="gloo"))
    while rank and not (folder / str(rank - 1)).exists():
        time.sleep(0.01)
    time.sleep(0.2)  # in which an earlier rank that does not wait goes on
    (folder / str(rank)).touch()
    world.wait_for_all()
    return [other for other in range(size) if (folder / str(other)).exists()]


def test_no_rank_goes_on_before_all_have_arrived(tmp_path):
    with pool.World(3) as ranks:
        assert ranks.run(arrive_one_by_one, tmp_path) == [[0, 1, 2]] * 3
