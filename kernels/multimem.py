"""Sums and copies by the NVLink switch (NVLink SHARP, PTX's `multimem`): one access to the memory of all ranks.

A multicast address refers to the same location in the slots of all ranks. A load from it returns the sum over ranks, a
store to it writes to all of them. Accesses here are 16 bytes per lane, at multiples of 16 bytes.

Note [Two addresses of one memory]: in the memory model, a rank's own address of its slot and the multicast address are
different proxies. In addition to the signal, a proxy fence is needed between a store by one address and an access by
the other: on both sides of the signal, by each thread that accesses the memory.

Note [Sums of the switch]: the switch sums 16-bit elements in fp32 and rounds once to the element. It chooses the order
of the sum, so the last bits may vary.

Note [One thread a piece]: if a tile has fewer pieces than a program has threads, several threads hold the same piece.
Triton's own stores are then done by one of them. But inline assembly runs in all of them, and a sum that overwrites its
operands would be summed again. So a tile here has at least one piece per thread, many of them masked if there is little
to do.

Note [Without a switch]: if there is no multicast address (ranks that share a GPU, ranks without one), the slots are
read one by one in rank order and written one by one. Callers use the same code, with `multicast` None.

PTX ISA 8.8, sections 9.7.9.14 (multimem) and 8.3 (proxies).
"""

import triton.language as tl

from . import signals
from .tiles import inline, narrow, widen

# loads words $0 to $3 from address $4, if $5
_LOAD = """{{
    .reg .pred %exists;
    setp.ne.b32 %exists, $5, 0;
    @%exists multimem.ld_reduce.weak.global.add.{} {{$0, $1, $2, $3}}, [$4];
}}"""
LOAD_FP32 = tl.constexpr(_LOAD.format("v4.f32"))
LOAD_FP16 = tl.constexpr(_LOAD.format("acc::f32.v4.f16x2"))
LOAD_BF16 = tl.constexpr(_LOAD.format("acc::f32.v4.bf16x2"))
# stores words $2 to $5 to address $1, if $6
STORE = tl.constexpr("""{
    .reg .pred %exists;
    setp.ne.b32 %exists, $6, 0;
    @%exists multimem.st.weak.global.v4.f32 [$1], {$2, $3, $4, $5};
    mov.b32 $0, 0;
}""")


@inline
def other_address(multicast):
    """Fence between accesses by a slot's own address and by the multicast one: Note [Two addresses of one memory]."""
    if multicast is not None:
        tl.inline_asm_elementwise("fence.proxy.alias; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@inline
def sum_slots(
    peers, multicast, first, last, col, stride, SUM_M: tl.constexpr, BLOCK_N: tl.constexpr, ELEMENT: tl.constexpr
):
    """Sum rows first, ..., last - 1 of a tile column of [., stride] over ranks, and store the sum in the slots of all.

    multicast   int64 [1], the multicast address of the data regions of all ranks, or None
    stride      in elements, a multiple of one access
    At most SUM_M rows; SUM_M is large enough for Note [One thread a piece].
    """
    rows = (first + tl.arange(0, SUM_M)).to(tl.int64)
    if multicast is not None:
        LANE: tl.constexpr = 128 // ELEMENT.primitive_bitwidth  # elements of an access
        cols = col * BLOCK_N + LANE * tl.arange(0, BLOCK_N // LANE)
        mask = ((rows < last)[:, None] & (cols < stride)[None, :]).to(tl.int32)
        slot = tl.load(multicast) + (tl.load(peers.epoch) & 1).to(tl.int64) * peers.slot_bytes
        at = slot + (rows[:, None] * stride + cols[None, :]) * (ELEMENT.primitive_bitwidth // 8)
        LOAD: tl.constexpr = LOAD_FP32 if ELEMENT == tl.float32 else LOAD_BF16 if ELEMENT == tl.bfloat16 else LOAD_FP16
        words = tl.inline_asm_elementwise(
            LOAD,
            "=r,=r,=r,=r,l,r",
            [at, mask],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
        a, b, c, d = words
        tl.inline_asm_elementwise(
            STORE, "=r,l,r,r,r,r,r", [at, a, b, c, d, mask], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        world: tl.constexpr = peers.world_size
        rank = signals.rank_of(peers)
        cols = col * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (rows < last)[:, None] & (cols < stride)[None, :]
        at = rows[:, None] * stride + cols[None, :]
        acc = tl.full((SUM_M, BLOCK_N), 0, tl.float32)
        for src in range(world):
            acc += widen(tl.load(_elements(peers, src, ELEMENT) + at, mask=mask, other=0.0)).to(tl.float32)
        for step in range(1, world + 1):
            tl.store(_elements(peers, (rank + step) % world, ELEMENT) + at, narrow(acc, ELEMENT), mask=mask)


@inline
def _elements(peers, rank, ELEMENT: tl.constexpr):
    """A rank's slot, by its own address, not by the multicast one."""
    return tl.multiple_of(signals.slot(peers, rank).to(tl.pointer_type(ELEMENT)), 16)
