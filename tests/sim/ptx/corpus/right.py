# mypy: ignore-errors
"""Kernels of several ranks that are right by the memory model of PTX, and the mistakes that wrong.py makes in them.

A line that ends in `# BUG`, a colon and names may be named by the report of these mistakes. With `# BUG` alone, the
report of every mistake of the kernel may name it. Such a comment on a line of its own stands for the next line. Both
lines of a race are marked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedtp.sim import Await, Copy, Signal

from .parts import (
    World,
    arrive,
    case,
    fence_gpu,
    fence_sc,
    fence_sys,
    floats,
    kernel,
    load_acquire,
    load_relaxed,
    longs,
    post,
    previous,
    store_relaxed,
    store_release,
    thread,
    total,
    wait,
    words,
)  # fmt: skip

# -- messages between two ranks ----------------------------------------------------------------------------------------


@kernel
def message(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Data go into the next rank's box, then its flag is set; release and acquire at system scope."""
    at, to = tl.arange(0, N), (rank + 1) % W
    told = to
    if BUG == "wrong peer told":
        told = (rank + 2) % W
    if BUG == "polls own flag":
        told = rank
    if BUG == "flag first":
        post(words(flags, told), 1)
    tl.store(floats(boxes, to) + at, tl.load(src + at))  # BUG
    if BUG == "relaxed release":
        post(words(flags, told), 1, "relaxed")
    elif BUG == "acquire in place of release":
        post(words(flags, told), 1, "acquire")
    elif BUG == "release at gpu scope":
        post(words(flags, told), 1, "release", "gpu")  # BUG: release at gpu scope
    elif BUG == "release at cta scope":
        post(words(flags, told), 1, "release", "cta")  # BUG: release at cta scope
    elif BUG == "flag past the last":
        post(words(flags, told) + 8 + (1 << 14), 1)  # BUG: flag past the last
    elif BUG != "flag first":
        post(words(flags, told), 1)  # BUG: acquire at gpu scope
    if BUG == "relaxed acquire":
        wait(words(flags, rank), 1, "relaxed")
    elif BUG == "release in place of acquire":
        wait(words(flags, rank), 1, "release")
    elif BUG == "acquire at gpu scope":
        wait(words(flags, rank), 1, "acquire", "gpu")  # BUG: acquire at gpu scope, release at gpu scope
    elif BUG == "wrong word":
        wait(words(flags, rank) + 1, 1)  # BUG: wrong word
    elif BUG == "waits for 0":
        wait(words(flags, rank), 0)
    elif BUG == "waits for 2":
        wait(words(flags, rank), 2)  # BUG: waits for 2
    elif BUG != "no wait":
        wait(words(flags, rank), 1)  # BUG: wrong peer told, release at gpu scope, release at cta scope
    tl.store(dst + at, tl.load(floats(boxes, rank) + at))  # BUG


def case_message(bug="", world=3):
    return case(message, previous, bug, world=world)


