"""Valid and invalid groups, two groups at once, and what a group leaves behind."""

import gc
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fusedtp.comm import Signature, VirtualWorld, communicator, process_world, reserve
from fusedtp.comm.virtual_world import prepare_cuda
from tests.harness import PerRank, world


def gathered_ranks(comm) -> list[int]:
    return comm.all_gather(torch.tensor([[float(comm.rank)]]), [1] * comm.world_size).flatten().int().tolist()


def pairs_of_a_mesh(group) -> tuple:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = communicator(mesh["dp"]), communicator(mesh["tp"])
    for comm in (dp, tp):
        with comm.workspace.call(Signature("all_reduce", "chunked", torch.float32, 1, (1, 1)), 64) as call:
            call.buffer(comm.rank, (1,), torch.float32).fill_(dist.get_rank())
            call.handshake()
            seen = [call.buffer(p, (1,), torch.float32).item() for p in range(2)]
        yield_ranks = [dist.get_global_rank(comm.world.group, p) for p in range(2)]
        assert seen == [float(r) for r in yield_ranks], (seen, yield_ranks)
    return dp.rank, tp.rank, gathered_ranks(tp), communicator(tp.name) is tp, communicator(mesh["tp"]) is tp


def test_mesh_dimensions_are_groups_whose_ranks_are_not_the_global_ones():
    assert world(4).run(pairs_of_a_mesh) == [(r // 2, r % 2, [0, 1], True, True) for r in range(4)]


def lines_of_ranks(group) -> list[tuple]:
    """Dimension 0 comes twice: its group is already registered the second time."""
    found = []
    for dim in (0, 1, 0):
        comm = communicator(group.along((2, 3), dim))
        x = torch.tensor([[float(group.rank())]])
        found.append((comm.all_gather(x, [1] * comm.world_size).flatten().int().tolist(), comm.rank))
        assert communicator(comm.name) is comm and comm.world.ranks_per_device == 6
    return found


def test_ranks_of_a_virtual_world_in_a_shape_are_groups():
    columns, rows = [[0, 3], [1, 4], [2, 5]], [[0, 1, 2], [3, 4, 5]]
    wanted = [[(columns[r % 3], r // 3), (rows[r // 3], r % 3), (columns[r % 3], r // 3)] for r in range(6)]
    assert VirtualWorld(6).run(lines_of_ranks) == wanted
    with pytest.raises(ValueError, match="cannot arrange 4 ranks in the shape \\(3, 2\\)"):
        VirtualWorld(4).run(lambda group: group.along((3, 2), 0))


def whole_mesh(group) -> None:
    communicator(init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")))


@pytest.mark.slow
def test_a_mesh_of_two_dimensions_is_refused_by_name():
    for outcome in world(2).outcomes(whole_mesh):
        assert outcome.is_a("ValueError") and "dp" in outcome.message and "tp" in outcome.message


def one_rank(group) -> tuple:
    comm = communicator(group)
    x = torch.arange(6.0).view(3, 2)
    results = comm.all_gather(x, (3,)), comm.reduce_scatter(x, (3,)), comm.all_reduce(x)
    assert all(torch.equal(r, x) and r.data_ptr() != x.data_ptr() for r in results)
    reserve(group, 1000)
    return comm.rank, comm.world_size, comm.fallback


def test_a_group_of_one_needs_no_memory_and_copies():
    assert world(1).run(one_rank) == [(0, 1, None)]
    assert VirtualWorld(1).run(one_rank) == [(0, 1, None)]


def on_several_hosts(group, host: str) -> tuple:
    import warnings

    process_world.host_identity, real = (lambda: host), process_world.host_identity
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            comm = communicator(group)
            again = communicator(group)
    finally:
        process_world.host_identity = real
    assert again is comm
    reserve(group, 1000)
    return comm.fallback, [str(w.message) for w in caught], gathered_ranks(comm)


def test_a_group_that_spans_hosts_says_so_once_and_uses_plain_collectives():
    outcomes = world(3).run(on_several_hosts, PerRank(["a", "b", "a"]), fresh=True)
    for rank, (fallback, warned, gathered) in enumerate(outcomes):
        assert "hosts" in fallback and gathered == [0, 1, 2]
        assert len(warned) == (rank == 0)
    assert "plain collectives" in outcomes[0][1][0]


def memory_of_a_destroyed_group(group) -> tuple[int, int, int, int]:
    gc.collect()  # what earlier tests left
    counts = _footprint()
    for _ in range(3):
        own = dist.new_group()
        reserve(own, 1 << 20)
        assert _footprint()[0] > counts[0]
        dist.destroy_process_group(own)
        del own
        gc.collect()
    return (*counts, *_footprint())


def _footprint() -> tuple[int, int]:
    maps = Path("/proc/self/maps").read_text()
    return maps.count("/memfd:fusedtp"), len(os.listdir("/proc/self/fd"))


def test_memory_and_descriptors_go_with_the_group():
    for maps_before, files_before, maps_after, files_after in world(2).run(memory_of_a_destroyed_group):
        assert maps_after == maps_before
        assert files_after <= files_before + 1


DESTROYS_THE_DEFAULT_GROUP = """
import sys, weakref
import torch
import torch.distributed as dist
import fusedtp
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
ids = torch.zeros(8, 1, dtype=torch.int64)
fusedtp.moe_dispatch(torch.randn(8, 4), ids, torch.ones(8, 1), 1, dist.group.WORLD)
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
print("alive" if group() else "gone")
"""


@pytest.mark.slow
def test_the_default_group_is_gone_when_it_is_destroyed(tmp_path):
    """Its threads are gone too: a thread that frees a tensor after the interpreter has exited aborts the process."""
    command = [sys.executable, "-c", DESTROYS_THE_DEFAULT_GROUP, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "gone\n"), done.stderr


@pytest.mark.parametrize("size", [0, -1])
def test_a_virtual_world_has_at_least_one_rank(size):
    with pytest.raises(ValueError, match=str(size)):
        VirtualWorld(size)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("before", [None, "4", "8"])
def test_a_virtual_world_on_a_gpu_has_connections_for_its_streams_or_says_so(started, before, monkeypatch):
    """8 connections serve 4 ranks and no more; once CUDA has started, the number is fixed."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    environment = {} if before is None else {name: before}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        prepare_cuda(4)
    set_now = not started and before is None
    assert environment.get(name) == ("32" if set_now else before)
    assert environment.get("CUDA_MODULE_LOADING") == (None if started else "EAGER")
    assert bool(said) == (before != "8" and not set_now)
