# mypy: ignore-errors
"""Kernels of several ranks that are right by the memory model of PTX, and the mistakes that wrong.py makes in them.

A line with `# BUG: name, name` is one that the report of these mistakes may name; `# BUG` alone: of every mistake of
the kernel. Both lines of a race are such lines.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .parts import (
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
    """Into the next rank's box, then its flag; release and acquire at system scope."""
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
    """Polls relaxed; thread 0 acquires once, then a barrier."""
    at = tl.arange(0, N)
    tl.store(floats(boxes, 1 - rank) + at, tl.load(src + at))  # BUG
    post(words(flags, 1 - rank), 1)
    mine = words(flags, rank)
    while tl.atomic_add(mine, 0, sem="relaxed", scope="sys") != 1:
        pass
    if BUG != "no acquire":
        tl.atomic_add(mine, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    tl.store(dst + at, tl.load(floats(boxes, rank) + at))  # BUG


def case_relaxed_polls(bug=""):
    return case(relaxed_polls, previous, bug)


@kernel
def volatile_polls(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Every thread polls by volatile loads, then fences: no barrier is needed."""
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
    """A barrier, a fence by all, then a relaxed flag."""
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
def acquire_in_every_thread(
    boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr
):
    """Polls by ld.acquire in every thread: no barrier is needed."""
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
    """Inline PTX in thread 0 alone releases and acquires; barriers before and after."""
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
    most: tl.constexpr = 2 if BUG == "goes on in vain" else 100000
    polls = 0
    seen = tl.atomic_add(words(flags, rank), 0, sem="acquire", scope="sys")
    while (seen < 1) & (polls < most):
        polls += 1
        seen = tl.atomic_add(words(flags, rank), 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    if BUG == "goes on in vain":
        tl.store(dst + at, tl.load(floats(boxes, rank) + at))  # BUG
    elif seen == 1:
        tl.store(dst + at, tl.load(floats(boxes, rank) + at))


def case_bounded_polls(bug=""):
    return case(bounded_polls, previous, bug)


@kernel
def signal_pad(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Puts a signal by CAS 0 -> 1 and takes it by CAS 1 -> 0, so that the next call finds 0: a slot for each sender."""
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
    """A flag of 0 and 1: the receiver sets it back when it has read, the sender waits for that."""
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
    """Four messages through two slots; the receiver gives the sender a credit when it has read one."""
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
    """Three rounds: fill the own box, meet, read the next rank's, meet. One counter on rank 0 goes on and on."""
    at = tl.arange(0, N)
    for e in range(3):
        tl.store(floats(boxes, rank) + at, tl.load(src + e * N + at))  # BUG
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
    """The last to arrive sets the counter back and turns the sense."""
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
            while (
                tl.atomic_add(words(flags, 0) + 1, 0, sem="acquire", scope="sys") != sense
            ):  # BUG: no reset, turns before it resets
                pass
        tl.debug_barrier()


def case_sense_reversing(bug=""):
    return case(sense_reversing, following, bug, world=2, rows=3)


@kernel
def epochs_of_calls(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Three launches; the flag holds the number of the call. Two rows, and each rank hears from its receiver."""
    at, to = tl.arange(0, N), 1 - rank
    row = call % 2 * N
    tl.store(floats(boxes, to) + row + at, tl.load(src + at))  # BUG
    if BUG == "not reset, always 1":
        post(words(flags, to), 1)
        wait(words(flags, rank), 1)
    elif BUG == "equal to the call":
        post(words(flags, to), call)
        while (
            tl.atomic_add(words(flags, rank), 0, sem="acquire", scope="sys") != call
        ):  # BUG: equal to the call
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
    """Fills its own box, says so, and readers pull; it is filled again when all have said that they are done."""
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
