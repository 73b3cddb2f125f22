"""A small fused kernel, right as it stands, and a `FAULT` for each way to get it wrong. Compiled, never run.

Every rank stores a block of x into its neighbour's inbox, says so, waits for its own inbox and multiplies what came
by w. `table` and `flags` hold the addresses of all ranks' inboxes and flags.
"""

import torch
import triton
import triton.language as tl

from fusedtp.sim import Case, Launch, Run, symmetric


@triton.jit
def poll(flag, limit, FAULT: tl.constexpr):
    """Wait for a flag, at most `limit` polls."""
    if FAULT == "unbounded":
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
            pass
    elif FAULT == "relaxed acquire":
        polls = 0
        while (tl.atomic_add(flag, 0, sem="relaxed", scope="sys") < 1) & (polls < limit):
            polls += 1
    elif FAULT == "device acquire":
        polls = 0
        while (tl.atomic_add(flag, 0, sem="acquire", scope="gpu") < 1) & (polls < limit):
            polls += 1
    elif FAULT == "ordinary poll":
        polls = 0
        while (tl.load(flag, volatile=True) < 1) & (polls < limit):
            polls += 1
    else:
        polls = 0
        while (tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1) & (polls < limit):
            polls += 1


@triton.jit
def notify(flag, FAULT: tl.constexpr):
    if FAULT != "no barrier":
        tl.debug_barrier()
    if FAULT == "relaxed release":
        tl.atomic_xchg(flag, 1, sem="relaxed", scope="sys")
    elif FAULT == "acquire as release":
        tl.atomic_xchg(flag, 1, sem="acquire", scope="sys")
    elif FAULT == "device release":
        tl.atomic_xchg(flag, 1, sem="release", scope="gpu")
    else:
        tl.atomic_xchg(flag, 1, sem="release", scope="sys")


@triton.jit
def exchange(
    x,
    w,
    y,
    table,
    flags,
    rank,
    tiles,
    K,
    limit,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FAULT: tl.constexpr,
):
    rows = tl.arange(0, M)[:, None]
    columns = tl.arange(0, N)[None, :]
    ks = tl.arange(0, BLOCK_K)
    address = tl.load(table + rank + 1)
    if FAULT == "hint before the cast":
        out = tl.multiple_of(address, 16).to(tl.pointer_type(x.dtype.element_ty))
    else:
        out = tl.multiple_of(address.to(tl.pointer_type(x.dtype.element_ty)), 16)
    for k in range(0, K, BLOCK_K):
        at = rows * K + k + ks[None, :]
        tl.store(out + at, tl.load(x + at))
    notify(tl.load(flags + rank + 1).to(tl.pointer_type(tl.int32)), FAULT)
    flag = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    inbox = tl.multiple_of(tl.load(table + rank).to(tl.pointer_type(x.dtype.element_ty)), 16)
    for tile in range(tiles):
        if FAULT != "wait in the K loop" and FAULT != "wait and barrier in the K loop":  # noqa: SIM102
            if FAULT != "wait after the loads":
                poll(flag + tile, limit, FAULT)
        acc = tl.zeros((M, N), tl.float32)
        for k in range(0, K, BLOCK_K):
            if FAULT == "wait in the K loop":  # noqa: SIM102
                if k % 1024 == 0:
                    poll(flag + tile + k, limit, FAULT)
            if FAULT == "wait and barrier in the K loop":
                poll(flag + tile + k, limit, FAULT)
                tl.debug_barrier()
            a = tl.load(inbox + rows * K + k + ks[None, :])
            b = tl.load(w + (k + ks[:, None]) + (tile * N + columns) * K)
            if FAULT == "widened":
                acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
            else:
                acc = tl.dot(a, b, acc, input_precision="ieee")
        if FAULT == "wait after the loads":
            poll(flag + tile, limit, FAULT)
        tl.store(y + rows * N * tiles + tile * N + columns, acc.to(y.dtype.element_ty))


