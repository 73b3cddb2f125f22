"""A barrier of ranks on their streams, which host-sequenced engines on GPUs launch before and after their copies.

    stream of a rank     copy x to the own slot | meet | copies from peers' slots | meet | next call

What any rank enqueued before it is complete and visible before anything enqueued after it starts. It compares
signatures, so ranks in different calls are found at once. One program, so it fits beside any other kernel.
"""

import triton

from .signals import arrive, leave, wait_all_arrivals


@triton.jit
def meet_kernel(peers):
    """Signal every peer, wait for every peer."""
    arrive(peers)
    wait_all_arrivals(peers)
    leave(peers)
