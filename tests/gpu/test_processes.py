"""Processes through torch's symmetric memory: on one GPU, correct but slow (they take turns); or with one GPU each."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fusedtp
from fusedtp.comm import Signature, communicator
from fusedtp.ops.engines import BY_COPY
from tests.properties.cases import Case
from tests.properties.laws import compare

WORLD_SIZE = 2


def _cases() -> list[Case]:
    shape = {
        "sizes": (70, 33),
        "features": 150,
        "local": ((60, 40), (60, 40)),
        "batch": None,
        "tell_sizes": True,
    }
    common = {"unused": (), "needs": frozenset("xwb"), "layouts": {}, "seed": 3, "biased": (True, False)}
    gathers = [
        Case(operation="all_gather_matmul", engine=engine, dtype=dtype, **shape, **common)
        for engine in ("triton", "chunked")
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ]
    others = {"local": ((90,), (90,)), "biased": (True,)}
    wgrads = [replace(case, operation="all_gather_wgrad", biased=(False, False)) for case in gathers]
    scatters = [
        replace(case, operation=operation, sizes=sizes, **others)
        for case in gathers
        for operation, sizes in (("matmul_reduce_scatter", (70, 33)), ("matmul_all_reduce", (52, 51)))
    ]
    return gathers + wgrads + scatters


def _rank(rank: int, store: str, apart: bool) -> None:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(rank if apart else 0)
    backend = "cpu:gloo,cuda:nccl" if apart else "cpu:gloo,cuda:gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    try:
        fusedtp.set_timeout(dist.group.WORLD, 60.0)
        for case in _cases():
            compare(case, dist.group.WORLD, "cuda")
        _by_copies(rank, rounds=2000 if apart else 20)
        torch.cuda.synchronize()
        fusedtp.check(dist.group.WORLD)
        for engine in () if apart else ("chunked", "collective", "triton"):
            _disagree(rank, engine)
            _stay_away(rank, engine)
    finally:
        dist.destroy_process_group()


def _by_copies(rank: int, rounds: int) -> None:
    """Gathers with the copy engine, forward and backward, interleaved with the other transport and engines; all exact.

    There are enough rows that the kernel fills the GPU while flags are on their way.
    """
    group, rows = dist.group.WORLD, 1024
    comm = communicator(group)
    full = torch.empty(WORLD_SIZE * rows, 256, dtype=torch.bfloat16, device="cuda")
    w = torch.randint(-1, 2, (512, 256), generator=torch.Generator().manual_seed(0)).to("cuda", full.dtype)
    for number in range(rounds):
        full.copy_(((torch.arange(full.numel(), device="cuda") + number) % 5 - 2).view(full.shape))
        x = full[rank * rows :][:rows].clone().requires_grad_()
        engine = "chunked" if number % 7 == 6 else BY_COPY if (number + rank) % 3 else "triton"
        (y,) = fusedtp.all_gather_matmul(x, [w], group, engine="triton" if engine == "chunked" else engine)
        assert torch.equal(y, full @ w.t()), (number, engine)
        if number % 5 == 0:
            y.backward(torch.ones_like(y))
            assert torch.equal(x.grad, w.sum(0).mul(WORLD_SIZE).expand_as(x)), (number, engine)
        if engine == "chunked":
            z = fusedtp.matmul_all_reduce(full, w, group, engine=engine)
            assert torch.equal(z, WORLD_SIZE * (full @ w.t())), number
    torch.cuda.synchronize()
    assert comm.workspace.epochs is not None
    assert comm.workspace.epochs + 1 == int(comm.workspace.epoch[0]), "the host counts as the device does"


def _disagree(rank: int, engine: str) -> None:
    """Ranks that call with different K name each other, in a group of their own that is unusable afterwards."""
    group = dist.new_group(range(WORLD_SIZE))
    fusedtp.set_timeout(group, 60.0)
    fusedtp.reserve(group, 1 << 20)
    k = 64 + 16 * rank
    x, w = torch.ones(8, k, device="cuda"), torch.ones(32, k, device="cuda")
    if engine == "collective":
        with communicator(group).agreed(Signature("all_gather", engine, x.dtype, k, (8, 8))):
            torch.cuda.synchronize()  # and no collective: gloo would wait forever
    else:
        fusedtp.all_gather_matmul(x, [w], group, sizes=(8, 8), engine=engine)
    torch.cuda.synchronize()
    with pytest.raises(fusedtp.SignatureMismatch, match=f"rank {rank}: a kernel waited for rank {1 - rank}"):
        fusedtp.check(group)


def _stay_away(rank: int, engine: str) -> None:
    """The other rank's kernel names the rank that does not come, in a group of their own."""
    group = dist.new_group(range(WORLD_SIZE))
    fusedtp.set_timeout(group, 2.0)
    fusedtp.reserve(group, 1 << 20)
    x = torch.ones(8, 64, device="cuda")
    if rank == 0 and engine != "collective":  # gloo has its own timeout
        fusedtp.all_gather_matmul(x, [x], group, sizes=(8, 8), engine=engine)
        torch.cuda.synchronize()
        with pytest.raises(fusedtp.SignalTimeout, match="waited for rank 1, which had not signalled"):
            fusedtp.check(group)
    dist.barrier()


TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=TWO)], ids=["one-gpu", "two-gpus"])
def test_two_processes_equal_the_formula(apart: bool, tmp_path: Path):
    mp.start_processes(_rank, args=(str(tmp_path / "store"), apart), nprocs=WORLD_SIZE, start_method="spawn")
