"""The routing plan of a mixture of experts on the device: sort a rank's choices, index where rows come from and go to,
and select one round of an exchange in rounds.

fusedtp/ops/moe/plan.py defines the terms and has the same in torch, which CPU ranks use.
"""

import triton
import triton.language as tl

from .tiles import decoded, inline, shard


@inline
def expert_of(ids, at, count, NUM_EXPERTS):
    """ids[at]; NUM_EXPERTS for a dropped choice or an id out of range, and NUM_EXPERTS + 1 past the end."""
    expert = tl.load(ids + at, mask=at < count, other=0)
    expert = tl.where((expert < 0) | (expert > NUM_EXPERTS), NUM_EXPERTS, expert).to(tl.int32)
    return tl.where(at < count, expert, NUM_EXPERTS + 1)


@triton.jit
def moe_sort_kernel(ids, words, places, count, NUM_EXPERTS, BLOCK: tl.constexpr):
    """ids [count] -> words int32 [NUM_EXPERTS + count]: how often each expert is chosen, then all choices by expert;
    and places int32 [count], the position of each choice in that order.

    Each program handles one expert, the last one the dropped choices. It counts the choices of all experts before its
    own, then writes its own after them, in order: a stable sort without a counter that programs share.
    """
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    before = tl.zeros_like(lanes)
    own = tl.zeros_like(lanes)
    for first in range(0, count, BLOCK):
        found = expert_of(ids, first + lanes, count, NUM_EXPERTS)
        before += (found < expert).to(tl.int32)
        own += (found == expert).to(tl.int32)
    if expert < NUM_EXPERTS:
        tl.store(words + expert, tl.sum(own, 0))
    place = tl.sum(before, 0)
    for first in range(0, count, BLOCK):
        here = expert_of(ids, first + lanes, count, NUM_EXPERTS) == expert
        at = place + tl.cumsum(here.to(tl.int32), 0) - 1
        tl.store(words + NUM_EXPERTS + at, first + lanes, mask=here)
        tl.store(places + first + lanes, at, mask=here)
        place += tl.sum(here.to(tl.int32), 0)


