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
NUMBERED_BY_GROUP = (2, 14)  # the first torch that numbers the keys of a rendezvous by its group, not by the process
_meetings = 0  # of this process, in all its groups
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
            fault = f"cannot allocate {nbytes} bytes of shared memory: {error}"
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
    """Collective, CUDA: torch's symmetric memory. Raises RuntimeError on every rank if one rank cannot have it.

    This does not use torch's `empty`, which allocates from a pool that reuses freed memory. Ranks collect garbage at
    different times, so they would come to the rendezvous with blocks of different sizes, or one rank would get a block
    that this group knows already and skip the rendezvous.
    """
    from torch.distributed._symmetric_memory import rendezvous

    global _meetings
    nbytes = round_up(max(nbytes, PAGE))
    local, handle, multicast, fault = None, None, 0, ""
    try:
        local = _own_symmetric(nbytes, device)
    except RuntimeError as error:
        fault = f"cannot allocate {nbytes} bytes of symmetric memory: {error}"
    told = exchange((fault, _meetings))
    _raise_first([each for each, _ in told])  # the other ranks would wait in the rendezvous
    _check_meetings([each for _, each in told])
    _meetings += 1
    try:
        handle = rendezvous(local, group_name)  # type: ignore[arg-type]
        multicast = handle.multicast_ptr
    except RuntimeError as error:
        fault = str(error)
    told = exchange((fault, multicast))
    _raise_first([each for each, _ in told])
    assert handle is not None and local is not None
    buffers = [handle.get_buffer(p, (nbytes,), torch.uint8) for p in range(len(told))]
    addresses = tuple(buffer.data_ptr() for buffer in buffers)
    if addresses[handle.rank] != local.data_ptr():  # a buffer must begin where its allocation begins
        raise RuntimeError("torch's symmetric memory returned a part of a larger allocation")
    multicast = multicast if all(each for _, each in told) else 0
    return Region(nbytes, buffers, addresses, multicast, (handle, local))


def _own_symmetric(nbytes: int, device: torch.device) -> Tensor:
    """This rank's part. The driver gives it, which does not know what torch's caching allocator keeps free."""
    from torch._C._distributed_c10d import _SymmetricMemory

    try:
        return _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
    except RuntimeError:
        torch.cuda.empty_cache()
        return _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)


def _check_meetings(counts: Sequence[int]) -> None:
    """Raises RuntimeError where ranks would look for each other by different keys: pytorch issue 196082.

    As after one group has grown and another has not, in a group of ranks of both.
    """
    if len(set(counts)) > 1 and torch_version() < NUMBERED_BY_GROUP:
        raise RuntimeError(
            f"its ranks have allocated symmetric memory {list(counts)} times in all their groups, and would wait "
            f"forever: torch {torch.__version__} numbers the allocations per process. Call fusedtp.reserve for each "
            "group before the first operation, in the same order on all ranks"
        )


def torch_version() -> tuple[int, int]:
    """Major and minor."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _raise_first(faults: Sequence[str]) -> None:
    """Of every rank's fault, "" for none."""
    for p, fault in enumerate(faults):
        if fault:
            raise RuntimeError(f"rank {p}: {fault}")


def allocate_plain(nbytes: int, device: torch.device, exchange: Exchange) -> Region:
    """Collective, virtual world: every rank's tensor lives in this process."""
    nbytes = round_up(max(nbytes, PAGE))
    own = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    buffers = exchange(own)
    return Region(nbytes, buffers, tuple(b.data_ptr() for b in buffers))
