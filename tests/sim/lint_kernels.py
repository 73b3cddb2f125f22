"""A small fused kernel, right as it is, and a `FAULT` for each way to get it wrong.

Every rank stores a block of x into its neighbour's inbox, signals, waits for its own inbox, and multiplies the received
block by w. `table` and `flags` hold the addresses of all ranks' inboxes and flags.
"""

import torch
import triton
import triton.language as tl

from fusedtp.sim import Case, Launch, Run, compare, symmetric


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
def by_tma(x, out, flag, M: tl.constexpr):
    """Send a block to a peer by a TMA store, then set its flag. Descriptors come from the host."""
    out.store([0, 0], x.load([0, 0]))
    notify(flag, "")


@triton.jit
def by_descriptor(x, w, y, K, M: tl.constexpr, BLOCK_K: tl.constexpr, SPECIALIZED: tl.constexpr):
    """A matmul with both operands by TMA; if requested, a separate warp does the copies."""
    a = tl.make_tensor_descriptor(x, (M, K), (K, 1), (M, BLOCK_K))
    b = tl.make_tensor_descriptor(w, (M, K), (K, 1), (M, BLOCK_K))
    acc = tl.full((M, M), 0.0, tl.float32)
    for k in tl.range(0, K, BLOCK_K, warp_specialize=SPECIALIZED):
        acc = tl.dot(a.load([0, k]), b.load([0, k]).T, acc)
    at = tl.arange(0, M)[:, None] * M + tl.arange(0, M)[None, :]
    tl.store(y + at, acc.to(tl.float16))


@triton.jit
def push(inbox, flag, x, own, N: tl.constexpr, HINT: tl.constexpr):
    """Sends a row and signals through arguments; `own` stays on the device. Without HINT, rows may begin anywhere."""
    at = tl.arange(0, N)
    tl.store(inbox + (0 if HINT else 1) + at, tl.load(x + at))
    tl.store(own + at, tl.load(x + at + 1))
    notify(flag, "")


@triton.jit
def walk(ends, y, lists, BOUND: tl.constexpr):
    """Programs share the items of lists in turn. With BOUND, a program's position is only a bound of a loop."""
    programs = tl.num_programs(0)
    start, end = tl.program_id(0), tl.load(ends)
    for each in range(lists):
        begin = end
        end = tl.load(ends + each + 1)
        count = end - begin
        mine = (tl.maximum(count - start, 0) + programs - 1) // programs
        if BOUND:
            for item in range(start, count, programs):
                tl.store(y + begin + item + tl.arange(0, 32), tl.program_id(0))
            start += mine * programs
        else:
            for _ in range(mine):
                tl.store(y + begin + start + tl.arange(0, 32), tl.program_id(0))
                start += programs
        start -= count


# -- as launches -------------------------------------------------------------------------------------------------------


def exchange_launch(
    target: str,
    fault: str = "",
    m: int = 128,
    n: int = 128,
    dtype: torch.dtype = torch.float16,
    **options: int,
) -> Launch:
    """With the sizes of a real matmul; only dtypes and alignment of the operands matter."""
    x, w, y = (torch.empty(16, dtype=dtype) for _ in "xwy")
    tables = [torch.empty(8, dtype=torch.int64) for _ in range(2)]
    numbers = dict(rank=5, tiles=3, K=4096, limit=1001)
    sizes = dict(M=m, N=n, BLOCK_K=64, FAULT=fault)
    args = dict(x=x, w=w, y=y, table=tables[0], flags=tables[1], **numbers, **sizes)
    return Launch(exchange, 1, args, options=dict(num_warps=8, num_stages=2 if target == "gfx942" else 3) | options)


def descriptor_launch(specialized: bool = False, num_stages: int = 3) -> Launch:
    x, w, y = (torch.empty(16, dtype=torch.float16) for _ in "xwy")
    args = dict(x=x, w=w, y=y, K=4096, M=128, BLOCK_K=64, SPECIALIZED=specialized)
    return Launch(by_descriptor, 1, args, options=dict(num_warps=8, num_stages=num_stages))


def walk_launch(bound: bool) -> Launch:
    ends, y = torch.zeros(8, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    return Launch(walk, 2, dict(ends=ends, y=y, lists=5, BOUND=bound), options=dict(num_warps=1))


def push_case(hint: bool) -> Case:
    """The case on two ranks."""

    def make() -> Run:
        inbox, flags = symmetric("inbox", 2, (512,)), symmetric("flags", 2, (1,), torch.int32)
        work = []
        for rank in range(2):
            to = dict(inbox=inbox.tensors[1 - rank], flag=flags.tensors[1 - rank])
            local = dict(x=torch.ones(257), own=torch.zeros(256))
            work.append([Launch(push, 1, dict(**to, **local, N=256, HINT=hint), options=dict(num_warps=1))])
        return Run(work, [inbox, flags])

    return Case("push", make)


def push_launch() -> Launch:
    x = torch.ones(512)
    return Launch(push, 1, dict(inbox=x, flag=torch.zeros(1, dtype=torch.int32), x=x, own=x, N=256, HINT=True))


def exchange_case(fault: str = "") -> Case:
    """Small and complete, so that it can run: y = what the previous rank sent @ w, in a ring of two."""
    m, n, k = 16, 16, 128

    def make() -> Run:
        torch.manual_seed(0)
        inbox = symmetric("inbox", 2, (m, k), torch.float16)
        flags = symmetric("flags", 2, (64,), torch.int32, poisoned=False)
        x, w = ([torch.randint(-2, 3, shape).half() for _ in range(2)] for shape in ((m, k), (n, k)))
        y = [torch.zeros(m, n, dtype=torch.float16) for _ in range(2)]
        table, words = (torch.cat([each.pointers, each.pointers[:1]]) for each in (inbox, flags))
        sizes = dict(K=k, limit=100_000, M=m, N=n, BLOCK_K=32, FAULT=fault)
        work = []
        for rank in range(2):
            args = dict(x=x[rank], w=w[rank], y=y[rank], table=table, flags=words, rank=rank, tiles=1, **sizes)
            work.append([Launch(exchange, 1, args, options=dict(num_warps=4, num_stages=3))])
        want = [x[1 - rank].float() @ w[rank].float().T for rank in range(2)]
        return Run(work, [inbox, flags], lambda: compare("y", y, [each.half() for each in want]))

    return Case("exchange", make)


@triton.jit
def spread(x, step):
    tl.store(x + tl.arange(0, 1024) * step, 1.0)


def spread_run(*steps: int) -> Run:
    """One rank for each step."""
    return Run([[Launch(spread, 1, dict(x=torch.zeros(1024 * step), step=step))] for step in steps])
