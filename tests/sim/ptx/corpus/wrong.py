# mypy: ignore-errors
"""Mistakes in kernels of several ranks: which rule finds each, and within how many schedules.

Mistakes in the kernels of right.py are named by their BUG there; kernels that are wrong as a whole follow below. Lines
that a report may name are marked with `# BUG`, see right.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import right
from .parts import World, arrive, case, floats, kernel, longs, post, previous, total, wait, words

RACE = ("read-write race", "never written")
UPDATE = ("read-write race", "write-write race")
WITHIN = 24


@dataclass(frozen=True)
class Wrong:
    """A mistake in the kernel of `make`, a case function that takes the mistake's name."""

    make: object
    bug: str
    rules: tuple[str, ...] = RACE
    within: int = WITHIN

    @property
    def name(self) -> str:
        return ": ".join([self.make.__name__.removeprefix("case_"), *filter(None, [self.bug])])


# -- kernels that are wrong as a whole ---------------------------------------------------------------------------------


@kernel
def torn(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Like NCCL's LL128 without its warp-wide check: a 128-bit word tears, and its flag half may come first."""
    at = tl.arange(0, N)
    number = tl.load(src + at).to(tl.int64) + 1
    put_pair(longs(boxes, 1 - rank) + 2 * at, number, number * 0 + 1)
    got, flag = get_pair(longs(boxes, rank) + 2 * at)
    while tl.min(flag) == 0:
        got, flag = get_pair(longs(boxes, rank) + 2 * at)
    tl.store(dst + at, (got - 1).to(tl.float32))  # BUG


@triton.jit
def put_pair(at, number, flag):
    tl.inline_asm_elementwise(
        "st.relaxed.sys.global.v2.b64 [$1], {$2, $3}; mov.u32 $0, 0;", "=r,l,l,l", [at, number, flag],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def get_pair(at):
    return tl.inline_asm_elementwise(
        "ld.relaxed.sys.global.v2.b64 {$0, $1}, [$2];", "=l,=l,l", [at], dtype=(tl.int64, tl.int64),
        is_pure=False, pack=1,
    )  # fmt: skip


def case_torn(bug=""):
    return case(torn, previous, box=2, dtype=torch.int64, poisoned=False)


@kernel
def plain_flag(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """The flag is a plain store, the poll a volatile load."""
    at = tl.arange(0, N)
    tl.store(floats(boxes, 1 - rank) + at, tl.load(src + at))
    tl.debug_barrier()
    tl.store(words(flags, 1 - rank), 1)  # BUG
    while tl.load(words(flags, rank), volatile=True) == 0:  # BUG
        pass
    tl.store(dst + at, tl.load(floats(boxes, rank) + at))


def case_plain_flag(bug=""):
    return case(plain_flag, previous)


@kernel
def plain_poll(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Polls by plain loads that nothing uses, so Triton removes the loop."""
    at = tl.arange(0, N)
    tl.store(floats(boxes, 1 - rank) + at, tl.load(src + at))  # BUG
    post(words(flags, 1 - rank), 1)
    while tl.load(words(flags, rank)) == 0:
        pass
    tl.store(dst + at, tl.load(floats(boxes, rank) + at))  # BUG


def case_plain_poll(bug=""):
    return case(plain_poll, previous)


@kernel
def polls_the_data(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Data are stored plainly, and polled until none of them is 0."""
    at = tl.arange(0, N)
    tl.store(floats(boxes, 1 - rank) + at, tl.load(src + at) + 1)  # BUG
    got = tl.load(floats(boxes, rank) + at, volatile=True)  # BUG
    while tl.min(got) == 0:
        got = tl.load(floats(boxes, rank) + at, volatile=True)  # BUG
    tl.store(dst + at, got - 1)


def case_polls_the_data(bug=""):
    return case(polls_the_data, previous, poisoned=False)


@kernel
def two_widths(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """The flag is written with 64 bits and polled with 32: no synchronization (PTX 8.7.1)."""
    at = tl.arange(0, N)
    tl.store(floats(boxes, 1 - rank) + at, tl.load(src + at))
    tl.debug_barrier()
    tl.atomic_xchg(longs(flags, 1 - rank), tl.full((), 1, tl.int64), sem="release", scope="sys")  # BUG
    wait(words(flags, rank), 1)  # BUG
    tl.store(dst + at, tl.load(floats(boxes, rank) + at))


def case_two_widths(bug=""):
    return case(two_widths, previous)


@kernel
def rows_from_1(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Calls count from 1, but the rows of the box count from 0."""
    at = tl.arange(0, N)
    tl.store(floats(boxes, rank) + call * N + at, tl.load(src + at))  # BUG
    tl.store(dst + at, tl.load(floats(boxes, rank) + call * N + at))


def case_rows_from_1(bug=""):
    return case(rows_from_1, right.own, calls=2, box=2)


@kernel
def no_modulo(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """The last rank looks up a next rank past the end of the table of addresses."""
    at = tl.arange(0, N)
    tl.store(floats(boxes, rank + 1) + at, tl.load(src + at))  # BUG
    post(words(flags, rank + 1), 1)
    wait(words(flags, rank), 1)
    tl.store(dst + at, tl.load(floats(boxes, rank) + at))


def case_no_modulo(bug=""):
    return case(no_modulo, previous)


@kernel
def bytes_for_elements(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """An offset in elements is added to an address in bytes."""
    at = tl.arange(0, N)
    begin = (tl.load(boxes + rank) + call * 2 + 1).to(tl.pointer_type(tl.float32))
    tl.store(begin + at, tl.load(src + at))  # BUG
    tl.store(dst + at, tl.load(src + at))


def case_bytes_for_elements(bug=""):
    return case(bytes_for_elements, right.own)


@kernel
def mask_one_too_long(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Two programs per rank, each with half of the row plus the first number of the other half."""
    half = N // 2
    at = tl.program_id(0) * half + tl.arange(0, N)
    mine = at <= tl.minimum((tl.program_id(0) + 1) * half, N - 1)
    tl.store(floats(boxes, rank) + at, tl.load(src + at, mask=mine), mask=mine)  # BUG
    tl.store(dst + at, tl.load(src + at, mask=mine), mask=at < (tl.program_id(0) + 1) * half)


def case_mask_one_too_long(bug=""):
    return case(mask_one_too_long, right.own, grid=2)


@kernel
def barrier_of_programs(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """All programs of a rank meet, but they need not all be resident at once."""
    at, row, programs = tl.arange(0, N), tl.program_id(0), tl.num_programs(0)
    tl.store(floats(boxes, rank) + row * N + at, tl.load(src + row * N + at))
    arrive(words(flags, rank), "acq_rel", "gpu")
    wait(words(flags, rank), programs, "acquire", "gpu")  # BUG
    tl.store(dst + row * N + at, tl.load(floats(boxes, rank) + row * N + at))


def case_barrier_of_programs(bug=""):
    return case(barrier_of_programs, right.own, grid=3, rows=3, box=3)


@kernel
def leaves_early(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """A rank without rows signals no one, so the others wait for it."""
    at = tl.arange(0, N)
    if rank != 1:
        tl.store(floats(boxes, rank) + at, tl.load(src + at))
        arrive(words(flags, 0))
        wait(words(flags, 0), W)  # BUG
        tl.store(dst + at, tl.load(floats(boxes, (rank + 1) % W) + at))


def case_leaves_early(bug=""):
    return case(leaves_early, total, world=3)


@kernel
def own_counters(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Each rank counts itself instead of its peers, and so meets no one."""
    at = tl.arange(0, N)
    tl.store(floats(boxes, rank) + at, tl.load(src + at))  # BUG
    for _ in range(W):
        arrive(words(flags, rank))
    wait(words(flags, rank), W)
    sum = tl.zeros((N,), tl.float32)
    for peer in range(W):
        sum += tl.load(floats(boxes, peer) + at)  # BUG
    tl.store(dst + at, sum)


def case_own_counters(bug=""):
    return case(own_counters, total)


@kernel
def ring_of_waits(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Each rank first waits for the previous one, then signals the next."""
    at, to = tl.arange(0, N), (rank + 1) % W
    tl.store(floats(boxes, to) + at, tl.load(src + at))
    wait(words(flags, rank), 1)  # BUG
    post(words(flags, to), 1)
    tl.store(dst + at, tl.load(floats(boxes, rank) + at))


def case_ring_of_waits(bug=""):
    return case(ring_of_waits, previous, world=3)


@kernel
def boxes_of_halves(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Two senders share a box; the second begins a few numbers too early."""
    at = tl.arange(0, N)
    tl.store(floats(boxes, 0) + rank * (N - 4) + at, tl.load(src + at))  # BUG
    tl.store(dst + at, tl.load(src + at))


def case_boxes_of_halves(bug=""):
    return case(boxes_of_halves, right.own, box=2)


@kernel
def reset_by_all(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Every rank resets the counter after the barrier: slow ranks still wait for it, or it forgets early arrivals."""
    at = tl.arange(0, N)
    for e in range(3):
        tl.store(floats(boxes, rank) + e * N + at, tl.load(src + e * N + at))
        arrive(words(flags, 0))
        wait(words(flags, 0), W)  # BUG
        tl.atomic_xchg(words(flags, 0), 0, sem="release", scope="sys")
        tl.store(dst + e * N + at, tl.load(floats(boxes, (rank + 1) % W) + e * N + at))


def case_reset_by_all(bug=""):
    return case(reset_by_all, right.following, rows=3, box=3)


@kernel
def empty_shard(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Two alternating slots. Rank 1 has no rows and sends no signal either, so rank 0 may run ahead without limit."""
    at = tl.arange(0, N)
    for e in range(4):
        slot = e % 2 * N
        if rank == 0:
            tl.store(floats(boxes, 1) + slot + at, tl.load(src + e * N + at))  # BUG
            post(words(flags, 1), e + 1)
        else:
            wait(words(flags, 1), e + 1)
            tl.store(dst + e * N + at, tl.load(floats(boxes, 1) + slot + at))  # BUG


def case_empty_shard(bug=""):
    return case(empty_shard, lambda src: [torch.full_like(src[0], -1), src[0]], rows=4, box=2)


@kernel
def resets_its_flag(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """The receiver resets its flag, and erases a fast peer's signal of the next message."""
    at = tl.arange(0, N)
    for e in range(4):
        slot = e % 2 * N
        tl.store(floats(boxes, 1 - rank) + slot + at, tl.load(src + e * N + at))
        post(words(flags, 1 - rank), 1)
        wait(words(flags, rank), 1)  # BUG
        tl.store(dst + e * N + at, tl.load(floats(boxes, rank) + slot + at))
        post(words(flags, rank), 0)


def case_resets_its_flag(bug=""):
    return case(resets_its_flag, previous, rows=4, box=2)


@kernel
def replayed(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """The host chose the call's number and a graph replays it, so no wait of the second launch waits."""
    at, slot = tl.arange(0, N), call % 2 * N
    tl.store(floats(boxes, 1 - rank) + slot + at, tl.load(src + at))  # BUG
    post(words(flags, 1 - rank), call)
    wait(words(flags, rank), call)
    tl.store(dst + at, tl.load(floats(boxes, rank) + slot + at))  # BUG


def case_replayed(bug=""):
    made = World(box=2)
    return made.run([[made.launch(replayed, r)] * 2 for r in made.ranks], previous)


@kernel
def waits_for_the_grid(boxes, flags, src, dst, rank, call, W: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    """Each program sends a row, then waits for all programs of the peer, which need not have started."""
    at, row = tl.arange(0, N), tl.program_id(0)
    tl.store(floats(boxes, 1 - rank) + row * N + at, tl.load(src + row * N + at))
    post(words(flags, 1 - rank) + row, 1)
    for other in range(tl.num_programs(0)):
        wait(words(flags, rank) + other, 1)  # BUG
    tl.store(dst + row * N + at, tl.load(floats(boxes, rank) + row * N + at))


def case_waits_for_the_grid(bug=""):
    return case(waits_for_the_grid, previous, grid=2, rows=2, box=2)


# -- all of them -------------------------------------------------------------------------------------------------------

WRONG = [
    Wrong(right.case_message, "wrong peer told", RACE),
    Wrong(right.case_message, "polls own flag"),
    Wrong(right.case_message, "flag first"),
    Wrong(right.case_message, "relaxed release"),
    Wrong(right.case_message, "acquire in place of release"),
    Wrong(right.case_message, "release at gpu scope", ("scope",)),
    Wrong(right.case_message, "release at cta scope", ("scope",)),
    Wrong(right.case_message, "flag past the last", ("out of bounds",)),
    Wrong(right.case_message, "relaxed acquire"),
    Wrong(right.case_message, "release in place of acquire"),
    Wrong(right.case_message, "acquire at gpu scope", ("scope",)),
    Wrong(right.case_message, "wrong word", ("deadlock",)),
    Wrong(right.case_message, "waits for 0"),
    Wrong(right.case_message, "waits for 2", ("deadlock",)),
    Wrong(right.case_message, "no wait"),
    Wrong(right.case_relaxed_polls, "no acquire"),
    Wrong(right.case_by_thread_0, "no barrier before the release"),
    Wrong(right.case_by_thread_0, "no barrier after the acquire"),
    Wrong(right.case_by_thread_0, "relaxed store"),
    Wrong(right.case_volatile_polls, "no fence"),
    Wrong(right.case_volatile_polls, "fence at gpu scope"),
    Wrong(right.case_fenced_flag, "no fence"),
    Wrong(right.case_fenced_flag, "fence before the barrier"),
    Wrong(right.case_fenced_flag, "fence at gpu scope"),
    Wrong(right.case_acquire_in_every_thread, "relaxed load"),
    Wrong(right.case_bounded_polls, "goes on in vain"),
    Wrong(right.case_bounded_polls, "goes on after 40", RACE, 60),
    Wrong(right.case_signal_pad, "put is relaxed"),
    Wrong(right.case_signal_pad, "taken from the wrong slot", ("deadlock",)),
    Wrong(right.case_signal_pad, "take is relaxed"),
    Wrong(right.case_signal_pad, "take at gpu scope", ("scope",)),
    Wrong(right.case_signal_pad, "not taken", ("deadlock",)),
    Wrong(right.case_signal_pad, "no credit"),
    Wrong(right.case_handshake, "no wait for the reset"),
    Wrong(right.case_handshake, "no reset", ("deadlock",)),
    Wrong(right.case_handshake, "reset is relaxed"),
    Wrong(right.case_double_buffer, "slot 0 alone"),
    Wrong(right.case_double_buffer, "one credit too few", (*RACE, "wrong value")),
    Wrong(right.case_double_buffer, "no credit"),
    Wrong(right.case_double_buffer, "flag is always 1"),
    Wrong(right.case_double_buffer, "waits for the first epoch"),
    Wrong(right.case_double_buffer, "waits for the last epoch"),
    Wrong(right.case_double_buffer, "reads the other slot"),
    Wrong(right.case_double_buffer, "credit before the read"),
    Wrong(right.case_double_buffer, "credit is relaxed"),
    Wrong(right.case_double_buffer, "credit to the wrong rank", (*RACE, "wrong value", "deadlock")),
    Wrong(right.case_double_buffer, "two credits at once", (*RACE, "wrong value")),
    Wrong(right.case_barrier_reused, "counter one too low"),
    Wrong(right.case_barrier_reused, "counter past the last", ("deadlock",)),
    Wrong(right.case_barrier_reused, "target of the first round"),
    Wrong(right.case_barrier_reused, "relaxed arrival"),
    Wrong(right.case_barrier_reused, "gpu scope", ("scope",)),
    Wrong(right.case_barrier_reused, "arrives twice"),
    Wrong(right.case_barrier_reused, "relaxed wait"),
    Wrong(right.case_barrier_reused, "no second barrier"),
    Wrong(right.case_sense_reversing, "sense stays"),
    Wrong(right.case_sense_reversing, "turns before it resets", (*RACE, "deadlock")),
    Wrong(right.case_sense_reversing, "no reset", ("deadlock",)),
    Wrong(right.case_epochs_of_calls, "not reset, always 1"),
    Wrong(right.case_epochs_of_calls, "equal to the call", ("deadlock",)),
    Wrong(right.case_epochs_of_calls, "toggles", ("deadlock",)),
    Wrong(right.case_pull, "one reader too few"),
    Wrong(right.case_pull, "no wait for readers"),
    Wrong(right.case_pull, "waits for itself"),
    Wrong(right.case_pull, "done is relaxed"),
    Wrong(right.case_lock, "no lock", UPDATE),
    Wrong(right.case_lock, "looks, then takes", UPDATE),
    Wrong(right.case_lock, "takes relaxed", UPDATE),
    Wrong(right.case_lock, "gives back relaxed", UPDATE),
    Wrong(right.case_lock, "lock at gpu scope", ("scope",)),
    Wrong(right.case_lock, "given back before the store", UPDATE),
    Wrong(right.case_lock, "gives back twice", UPDATE),
    Wrong(right.case_lock, "never given back", ("deadlock",)),
    Wrong(right.case_two_locks, "the other order on rank 1", ("deadlock",)),
    Wrong(right.case_ticket_lock, "ticket not taken at once", UPDATE),
    Wrong(right.case_ticket_lock, "enters one too early", UPDATE),
    Wrong(right.case_ticket_lock, "serving is read relaxed", UPDATE),
    Wrong(right.case_ticket_lock, "served relaxed", UPDATE),
    Wrong(right.case_ticket_lock, "serves two at once", UPDATE),
    Wrong(right.case_ticket_lock, "never served", ("deadlock",)),
    Wrong(right.case_flags_and_fences, "no fence", ("write-write race",), 60),
    Wrong(right.case_flags_and_fences, "acq_rel fence", ("write-write race",), 60),
    Wrong(right.case_cas_loop, "plain load and store", UPDATE),
    Wrong(right.case_cas_loop, "relaxed load and store", ("wrong value",)),
    Wrong(right.case_cas_loop, "does not try again", ("wrong value",)),
    Wrong(right.case_last_block, "relaxed"),
    Wrong(right.case_last_block, "release alone"),
    Wrong(right.case_last_block, "acquire alone"),
    Wrong(right.case_last_block, "cta scope", ("scope",)),
    Wrong(right.case_last_block, "one program too few"),
    Wrong(right.case_last_block, "no reset"),
    Wrong(right.case_chain, "begins with the last program", ("deadlock",)),
    Wrong(right.case_chain, "waits relaxed", UPDATE),
    Wrong(right.case_chain, "no wait", (*UPDATE, "never written")),
    Wrong(right.case_chain, "passed on relaxed", UPDATE),
    Wrong(right.case_chain, "passes it on to itself", ("deadlock",)),
    Wrong(right.case_one_flag_for_all_programs, "the last one does not acquire"),
    Wrong(right.case_one_flag_for_all_programs, "program 0 tells for all"),
    Wrong(right.case_one_flag_for_all_programs, "told at gpu scope", ("scope",)),
    Wrong(right.case_work_queue, "one row too many", ("out of bounds",)),
    Wrong(right.case_work_queue, "claims by load and store", ("write-write race",)),
    Wrong(right.case_a_flag_a_program, "rows overlap", ("write-write race", *RACE)),
    Wrong(right.case_a_flag_a_program, "tells the next program", (*RACE, "deadlock")),
    Wrong(right.case_a_flag_a_program, "waits for the flag of program 0"),
    Wrong(right.case_a_flag_a_program, "waits for the last program", ("deadlock",)),
    Wrong(right.case_a_flag_a_program, "too few flags", ("out of bounds",)),
    Wrong(right.case_packed, "flag in another word", ("wrong value",)),
    Wrong(right.case_packed, "one lane's flag", ("wrong value",)),
    Wrong(right.case_packed, "any flag, one row", ("wrong value",)),
    Wrong(right.case_packed, "loads again", ("wrong value",)),
    Wrong(right.case_seqlock, "writer does not fence", ("wrong value",), 120),
    Wrong(right.case_seqlock, "all threads write the number, without a fence", ("wrong value",), 120),
    Wrong(right.case_seqlock, "does not look again", ("wrong value",)),
    Wrong(right.case_seqlock, "takes odd numbers", ("wrong value",)),
    Wrong(right.case_one_shot, "one row"),
    Wrong(right.case_one_shot, "told relaxed"),
    Wrong(right.case_one_shot, "all tell in one slot", ("deadlock",)),
    Wrong(right.case_one_shot, "does not wait for rank 0"),
    Wrong(right.case_one_shot, "adds itself twice", ("wrong value",)),
    Wrong(right.case_two_shot, "parts overlap", ("write-write race", "never written")),
    Wrong(right.case_two_shot, "waits for the first meeting again"),
    Wrong(right.case_all_to_all, "all into one slot", ("write-write race",)),
    Wrong(right.case_all_to_all, "counted before the store"),
    Wrong(right.case_all_to_all, "counted relaxed"),
    Wrong(right.case_all_to_all, "counted at the sender"),
    Wrong(right.case_all_to_all, "one sender too few"),
    Wrong(right.case_all_to_all, "one sender too many", ("deadlock",)),
    Wrong(right.case_ring_gather, "hands on the row of the next step", (*RACE, "deadlock")),
    Wrong(right.case_ring_gather, "one flag for all rows"),
    Wrong(right.case_ring_gather, "waits for its own row", ("deadlock",)),
    Wrong(right.case_ring_gather, "waits relaxed"),
    Wrong(right.case_tree, "one child is forgotten", ("deadlock",)),
    Wrong(right.case_tree, "told before the row is there"),
    Wrong(right.case_tree, "tells the first child twice", ("deadlock",)),
    Wrong(right.case_relay, "tells at gpu scope", ("scope",)),
    Wrong(right.case_relay, "relay does not acquire"),
    Wrong(right.case_relay, "relay does not wait"),
    Wrong(right.case_relay, "relay does not release"),
    Wrong(right.case_release_sequence, "begins relaxed"),
    Wrong(right.case_release_sequence, "a store breaks it"),
    Wrong(right.case_queue, "slot by load and store", ("write-write race", *RACE, "deadlock")),
    Wrong(right.case_queue, "ready relaxed"),
    Wrong(right.case_queue, "waits for the tail"),
    Wrong(right.case_queue, "waits for slot 0 alone"),
    Wrong(right.case_queue, "one slot further", (*RACE, "deadlock")),
    Wrong(right.case_flags_as_a_vector, "one flag will do"),
    Wrong(right.case_flags_as_a_vector, "no fence"),
    Wrong(right.case_receiver, "waits relaxed"),
    Wrong(right.case_receiver, "flag on another stream"),
    Wrong(right.case_receiver, "flag before the copy"),
    Wrong(right.case_sender, "flag before the store"),
    Wrong(right.case_sender, "told relaxed"),
    Wrong(right.case_sender, "waits for 0"),
    Wrong(right.case_sender, "does not wait"),
    Wrong(right.case_launches_in_a_row, "on two streams"),
    Wrong(right.case_barrier_launches, "meets for the first time each time"),
    Wrong(right.case_barrier_launches, "no barrier at the end"),
    Wrong(right.case_barrier_launches, "barrier on another stream", (*RACE, "deadlock")),
    Wrong(right.case_three_slots, "credits of this launch alone", (*RACE, "wrong value")),
    Wrong(right.case_three_slots, "slots of four", (*RACE, "wrong value")),
    Wrong(right.case_three_slots, "numbers begin again", (*RACE, "deadlock")),
    Wrong(right.case_reduce_scatter, "one slot for all steps"),
    Wrong(right.case_reduce_scatter, "one flag, always 1"),
    Wrong(right.case_reduce_scatter, "adds the part of the step before", ("wrong value",)),
    Wrong(right.case_histogram, "adds without atomics", UPDATE),
    Wrong(right.case_histogram, "adds at gpu scope", ("scope",)),
    Wrong(right.case_histogram, "arrives relaxed"),
    Wrong(right.case_histogram, "reads before the last"),
    Wrong(case_torn, "", ("wrong value",)),
    Wrong(case_plain_flag, ""),
    Wrong(case_plain_poll, ""),
    Wrong(case_polls_the_data, ""),
    Wrong(case_two_widths, ""),
    Wrong(case_rows_from_1, "", ("out of bounds",)),
    Wrong(case_no_modulo, "", ("out of bounds",)),
    Wrong(case_bytes_for_elements, "", ("misaligned",)),
    Wrong(case_mask_one_too_long, "", ("write-write race",)),
    Wrong(case_barrier_of_programs, "", ("deadlock",)),
    Wrong(case_leaves_early, "", ("deadlock",)),
    Wrong(case_own_counters, ""),
    Wrong(case_ring_of_waits, "", ("deadlock",)),
    Wrong(case_boxes_of_halves, "", ("write-write race",)),
    Wrong(case_reset_by_all, "", ("deadlock",)),
    Wrong(case_empty_shard, ""),
    Wrong(case_resets_its_flag, "", ("deadlock",)),
    Wrong(case_replayed, ""),
    Wrong(case_waits_for_the_grid, "", ("deadlock",)),
]
