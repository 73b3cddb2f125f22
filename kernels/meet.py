"""A barrier of ranks on their streams. Host-driven engines on GPUs launch it before and after their copies.

    stream of a rank     copy x to own slot | meet | copies from peers' slots | meet | next call

All work that any rank enqueued before it is complete and visible before any work enqueued after it starts. It compares
signatures, so ranks in different calls are detected at once. It has one program, so it fits next to any other kernel.
"""

import triton

from .signals import arrive, leave, wait_all_arrivals


@triton.jit
def meet_kernel(peers):
    """Signal every peer, wait for every peer."""
    arrive(peers)
    wait_all_arrivals(peers)
    leave(peers)
