"""Symmetric memory: a region of equal size on every rank that every rank can read and write.

world       device   region
processes   CPU      memfd, mapped by every peer through /proc/PID/fd: it has no name, is not limited like /dev/shm in
                     containers, and leaves nothing behind, even after SIGKILL
processes   CUDA     torch's symmetric memory (NVLink; file descriptors, or fabric handles between hosts)
virtual     any      plain tensors of one process
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

PAGE = 4096
Exchange = Callable[[Any], list[Any]]  # every rank's object, in rank order; collective


@dataclass
class Region:
    """One allocation of `nbytes` per rank.

    buffers     by rank: its bytes, as a uint8 tensor mapped in this process
    multicast   the address of all ranks' bytes at once (NVLink SHARP); nonzero on every rank or on none
    """

    nbytes: int
    buffers: Sequence[Tensor]
    addresses: tuple[int, ...]
    multicast: int = 0
    handle: Any = field(default=None, repr=False)  # CUDA: torch's symmetric memory handle, and the allocation


def round_up(n: int, to: int = PAGE) -> int:
    return -(-n // to) * to


def host_identity() -> str:
    """Equal on two ranks exactly if they run on the same host, in containers or not."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        return f.read().strip()


def pid_namespace() -> str:
    """Equal on two ranks of a host exactly if each can open the other's /proc/PID/fd by PID."""
    return os.readlink("/proc/self/ns/pid")


def allocate_memfd(nbytes: int, exchange: Exchange) -> Region:
    """Collective. Raises OSError on every rank if any rank could not map a peer's memory."""
    nbytes = round_up(max(nbytes, PAGE))
    fd, fault = -1, ""
    try:
        try:
            fd = os.memfd_create("fusedtp", os.MFD_CLOEXEC)
            os.ftruncate(fd, nbytes)
        except OSError as error:
            fault = f"cannot make {nbytes} bytes of shared memory: {error}"
        mappings: list[mmap.mmap] = []
        for pid, peer_fd in exchange((os.getpid(), fd)):
            try:
                mappings.append(_map_peer(pid, peer_fd, nbytes))
            except (OSError, ValueError) as error:
                fault = fault or f"cannot map the memory of process {pid}: {error}"
        faults = [f for f in exchange(fault) if f]  # also a barrier: no rank closes its descriptor too early
    finally:
        if fd >= 0:
            os.close(fd)
    if faults:
        raise OSError(faults[0])
    buffers = [torch.frombuffer(m, dtype=torch.uint8) for m in mappings]
    return Region(nbytes, buffers, tuple(b.data_ptr() for b in buffers))


def _map_peer(pid: int, fd: int, nbytes: int) -> mmap.mmap:
    opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(opened, nbytes)
    finally:
        os.close(opened)


def allocate_symmetric(nbytes: int, device: torch.device, group_name: str, exchange: Exchange) -> Region:
    """Collective, CUDA: torch's symmetric memory. Raises RuntimeError if it is unavailable.

    This does not use torch's `empty`, which allocates from a pool that reuses freed memory. Ranks collect garbage at
    different times, so they would come to the rendezvous with blocks of different sizes, or one rank would get a block
    that this group knows already and skip the rendezvous.
    """
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed._symmetric_memory import rendezvous

    nbytes = round_up(max(nbytes, PAGE))
    local = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
    handle = rendezvous(local, group_name)  # type: ignore[arg-type]
    multicasts = exchange(handle.multicast_ptr)
    buffers = [handle.get_buffer(p, (nbytes,), torch.uint8) for p in range(len(multicasts))]
    addresses = tuple(buffer.data_ptr() for buffer in buffers)
    if addresses[handle.rank] != local.data_ptr():  # a buffer must begin where its allocation begins
        raise RuntimeError("torch's symmetric memory gave a part of a larger allocation")
    multicast = multicasts[handle.rank] if all(multicasts) else 0
    return Region(nbytes, buffers, addresses, multicast, (handle, local))


def allocate_plain(nbytes: int, device: torch.device, exchange: Exchange) -> Region:
    """Collective, virtual world: every rank's tensor lives in this process."""
    nbytes = round_up(max(nbytes, PAGE))
    own = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    buffers = exchange(own)
    return Region(nbytes, buffers, tuple(b.data_ptr() for b in buffers))
