# mypy: ignore-errors
"""Cases as users write them, for the compiled kernel: right ones, wrong ones, and ones that were once unsupported."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.distributed._symmetric_memory import _nvshmem_triton as theirs
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedtp.sim import Launch, Run, compare, nvshmem, symmetric

N = 32


def one(kernel, args, out, want, grid=1, **options) -> Run:
    """One rank, one launch, one output."""
    return Run([[Launch(kernel, grid, args, **options)]], (), lambda: compare("out", [out], [want]))


def filled(dtype=torch.float32):
    return torch.full((N,), -1, dtype=dtype)


# -- how kernels are launched ------------------------------------------------------------------------------------------


@triton.autotune([triton.Config({"BLOCK": b}, num_warps=w) for b, w in ((8, 1), (16, 2), (32, 4))], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def tuned(x, out, n, BLOCK: tl.constexpr, EVEN: tl.constexpr, SHIFT: tl.constexpr = 1):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(out + at, tl.load(x + at) + SHIFT)
    else:
        tl.store(out + at, tl.load(x + at, mask=at < n) + SHIFT, mask=at < n)


def case_tuned(n=N, config=None):
    x, out = torch.arange(n, dtype=torch.float32), torch.full((n,), -1.0)
    grid = lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)  # noqa: E731
    return one(tuned, dict(x=x, out=out, n=n), out, x + 1, grid, tuned=config)


@triton.autotune([triton.Config({"BLOCK": 8}), triton.Config({"BLOCK": 16})], key=[])
@triton.jit
def wrong_when_wide(out, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), 1.0)


def case_wrong_in_one_config():
    out = filled()
    want = torch.cat([torch.ones(8), filled()[8:]])
    return one(wrong_when_wide, dict(out=out), out, want)


@triton.jit
def helper(at, k):
    return at * 10 + k


@triton.jit
def three_axes(out, K):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = (z * tl.num_programs(1) + y) * tl.num_programs(0) + x
    tl.store(out + at, helper(at, K))


def case_three_axes():
    out = torch.full((12,), -1, dtype=torch.int32)
    return one(three_axes, dict(out=out, K=3), out, torch.arange(12, dtype=torch.int32) * 10 + 3, (2, 3, 2))


def grid_of(grid):
    out = torch.full((12,), -1, dtype=torch.int32)
    return one(three_axes, dict(out=out, K=3), out, out.clone(), grid)


def case_no_axes():
    return grid_of(())


def case_four_axes():
    return grid_of((1, 1, 1, 1))


def case_grid_of_words():
    return grid_of(lambda meta: ("many",))


def case_unknown_argument():
    out = filled()
    return one(three_axes, dict(out=out, K=3, L=4), out, out)


def case_missing_argument():
    out = filled()
    return one(three_axes, dict(out=out), out, out)


def undecorated(out):
    tl.store(out, 1)


def case_plain_function():
    out = filled()
    return one(undecorated, dict(out=out), out, out)


@triton.jit
def double_by_descriptor(x, out, B: tl.constexpr):
    row = tl.program_id(0) * B
    out.store([row, 0], x.load([row, 0]) * 2)


def case_descriptors():
    x, out = torch.arange(16 * 16, dtype=torch.float16).view(16, 16), torch.zeros(16, 16, dtype=torch.float16)
    args = dict(x=TensorDescriptor.from_tensor(x, [8, 16]), out=TensorDescriptor.from_tensor(out, [8, 16]), B=8)
    return one(double_by_descriptor, args, out, x * 2, 2)


@triton.jit
def does_not_compile(out):
    tl.static_assert(out.dtype.element_ty == tl.float16, "only halves")
    tl.store(out, 1.0)


def case_does_not_compile():
    out = filled()
    return one(does_not_compile, dict(out=out), out, out)


@triton.jit
def unknown_opcode(out):
    got = tl.inline_asm_elementwise("dp4a.s32.s32 $0, 1, 2, 3;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(out, got)


def case_unknown_opcode():
    out = filled(torch.int32)
    return one(unknown_opcode, dict(out=out), out, out)


def case_raises():
    raise KeyError("mine")


def case_reference_raises():
    run = case_three_axes()

    def check():
        raise KeyError("my reference")

    return Run(run.work, run.memory, check)


def case_empty_world():
    return Run([], (), lambda: None)


def case_ranks_without_work():
    return Run([[], []], (), lambda: None)


# -- numbers -----------------------------------------------------------------------------------------------------------


@triton.jit
def sums_in_bf16(x, y, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at) + tl.load(y + at) * tl.load(y + at))


def case_sums_in_bf16():
    x, y = (torch.randn(N, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (1, 2))
    out = filled(torch.bfloat16)
    # Triton computes bf16 in bf16, with a fused multiply and add: exact in fp32 but for its own rounding
    want = (x.double() + y.double() * y.double()).bfloat16()
    return one(sums_in_bf16, dict(x=x, y=y, out=out, N=N), out, want)


@triton.jit
def dot_in_bf16(x, y, out, M: tl.constexpr):
    at = tl.arange(0, M)[:, None] * M + tl.arange(0, M)[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))


def case_dot_in_bf16():
    """Small integers: exact however a tensor core sums."""
    m = 16
    x, y = (torch.randint(-8, 9, (m, m), generator=torch.Generator().manual_seed(s)).bfloat16() for s in (1, 2))
    out = torch.full((m, m), -1.0)
    return one(dot_in_bf16, dict(x=x, y=y, out=out, M=m), out, x.float() @ y.float())


@triton.jit
def exchange_floats(word, old):
    tl.store(old, tl.atomic_xchg(word, 2.5))


def case_exchange_of_fp32():
    word, old = torch.full((1,), -0.5), torch.zeros(1)

    def both():
        new, before = torch.full((1,), 2.5), torch.full((1,), -0.5)
        return [*compare("word", [word], [new]), *compare("old", [old], [before])]

    return Run([[Launch(exchange_floats, 1, dict(word=word, old=old))]], (), both)


@triton.jit
def add_in_bf16(word, N: tl.constexpr):
    tl.atomic_add(word + tl.arange(0, N) % 4, tl.full((N,), 0.5, tl.bfloat16))


def case_atomic_add_of_bf16():
    word = torch.ones(4, dtype=torch.bfloat16)
    return one(add_in_bf16, dict(word=word, N=N), word, torch.full((4,), 9.0, dtype=torch.bfloat16), 2)


# -- faults that do not depend on the schedule -------------------------------------------------------------------------


@triton.jit
def asserts(x, out):
    got = tl.load(x)
    tl.device_print("got", got)
    tl.device_assert(got > 0, "must be positive")
    tl.store(out, got)


def case_assertion_fails():
    out = torch.zeros(1)
    return one(asserts, dict(x=torch.tensor([-1.0]), out=out), out, out)


def case_assertion_holds():
    out = torch.zeros(1)
    return one(asserts, dict(x=torch.tensor([4.0]), out=out), out, torch.tensor([4.0]))


@triton.jit
def at_address(address, out):
    tl.store(out, tl.load(address.to(tl.pointer_type(tl.float32))))


def case_address_outside_all_memory():
    out = torch.zeros(1)
    return one(at_address, dict(address=1 << 40, out=out), out, out)


def case_wrong_in_every_schedule():
    out = torch.zeros(1)
    return one(asserts, dict(x=torch.tensor([4.0]), out=out), out, torch.tensor([5.0]))


# -- loops that do not end ---------------------------------------------------------------------------------------------


@triton.jit
def spins_on_plain_loads(flag, out):
    seen = tl.load(flag)
    while seen == 0:
        seen = tl.load(flag)
    tl.store(out, seen)


@triton.jit
def spins_without_memory(flag, out):
    n = tl.load(flag)
    while n < 10:
        n = n * 3
    tl.store(out, n)


@triton.jit
def spins_and_stores(flag, out):
    n = 0
    while tl.load(flag) == 0:
        n += 1
        tl.store(out, n)


@triton.jit
def polls_and_stores(flag, out):
    n = 0
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") == 0:
        n += 1
        tl.store(out, n)


@triton.jit
def polls_and_counts(flag, out):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") == 0:
        tl.atomic_add(out, 1, sem="relaxed", scope="sys")


@triton.jit
def polls_an_answer(flag, out):
    """Asks again in every iteration: each store is one that others could see."""
    while tl.load(flag, volatile=True) == 0:
        tl.atomic_xchg(out, 1, sem="release", scope="sys")


ENDLESS = {
    each.fn.__name__: each
    for each in (spins_on_plain_loads, spins_without_memory, spins_and_stores, polls_and_stores, polls_and_counts,
                 polls_an_answer)
}  # fmt: skip


def endless(name) -> Run:
    flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    return one(ENDLESS[name], dict(flag=flag, out=out), out, out)


def case_polls_and_stores():
    return endless("polls_and_stores")


# -- messages between two ranks ----------------------------------------------------------------------------------------


@triton.jit
def send(boxes, flags, src, rank, N: tl.constexpr):
    at, to = tl.arange(0, N), 1 - rank
    tl.store(tl.load(boxes + to).to(tl.pointer_type(tl.float32)) + at, tl.load(src + at))
    tl.debug_barrier()
    tl.atomic_xchg(tl.load(flags + to).to(tl.pointer_type(tl.int32)), 1, sem="release", scope="sys")


@triton.jit
def receive(boxes, flags, dst, rank, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(dst + at, tl.load(tl.load(boxes + rank).to(tl.pointer_type(tl.float32)) + at))


@triton.jit
def by_relaxed_polls(boxes, flags, src, dst, rank, N: tl.constexpr):
    """Polls are relaxed; one acquire follows."""
    send(boxes, flags, src, rank, N)
    mine = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    while tl.atomic_add(mine, 0, sem="relaxed", scope="sys") != 1:
        pass
    while tl.atomic_add(mine, 0, sem="acquire", scope="sys") != 1:
        pass
    tl.debug_barrier()
    receive(boxes, flags, dst, rank, N)


@triton.jit
def by_volatile_polls(boxes, flags, src, dst, rank, N: tl.constexpr):
    send(boxes, flags, src, rank, N)
    mine = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    while tl.load(mine, volatile=True) != 1:
        pass
    while tl.atomic_add(mine, 0, sem="acquire", scope="sys") != 1:
        pass
    tl.debug_barrier()
    receive(boxes, flags, dst, rank, N)


@triton.jit
def by_unused_acquire(boxes, flags, src, dst, rank, N: tl.constexpr):
    """Nothing uses the value that the acquire reads."""
    send(boxes, flags, src, rank, N)
    mine = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    while tl.atomic_add(mine, 0, sem="relaxed", scope="sys") != 1:
        pass
    tl.atomic_add(mine, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    receive(boxes, flags, dst, rank, N)


@triton.jit
def by_bounded_polls(boxes, flags, src, dst, rank, N: tl.constexpr):
    """Gives up after one second by the clock, and pauses between polls."""
    send(boxes, flags, src, rank, N)
    mine = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    begin = clock()
    seen = tl.atomic_add(mine, 0, sem="acquire", scope="sys")
    while (seen != 1) & (clock() - begin < 1000000000):
        pause()
        seen = tl.atomic_add(mine, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    receive(boxes, flags, dst, rank, N)


@triton.jit
def clock():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def pause():
    tl.inline_asm_elementwise("nanosleep.u32 20; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def by_inline_ptx(boxes, flags, src, dst, rank, N: tl.constexpr):
    """Thread 0 sends and waits in loops with labels in braces, which Triton copies to each call of this function."""
    at, to = tl.arange(0, N), 1 - rank
    tl.store(tl.load(boxes + to).to(tl.pointer_type(tl.float32)) + at, tl.load(src + at))
    meet()
    theirs = tl.load(flags + to).to(tl.pointer_type(tl.int32))
    mine = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    for round in tl.static_range(2):
        if thread() == 0:
            compare_and_swap(theirs + round)
            wait(mine + round)
    meet()
    receive(boxes, flags, dst, rank, N)


@triton.jit
def thread():
    return tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def meet():
    tl.inline_asm_elementwise("bar.sync 0; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def compare_and_swap(at):
    tl.inline_asm_elementwise(
        """
        {
            .reg .u32 %seen<1>;
            .reg .pred %p<1>;
            again:
                atom.global.sys.release.cas.b32 %seen0, [$1], 0, 1;
                setp.eq.u32 %p0, %seen0, 0;
                @!%p0 bra again;
        }
        """,
        "=r, l", [at], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def wait(at):
    tl.inline_asm_elementwise(
        """
        {
            .reg .u32 %seen<1>;
            .reg .pred %p<1>;
            again:
                ld.global.acquire.sys.u32 %seen0, [$1];
                setp.eq.u32 %p0, %seen0, 1;
                @!%p0 bra again;
                st.global.release.sys.u32 [$1], 2;
        }
        """,
        "=r, l", [at], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def without_acquire(boxes, flags, src, dst, rank, N: tl.constexpr):
    send(boxes, flags, src, rank, N)
    mine = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    while tl.atomic_add(mine, 0, sem="relaxed", scope="sys") != 1:
        pass
    tl.debug_barrier()
    receive(boxes, flags, dst, rank, N)


@triton.jit
def by_plain_polls(boxes, flags, src, dst, rank, N: tl.constexpr):
    """A plain load that nothing uses: the compiler removes the loop."""
    send(boxes, flags, src, rank, N)
    mine = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    while tl.load(mine) != 1:
        pass
    tl.debug_barrier()
    receive(boxes, flags, dst, rank, N)


@triton.jit(noinline=True)
def sends(flag, SEM: tl.constexpr):
    meet()
    tl.atomic_xchg(flag, 1, sem=SEM, scope="sys")


@triton.jit(noinline=True)
def waits(flag):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != 1:
        pass


@triton.jit
def by_noinline(boxes, flags, src, dst, rank, N: tl.constexpr, SEM: tl.constexpr = "release"):
    at, to = tl.arange(0, N), 1 - rank
    tl.store(tl.load(boxes + to).to(tl.pointer_type(tl.float32)) + at, tl.load(src + at))
    sends(tl.load(flags + to).to(tl.pointer_type(tl.int32)), SEM)
    waits(tl.load(flags + rank).to(tl.pointer_type(tl.int32)))
    meet()
    receive(boxes, flags, dst, rank, N)


def message(kernel, more=(), **options) -> Run:
    box = symmetric("box", 2, (N,))
    flag = symmetric("flag", 2, (2,), torch.int32, poisoned=False)
    src, dst = [torch.arange(N) + 100.0 * r for r in range(2)], [torch.full((N,), -1.0) for _ in range(2)]
    work = [
        [
            Launch(
                kernel,
                1,
                dict(boxes=box.pointers, flags=flag.pointers, src=src[r], dst=dst[r], rank=r, N=N, **dict(more)),
                **options,
            )
        ]
        for r in range(2)
    ]
    return Run(work, [box, flag], lambda: compare("dst", dst, [src[1], src[0]]))


def case_message():
    return message(by_relaxed_polls)


def case_message_without_acquire():
    return message(without_acquire)


# -- device functions of a library -------------------------------------------------------------------------------------


@tl.core.extern
def their_put(dest, source, nbytes, pe, _semantic=None):
    kinds = (*(tl.core.dtype("int64"),) * 3, tl.core.dtype("int32"))
    symbol = {kinds: ("their_put", tl.core.dtype("int32"))}
    return tl.core.extern_elementwise("", "", [dest, source, nbytes, pe], symbol, is_pure=False, _semantic=_semantic)


@triton.jit
def puts(box, flag, src, dst, N: tl.constexpr, SIGNAL: tl.constexpr):
    peer = 1 - theirs.my_pe()
    size = tl.full((), N * 4, tl.int64)
    if SIGNAL:
        theirs.putmem_signal_block_extern_wrapper(
            box.to(tl.int64), src.to(tl.int64), size, flag.to(tl.int64), tl.full((), 1, tl.uint64), 0, peer
        )
    else:
        theirs.putmem_block_extern_wrapper(box.to(tl.int64), src.to(tl.int64), size, peer)
        theirs.signal_op(flag.to(tl.int64), tl.full((), 1, tl.int64), 0, peer)
    theirs.signal_wait_until_extern_wrapper(flag.to(tl.int64), 0, tl.full((), 1, tl.uint64))
    at = tl.arange(0, N)
    tl.store(dst + at, tl.load(box + at))


@triton.jit
def gets(box, flag, src, dst, N: tl.constexpr, SIGNAL: tl.constexpr):
    """A rank fills its own box, signals, and gets the other's."""
    at = tl.arange(0, N)
    tl.store(box + at, tl.load(src + at))
    tl.debug_barrier()
    theirs.fence()
    peer = 1 - theirs.my_pe()
    theirs.signal_op(flag.to(tl.int64), tl.full((), 1, tl.int64), 0, peer)
    theirs.signal_wait_until_extern_wrapper(flag.to(tl.int64), 0, tl.full((), 1, tl.uint64))
    theirs.getmem_block_extern_wrapper(dst.to(tl.int64), box.to(tl.int64), tl.full((), N * 4, tl.int64), peer)


