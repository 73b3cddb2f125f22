"""What one call allocates at its peak, beyond what was there before it."""

from __future__ import annotations

import os

import torch
from torch.profiler import ProfilerActivity, profile

from .rank import Rank
from .sample import Way


def peak_bytes(rank: Rank, way: Way) -> int | None:
    """Of the rank that needs most. Collective.

    GPU   as torch's caching allocator counts. Ranks of a virtual world have one allocator: the peak of all of them,
          divided by their number
    CPU   the sum of what torch's profiler saw allocated and freed; None in a virtual world, whose ranks it mixes up
    """
    way()  # compiles, connects and grows workspaces
    if rank.device.type != "cuda":
        return None if rank.world == "virtual" else int(rank.worst(float(_profiled(way)))[0])
    torch.cuda.synchronize(rank.device)
    rank.meeting.barrier()
    if rank.rank == 0 or rank.world != "virtual":
        torch.cuda.reset_peak_memory_stats(rank.device)
    before = torch.cuda.memory_allocated(rank.device)
    rank.meeting.barrier()
    way()
    torch.cuda.synchronize(rank.device)
    rank.meeting.barrier()
    peak = torch.cuda.max_memory_allocated(rank.device) - before
    return int(rank.worst(float(peak))[0]) // (rank.world_size if rank.world == "virtual" else 1)


def _profiled(way: Way) -> int:
    """The largest sum of what was allocated and not yet freed."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # below it torch 2.13 tells of every profile on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        way()
    events = found.profiler.kineto_results.events()
    held = most = 0
    for _, nbytes in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        held += nbytes
        most = max(most, held)
    return most
