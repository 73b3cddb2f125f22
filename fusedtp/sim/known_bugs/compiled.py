# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""The known bug that no schedule shows: the compiler moves a load to before the wait that stands in front of it.

Compiled by the lint's processes, imported nowhere else.
"""

import triton
import triton.language as tl


@triton.jit
def wait(flag, limit):
    """Until the flag is up, at most `limit` polls."""
    polls = 0
    while (tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1) & (polls < limit):
        polls += 1


@triton.jit
def gated_matmul(
    inbox, w, y, flags, limit, K, M: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, OUTSIDE: tl.constexpr
):  # fmt: skip
    """y [M, M] = inbox [M, K] @ w [M, K].T while a peer fills the inbox, with a flag for each CHUNK columns.

    Not OUTSIDE: the wait for a chunk stands in the loop that loads it, whose loads of later rounds the compiler's
    software pipeliner issues first. OUTSIDE: it stands in a loop over chunks, and the inner loop holds none.
    """
    ms, ks = tl.arange(0, M), tl.arange(0, BLOCK_K)
    acc = tl.zeros((M, M), tl.float32)
    if OUTSIDE:
        for first in range(0, K, CHUNK):
            wait(flags + first // CHUNK, limit)
            for k in range(first, first + CHUNK, BLOCK_K):
                a = tl.load(inbox + ms[:, None] * K + k + ks[None, :])
                acc = tl.dot(a, tl.load(w + k + ks[:, None] + ms[None, :] * K), acc)
    else:
        for k in range(0, K, BLOCK_K):
            if k % CHUNK == 0:
                wait(flags + k // CHUNK, limit)
            a = tl.load(inbox + ms[:, None] * K + k + ks[None, :])
            acc = tl.dot(a, tl.load(w + k + ks[:, None] + ms[None, :] * K), acc)
    tl.store(y + ms[:, None] * M + ms[None, :], acc)