@triton.jit
def moe_index_kernel(
    table,
    begins,
    sources,
    at_owners,
    in_sources,
    totals,
    blocks,
    arrivals,
    origins,
    offsets,
    to,
    to_places,
    counts,
    rank2,
    max_rows,
    WORLD: tl.constexpr,
    HERE: tl.constexpr,
    SOURCES: tl.constexpr,
    EXPERTS: tl.constexpr,
    ALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """table int32 [WORLD, WORLD * HERE] -> the index of one rank, all int32. Each rank has HERE experts.

    SOURCES, EXPERTS and ALL are the powers of two that cover WORLD, HERE and WORLD * HERE. One program per block: the
    rows from one source for one of this rank's experts. WORLD + 1 more: one per rank, one for the end of every list.
    """
    rank = decoded(rank2)
    program = tl.program_id(0)
    source = tl.arange(0, SOURCES)[:, None]
    expert = tl.arange(0, EXPERTS)[None, :]
    inside = (source < WORLD) & (expert < HERE)
    rows = table + source * (WORLD * HERE) + expert
    mine = tl.load(rows + rank * HERE, mask=inside, other=0)
    everyone = tl.arange(0, ALL)
    if program < WORLD * HERE:
        s = program // HERE
        e = program % HERE
        size = tl.load(table + s * (WORLD * HERE) + rank * HERE + e)
        by_source = tl.sum(tl.sum(tl.where((source < s) | ((source == s) & (expert < e)), mine, 0), 1), 0)
        by_expert = tl.sum(tl.sum(tl.where((expert < e) | ((expert == e) & (source < s)), mine, 0), 1), 0)
        chosen = tl.load(table + s * (WORLD * HERE) + everyone, mask=everyone < rank * HERE + e, other=0)
        in_order = tl.sum(chosen, 0)
        tl.store(blocks + program, by_source)
        if s == 0:
            tl.store(offsets + e, by_expert)
        for first in range(0, size, BLOCK):
            row = first + tl.arange(0, BLOCK)
            arrived = by_source + row
            tl.store(arrivals + arrived, by_expert + row, mask=(row < size) & (arrived < max_rows))
            sorted_row = by_expert + row
            fits = (row < size) & (sorted_row < max_rows)
            tl.store(origins + sorted_row, arrived, mask=fits)
            tl.store(to + sorted_row, tl.zeros_like(row) + s, mask=fits)
            tl.store(to_places + sorted_row, in_order + row, mask=fits)
    else:
        p = program - WORLD * HERE
        own = tl.load(table + rank * (WORLD * HERE) + everyone, mask=everyone < p * HERE, other=0)
        tl.store(begins + p, tl.sum(own, 0))
        tl.store(sources + p, tl.sum(tl.sum(tl.where(source < p, mine, 0), 1), 0))
        if p < WORLD:
            theirs = tl.load(rows + p * HERE, mask=inside, other=0)
            tl.store(totals + p, tl.sum(tl.sum(theirs, 1), 0))
            tl.store(at_owners + p, tl.sum(tl.sum(tl.where(source < rank, theirs, 0), 1), 0))
            sent = tl.load(table + p * (WORLD * HERE) + everyone, mask=everyone < rank * HERE, other=0)
            tl.store(in_sources + p, tl.sum(sent, 0))
            of_expert = tl.arange(0, EXPERTS)
            tl.store(counts + p * HERE + of_expert, tl.sum(theirs, 0), mask=of_expert < HERE)
        else:
            total = tl.sum(tl.sum(mine, 1), 0)
            tl.store(blocks + WORLD * HERE, total)
            tl.store(offsets + HERE, total)


@inline
def window_of(
    table,
    s,
    owner,
    low,
    high,
    WORLD: tl.constexpr,
    HERE: tl.constexpr,
    SOURCES: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """(rows, rows before low, rows in low .. high - 1) of the blocks of source s at an owner, by expert."""
    source, expert = tl.arange(0, SOURCES)[:, None], tl.arange(0, EXPERTS)[None, :]
    rows = table + source * (WORLD * HERE) + owner * HERE + expert
    counts = tl.load(rows, mask=(source < WORLD) & (expert < HERE), other=0)
    own = tl.sum(tl.where(source == s, counts, 0), 0)
    every = tl.sum(counts, 0)
    begin = tl.cumsum(every, 0) - every + tl.sum(tl.where(source < s, counts, 0), 0)
    first = tl.minimum(tl.maximum(begin, low), high)
    taken = tl.minimum(tl.maximum(begin + own, low), high) - first
    return own, first - begin, taken


@triton.jit(do_not_specialize=["low", "high"])
def moe_window_kernel(
    sizes,  # choices of every rank, a tuple
    table,
    orders,
    low,
    high,
    table_out,
    orders_out,
    places,
    rank2,
    WORLD: tl.constexpr,
    HERE: tl.constexpr,
    SOURCES: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """table int32 [WORLD, WORLD * HERE] and orders, every rank's choices by (expert, choice) -> the same for rows
    low .. high - 1 of each owner, in the owner's order (expert, source, choice); and places int32, the position of each
    choice of this rank in its new order: past all choices if its row is not one of these.

    One program per block: the choices of one source for one expert, contiguous in both orders. One more for this rank's
    dropped choices. Orders are written only where they are read: this rank's own, and its rows in those of others.
    """
    rank = decoded(rank2)
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    if program < WORLD * WORLD * HERE:
        s = program // (WORLD * HERE)
        e = program % (WORLD * HERE)
        size, offset = shard(sizes, s, WORLD)
        own, first, taken = window_of(table, s, e // HERE, low, high, WORLD, HERE, SOURCES, EXPERTS)
        expert = tl.arange(0, EXPERTS)
        here = expert == e % HERE
        count = tl.sum(tl.where(here, own, 0), 0)
        skipped = tl.sum(tl.where(here, first, 0), 0)
        kept = tl.sum(tl.where(here, taken, 0), 0)
        tl.store(table_out + program, kept)
        if (s == rank) | (e // HERE == rank):
            old = offset + tl.sum(tl.where(expert < e % HERE, own, 0), 0)
            new = tl.sum(tl.where(expert < e % HERE, taken, 0), 0)
            for p in range(e // HERE):
                own, first, taken = window_of(table, s, p, low, high, WORLD, HERE, SOURCES, EXPERTS)
                old += tl.sum(own, 0)
                new += tl.sum(taken, 0)
            for at in range(0, count, BLOCK):
                inside = at + lanes < count
                choice = tl.load(orders + old + at + lanes, mask=inside, other=0)
                row = at + lanes - skipped
                moves = (row >= 0) & (row < kept)
                tl.store(orders_out + offset + new + row, choice, mask=moves)
                if s == rank:
                    tl.store(places + choice, tl.where(moves, new + row, size), mask=inside)
    else:
        size, offset = shard(sizes, rank, WORLD)
        everyone = tl.arange(0, SOURCES * EXPERTS)
        mine = tl.load(table + rank * (WORLD * HERE) + everyone, mask=everyone < WORLD * HERE, other=0)
        for at in range(tl.sum(mine, 0), size, BLOCK):
            inside = at + lanes < size
            choice = tl.load(orders + offset + at + lanes, mask=inside, other=0)
            tl.store(places + choice, tl.zeros_like(choice) + size, mask=inside)
