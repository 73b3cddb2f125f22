# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Known bugs of multi-rank kernels, each as a small kernel whose compile-time switch makes it right.

Two ranks exchange a row of numbers some times over:

    x       [CALLS, N]       what this rank sends, a row a call
    boxes   int64 [2]        address of each rank's receive buffers, [SLOTS, N]
    flags   int64 [2]        address of each rank's int32 flags
    y       [CALLS, N]       what it received

Only what is broken is spelled out in a kernel; what all do alike is above them.
"""

import triton
import triton.language as tl

from fusedtp.kernels.tiles import inline


@inline
def numbers(table, rank):
    """The fp32 memory of `rank`."""
    return tl.load(table + rank).to(tl.pointer_type(tl.float32))


@inline
def words(table, rank):
    """The int32 memory of `rank`."""
    return tl.load(table + rank).to(tl.pointer_type(tl.int32))


@inline
def signal(word, value):
    """Everything this program stored is there."""
    tl.debug_barrier()
    tl.atomic_xchg(word, value, sem="release", scope="sys")


@inline
def wait(word, value):
    """Until the word is at least `value`."""
    while tl.atomic_add(word, 0, sem="acquire", scope="sys") < value:
        pass
    tl.debug_barrier()


@triton.jit
def exchange(x, boxes, flags, y, rank, CALLS: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr):
    """SLOTS = 1: a fast peer sends call 2 into the buffer from which call 1 is still being read."""
    at = tl.arange(0, N)
    for call in range(CALLS):
        slot = call % SLOTS * N
        tl.store(numbers(boxes, 1 - rank) + slot + at, tl.load(x + call * N + at))
        signal(words(flags, 1 - rank), call + 1)
        wait(words(flags, rank), call + 1)
        tl.store(y + call * N + at, tl.load(numbers(boxes, rank) + slot + at))


@triton.jit
def from_rank_0(x, boxes, flags, y, rank, CALLS: tl.constexpr, N: tl.constexpr, ALWAYS: tl.constexpr):
    """Rank 1 has no rows. Not ALWAYS: it sends no signal either, so rank 0 runs as far ahead as it likes."""
    at = tl.arange(0, N)
    for call in range(CALLS):
        slot = call % 2 * N
        if rank == 0:
            tl.store(numbers(boxes, 1) + slot + at, tl.load(x + call * N + at))
            signal(words(flags, 1), call + 1)
            if ALWAYS:
                wait(words(flags, 0), call + 1)
        else:
            if ALWAYS:
                signal(words(flags, 0), call + 1)
            wait(words(flags, 1), call + 1)
            tl.store(y + call * N + at, tl.load(numbers(boxes, 1) + slot + at))


@triton.jit
def equality(x, boxes, flags, y, rank, CALLS: tl.constexpr, N: tl.constexpr, AT_LEAST: tl.constexpr):
    """Not AT_LEAST: a peer that is a call ahead has already overwritten the number that is waited for."""
    at = tl.arange(0, N)
    for call in range(CALLS):
        slot = call % 2 * N
        tl.store(numbers(boxes, 1 - rank) + slot + at, tl.load(x + call * N + at))
        signal(words(flags, 1 - rank), call + 1)
        if AT_LEAST:
            wait(words(flags, rank), call + 1)
        else:
            while tl.atomic_add(words(flags, rank), 0, sem="acquire", scope="sys") != call + 1:
                pass
        tl.store(y + call * N + at, tl.load(numbers(boxes, rank) + slot + at))


@triton.jit
def reset(x, boxes, flags, y, rank, CALLS: tl.constexpr, N: tl.constexpr, COUNT: tl.constexpr):
    """Not COUNT: the flag is 1 or 0, and setting it back erases what a fast peer signalled for the next call."""
    at = tl.arange(0, N)
    for call in range(CALLS):
        slot = call % 2 * N
        number = call + 1 if COUNT else 1
        tl.store(numbers(boxes, 1 - rank) + slot + at, tl.load(x + call * N + at))
        signal(words(flags, 1 - rank), number)
        wait(words(flags, rank), number)
        tl.store(y + call * N + at, tl.load(numbers(boxes, rank) + slot + at))
        if not COUNT:
            signal(words(flags, rank), 0)


@triton.jit
def locked_sum(total, locks, CALLS: tl.constexpr, SCOPE: tl.constexpr):
    """Every rank adds 1 to rank 0's number under rank 0's lock. SCOPE "gpu": no lock towards another device."""
    lock = words(locks, 0)
    for _ in range(CALLS):
        while tl.atomic_cas(lock, 0, 1, sem="acquire", scope=SCOPE) != 0:
            pass
        tl.debug_barrier()
        tl.store(numbers(total, 0), tl.load(numbers(total, 0)) + 1.0)
        tl.debug_barrier()
        tl.atomic_xchg(lock, 0, sem="release", scope=SCOPE)


@triton.jit
def one_way(x, boxes, flags, y, rank, N: tl.constexpr, SEM: tl.constexpr):
    """SEM "relaxed": the flag may arrive before the numbers that were stored before it."""
    at = tl.arange(0, N)
    tl.store(numbers(boxes, 1 - rank) + at, tl.load(x + at))
    tl.debug_barrier()
    tl.atomic_xchg(words(flags, 1 - rank), 1, sem=SEM, scope="sys")
    wait(words(flags, rank), 1)
    tl.store(y + at, tl.load(numbers(boxes, rank) + at))


@triton.jit
def replayed(x, boxes, flags, y, rank, epoch, counter, N: tl.constexpr, OWN_COUNT: tl.constexpr):
    """One call. Not OWN_COUNT: `epoch` was chosen by the host, so a replayed launch has the last one's number."""
    at = tl.arange(0, N)
    if OWN_COUNT:
        epoch = tl.load(counter) + 1
        tl.store(counter, epoch)
    slot = epoch % 2 * N
    tl.store(numbers(boxes, 1 - rank) + slot + at, tl.load(x + at))
    signal(words(flags, 1 - rank), epoch)
    wait(words(flags, rank), epoch)
    tl.store(y + at, tl.load(numbers(boxes, rank) + slot + at))


@triton.jit
def all_push(x, boxes, flags, y, rank, N: tl.constexpr, STAGED: tl.constexpr):
    """Two programs, two rows. Not STAGED: each sends a row, then waits for both; STAGED: the first sends, the
    second receives, so one that waits needs no program after it."""
    at = tl.arange(0, N)
    pid = tl.program_id(0)
    for row in range(2):
        if (pid == 0) if STAGED else (pid == row):
            tl.store(numbers(boxes, 1 - rank) + row * N + at, tl.load(x + row * N + at))
            signal(words(flags, 1 - rank) + row, 1)
    for row in range(2):
        if not STAGED or pid == 1:
            wait(words(flags, rank) + row, 1)
            if STAGED or pid == row:
                tl.store(y + row * N + at, tl.load(numbers(boxes, rank) + row * N + at))


@triton.jit
def flag_per_program(x, boxes, flags, y, rank, N: tl.constexpr):
    """A row and a flag a program; whether there are as many flags is up to who allocated them."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(numbers(boxes, 1 - rank) + at, tl.load(x + at))
    signal(words(flags, 1 - rank) + tl.program_id(0), 1)
    wait(words(flags, rank) + tl.program_id(0), 1)
    tl.store(y + at, tl.load(numbers(boxes, rank) + at))
