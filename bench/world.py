"""Ranks as processes of this machine, one thread and one core each."""

from __future__ import annotations

import ctypes
import os
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import start_processes

from fusedtp.ops.engines import interpreting

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
LARGEST_MMAP_THRESHOLD = 32 << 20  # that glibc takes


def pin(rank: int) -> None:
    """Keep this process on one core, if there is more than one, on one thread, and what it frees in its heap."""
    torch.set_num_threads(1)
    keep_heap()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def keep_heap() -> bool:
    """Have glibc keep memory that was freed, as other allocators do; False where there is no glibc.

    It gives free memory at the heap's top back to the kernel, and faults it in again, zeroed. Up to a third of a call
    then depends on what happens to lie at the top: of two ways that are measured in turn, sometimes on one, sometimes
    on the other.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(M_TRIM_THRESHOLD, 1 << 30), mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
    return all(kept)


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, backend: str = "gloo") -> Any:
    """What fn(rank, *args) returns on rank 0; fn runs on every rank of a world made for this call.

    With a backend that serves CUDA, rank r has GPU r.
    """
    with tempfile.TemporaryDirectory() as folder:
        # A fork server imports once for all ranks and worlds. CUDA must not start before a fork, and Triton interprets
        # only where it was imported for that: such ranks spawn.
        method = "spawn" if "cuda" in backend or interpreting() else "forkserver"
        if method == "forkserver":
            mp.get_context(method).set_forkserver_preload(["torch", "torch.distributed", "fusedtp"])
        start_processes(_enter, (fn, world_size, folder, args, backend), world_size, start_method=method)
        with open(os.path.join(folder, "result"), "rb") as f:
            return pickle.load(f)


def _enter(
    rank: int, fn: Callable[..., Any], world_size: int, folder: str, args: tuple[Any, ...], backend: str
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine; its host name need not resolve
    if "cuda" in backend:
        torch.cuda.set_device(rank)
    else:
        pin(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    result = fn(rank, *args)
    if rank == 0:
        with open(os.path.join(folder, "result"), "wb") as f:
            pickle.dump(result, f)
    dist.barrier()
    dist.destroy_process_group()
