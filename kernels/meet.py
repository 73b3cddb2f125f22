"""Ranks meet on their streams: what host-sequenced engines on GPUs put before and after their copies.

    stream of a rank     copy x to the own slot | meet | copies from peers' slots | meet | next call

What any rank enqueued before it is done, and seen, before what any rank enqueues after it; and signatures are
compared, so that ranks in different calls are found at once. One program, so it needs no room beside others.
"""

import triton

from .signals import arrive, wait_all_arrivals


@triton.jit
def meet_kernel(peers):
    """Signal every peer, wait for every peer; after bump_epoch, as every call of a group."""
    arrive(peers)
    wait_all_arrivals(peers)