def shmem(kernel, signal=True) -> Run:
    replace = nvshmem.of_torch()
    box = symmetric("box", 2, (N,))
    flag = symmetric("flag", 2, (1,), torch.int64, poisoned=False)
    src, dst = [torch.arange(N) + 100.0 * r for r in range(2)], [torch.full((N,), -1.0) for _ in range(2)]
    work = [
        [Launch(kernel, 1, dict(box=box.tensors[r], flag=flag.tensors[r], src=src[r], dst=dst[r], N=N, SIGNAL=signal),
                replace=replace)]
        for r in range(2)
    ]  # fmt: skip
    return Run(work, [box, flag], lambda: compare("dst", dst, [src[1], src[0]]))


@triton.jit
def puts_by_itself(out, src):
    their_put(out.to(tl.int64), src.to(tl.int64), tl.full((), 4, tl.int64), 0)


def case_extern_call():
    out = filled()
    return one(puts_by_itself, dict(out=out, src=filled()), out, out)


@triton.jit
def assumes(out):
    pid = tl.program_id(0)
    tl.assume(pid > 0)
    tl.store(out + pid, 1.0)


def case_false_assumption(replace=None):
    out = torch.zeros(2)
    return one(assumes, dict(out=out), out, torch.ones(2), 2, replace=replace or {})


