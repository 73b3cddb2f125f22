"""What ranks say to each other inside a kernel: publish, wait, fail. Nothing else here names an order.

A rank's flag word belongs to one (source, chunk); the source sets it to the call's epoch, and it is never reset.

    source        stores of the data | block barrier | release of the flag at system scope
    destination   acquire spin on the flag, in its own memory | block barrier | loads of the data

Note [Barrier before the release]: only the thread that issues the release is ordered by it. Before Triton 3.9
the compiler puts no block barrier in front of a scalar release for the release's sake. In `publish` there happens
to be one: the failure word, which one thread reads, is handed to all through shared memory, and 3.6's code is in
order without `debug_barrier` too. No language rule promises that, so `publish` has its own.

Note [Modular compare]: a fast peer may already be a call ahead, and 2**31 calls wrap; so `seen - epoch >= 0`
in int32, never `==`.

Note [Two rotating buffers]: data and signature words alternate between two places by the epoch's parity. A rank
that runs call e + 2 has seen every peer arrive in call e + 1, so no peer still reads what call e left. That
holds only if in every call every rank signals every peer (chunk 0) and waits for every peer, also with no rows.

Note [Waits stand in outer loops]: the compiler's software pipeliner issues loads of later iterations early,
across an acquire in the same loop. So a wait stands in a loop over shards or tiles, and the innermost loop, the
only one that is pipelined, holds none.

Note [Generic proxy]: what a peer wrote is read by pointer loads, which share the memory order of ordinary
stores. TMA would need a proxy fence after the acquire, and on older compilers TMA stores have not landed when
the flag is released. So there are no descriptors and no fence here.

Note [A failed call]: a wait that times out, or meets another call's signature, is recorded by the first
program it happens to. From then on waits return at once, nothing is published, and later launches return
before they do anything. What the call wrote to its outputs is garbage, which the host never hands out.

Note [Odd integers]: the compiler specialises a kernel on integer arguments that are 1 or divisible by 16, entries
of a tuple included, and those cannot be exempted. Integers on which a kernel must not depend travel as 2n + 3,
which is neither: one compiled kernel serves every rank, every signature and every split of the rows.
"""

import time
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .tiles import INTERPRETED, decoded, inline

# words of `failure`, in the device's own memory: the code; scratch for the clock
FINE = tl.constexpr(0)
TIMED_OUT = tl.constexpr(1)
OTHER_SIGNATURE = tl.constexpr(2)
OVERFLOW = tl.constexpr(3)
CLOCK_WORD = tl.constexpr(7)
# polls between two looks at the clock and at the other programs' failures
PATIENCE = tl.constexpr(4 if INTERPRETED.value else 1024)


class Peers(NamedTuple):
    """One rank's view of its group, passed to a kernel as one argument.

    data         int64 [W]   address of every rank's data region, two slots of slot_bytes
    flags        int64 [W]   address of every rank's int32 flags, [W, flags_per_source]; chunk 0 is the arrival
    signatures   int64 [W]   address of every rank's int32 [2, W]
    epoch        int32 [1]   number of this call
    failure      int64 [8]   own memory on the device, read by every program: nonzero after a failure
    status       int64 [8]   where the host looks: code, peer, flag index, wanted, seen
    rank2        int         2 rank + 3; see Note [Odd integers]
    low2, high2  int         the signature's 16-bit halves, likewise
    world_size and clock ("cuda", "hip" or "host") are tl.constexpr, the rest are ints.
    """

    data: Any
    flags: Any
    signatures: Any
    epoch: Any
    failure: Any
    status: Any
    world_size: Any
    clock: Any
    slot_bytes: Any
    flags_per_source: Any
    timeout_ns: Any
    rank2: Any
    low2: Any
    high2: Any


@triton.jit
def bump_epoch(epoch):
    """Start a call: one program, on the stream of the fused kernel and before it, which only reads the epoch.

    The number lives in device memory, so a replayed CUDA graph counts on.
    """
    tl.store(epoch, tl.load(epoch) + 1)


@inline
def rank_of(peers):
    """This rank."""
    return decoded(peers.rank2)


@inline
def signature_of(peers):
    """This call's signature, int32."""
    return (decoded(peers.high2) << 16) | decoded(peers.low2)


@inline
def slot(peers, rank):
    """Address of the slot of this call in the data region of `rank`, as int64."""
    base = tl.load(peers.data + rank)
    return base + (tl.load(peers.epoch) & 1).to(tl.int64) * peers.slot_bytes


@inline
def failed(peers):
    """Whether this or an earlier call failed. One thread reads, all threads of the program get its answer."""
    return tl.atomic_add(peers.failure, 0, sem="relaxed", scope="gpu") != FINE


