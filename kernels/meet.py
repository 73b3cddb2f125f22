"""Ranks meet on their streams: what host-sequenced engines on GPUs put before and after their copies.

    stream of a rank     copy x to the own slot | meet | copies from peers' slots | meet | next call

What any rank enqueued before it is done, and seen, before what any rank enqueues after it; and signatures are
compared, so that ranks in different calls are found at once. One program, so it needs no room beside others.
"""

import triton
import triton.language as tl

from .signals import arrive, bump_epoch, wait_all_arrivals


@triton.jit
def meet_kernel(peers):
    """Begin the group's next epoch, signal every peer, wait for every peer."""
    bump_epoch(peers.epoch)
    tl.debug_barrier()  # the epoch was stored by one thread and is read by all
    arrive(peers)
    wait_all_arrivals(peers)
