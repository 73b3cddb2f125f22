"""All-reduces summed by the NVLink switch, one process and one GPU per rank: on machines with such a switch.

Its bits may differ from run to run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fusedtp
from fusedtp.comm import communicator
from tests.properties.cases import Case
from tests.properties.laws import compare, errors
from tests.properties.test_numerics import a_case, together

NAME = "matmul_all_reduce"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def switched() -> int:
    """The number of GPUs here whose memory a switch can sum; 0 without such a switch."""
    if torch.version.cuda is None:
        return 0
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    count = torch.cuda.device_count()
    return count if all(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, i) for i in range(count)) else 0


def _rank(rank: int, world_size: int, store: str) -> None:
    torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
    group = dist.group.WORLD
    try:
        fusedtp.set_timeout(group, 60.0)
        assert communicator(group).has_switch
        for dtype in DTYPES:
            for rows, n in ((1, 17), (5, 200), (90, 640), (700, 2048)):
                sizes, local = (rows,) * world_size, ((60,),) * world_size
                compare(Case(NAME, "multimem", dtype, sizes, n, local, biased=(True,)), group, "cuda")
            case = a_case(NAME, "multimem", dtype, world_size)
            told: list[dict] = [{}] * world_size
            dist.all_gather_object(told, errors(group, case, device="cuda"), group=group)
            for name, (ratio, worst) in together(told).items():
                assert worst <= 1 and (dtype == torch.float32 or ratio <= 2), f"{name}: {worst}, {ratio}"
        torch.cuda.synchronize()
        fusedtp.check(group)
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(switched() < 2, reason="needs two GPUs behind a switch that sums")
def test_the_switch_equals_the_formula(tmp_path: Path):
    arguments = switched(), str(tmp_path / "store")
    mp.start_processes(_rank, args=arguments, nprocs=switched(), start_method="spawn")