@inline
def publish(peers, dst, chunk):
    """Tell `dst` that everything this program stored so far is there: its flag for (this rank, chunk)."""
    healthy = tl.atomic_add(peers.failure, 0, sem="relaxed", scope="gpu") == FINE
    flag = tl.load(peers.flags + dst).to(tl.pointer_type(tl.int32))
    flag += rank_of(peers) * peers.flags_per_source + chunk
    tl.debug_barrier()  # Note [Barrier before the release]
    tl.atomic_xchg(flag, tl.load(peers.epoch), mask=healthy, sem="release", scope="sys")


@inline
def arrive(peers):
    """Signal every peer that this rank is in the call, and which call it takes it for. Once a launch."""
    parity = tl.load(peers.epoch) & 1
    for step in range(1, peers.world_size):
        dst = (rank_of(peers) + step) % peers.world_size
        word = tl.load(peers.signatures + dst).to(tl.pointer_type(tl.int32))
        tl.store(word + parity * peers.world_size + rank_of(peers), signature_of(peers))
        publish(peers, dst, 0)


@inline
def wait(peers, src, chunk):
    """Spin until `src` has published `chunk` in this call; on the way out every thread of the program is ordered.

    Returns at once after a failure; see Note [A failed call].
    """
    epoch = tl.load(peers.epoch)
    index = src * peers.flags_per_source + chunk
    flag = tl.load(peers.flags + rank_of(peers)).to(tl.pointer_type(tl.int32)) + index
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    start = tl.full((), 0, tl.int64)
    polls = tl.full((), 0, tl.int32)
    gave_up = tl.full((), 0, tl.int32)
    while ((seen - epoch) < 0) & (gave_up == 0):  # Note [Modular compare]
        _pause()
        if polls % PATIENCE == 0:
            now = _clock(peers)
            if polls == 0:
                start = now
            if now - start > peers.timeout_ns:
                record(peers, TIMED_OUT, src, index, epoch, seen)
            if failed(peers):
                gave_up += 1
        polls += 1
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    tl.debug_barrier()


@inline
def wait_chunks(peers, src, first, last):
    """Wait for the chunks first, ..., last - 1 of `src`."""
    for chunk in range(first, last):
        wait(peers, src, chunk)


@inline
def wait_arrival(peers, src):
    """Wait until peer `src` is in this call too, and compare signatures."""
    wait(peers, src, 0)
    parity = tl.load(peers.epoch) & 1
    word = tl.load(peers.signatures + rank_of(peers)).to(tl.pointer_type(tl.int32))
    theirs = tl.load(word + parity * peers.world_size + src, volatile=True)
    if theirs != signature_of(peers):
        if not failed(peers):  # after a timeout the word is an older call's
            index = src * peers.flags_per_source
            record(peers, OTHER_SIGNATURE, src, index, signature_of(peers), theirs)


@inline
def wait_all_arrivals(peers):
    """Wait for every peer: some program of every launch does, see Note [Two rotating buffers]."""
    for step in range(1, peers.world_size):
        wait_arrival(peers, (rank_of(peers) + step) % peers.world_size)


@inline
def record(peers, code, peer, index, wanted, seen):
    """Write the failure, unless another program was first."""
    zero = tl.full((), 0, tl.int64)
    first = tl.atomic_cas(peers.failure, zero, zero + code, sem="relaxed", scope="gpu") == FINE
    tl.store(peers.status, zero + code, mask=first)
    tl.store(peers.status + 1, zero + peer, mask=first)
    tl.store(peers.status + 2, zero + index, mask=first)
    tl.store(peers.status + 3, zero + wanted, mask=first)
    tl.store(peers.status + 4, zero + seen, mask=first)


if INTERPRETED.value:

    def _clock(peers):
        """Nanoseconds of a clock that runs while others compute."""
        return time.monotonic_ns()

    def _pause():
        """Yield the core: the rank that is waited for may need it."""
        time.sleep(5e-4)

else:

    @inline
    def _clock(peers):
        """Nanoseconds, the same for all threads of the program, which a branch on them must not divide.

        Threads read the timer at different moments. An atomic is done by one thread and its result handed to all; so
        the timer's maximum goes through a word of memory.
        """
        if peers.clock == "cuda":
            ticks = tl.inline_asm_elementwise(
                "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
            )
        else:
            ticks = tl.extra.hip.memrealtime() * 10  # 100 MHz
        tl.atomic_max(peers.failure + CLOCK_WORD, ticks, sem="relaxed", scope="gpu")
        return tl.atomic_max(peers.failure + CLOCK_WORD, tl.full((), 0, tl.int64), sem="relaxed", scope="gpu")

    @inline
    def _pause():
        """Nothing: each poll already waits for memory."""
