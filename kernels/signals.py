"""Signals between ranks inside a kernel: publish, wait, fail. No other kernel file specifies a memory order.

Each of a rank's flag words belongs to one (source, chunk); the source sets it to the call's epoch, and it is never
reset.

    source        stores of the data | block barrier | release of the flag at system scope
    destination   acquire spin on the flag, in its own memory | block barrier | loads of the data

When a rank enters a call, it writes its arrival to every rank, in one word: the epoch and a hash of the signature of
the call that it is making.

Note [All at once]: a signal to all ranks is one instruction on a tile with one word per rank, and so is a poll of all
ranks. A loop over peers would be a chain: each release waits for earlier stores to land, including the atomic exchange
for the previous peer, and each poll waits for memory. Here one barrier is enough, and the lanes of a warp release
together.

Note [Barrier before the release]: a release orders only the thread that issues it. Before Triton 3.9 the compiler adds
no block barrier for a scalar release. `publish` happens to get one for another reason: one thread reads the failure
word and broadcasts it through shared memory, so 3.6's code is ordered without `debug_barrier` too. The language does
not guarantee that, so `publish` has its own barrier.

Note [Modular compare]: a fast peer may already be a call ahead, and 2**31 calls wrap; so `seen - epoch >= 0`
in int32, never `==`.

Note [Two rotating buffers]: data and arrivals alternate between two places by the epoch's parity. A rank
that runs call e + 2 has seen every peer arrive in call e + 1, so no peer still reads the data of call e. This
holds only if in every call every rank arrives at every peer, and one of its programs waits for every peer's arrival,
even with no rows.

Note [Waits stand in outer loops]: the compiler's software pipeliner issues loads of later iterations early,
across an acquire in the same loop. So a wait belongs in a loop over shards or tiles, and the innermost loop, the
only one that is pipelined, contains none.

Note [Generic proxy]: data written by a peer is read by pointer loads, which share the memory order of ordinary
stores. TMA would need a proxy fence after the acquire, and with older compilers TMA stores have not landed when
the flag is released. So there are no descriptors and no fence here.

Note [Strangers]: a rank that is in a different call may never publish the awaited chunk, and neither may a third rank
that has failed because of it. So a long wait also checks all arrivals, the clock and the failure word. These are four
atomics in a row, during which it cannot see its flag, so a short wait only polls. If a stranger does publish, the data
read is garbage, and the program that waits for all arrivals detects the mismatch. A rank arrives as soon as its first
program begins, even if it fails in this very launch: otherwise the others would wait until they time out.

Note [Tickets]: any free program of a rank takes the next piece of work, however many programs are resident. A piece
that waits for peers is handed out only after all of this rank's pieces that such a wait, on any rank, depends on, and a
program publishes its finished work before it waits. So one resident program per rank is enough.

Note [One flag of many programs]: a receiver that waits for everything a rank sends it, in this call or this part of it,
need not wait for each piece. The programs that store the pieces count themselves, and the last one publishes: it has
acquired what the others released, so its own release covers their stores too. It also clears the count for the next
call.

Note [The next call]: a call's number lives in device memory, so that a replayed CUDA graph advances it. No program
may change it while another program of the launch reads it. So programs count themselves out, and the last one advances
the number: all other reads happen before, because each program releases and the last one acquires. A separate launch
before each kernel could do this too, but costs the host as much as the kernel's own launch. A failed call may not be
counted.

Note [A failed call]: if a wait times out or meets another call's signature, the first program that notices records it.
From then on waits return at once, no chunk is published, and later launches return before they do anything. The
call's outputs are garbage; the host never returns them.

Note [Odd integers]: the compiler specialises a kernel on integer arguments that are 1 or divisible by 16, including
entries of a tuple, which cannot be exempted. Integers on which a kernel must not depend are passed as 2n + 3, which is
neither: one compiled kernel serves every rank, every signature and every split of the rows.
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
# words after the epoch; DONE is an array with one word for each (part, rank)
PUSH, TILE, LEFT, DONE = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
ARRIVAL = tl.constexpr(-1)  # recorded instead of a chunk
# polls of a wait before it first checks the clock, arrivals and failures; and between two such checks
QUICK = tl.constexpr(2 if INTERPRETED.value else 8)
PATIENCE = tl.constexpr(4 if INTERPRETED.value else 1024)


class Peers(NamedTuple):
    """One rank's view of its group, passed to a kernel as one argument.

    data         int64 [W]   address of each rank's data region, two slots of slot_bytes
    flags        int64 [W]   address of each rank's int32 flags [W, flags_per_source], by source and chunk
    arrivals     int64 [W]   address of each rank's int64 [2, W], by parity and source: signature << 32 | epoch
    epoch        int32 [4 + MOST_PARTS W]   own device memory: number of this call, from 1 on; numbers of PUSH and TILE
                             pieces handed out; number of programs that have LEFT; for each (part, rank), number of
                             programs or pieces that are DONE
    failure      int64 [8]   own device memory, read by every program: nonzero after a failure
    status       int64 [8]   read by the host: code, peer, chunk or ARRIVAL, wanted, seen
    rank2        int         2 rank + 3; see Note [Odd integers]
    low2, high2  int         the 16-bit halves of the signature, encoded in the same way
    world_size and clock ("cuda", "hip" or "host") are tl.constexpr, the rest are ints.
    """

    data: Any
    flags: Any
    arrivals: Any
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


@inline
def leave(peers):
    """Leave the call. Every program does this last, and the last program to leave begins the next call.

    See Note [The next call].
    """
    tl.debug_barrier()  # after all reads of this call by this program's threads
    left = tl.atomic_add(peers.epoch + LEFT, 1, sem="acq_rel", scope="gpu")
    if left == tl.num_programs(0) - 1:
        tl.store(peers.epoch + PUSH, 0)
        tl.store(peers.epoch + TILE, 0)
        tl.store(peers.epoch + LEFT, 0)
        tl.store(peers.epoch, tl.load(peers.epoch) + 1)


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
    """Address, as int64, of this call's slot in the data region of `rank`."""
    base = tl.load(peers.data + rank)
    return base + (tl.load(peers.epoch) & 1).to(tl.int64) * peers.slot_bytes