@triton.jit
def double_by_own_descriptor(x, out, M: tl.constexpr, B: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [M, M], [M, 1], [B, M])
    row = tl.program_id(0) * B
    at = (row + tl.arange(0, B))[:, None] * M + tl.arange(0, M)[None, :]
    tl.store(out + at, source.load([row, 0]) * 2)


def case_descriptors_of_the_kernel():
    x, out = torch.arange(16 * 16, dtype=torch.float16).view(16, 16), torch.zeros(16, 16, dtype=torch.float16)
    return one(double_by_own_descriptor, dict(x=x, out=out, M=16, B=8), out, x * 2, 2)


@triton.jit
def square_by_own_descriptors(x, w, out, n, B: tl.constexpr, K: tl.constexpr):
    """out += x w^T, tile by tile, with new descriptors in each iteration; x and w [n, K]."""
    for first in range(0, n, B):
        left = tl.make_tensor_descriptor(x + first * K, [B, K], [K, 1], [B, 32])
        right = tl.make_tensor_descriptor(w, [n, K], [K, 1], [B, 32])
        target = tl.make_tensor_descriptor(out, [n, n], [n, 1], [B, B])
        total = tl.zeros([B, B], tl.float32)
        for k in range(0, K, 32):
            total += tl.dot(left.load([0, k]), right.load([tl.program_id(0) * B, k]).T)
        target.atomic_add([first, tl.program_id(0) * B], total)