@kernel
def relaxed_polls(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Polls are relaxed; thread 0 acquires once, then a barrier follows."""
    at = tl.arange(0, N)
    tl.store(floats(boxes, 1 - rank) + at, tl.load(src + at))  # BUG
    post(words(flags, 1 - rank), 1)
    mine = words(flags, rank)
    while tl.atomic_add(mine, 0, sem="relaxed", scope="sys") != 1:
        pass
    if BUG != "no acquire":
        while tl.atomic_add(mine, 0, sem="acquire", scope="sys") != 1:  # Triton 3.7 removes it if nothing uses it
            pass
    tl.debug_barrier()
    tl.store(dst + at, tl.load(floats(boxes, rank) + at))  # BUG


def case_relaxed_polls(bug=""):
    return case(relaxed_polls, previous, bug)


@kernel
def volatile_polls(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Every thread polls by volatile loads, then fences, so no barrier is needed."""
    at = tl.arange(0, N)
    tl.store(floats(boxes, 1 - rank) + at, tl.load(src + at))  # BUG
    post(words(flags, 1 - rank), 1)
    mine = words(flags, rank)
    while tl.load(mine, volatile=True) != 1:
        pass
    if BUG == "fence at gpu scope":
        fence_gpu()
    elif BUG != "no fence":
        fence_sys()
    tl.store(dst + at, tl.load(floats(boxes, rank) + at))  # BUG


def case_volatile_polls(bug=""):
    return case(volatile_polls, previous, bug)


@kernel
def fenced_flag(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """A barrier, a fence by all threads, then a relaxed flag."""
    at = tl.arange(0, N)
    tl.store(floats(boxes, 1 - rank) + at, tl.load(src + at))  # BUG
    if BUG == "fence before the barrier":
        fence_sys()
        tl.debug_barrier()
    elif BUG == "fence at gpu scope":
        tl.debug_barrier()
        fence_gpu()
    elif BUG == "no fence":
        tl.debug_barrier()
    else:
        tl.debug_barrier()
        fence_sys()
    tl.atomic_xchg(words(flags, 1 - rank), 1, sem="relaxed", scope="sys")
    wait(words(flags, rank), 1)
    tl.store(dst + at, tl.load(floats(boxes, rank) + at))  # BUG


def case_fenced_flag(bug=""):
    return case(fenced_flag, previous, bug)


@kernel
def acquire_in_every_thread(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Every thread polls by ld.acquire, so no barrier is needed."""
    at = tl.arange(0, N)
    tl.store(floats(boxes, 1 - rank) + at, tl.load(src + at))  # BUG
    post(words(flags, 1 - rank), 1)
    if BUG == "relaxed load":
        while load_relaxed(words(flags, rank)) != 1:
            pass
    else:
        while load_acquire(words(flags, rank)) != 1:
            pass
    tl.store(dst + at, tl.load(floats(boxes, rank) + at))  # BUG


def case_acquire_in_every_thread(bug=""):
    return case(acquire_in_every_thread, previous, bug)


@kernel
def by_thread_0(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Inline PTX in thread 0 alone releases and acquires, with barriers before and after."""
    at = tl.arange(0, N)
    tl.store(floats(boxes, 1 - rank) + at, tl.load(src + at))  # BUG
    if BUG != "no barrier before the release":
        tl.debug_barrier()
    if thread() == 0:
        if BUG == "relaxed store":
            store_relaxed(words(flags, 1 - rank), 1)
        else:
            store_release(words(flags, 1 - rank), 1)
        while load_acquire(words(flags, rank)) != 1:
            pass
    if BUG != "no barrier after the acquire":
        tl.debug_barrier()
    tl.store(dst + at, tl.load(floats(boxes, rank) + at))  # BUG


def case_by_thread_0(bug=""):
    return case(by_thread_0, previous, bug)


@kernel
def bounded_polls(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Gives up after many polls, and then reads nothing."""
    at = tl.arange(0, N)
    tl.store(floats(boxes, 1 - rank) + at, tl.load(src + at))  # BUG
    post(words(flags, 1 - rank), 1)
    most: tl.constexpr = 2 if BUG == "goes on in vain" else 40 if BUG == "goes on after 40" else 100000
    polls = 0
    seen = tl.atomic_add(words(flags, rank), 0, sem="acquire", scope="sys")
    while (seen < 1) & (polls < most):
        polls += 1
        seen = tl.atomic_add(words(flags, rank), 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    if (BUG == "goes on in vain") | (BUG == "goes on after 40"):
        tl.store(dst + at, tl.load(floats(boxes, rank) + at))  # BUG
    elif seen == 1:
        tl.store(dst + at, tl.load(floats(boxes, rank) + at))


def case_bounded_polls(bug=""):
    return case(bounded_polls, previous, bug)


@kernel
def signal_pad(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Sets a signal by CAS 0 -> 1, takes it by CAS 1 -> 0, so that the next call finds 0. One word for each sender."""
    at, to = tl.arange(0, N), (rank + 1) % W
    before = (rank + W - 1) % W
    row = call % 2 * N
    tl.store(floats(boxes, to) + row + at, tl.load(src + at))  # BUG
    tl.debug_barrier()
    put = words(flags, to) + rank
    if BUG == "put is relaxed":
        while tl.atomic_cas(put, 0, 1, sem="relaxed", scope="sys") != 0:
            pass
    else:
        while tl.atomic_cas(put, 0, 1, sem="release", scope="sys") != 0:  # BUG: not taken, take at gpu scope
            pass
    take = words(flags, rank) + before
    if BUG == "taken from the wrong slot":
        take = words(flags, rank) + to
    if BUG == "take is relaxed":
        while tl.atomic_cas(take, 1, 0, sem="relaxed", scope="sys") != 1:
            pass
    elif BUG == "take at gpu scope":
        while tl.atomic_cas(take, 1, 0, sem="acquire", scope="gpu") != 1:  # BUG: take at gpu scope
            pass
    elif BUG == "not taken":
        while tl.atomic_add(take, 0, sem="acquire", scope="sys") != 1:
            pass
    else:
        while tl.atomic_cas(take, 1, 0, sem="acquire", scope="sys") != 1:  # BUG: taken from the wrong slot
            pass
    tl.debug_barrier()
    tl.store(dst + at, tl.load(floats(boxes, rank) + row + at))  # BUG
    # the sender may fill this row again after the next call's signal comes back round, in which all take part
    if BUG != "no credit":
        arrive(words(flags, before) + W)
        wait(words(flags, rank) + W, call)  # BUG: not taken, taken from the wrong slot


def case_signal_pad(bug=""):
    return case(signal_pad, previous, bug, world=3, calls=3, box=2)


@kernel
def handshake(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """A flag of 0 or 1: the receiver resets it after reading, and the sender waits for that."""
    at = tl.arange(0, N)
    theirs, mine = words(flags, 1 - rank), words(flags, rank)
    if BUG != "no wait for the reset":
        while tl.atomic_add(theirs, 0, sem="acquire", scope="sys") != 0:  # BUG: no reset
            pass
        tl.debug_barrier()
    tl.store(floats(boxes, 1 - rank) + at, tl.load(src + at))  # BUG
    post(theirs, 1)
    wait(mine, 1)
    tl.store(dst + at, tl.load(floats(boxes, rank) + at))  # BUG
    if BUG == "reset is relaxed":
        post(mine, 0, "relaxed")
    elif BUG != "no reset":
        post(mine, 0)


def case_handshake(bug=""):
    return case(handshake, previous, bug, calls=3)


# -- several epochs ----------------------------------------------------------------------------------------------------


@kernel
def double_buffer(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Four messages through two slots; the receiver gives the sender a credit after it has read one."""
    at, to, before = tl.arange(0, N), (rank + 1) % W, (rank + W - 1) % W
    for e in range(4):
        slot = (e % 2) * N
        if BUG == "slot 0 alone":
            slot = 0
        if BUG == "one credit too few":
            wait(words(flags, rank) + 1, e - 2)
        elif BUG != "no credit":
            wait(words(flags, rank) + 1, e - 1)  # BUG: credit to the wrong rank
        tl.store(floats(boxes, to) + slot + at, tl.load(src + e * N + at))  # BUG
        if BUG == "flag is always 1":
            post(words(flags, to), 1)
        else:
            post(words(flags, to), e + 1)
        if BUG == "flag is always 1" or BUG == "waits for the first epoch":
            wait(words(flags, rank), 1)
        elif BUG == "waits for the last epoch":
            wait(words(flags, rank), e)
        else:
            wait(words(flags, rank), e + 1)
        own = slot
        if BUG == "reads the other slot":
            own = N - slot
        if BUG == "credit before the read":
            arrive(words(flags, before) + 1)
        tl.store(dst + e * N + at, tl.load(floats(boxes, rank) + own + at))  # BUG
        if BUG == "credit to the wrong rank":
            arrive(words(flags, to) + 1)
        elif BUG == "credit is relaxed":
            arrive(words(flags, before) + 1, "relaxed")
        elif BUG == "two credits at once":
            tl.debug_barrier()
            tl.atomic_add(words(flags, before) + 1, 2, sem="release", scope="sys")
        elif BUG != "credit before the read":
            arrive(words(flags, before) + 1)


def case_double_buffer(bug="", world=3):
    return case(double_buffer, previous, bug, world=world, rows=4, box=2)


@kernel
def barrier_reused(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Three rounds: fill the own box, meet, read the next rank's, meet. One counter on rank 0 keeps counting."""
    at = tl.arange(0, N)
    for e in range(3):
        tl.store(floats(boxes, rank) + at, tl.load(src + e * N + at))  # BUG
        if BUG == "no second barrier":
            meet(words(flags, 0), (e + 1) * W, W, BUG)
        else:
            meet(words(flags, 0), (2 * e + 1) * W, W, BUG)  # BUG: counter past the last, gpu scope
        tl.store(dst + e * N + at, tl.load(floats(boxes, (rank + 1) % W) + at))  # BUG
        if BUG != "no second barrier":
            meet(words(flags, 0), (2 * e + 2) * W, W, BUG)


@triton.jit
def meet(counter, target, W: tl.constexpr, BUG: tl.constexpr):
    if BUG == "counter one too low":
        target -= 1
    if BUG == "counter past the last":
        target += 1
    if BUG == "target of the first round":
        target = W
    if BUG == "relaxed arrival":
        arrive(counter, "relaxed")
    elif BUG == "gpu scope":
        arrive(counter, "acq_rel", "gpu")
    elif BUG == "arrives twice":
        arrive(counter)
        arrive(counter)
    else:
        arrive(counter)
    if BUG == "relaxed wait":
        wait(counter, target, "relaxed")
    else:
        wait(counter, target)


def following(src):
    return [src[(r + 1) % len(src)] for r in range(len(src))]


def case_barrier_reused(bug="", world=3):
    return case(barrier_reused, following, bug, world=world, rows=3)


@kernel
def sense_reversing(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """The last rank to arrive resets the counter and flips the sense."""
    at = tl.arange(0, N)
    sense = 0
    for e in range(6):
        if e % 2 == 0:
            tl.store(floats(boxes, rank) + at, tl.load(src + e // 2 * N + at))  # BUG
        else:
            tl.store(dst + e // 2 * N + at, tl.load(floats(boxes, (rank + 1) % W) + at))  # BUG
        if BUG == "sense stays":
            sense = 1
        else:
            sense = 1 - sense
        tl.debug_barrier()
        if tl.atomic_add(words(flags, 0), 1, sem="acq_rel", scope="sys") == W - 1:
            if BUG == "turns before it resets":
                post(words(flags, 0) + 1, sense)
                tl.atomic_xchg(words(flags, 0), 0, sem="relaxed", scope="sys")
            elif BUG == "no reset":
                post(words(flags, 0) + 1, sense)
            else:
                tl.atomic_xchg(words(flags, 0), 0, sem="relaxed", scope="sys")
                post(words(flags, 0) + 1, sense)
        else:
            # BUG: no reset, turns before it resets
            while tl.atomic_add(words(flags, 0) + 1, 0, sem="acquire", scope="sys") != sense:
                pass
        tl.debug_barrier()


def case_sense_reversing(bug=""):
    return case(sense_reversing, following, bug, world=2, rows=3)


@kernel
def epochs_of_calls(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Three launches; the flag holds the call's number. Two rows, and each rank hears from its receiver."""
    at, to = tl.arange(0, N), 1 - rank
    row = call % 2 * N
    tl.store(floats(boxes, to) + row + at, tl.load(src + at))  # BUG
    if BUG == "not reset, always 1":
        post(words(flags, to), 1)
        wait(words(flags, rank), 1)
    elif BUG == "equal to the call":
        post(words(flags, to), call)
        # BUG: equal to the call
        while tl.atomic_add(words(flags, rank), 0, sem="acquire", scope="sys") != call:
            pass
        tl.debug_barrier()
    elif BUG == "toggles":
        post(words(flags, to), call % 2)
        while tl.atomic_add(words(flags, rank), 0, sem="acquire", scope="sys") != call % 2:  # BUG: toggles
            pass
        tl.debug_barrier()
    else:
        post(words(flags, to), call)
        wait(words(flags, rank), call)
    tl.store(dst + at, tl.load(floats(boxes, rank) + row + at))  # BUG


def case_epochs_of_calls(bug=""):
    return case(epochs_of_calls, previous, bug, calls=4, box=2)


@kernel
def pull(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Fills its own box and signals; readers pull. Refills the box after all have signalled that they are done."""
    at = tl.arange(0, N)
    for e in range(3):
        if BUG == "one reader too few":
            wait(words(flags, rank) + 1, e * (W - 1) - 1)
        elif BUG != "no wait for readers":
            wait(words(flags, rank) + 1, e * (W - 1))
        tl.store(floats(boxes, rank) + at, tl.load(src + e * N + at))  # BUG
        post(words(flags, rank), e + 1)
        sum = tl.load(src + e * N + at)
        for step in range(1, W):
            peer = (rank + step) % W
            if BUG == "waits for itself":
                wait(words(flags, rank), e + 1)
            else:
                wait(words(flags, peer), e + 1)
            sum += tl.load(floats(boxes, peer) + at)  # BUG
            if BUG == "done is relaxed":
                arrive(words(flags, peer) + 1, "relaxed")
            else:
                arrive(words(flags, peer) + 1)
        tl.store(dst + e * N + at, sum)


def case_pull(bug=""):
    return case(pull, total, bug, world=3, rows=3)


# -- locks -------------------------------------------------------------------------------------------------------------


@triton.jit
def read_when_all_have(boxes, flags, dst, W: tl.constexpr, at, ROW: tl.constexpr = 0):
    arrive(words(flags, 0) + 7)
    wait(words(flags, 0) + 7, W)
    tl.store(dst + at, tl.load(floats(boxes, 0) + ROW + at))


def sum_of_all(src):
    """Each rank gets one row: the sum of all rows of all ranks."""
    return [sum(each.sum(1, keepdim=True) for each in src) for _ in src]


@kernel
def lock(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Two additions to rank 0's row, each under a lock taken by CAS and released by an exchange."""
    at = tl.arange(0, N)
    SCOPE: tl.constexpr = "gpu" if BUG == "lock at gpu scope" else "sys"
    TAKES: tl.constexpr = "relaxed" if BUG == "takes relaxed" else "acquire"
    GIVES: tl.constexpr = "relaxed" if BUG == "gives back relaxed" else "release"
    word = words(flags, 0)
    for e in range(2):
        if BUG == "looks, then takes":
            while tl.atomic_add(word, 0, sem="acquire", scope="sys") != 0:
                pass
            tl.atomic_xchg(word, 1, sem="acquire", scope="sys")
        elif BUG != "no lock":
            # BUG: lock at gpu scope, never given back
            while tl.atomic_cas(word, 0, 1, sem=TAKES, scope=SCOPE) != 0:
                pass
        tl.debug_barrier()
        row = tl.load(floats(boxes, 0) + at) + tl.load(src + e * N + at)  # BUG
        if BUG == "given back before the store":
            post(word, 0)
        tl.store(floats(boxes, 0) + at, row)  # BUG
        if BUG == "gives back twice":
            post(word, 0)
            tl.atomic_xchg(word, 0, sem="release", scope="sys")
        elif BUG != "never given back" and BUG != "given back before the store":
            post(word, 0, GIVES, SCOPE)  # BUG: lock at gpu scope
    read_when_all_have(boxes, flags, dst, W, at)  # BUG: never given back


def case_lock(bug=""):
    return case(lock, sum_of_all, bug, world=3, rows=2, out=1, poisoned=False)


@kernel
def two_locks(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Two locks, taken in the same order by all ranks."""
    at = tl.arange(0, N)
    first, second = words(flags, 0), words(flags, 0) + 1
    if BUG == "the other order on rank 1":
        first, second = words(flags, 0) + rank, words(flags, 0) + 1 - rank
    for _ in range(4):
        while tl.atomic_cas(first, 0, 1, sem="acquire", scope="sys") != 0:  # BUG: the other order on rank 1
            pass
        # BUG: the other order on rank 1
        while tl.atomic_cas(second, 0, 1, sem="acquire", scope="sys") != 0:
            pass
        tl.debug_barrier()
        tl.store(floats(boxes, 0) + at, tl.load(floats(boxes, 0) + at) + tl.load(src + at) / 4)
        post(second, 0)
        tl.atomic_xchg(first, 0, sem="release", scope="sys")
    read_when_all_have(boxes, flags, dst, W, at)


def case_two_locks(bug=""):
    return case(two_locks, sum_of_all, bug, out=1, poisoned=False)


@kernel
def ticket_lock(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Tickets by a relaxed atomic add, served in order."""
    at = tl.arange(0, N)
    tickets, serving = words(flags, 0), words(flags, 0) + 1
    for e in range(2):
        if BUG == "ticket not taken at once":
            mine = tl.atomic_add(tickets, 0, sem="relaxed", scope="sys")
            tl.atomic_xchg(tickets, mine + 1, sem="relaxed", scope="sys")
        else:
            mine = tl.atomic_add(tickets, 1, sem="relaxed", scope="sys")
        if BUG == "enters one too early":
            mine -= 1
        if BUG == "serving is read relaxed":
            wait(serving, mine, "relaxed")
        else:
            wait(serving, mine)  # BUG: never served
        row = tl.load(floats(boxes, 0) + at) + tl.load(src + e * N + at)  # BUG
        tl.store(floats(boxes, 0) + at, row)  # BUG
        if BUG == "served relaxed":
            arrive(serving, "relaxed")
        elif BUG == "serves two at once":
            arrive(serving)
            arrive(serving)
        elif BUG != "never served":
            arrive(serving)
    read_when_all_have(boxes, flags, dst, W, at)  # BUG: never served


def case_ticket_lock(bug=""):
    return case(ticket_lock, sum_of_all, bug, world=3, rows=2, out=1, poisoned=False)


@kernel
def flags_and_fences(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Like Dekker: raise the own flag, look at the other's. With fence.sc at most one rank enters."""
    at = tl.arange(0, N)
    tl.atomic_xchg(words(flags, rank), 1, sem="relaxed", scope="sys")
    if BUG == "acq_rel fence":
        fence_sys()
    elif BUG != "no fence":
        fence_sc()
    if tl.atomic_add(words(flags, 1 - rank), 0, sem="relaxed", scope="sys") == 0:
        tl.store(floats(boxes, 0) + at, tl.load(src + at))  # BUG
    tl.store(dst + at, tl.load(src + at))


def own(src):
    return src


def case_flags_and_fences(bug=""):
    return case(flags_and_fences, own, bug)


@kernel
def cas_loop(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Adds to a word by compare-and-swap until it succeeds."""
    at = tl.arange(0, N)
    word = words(flags, 0)
    if BUG == "plain load and store":
        seen = tl.load(word)  # BUG: plain load and store
        tl.debug_barrier()
        tl.store(word, seen + rank + 1)  # BUG: plain load and store
    elif BUG == "relaxed load and store":
        seen = tl.atomic_add(word, 0, sem="relaxed", scope="sys")
        tl.atomic_xchg(word, seen + rank + 1, sem="relaxed", scope="sys")
    else:
        seen = tl.atomic_add(word, 0, sem="relaxed", scope="sys")
        now = tl.atomic_cas(word, seen, seen + rank + 1, sem="relaxed", scope="sys")
        while (now != seen) & (BUG != "does not try again"):
            seen = now
            now = tl.atomic_cas(word, seen, seen + rank + 1, sem="relaxed", scope="sys")
    arrive(words(flags, 0) + 1)
    wait(words(flags, 0) + 1, W)
    sum = tl.atomic_add(word, 0, sem="relaxed", scope="sys")
    tl.store(dst + at, tl.load(src + at) + sum)  # BUG: does not try again, relaxed load and store


def case_cas_loop(bug=""):
    return case(cas_loop, lambda src: [each + 6 for each in src], bug, world=3)


# -- programs of one rank ----------------------------------------------------------------------------------------------


@kernel
def last_block(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """The last program to finish sums what all programs wrote, and resets the counter for the next launch."""
    at, row, programs = tl.arange(0, N), tl.program_id(0), tl.num_programs(0)
    SEM: tl.constexpr = "relaxed" if BUG == "relaxed" else "release" if BUG == "release alone" else \
        "acquire" if BUG == "acquire alone" else "acq_rel"  # fmt: skip
    tl.store(floats(boxes, rank) + row * N + at, tl.load(src + row * N + at))  # BUG
    tl.debug_barrier()  # Triton before 3.8 lets one thread release without it
    last = programs - 2 if BUG == "one program too few" else programs - 1
    if BUG == "cta scope":
        done = tl.atomic_add(words(flags, rank), 1, sem=SEM, scope="cta")  # BUG: cta scope
    else:
        done = tl.atomic_add(words(flags, rank), 1, sem=SEM, scope="gpu")
    if done >= last:
        sum = tl.zeros((N,), tl.float32)
        for other in range(programs):
            sum += tl.load(floats(boxes, rank) + other * N + at)  # BUG
        tl.store(dst + at, sum)
        if BUG != "no reset":
            tl.atomic_xchg(words(flags, rank), 0, sem="relaxed", scope="gpu")


def case_last_block(bug=""):
    return case(
        last_block,
        lambda src: [x.sum(1, keepdim=True) for x in src],
        bug,
        grid=4,
        rows=4,
        out=1,
        box=4,
        calls=2,
    )


@kernel
def chain(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Like split-K: each program adds its row after the previous one has; the last one sends the sum."""
    at, turn, programs = tl.arange(0, N), tl.program_id(0), tl.num_programs(0)
    row = turn
    if BUG == "begins with the last program":
        turn = programs - 1 - turn
    if BUG == "waits relaxed":
        wait(words(flags, rank), turn, "relaxed", "gpu")
    elif BUG != "no wait":
        # BUG: begins with the last program, passes it on to itself
        wait(words(flags, rank), turn, "acquire", "gpu")
    sum = tl.load(src + row * N + at)
    if turn > 0:
        sum += tl.load(floats(boxes, rank) + at)  # BUG
    tl.store(floats(boxes, rank) + at, sum)  # BUG
    if BUG == "passed on relaxed":
        post(words(flags, rank), turn + 1, "relaxed", "gpu")
    elif BUG == "passes it on to itself":
        post(words(flags, rank), turn, "release", "gpu")
    else:
        post(words(flags, rank), turn + 1, "release", "gpu")
    if turn == programs - 1:
        tl.store(dst + at, sum)


def case_chain(bug=""):
    return case(chain, lambda src: [each.sum(1, keepdim=True) for each in src], bug, grid=3, rows=3, out=1)


@kernel
def one_flag_for_all_programs(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Programs push rows to the peer and meet at gpu scope; the last one signals the peer at system scope and waits."""
    at, row, programs = tl.arange(0, N), tl.program_id(0), tl.num_programs(0)
    tl.store(floats(boxes, 1 - rank) + row * N + at, tl.load(src + row * N + at))  # BUG
    tl.debug_barrier()  # Triton before 3.8 lets one thread release without it
    if BUG == "the last one does not acquire":
        done = tl.atomic_add(words(flags, rank) + 1, 1, sem="release", scope="gpu")
    else:
        done = tl.atomic_add(words(flags, rank) + 1, 1, sem="acq_rel", scope="gpu")
    if BUG == "program 0 tells for all":
        if row == 0:
            post(words(flags, 1 - rank), 1)
    if done == programs - 1:
        if BUG == "told at gpu scope":
            post(words(flags, 1 - rank), 1, "release", "gpu")  # BUG: told at gpu scope
        elif BUG != "program 0 tells for all":
            post(words(flags, 1 - rank), 1)
        wait(words(flags, rank), 1)  # BUG: told at gpu scope
        for other in range(programs):
            tl.store(dst + other * N + at, tl.load(floats(boxes, rank) + other * N + at))  # BUG


def case_one_flag_for_all_programs(bug=""):
    return case(one_flag_for_all_programs, previous, bug, grid=3, rows=3, box=3)


@kernel
def work_queue(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Programs claim rows by a relaxed counter until none is left."""
    at = tl.arange(0, N)
    rows = 5
    if BUG == "one row too many":
        rows = 6
    counter = words(flags, rank)
    row = claim(counter, BUG)
    while row < rows:
        numbers = tl.load(src + row % 5 * N + at)
        tl.store(floats(boxes, rank) + row * N + at, numbers)  # BUG
        tl.store(dst + row % 5 * N + at, numbers)
        row = claim(counter, BUG)


@triton.jit
def claim(counter, BUG: tl.constexpr):
    if BUG == "claims by load and store":
        row = tl.atomic_add(counter, 0, sem="relaxed", scope="gpu")
        tl.atomic_xchg(counter, row + 1, sem="relaxed", scope="gpu")
    else:
        row = tl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
    return row


def case_work_queue(bug=""):
    return case(work_queue, own, bug, grid=3, rows=5, box=5)


@kernel
def a_flag_a_program(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Each program exchanges its row with the same program of the peer, by its own flag."""
    at, row, told = tl.arange(0, N), tl.program_id(0), tl.program_id(0)
    slot = row
    if BUG == "rows overlap":
        slot = row // 2
    if BUG == "tells the next program":
        told = (row + 1) % tl.num_programs(0)
    tl.store(floats(boxes, 1 - rank) + slot * N + at, tl.load(src + row * N + at))  # BUG
    post(words(flags, 1 - rank) + told, 1)  # BUG: too few flags
    if BUG == "waits for the flag of program 0":
        wait(words(flags, rank), 1)
    else:
        if BUG == "waits for the last program":
            wait(words(flags, rank) + tl.num_programs(0) - 1, 1)  # BUG: waits for the last program
        wait(words(flags, rank) + row, 1)  # BUG: tells the next program, too few flags
    tl.store(dst + row * N + at, tl.load(floats(boxes, rank) + slot * N + at))  # BUG


def case_a_flag_a_program(bug=""):
    count = 2 if bug == "too few flags" else 3
    return case(a_flag_a_program, previous, bug, grid=3, rows=3, box=3, count=count)


# -- words that carry data and flag ------------------------------------------------------------------------------------


@triton.jit
def packed_word(numbers, epoch):
    bits = numbers.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return bits | (epoch.to(tl.int64) << 32)


@triton.jit
def epochs_of(got):
    return (got >> 32).to(tl.int32)


@kernel
def packed(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Like NCCL's LL: a 64-bit word holds 32 bits of data and the epoch; relaxed. One row for each of three epochs."""
    at, to = tl.arange(0, N), (rank + 1) % W
    for e in range(3):
        row = e * N
        if BUG == "any flag, one row":
            row = 0
        word = packed_word(tl.load(src + e * N + at), e + 1 + at * 0)
        if BUG == "flag in another word":
            tl.atomic_xchg(longs(boxes, to) + row + at, word & 0xFFFFFFFF, sem="relaxed", scope="sys")
            tl.atomic_xchg(words(flags, to) + e, 1, sem="relaxed", scope="sys")
            while tl.atomic_add(words(flags, rank) + e, 0, sem="relaxed", scope="sys") == 0:
                pass
            got = tl.load(longs(boxes, rank) + row + at, volatile=True)
        else:
            tl.atomic_xchg(longs(boxes, to) + row + at, word, sem="relaxed", scope="sys")
            got = tl.load(longs(boxes, rank) + row + at, volatile=True)
            if BUG == "one lane's flag":
                while tl.max(epochs_of(got)) == 0:
                    got = tl.load(longs(boxes, rank) + row + at, volatile=True)
            elif BUG == "any flag, one row":
                while tl.min(epochs_of(got)) == 0:
                    got = tl.load(longs(boxes, rank) + row + at, volatile=True)
            elif BUG == "loads again":
                while tl.min(epochs_of(got)) == 0:
                    got = tl.load(longs(boxes, rank) + row + at, volatile=True)
                got = tl.load(longs(boxes, rank) + (row + N) % (3 * N) + at, volatile=True)
            else:
                while tl.min(epochs_of(got)) != e + 1:
                    got = tl.load(longs(boxes, rank) + row + at, volatile=True)
        tl.store(dst + e * N + at, got.to(tl.int32).to(tl.float32, bitcast=True))  # BUG


def case_packed(bug=""):
    return case(packed, previous, bug, rows=3, box=3, dtype=torch.int64, poisoned=False)


@kernel
def seqlock(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Rank 0 changes a row and holds the number odd meanwhile; rank 1 reads until one even number held throughout."""
    at = tl.arange(0, N)
    number, row = words(flags, 0), words(boxes, 0)
    if rank == 0:
        for e in range(1, 5):
            if BUG == "all threads write the number, without a fence":
                store_relaxed(number, 2 * e - 1)
            else:
                tl.atomic_xchg(number, 2 * e - 1, sem="relaxed", scope="sys")
            tl.debug_barrier()
            if (BUG != "writer does not fence") & (BUG != "all threads write the number, without a fence"):
                fence_sys()
            tl.atomic_xchg(row + at, e + at * 0, sem="relaxed", scope="sys")
            post(number, 2 * e)
        tl.store(dst + at, tl.zeros((N,), tl.float32))
    else:
        spread = 0
        for _ in range(4):
            before, got, after = snapshot(number, row + at)
            if BUG == "does not look again":
                after = before
            while (before != after) | ((before % 2 == 1) & (BUG != "takes odd numbers")):
                before, got, after = snapshot(number, row + at)
            spread = tl.maximum(spread, tl.max(got) - tl.min(got))
        tl.store(dst + at, (spread + at * 0).to(tl.float32))  # BUG


@triton.jit
def snapshot(number, row):
    """Reads the number, the row, and the number again."""
    before = tl.atomic_add(number, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    got = tl.load(row, volatile=True)
    fence_sys()
    tl.debug_barrier()
    return before, got, tl.atomic_add(number, 0, sem="relaxed", scope="sys")


def case_seqlock(bug=""):
    return case(seqlock, lambda src: [each * 0 for each in src], bug, dtype=torch.int32, poisoned=False)


# -- collectives -------------------------------------------------------------------------------------------------------


@kernel
def one_shot(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """All-reduce: each rank fills its own row, signals all, waits for all, and sums. Two rows over three launches."""
    at = tl.arange(0, N)
    row = call % 2 * N
    if BUG == "one row":
        row = 0
    tl.store(floats(boxes, rank) + row + at, tl.load(src + at))  # BUG
    tl.debug_barrier()
    for peer in range(W):
        if BUG == "told relaxed":
            tl.atomic_xchg(words(flags, peer) + rank, call, sem="relaxed", scope="sys")
        elif BUG == "all tell in one slot":
            tl.atomic_xchg(words(flags, peer), call, sem="release", scope="sys")
        else:
            tl.atomic_xchg(words(flags, peer) + rank, call, sem="release", scope="sys")
    sum = tl.zeros((N,), tl.float32)
    first = 0
    if BUG == "does not wait for rank 0":
        first = 1
    for peer in range(first, W):
        wait(words(flags, rank) + peer, call)  # BUG: all tell in one slot
    for peer in range(W):
        if BUG == "adds itself twice":
            peer = tl.maximum(peer, rank)
        sum += tl.load(floats(boxes, peer) + row + at)  # BUG
    tl.store(dst + at, sum)  # BUG: adds itself twice


def case_one_shot(bug=""):
    return case(one_shot, total, bug, world=3, calls=3, box=2)


@kernel
def two_shot(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """All-reduce: each rank sums its part and stores it at all ranks. Row 0 holds the terms, row 1 the sums."""
    C: tl.constexpr = N // W
    at, part = tl.arange(0, N), tl.arange(0, C)
    begin = rank * C
    if BUG == "parts overlap":
        begin = rank * (C // 2)
    tl.store(floats(boxes, rank) + at, tl.load(src + at))  # BUG
    met = (call - 1) * 2 * W
    meet(words(flags, 0), met + W, W, "")
    sum = tl.zeros((C,), tl.float32)
    for peer in range(W):
        sum += tl.load(floats(boxes, peer) + begin + part)  # BUG
    for peer in range(W):
        tl.store(floats(boxes, peer) + N + begin + part, sum)  # BUG
    if BUG == "waits for the first meeting again":
        arrive(words(flags, 0))
        wait(words(flags, 0), met + W)
    else:
        meet(words(flags, 0), met + 2 * W, W, "")
    tl.store(dst + at, tl.load(floats(boxes, rank) + N + at))  # BUG


def case_two_shot(bug=""):
    return case(two_shot, total, bug, calls=2, box=2)


@kernel
def all_to_all(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """A row to each peer, into the sender's slot; the receiver counts senders."""
    at = tl.arange(0, N)
    for peer in range(W):
        slot = rank
        if BUG == "all into one slot":
            slot = 0
        if BUG == "counted before the store":
            arrive(words(flags, peer))
        tl.store(floats(boxes, peer) + slot * N + at, tl.load(src + peer * N + at))  # BUG
        if BUG == "counted relaxed":
            arrive(words(flags, peer), "relaxed")
        elif BUG == "counted at the sender":
            arrive(words(flags, rank))
        elif BUG != "counted before the store":
            arrive(words(flags, peer))
    if BUG == "one sender too few":
        wait(words(flags, rank), W - 1)
    elif BUG == "one sender too many":
        wait(words(flags, rank), W + 1)  # BUG: one sender too many
    else:
        wait(words(flags, rank), W)
    for peer in range(W):
        tl.store(dst + peer * N + at, tl.load(floats(boxes, rank) + peer * N + at))  # BUG


def case_all_to_all(bug=""):
    def transposed(src):
        return list(torch.stack([each[0] for each in src]).transpose(0, 1)[:, None])

    return case(all_to_all, transposed, bug, world=3, rows=3, box=3)


@kernel
def ring_gather(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """All-gather: each rank passes on what it got in the previous step. One slot and one flag for each rank's row."""
    at, to = tl.arange(0, N), (rank + 1) % W
    tl.store(floats(boxes, rank) + rank * N + at, tl.load(src + at))
    for step in range(W - 1):
        out = (rank + W - step) % W
        got = (rank + W - step - 1) % W
        if BUG == "hands on the row of the next step":
            out = got
        tl.store(floats(boxes, to) + out * N + at, tl.load(floats(boxes, rank) + out * N + at))  # BUG
        if BUG == "one flag for all rows":
            post(words(flags, to), 1)
            wait(words(flags, rank), 1)
        elif BUG == "waits for its own row":
            post(words(flags, to) + out, 1)
            wait(words(flags, rank) + out, 1)  # BUG: waits for its own row
        else:
            post(words(flags, to) + out, 1)
            if BUG == "waits relaxed":
                wait(words(flags, rank) + got, 1, "relaxed")
            else:
                wait(words(flags, rank) + got, 1)  # BUG: hands on the row of the next step
    for row in range(W):
        tl.store(dst + row * N + at, tl.load(floats(boxes, rank) + row * N + at))  # BUG


def case_ring_gather(bug=""):
    def gathered(src):
        return [torch.stack([each[0, 0] for each in src])[None] for _ in src]

    return case(ring_gather, gathered, bug, world=4, out=4, box=4)


@kernel
def tree(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Rank 0's row goes down a tree; each node has two children."""
    at = tl.arange(0, N)
    if rank > 0:
        wait(words(flags, rank), 1)  # BUG: one child is forgotten, tells the first child twice
        row = tl.load(floats(boxes, rank) + at)  # BUG
    else:
        row = tl.load(src + at)
    children = 2
    if BUG == "one child is forgotten":
        children = 1
    for child in range(2 * rank + 1, tl.minimum(2 * rank + 1 + children, W)):
        if BUG == "told before the row is there":
            post(words(flags, child), 1)
        tl.store(floats(boxes, child) + at, row)  # BUG
        if BUG == "tells the first child twice":
            post(words(flags, 2 * rank + 1), 1)
        elif BUG != "told before the row is there":
            post(words(flags, child), 1)
    tl.store(dst + at, row)


def case_tree(bug=""):
    return case(tree, lambda src: [src[0]] * len(src), bug, world=4)


# -- three ranks and more ----------------------------------------------------------------------------------------------


@kernel
def relay(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Rank 0 stores to rank 2 and signals rank 1, which signals rank 2."""
    at = tl.arange(0, N)
    if rank == 0:
        tl.store(floats(boxes, 2) + at, tl.load(src + at))  # BUG
        if BUG == "tells at gpu scope":
            post(words(flags, 1), 1, "release", "gpu")  # BUG: tells at gpu scope
        else:
            post(words(flags, 1), 1)
    elif rank == 1:
        if BUG == "relay does not acquire":
            wait(words(flags, 1), 1, "relaxed")
        elif BUG != "relay does not wait":
            wait(words(flags, 1), 1)  # BUG: tells at gpu scope
        if BUG == "relay does not release":
            post(words(flags, 2), 1, "relaxed")
        else:
            post(words(flags, 2), 1)
    else:
        wait(words(flags, 2), 1)
        tl.store(dst + at, tl.load(floats(boxes, 2) + at))  # BUG


def to_rank_2(src):
    return [src[0] * 0 - 1, src[0] * 0 - 1, src[0]]


def case_relay(bug=""):
    return case(relay, to_rank_2, bug, world=3)


@kernel
def release_sequence(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Rank 1 adds, relaxed, to the word that rank 0 released. A rank that acquires the sum has rank 0's row."""
    at = tl.arange(0, N)
    word = words(flags, 2)
    if rank == 0:
        tl.store(floats(boxes, 2) + at, tl.load(src + at))  # BUG
        if BUG == "begins relaxed":
            post(word, 1, "relaxed")
        else:
            post(word, 1)
    elif rank == 1:
        wait(word, 1, "relaxed")
        if BUG == "a store breaks it":
            if thread() == 0:
                store_relaxed(word, 2)
        else:
            tl.atomic_add(word, 1, sem="relaxed", scope="sys")
    else:
        wait(word, 2)
        tl.store(dst + at, tl.load(floats(boxes, 2) + at))  # BUG


def case_release_sequence(bug=""):
    return case(release_sequence, to_rank_2, bug, world=3)


@kernel
def queue(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Each rank puts a row into rank 0's queue: a slot by a relaxed counter, a flag per slot. Rank 0 sums the rows."""
    at = tl.arange(0, N)
    tail, ready = words(flags, 0), words(flags, 0) + 1
    if BUG == "slot by load and store":
        slot = tl.atomic_add(tail, 0, sem="relaxed", scope="sys")
        tl.atomic_xchg(tail, slot + 1, sem="relaxed", scope="sys")
    else:
        slot = tl.atomic_add(tail, 1, sem="relaxed", scope="sys")
    tl.store(floats(boxes, 0) + slot * N + at, tl.load(src + at))  # BUG
    if BUG == "ready relaxed":
        post(ready + slot, 1, "relaxed")
    else:
        post(ready + slot, 1)
    if rank == 0:
        sum = tl.zeros((N,), tl.float32)
        if BUG == "waits for the tail":
            wait(tail, W)
        for other in range(W):
            if BUG == "waits for slot 0 alone":
                wait(ready, 1)
            elif BUG == "one slot further":
                wait(ready + other + 1, 1)  # BUG: one slot further
            elif BUG != "waits for the tail":
                wait(ready + other, 1)  # BUG: slot by load and store
            sum += tl.load(floats(boxes, 0) + other * N + at)  # BUG
        tl.store(dst + at, sum)


def case_queue(bug=""):
    return case(queue, lambda src: [total(src)[0], *(each * 0 - 1 for each in src[1:])], bug, world=3, box=3)


@kernel
def flags_as_a_vector(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Polls the flags of all peers by one volatile vector load, then fences."""
    at, peers = tl.arange(0, N), tl.arange(0, W)
    tl.store(floats(boxes, rank) + at, tl.load(src + at))  # BUG
    tl.debug_barrier()
    for peer in range(W):
        tl.atomic_xchg(words(flags, peer) + rank, 1, sem="release", scope="sys")
    mine = words(flags, rank)
    if BUG == "one flag will do":
        while tl.max(tl.load(mine + peers, volatile=True)) == 0:
            pass
    else:
        while tl.min(tl.load(mine + peers, volatile=True)) == 0:
            pass
    if BUG != "no fence":
        fence_sys()
    tl.debug_barrier()
    sum = tl.zeros((N,), tl.float32)
    for peer in range(W):
        sum += tl.load(floats(boxes, peer) + at)  # BUG
    tl.store(dst + at, sum)


def case_flags_as_a_vector(bug=""):
    return case(flags_as_a_vector, total, bug, world=4)


# -- streams -----------------------------------------------------------------------------------------------------------


@kernel
def receiver(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """A copy engine fills the box piece by piece, then its stream writes the flag."""
    at = tl.arange(0, N)
    if BUG == "waits relaxed":
        wait(words(flags, rank), 1, "relaxed")
    else:
        wait(words(flags, rank), 1)
    tl.store(dst + at, tl.load(floats(boxes, rank) + at))  # BUG


def case_receiver(bug=""):
    made = World(bug)
    of_flag = "2" if bug == "flag on another stream" else "1"
    work = []
    for r in made.ranks:
        copy = Copy(made.boxes.tensors[1 - r][0], made.src[r][0, 0], 4, "1")
        signal = Signal(made.flags.tensors[1 - r][:1], 1, of_flag)
        both = [signal, copy] if bug == "flag before the copy" else [copy, signal]
        work.append([*both, made.launch(receiver, r)])
    return made.run(work, previous)


@kernel
def sender(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """A stream of the peer waits for the flag's value, then copies the box."""
    at = tl.arange(0, N)
    if BUG == "flag before the store":
        post(words(flags, 1 - rank), call)
    tl.store(floats(boxes, 1 - rank) + at, tl.load(src + at))  # BUG
    if BUG == "told relaxed":
        post(words(flags, 1 - rank), call, "relaxed")
    elif BUG != "flag before the store":
        post(words(flags, 1 - rank), call)


def case_sender(bug=""):
    made = World(bug)
    work = []
    for r in made.ranks:
        value = 0 if bug == "waits for 0" else 1
        after = [] if bug == "does not wait" else [Await(made.flags.tensors[r][:1], value, "1")]
        copy = Copy(made.dst[r][0, 0], made.boxes.tensors[r][0], 2, "1")
        work.append([made.launch(sender, r), *after, copy])
    return made.run(work, previous)


@kernel
def fills(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Plain stores to the own box by several programs; the next launch of the stream is ordered after them."""
    at = tl.arange(0, N // 2) + tl.program_id(0) * (N // 2)
    tl.store(floats(boxes, rank) + at, tl.load(src + at))  # BUG


@kernel
def takes(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Reads what the previous launch stored, from the other program's half."""
    at = tl.arange(0, N // 2) + (1 - tl.program_id(0)) * (N // 2)
    tl.store(dst + at, tl.load(floats(boxes, rank) + at))  # BUG


def case_launches_in_a_row(bug=""):
    made = World(bug, grid=2, calls=3)
    streams = dict(stream="1") if bug == "on two streams" else {}
    work = [
        [each for c in range(3) for each in (made.launch(fills, r, c), made.launch(takes, r, c, **streams))]
        for r in made.ranks
    ]
    return made.run(work, own)


@kernel
def meets(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """A launch that is only a barrier of all ranks."""
    if BUG == "meets for the first time each time":
        meet(words(flags, 0), W, W, "")
    else:
        meet(words(flags, 0), (2 * call - 1) * W, W, BUG)


@kernel
def meets_again(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    meet(words(flags, 0), 2 * call * W, W, BUG)


@kernel
def takes_from_next(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(dst + at, tl.load(floats(boxes, (rank + 1) % W) + at))  # BUG


@kernel
def fills_own(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(floats(boxes, rank) + at, tl.load(src + at))  # BUG


def case_barrier_launches(bug=""):
    """Fill, meet, read the next rank's, meet: one launch each."""
    made = World(bug, world=3, calls=2)
    row = [fills_own, meets, takes_from_next, meets_again]
    if bug == "no barrier at the end":
        row = row[:3]
    work = [[made.launch(each, r, c) for c in range(2) for each in row] for r in made.ranks]
    if bug == "barrier on another stream":
        work = [
            [made.launch(e, r, c, stream="1" if e is meets else "0") for c in range(2) for e in row] for r in made.ranks
        ]
    return made.run(work, following)


# -- more of the same --------------------------------------------------------------------------------------------------


@kernel
def three_slots(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Six messages through three slots; the number of messages read is the credit. Launched twice; numbers continue."""
    at, to, before = tl.arange(0, N), (rank + 1) % W, (rank + W - 1) % W
    for e in range(6):
        n = (call - 1) * 6 + e
        slot = n % 3 * N
        if BUG == "credits of this launch alone":
            wait(words(flags, rank) + 1, e - 2)
        elif BUG == "slots of four":
            wait(words(flags, rank) + 1, n - 3)
        else:
            wait(words(flags, rank) + 1, n - 2)  # BUG: numbers begin again
        tl.store(floats(boxes, to) + slot + at, tl.load(src + e * N + at))  # BUG
        if BUG == "numbers begin again":
            post(words(flags, to), e + 1)
            wait(words(flags, rank), e + 1)  # BUG: numbers begin again
        else:
            post(words(flags, to), n + 1)
            wait(words(flags, rank), n + 1)
        tl.store(dst + e * N + at, tl.load(floats(boxes, rank) + slot + at))  # BUG
        post(words(flags, before) + 1, n + 1)


def case_three_slots(bug=""):
    return case(three_slots, previous, bug, world=4, calls=2, rows=6, box=3)


@kernel
def reduce_scatter(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Partial sums go round the ring; each step has its own slot and flag."""
    at, to = tl.arange(0, N), (rank + 1) % W
    sum = tl.load(src + (rank + W - 1) % W * N + at)
    for step in range(W - 1):
        slot = step * N
        if BUG == "one slot for all steps":
            slot = 0
        tl.store(floats(boxes, to) + slot + at, sum)  # BUG
        if BUG == "one flag, always 1":
            post(words(flags, to), 1)
            wait(words(flags, rank), 1)
        else:
            post(words(flags, to) + step, 1)
            wait(words(flags, rank) + step, 1)
        part = (rank + 2 * W - step - 2) % W
        if BUG == "adds the part of the step before":
            part = (part + 1) % W
        sum = tl.load(floats(boxes, rank) + slot + at) + tl.load(src + part * N + at)  # BUG
    tl.store(dst + at, sum)  # BUG: adds the part of the step before


def case_reduce_scatter(bug=""):
    def scattered(src):
        return [sum(each[:, r : r + 1] for each in src) for r in range(len(src))]

    return case(reduce_scatter, scattered, bug, world=4, rows=4, out=1, box=3)


@kernel
def histogram(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """All ranks add to rank 0's row by relaxed atomics. A rank that has seen all arrive reads it."""
    at = tl.arange(0, N)
    if BUG == "adds without atomics":
        tl.store(floats(boxes, 0) + at, tl.load(floats(boxes, 0) + at) + tl.load(src + at))  # BUG
    elif BUG == "adds at gpu scope":
        tl.atomic_add(floats(boxes, 0) + at, tl.load(src + at), sem="relaxed", scope="gpu")  # BUG
    else:
        tl.atomic_add(floats(boxes, 0) + at, tl.load(src + at), sem="relaxed", scope="sys")  # BUG
    if BUG == "arrives relaxed":
        arrive(words(flags, 0), "relaxed")
    else:
        arrive(words(flags, 0))
    if BUG == "reads before the last":
        wait(words(flags, 0), W - 1)
    else:
        wait(words(flags, 0), W)
    tl.store(dst + at, tl.load(floats(boxes, 0) + at))  # BUG


def case_histogram(bug=""):
    return case(histogram, total, bug, world=3, poisoned=False)


@kernel
def stack(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """A stack of nodes 1 to 3: a head, with a number that every change increments, and a word per node for its next.

    Rank 0 takes two nodes and puts the first back, rank 1 takes one. The stack may not contain a node that was taken.
    """
    at = tl.arange(0, N)
    head = words(flags, 0)
    if rank == 0:
        tl.atomic_xchg(head + 1, 2, sem="relaxed", scope="sys")
        tl.atomic_xchg(head + 2, 3, sem="relaxed", scope="sys")
        tl.atomic_xchg(head, 1, sem="relaxed", scope="sys")
    meet(head + 6, W, W, "")
    first = pop(head, BUG)
    taken = first
    if rank == 0:
        taken = pop(head, BUG)
        before = tl.atomic_add(head, 0, sem="acquire", scope="sys")
        tl.atomic_xchg(head + first, before % 16, sem="relaxed", scope="sys")
        now = tl.atomic_cas(head, before, raised(before, first, BUG), sem="acq_rel", scope="sys")
        while now != before:
            before = now
            tl.atomic_xchg(head + first, before % 16, sem="relaxed", scope="sys")
            now = tl.atomic_cas(head, before, raised(before, first, BUG), sem="acq_rel", scope="sys")
    meet(head + 6, 2 * W, W, "")
    node = tl.atomic_add(head, 0, sem="relaxed", scope="sys") % 16
    found = 0
    for _ in range(3):
        if node > 0:
            found += (node == taken).to(tl.int32)
            node = tl.atomic_add(head + node, 0, sem="relaxed", scope="sys")
    tl.store(dst + at, (found + at * 0).to(tl.float32))  # BUG


@triton.jit
def pop(head, BUG: tl.constexpr):
    before = tl.atomic_add(head, 0, sem="acquire", scope="sys")
    below = tl.atomic_add(head + before % 16, 0, sem="relaxed", scope="sys")
    now = tl.atomic_cas(head, before, raised(before, below, BUG), sem="acq_rel", scope="sys")
    while now != before:
        before = now
        below = tl.atomic_add(head + before % 16, 0, sem="relaxed", scope="sys")
        now = tl.atomic_cas(head, before, raised(before, below, BUG), sem="acq_rel", scope="sys")
    return before % 16


@triton.jit
def raised(before, node, BUG: tl.constexpr):
    if BUG == "no number (ABA)":
        word = node
    else:
        word = (before // 16 + 1) * 16 + node
    return word


def case_stack(bug=""):
    return case(stack, lambda src: [each * 0 for each in src], bug)