@inline
def failed(peers):
    """Whether this or an earlier call failed. One thread reads, and all threads of the program get its answer."""
    return tl.atomic_add(peers.failure, 0, sem="relaxed", scope="gpu") != FINE


@inline
def take(peers, kind):
    """Take the number of the next piece of work of this kind: 0, 1, ..., each for one program. See Note [Tickets]."""
    return tl.atomic_add(peers.epoch + kind, 1, sem="relaxed", scope="gpu")


@inline
def complete(peers, dst, part, programs):
    """Whether this program is the last of `programs` that store data for `dst` in this part of the call.

    See Note [One flag of many programs].
    """
    word = peers.epoch + DONE + part * peers.world_size + dst
    tl.debug_barrier()  # Note [Barrier before the release]
    last = tl.atomic_add(word, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(word, 0)
    return last


@inline
def complete_pieces(peers, dst, part, mine, pieces):
    """`complete` for `pieces` pieces instead of programs. This program has stored `mine` of them, at least one.

    The last of them is counted by `complete`, which releases the stores of all of them.
    """
    tl.atomic_add(peers.epoch + DONE + part * peers.world_size + dst, mine - 1, sem="relaxed", scope="gpu")
    return complete(peers, dst, part, pieces)


@inline
def publish(peers, dst, chunk):
    """Set the flag of `dst` for (this rank, chunk): everything that this program has stored so far is there."""
    healthy = failed(peers) == 0
    flag = tl.load(peers.flags + dst).to(tl.pointer_type(tl.int32))
    flag += rank_of(peers) * peers.flags_per_source + chunk
    tl.debug_barrier()  # Note [Barrier before the release]
    tl.atomic_xchg(flag, tl.load(peers.epoch), mask=healthy, sem="release", scope="sys")


@inline
def publish_to_all(peers, chunk):
    """`publish` to every rank, including this one. See Note [All at once]."""
    reached = tl.where(failed(peers), 0, peers.world_size)
    rank, exists = all_ranks(peers)
    flag = tl.load(peers.flags + rank, mask=exists, other=0).to(tl.pointer_type(tl.int32))
    flag += rank_of(peers) * peers.flags_per_source + chunk
    tl.debug_barrier()  # Note [Barrier before the release]
    tl.atomic_xchg(flag, tl.load(peers.epoch), mask=rank < reached, sem="release", scope="sys")


@inline
def arrive(peers):
    """Tell every rank, including this one, that this rank is in the call, and the call's signature. Once per launch.

    This releases the work of all earlier launches.
    """
    rank, exists = all_ranks(peers)
    epoch = tl.load(peers.epoch)
    word = tl.load(peers.arrivals + rank, mask=exists, other=0).to(tl.pointer_type(tl.int64))
    word += (epoch & 1) * peers.world_size + rank_of(peers)
    arrival = (signature_of(peers).to(tl.int64) << 32) | (epoch.to(tl.int64) & 0xFFFFFFFF)
    tl.debug_barrier()  # after this program has recorded a failure, if any
    tl.atomic_xchg(word, arrival, mask=exists, sem="release", scope="sys")


@inline
def wait(peers, src, chunk):
    """Spin until `src` has published `chunk` in this call. Every thread of the program is then ordered after that.

    Returns at once after a failure; see Note [A failed call].
    """
    _spin(peers, _flag_of(peers, src, chunk), src, chunk, False)


@inline
def wait_chunks(peers, src, first, last):
    """Wait for chunks first, ..., last - 1 of `src`."""
    for chunk in range(first, last):
        wait(peers, src, chunk)


@inline
def missing(peers, src, chunk):
    """Poll once: how many of these chunks are not published yet. Every thread is ordered after those that are.

    src, chunk   tiles; ranks >= world_size are ignored
    """
    seen = _look(peers, _flag_of(peers, src, chunk), src, True)
    late = (src < peers.world_size) & (seen - tl.load(peers.epoch) < 0)  # Note [Modular compare]
    tl.debug_barrier()
    return tl.sum(late.to(tl.int32), 0)


@inline
def wait_chunk_of_all(peers, chunk):
    """Wait for this chunk of every rank, including this one."""
    rank, _ = all_ranks(peers)
    _spin(peers, _flag_of(peers, rank, chunk), rank, chunk, True)


@inline
def wait_all_arrivals(peers):
    """Wait until every rank is in this call, and compare signatures.

    One program of every launch calls this, see Note [Two rotating buffers].
    """
    rank, _ = all_ranks(peers)
    _compare(peers, _spin(peers, _arrival_of(peers, rank), rank, ARRIVAL, True))


@inline
def all_ranks(peers):
    """(tile of ranks, mask of those that exist). The tile's size is a power of two."""
    rank = tl.arange(0, triton.next_power_of_2(peers.world_size))
    return rank, rank < peers.world_size


@inline
def _flag_of(peers, src, chunk):
    """Address of this rank's flag for a chunk of `src`. Both may be tiles."""
    flag = tl.load(peers.flags + rank_of(peers)).to(tl.pointer_type(tl.int32))
    return flag + src * peers.flags_per_source + chunk


@inline
def _arrival_of(peers, src):
    """Address of this rank's arrival word for `src`, which may be a tile."""
    word = tl.load(peers.arrivals + rank_of(peers)).to(tl.pointer_type(tl.int64))
    return word + (tl.load(peers.epoch) & 1) * peers.world_size + src


@inline
def _spin(peers, words, src, chunk, ALL: tl.constexpr):
    """Poll the words of `src`, with ALL a tile of all ranks, until each holds this call's epoch. Returns the words."""
    epoch = tl.load(peers.epoch)
    seen = _look(peers, words, src, ALL)
    late = _first(peers, seen.to(tl.int32) - epoch < 0, src, ALL)  # Note [Modular compare]
    start = tl.full((), 0, tl.int64)
    polls = tl.full((), 0, tl.int32)
    gave_up = tl.full((), 0, tl.int32)
    while (late < peers.world_size) & (gave_up == 0):
        _pause()
        if polls % PATIENCE == QUICK:  # Note [Strangers]
            rank, exists = all_ranks(peers)
            arrivals = _arrival_of(peers, rank)
            arrivals = tl.atomic_add(arrivals, 0, mask=exists, sem="relaxed", scope="sys")
            _compare(peers, arrivals)
            now = _clock(peers)
            if polls == QUICK:
                start = now
            if now - start > peers.timeout_ns:
                record(peers, TIMED_OUT, late, chunk, epoch, _of(seen, src, late, ALL).to(tl.int32))
            if failed(peers):
                gave_up += 1
        polls += 1
        seen = _look(peers, words, src, ALL)
        late = _first(peers, seen.to(tl.int32) - epoch < 0, src, ALL)
    tl.debug_barrier()
    return seen


@inline
def _look(peers, words, src, ALL: tl.constexpr):
    """Read the words of `src` with acquire. One thread reads each word and hands it to the others."""
    if ALL:
        return tl.atomic_add(words, 0, mask=src < peers.world_size, sem="acquire", scope="sys")
    else:
        return tl.atomic_add(words, 0, sem="acquire", scope="sys")


@inline
def _compare(peers, arrivals):
    """Record the first rank that has arrived in this call with another signature, if there is one."""
    rank, _ = all_ranks(peers)
    theirs = (arrivals >> 32).to(tl.int32)
    here = arrivals.to(tl.int32) - tl.load(peers.epoch) >= 0
    stranger = _first(peers, here & (theirs != signature_of(peers)), rank, True)
    if stranger < peers.world_size:
        record(peers, OTHER_SIGNATURE, stranger, ARRIVAL, signature_of(peers), _of(theirs, rank, stranger, True))


@inline
def _first(peers, holds, src, ALL: tl.constexpr):
    """The first rank of `src` for which `holds` is true; world_size if there is none."""
    found = tl.where(holds, src, peers.world_size)  # ranks of the tile that do not exist count as none
    if ALL:
        found = tl.minimum(tl.min(found, 0), peers.world_size)
    return found


@inline
def _of(values, src, rank, ALL: tl.constexpr):
    """The entry of `values` that belongs to `rank`, one of `src`."""
    if ALL:
        values = tl.sum(tl.where(src == rank, values, 0), 0)
    return values


@inline
def record(peers, code, peer, chunk, wanted, seen):
    """Record the failure, unless another program has recorded one."""
    zero = tl.full((), 0, tl.int64)
    first = tl.atomic_cas(peers.failure, zero, zero + code, sem="relaxed", scope="gpu") == FINE
    tl.store(peers.status, zero + code, mask=first)
    tl.store(peers.status + 1, zero + peer, mask=first)
    tl.store(peers.status + 2, zero + chunk, mask=first)
    tl.store(peers.status + 3, zero + wanted, mask=first)
    tl.store(peers.status + 4, zero + seen, mask=first)


if INTERPRETED.value:

    def _clock(peers):
        """Nanoseconds of a clock that also runs while this process does not."""
        return time.monotonic_ns()

    def _pause():
        """Yield the core: the awaited rank may need it."""
        time.sleep(5e-4)

else:

    @inline
    def _clock(peers):
        """Nanoseconds, the same value in all threads of the program, so that they take the same branch.

        Threads read the timer at different moments. An atomic is done by one thread and its result handed to all, so
        the maximum of the timer goes through a word of memory.
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
        """Do nothing: each poll already waits for memory."""