def case_products_by_descriptors_of_the_kernel():
    n, k = 64, 96
    x, w = ((torch.arange(n * k) * step % 7 - 3).view(n, k).half() for step in (3, 5))
    out = torch.ones(n, n)
    return one(
        square_by_own_descriptors,
        dict(x=x, w=w, out=out, n=n, B=32, K=k),
        out,
        x.float() @ w.t().float() + 1,
        2,
    )


@triton.jit
def square_in_fp16(x, w, out, N: tl.constexpr, K: tl.constexpr):
    n, k = tl.arange(0, N), tl.arange(0, K)
    at = n[:, None] * K + k[None, :]
    made = tl.dot(tl.load(x + at), tl.load(w + at).T, out_dtype=tl.float16)
    tl.store(out + n[:, None] * N + n[None, :], made)


def case_products_in_fp16():
    n, k = 64, 32
    x, w = ((torch.arange(n * k) * step % 7 - 3).view(n, k).half() for step in (3, 5))
    want = (x.float() @ w.t().float()).half()
    out = torch.zeros_like(want)
    return one(square_in_fp16, dict(x=x, w=w, out=out, N=n, K=k), out, want, 1)


@triton.jit
def notes_what_is_negative(x, out, M: tl.constexpr, B: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [M, M], [M, 1], [B, M])
    found = source.load([tl.program_id(0) * B, 0])
    at = tl.arange(0, B)[:, None] * M + tl.arange(0, M)[None, :]
    tl.store(out + at, found, mask=found < 0)