@triton.jit
def by_tma(w, y, table, flags, rank, limit, M: tl.constexpr, FAULT: tl.constexpr):
    """The same with TMA: the block goes out by a TMA store, and what came is read by a TMA load."""
    out = tl.load(table + rank + 1).to(tl.pointer_type(w.dtype.element_ty))
    block = tl.make_tensor_descriptor(w, (M, M), (M, 1), (M, M)).load([0, 0])
    if FAULT == "TMA store":
        tl.make_tensor_descriptor(out, (M, M), (M, 1), (M, M)).store([0, 0], block)
    else:
        at = tl.arange(0, M)[:, None] * M + tl.arange(0, M)[None, :]
        tl.store(out + at, block)
    notify(tl.load(flags + rank + 1).to(tl.pointer_type(tl.int32)), FAULT)
    poll(tl.load(flags + rank).to(tl.pointer_type(tl.int32)), limit, FAULT)
    if FAULT != "no proxy fence":
        tl.inline_asm_elementwise(
            "fence.proxy.async; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1
        )
    inbox = tl.load(table + rank).to(tl.pointer_type(w.dtype.element_ty))
    came = tl.make_tensor_descriptor(inbox, (M, M), (M, 1), (M, M)).load([0, 0])
    tl.make_tensor_descriptor(y, (M, M), (M, 1), (M, M)).store([0, 0], came)


@triton.jit
def by_descriptor(x, w, y, K, M: tl.constexpr, BLOCK_K: tl.constexpr, SPECIALIZED: tl.constexpr):
    """A matmul whose operands both come by TMA, with a warp of its own for the copies if that is asked for."""
    a = tl.make_tensor_descriptor(x, (M, K), (K, 1), (M, BLOCK_K))
    b = tl.make_tensor_descriptor(w, (M, K), (K, 1), (M, BLOCK_K))
    acc = tl.full((M, M), 0.0, tl.float32)
    for k in tl.range(0, K, BLOCK_K, warp_specialize=SPECIALIZED):
        acc = tl.dot(a.load([0, k]), b.load([0, k]).T, acc)
    at = tl.arange(0, M)[:, None] * M + tl.arange(0, M)[None, :]
    tl.store(y + at, acc.to(tl.float16))


@triton.jit
def direct(inbox, lock, y, N: tl.constexpr):
    """Reaches what it shares through its arguments, and takes a lock that orders one device only."""
    while tl.atomic_cas(lock, 0, 1, sem="acquire", scope="gpu") != 0:
        pass
    tl.store(y + tl.arange(0, N), tl.load(inbox + tl.arange(0, N)))
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0, sem="release", scope="gpu")


@triton.jit
def push_direct(inbox, flag, x, own, N: tl.constexpr, SCOPE: tl.constexpr):
    """Signals a neighbour through arguments; `own` counts what stays on the device."""
    tl.store(inbox + tl.arange(0, N), tl.load(x + tl.arange(0, N)))
    tl.debug_barrier()
    tl.atomic_xchg(flag, 1, sem="release", scope=SCOPE)
    tl.atomic_add(own, 1, sem="relaxed", scope=SCOPE if SCOPE == "cta" else "gpu")


def _pushes(scope: str) -> Case:
    def make() -> Run:
        inbox, flags = symmetric("inbox", 2, (256,)), symmetric("flags", 2, (1,), torch.int32)
        work = []
        for rank in range(2):
            own = torch.zeros(1, dtype=torch.int32)
            to = dict(inbox=inbox.tensors[1 - rank], flag=flags.tensors[1 - rank])
            work.append([Launch(push_direct, 1, dict(**to, x=torch.ones(256), own=own, N=256, SCOPE=scope))])
        return Run(work, [inbox, flags])

    return Case("push", make)


right = _pushes("sys")


def wrong() -> Case:
    return _pushes("gpu")


def wrong_among_programs() -> Case:
    return _pushes("cta")
