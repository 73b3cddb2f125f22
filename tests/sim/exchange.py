"""Small multi-rank kernels whose faults can be switched on one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from hypothesis import strategies as st

from fusedtp.sim import DEFAULT, Await, Case, Copy, Launch, Memory, Run, Schedule, Signal, compare, symmetric

N = 16


def schedules(*targets: str) -> st.SearchStrategy[Schedule]:
    """Any schedule for any of these targets."""
    residents = st.sampled_from([None, 1, 2, "varying"])
    seeds, strategies = st.integers(0, 2**31), st.sampled_from(DEFAULT)
    return st.builds(Schedule, strategies, seeds, residents, st.booleans(), st.booleans(), st.sampled_from(targets))


def replaced(case: Case, bodies: dict[Any, Any]) -> Case:
    """The case with its kernels' device functions replaced; None: a call does nothing."""

    def make() -> Run:
        run = case.make()
        work = [[replace(w, replace=bodies) if isinstance(w, Launch) else w for w in of_rank] for of_rank in run.work]
        return replace(run, work=work)

    return replace(case, make=make)


@triton.jit
def ring(src, inbox, flags, dst, rank, W, N: tl.constexpr, SEM: tl.constexpr, SCOPE: tl.constexpr,
         ACQUIRE: tl.constexpr, WAIT: tl.constexpr, SHIFT: tl.constexpr):  # fmt: skip
    """Send to the next rank, wait for the previous one, keep what it sent."""
    at = tl.arange(0, N)
    to = (rank + 1) % W
    out = tl.load(inbox + to).to(tl.pointer_type(tl.float32))
    tl.store(out + SHIFT + at, tl.load(src + at))
    tl.debug_barrier()
    flag = tl.load(flags + to).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flag, 1, sem=SEM, scope=SCOPE)
    mine = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    if WAIT:
        while tl.atomic_add(mine, 0, sem=ACQUIRE, scope=SCOPE) < 1:
            pass
    box = tl.load(inbox + rank).to(tl.pointer_type(tl.float32))
    tl.store(dst + at, tl.load(box + at))


def ring_run(world_size: int = 3, **changes) -> Run:
    """changes: sem, scope, acquire, wait, shift."""
    options = dict(SEM="release", SCOPE="sys", ACQUIRE="acquire", WAIT=True, SHIFT=0)
    options |= {name.upper(): value for name, value in changes.items()}
    inbox = symmetric("inbox", world_size, (N,))
    flags = symmetric("flags", world_size, (1,), torch.int32, poisoned=False)
    src = [torch.arange(N) + 100.0 * r for r in range(world_size)]
    dst = [torch.full((N,), torch.nan) for _ in range(world_size)]
    work = [
        [Launch(ring, 1, dict(src=src[r], inbox=inbox.pointers, flags=flags.pointers, dst=dst[r], rank=r,
                              W=world_size, N=N, **options))]
        for r in range(world_size)
    ]  # fmt: skip
    return Run(work, [inbox, flags], lambda: compare("dst", dst, [src[r - 1] for r in range(world_size)]))


@triton.jit
def wait_for(flag, dst, VALUE: tl.constexpr):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < VALUE:
        pass
    tl.store(dst, 1.0)


def unanswered_run() -> Run:
    """Rank 1 waits for a value that rank 0 never writes."""
    flags = symmetric("flags", 2, (4,), torch.int32, poisoned=False)
    dst = torch.zeros(1)
    work = [
        [Signal(flags.tensors[1][2], 1)],
        [Launch(wait_for, 1, dict(flag=flags.tensors[1][2:], dst=dst, VALUE=2))],
    ]
    return Run(work, [flags], lambda: compare("dst", [dst], [torch.ones(1)]))


@triton.jit
def push_then_wait(flag, count, dst, PROGRAMS: tl.constexpr):
    """Every program announces itself and waits for all others: right only if all are resident at once."""
    tl.atomic_add(count, 1, sem="acq_rel", scope="gpu")
    while tl.atomic_add(count, 0, sem="acquire", scope="gpu") < PROGRAMS:
        pass
    tl.store(dst + tl.program_id(0), 1.0)


def barrier_run(programs: int = 3) -> Run:
    count, dst = torch.zeros(1, dtype=torch.int32), torch.zeros(programs)
    args = dict(flag=count, count=count, dst=dst, PROGRAMS=programs)
    return Run([[Launch(push_then_wait, programs, args)]], (), lambda: compare("dst", [dst], [torch.ones(programs)]))


@triton.jit
def add(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at) + 1)


def streams_run(second: str = "0", awaited: bool = True) -> Run:
    """x -> +1 -> copied to rank 1 by a copy engine -> +1 there, after the copy's flag."""
    x, y, z, w = (torch.zeros(N) for _ in range(4))
    flags = symmetric("flags", 2, (1,), torch.int32, poisoned=False)
    flag = flags.tensors[1][0]
    sender = [
        Launch(add, 1, dict(x=x, y=y, N=N)),
        Copy(z, y, 4, stream=second),
        Signal(flag, 1, stream=second),
    ]
    receiver = [*([Await(flag, 1)] if awaited else []), Launch(add, 1, dict(x=z, y=w, N=N))]
    return Run([sender, receiver], [flags, Memory("z", (y, z))], lambda: compare("w", [w], [torch.full((N,), 2.0)]))


@triton.jit
def critical(lock, data, ROUNDS: tl.constexpr, SCOPE: tl.constexpr):
    for _ in range(ROUNDS):
        while tl.atomic_cas(lock, 0, 1, sem="acquire", scope=SCOPE) != 0:
            pass
        tl.store(data, tl.load(data) + 1)
        tl.debug_barrier()  # Triton 3.6 lets one thread release without it
        tl.atomic_xchg(lock, 0, sem="release", scope=SCOPE)


def lock_run(scope: str, ranks: int) -> Run:
    """Programs add to one number under a lock: programs of one rank, or one program each of several ranks."""
    lock = symmetric("lock", 1, (1,), torch.int32, poisoned=False).tensors[0]
    data = torch.zeros(1)
    args = dict(lock=lock, data=data, ROUNDS=2, SCOPE=scope)
    work = [[Launch(critical, 3 // ranks, args)] for _ in range(ranks)]
    return Run(work, (), lambda: compare("data", [data], [torch.full((1,), 6.0)]))


@triton.jit
def masked(x, y, n, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


def masked_run(n: int) -> Run:
    x, y = torch.arange(5.0), torch.zeros(5)
    return Run([[Launch(masked, 1, dict(x=x, y=y, n=n, N=8))]], (), lambda: compare("y", [y[:n]], [x[:n]]))


@triton.jit
def reverse(x, y, N: tl.constexpr):
    """Each program keeps what the program at the opposite end wrote."""
    tl.store(y + tl.program_id(0), tl.load(x + N - 1 - tl.program_id(0)))


def launches_run(second: str = "0", n: int = 4) -> Run:
    """Two launches of n programs, the second on the same stream or on another."""
    x, y, z = torch.arange(float(n)), torch.zeros(n), torch.zeros(n)
    work = [Launch(reverse, n, dict(x=x, y=y, N=n)), Launch(reverse, n, dict(x=y, y=z, N=n), stream=second)]
    return Run([work], (), lambda: compare("z", [z], [x]))


@triton.jit
def store_at(x, i):
    tl.store(x + i, 1.0)


@triton.jit
def stores_in_a_helper(x, i):
    store_at(x, i)


def helper_run(i: int) -> Run:
    x = torch.zeros(4)
    return Run(
        [[Launch(stores_in_a_helper, 1, dict(x=x, i=i))]],
        (),
        lambda: compare("x", [x[i:]], [torch.ones(4)[i:]]),
    )


@triton.jit
def overwrites_its_table(inbox, rank, W: tl.constexpr):
    """Every rank writes into the table that all ranks read."""
    tl.store(tl.load(inbox + (rank + 1) % W).to(tl.pointer_type(tl.float32)), 1.0)
    tl.store(inbox + rank, tl.load(inbox + rank))


def table_run(world_size: int = 2) -> Run:
    """One table for all ranks, named as the memory that it points to."""
    inbox = symmetric("inbox", world_size, (N,))
    table = inbox.pointers
    work = [[Launch(overwrites_its_table, 1, dict(inbox=table, rank=r, W=world_size))] for r in range(world_size)]
    return Run(work, [inbox], lambda: ())


@triton.jit
def by_descriptor(x, y, z, N: tl.constexpr, PEER: tl.constexpr):
    """Each of two programs copies its half of x to y, and the half of the program PEER further from y to z."""
    half: tl.constexpr = N // 2
    mine = tl.program_id(0)
    source = tl.make_tensor_descriptor(x, [N], [1], [half])
    middle = tl.make_tensor_descriptor(y, [N], [1], [half])
    target = tl.make_tensor_descriptor(z, [N], [1], [half])
    middle.store([mine * half], source.load([mine * half]))
    tl.debug_barrier()
    there = (mine + PEER) % 2 * half
    target.store([there], middle.load([there]))


def descriptor_run(peer: int) -> Run:
    x, y, z = torch.arange(1.0 * N), torch.full((N,), torch.nan), torch.zeros(N)
    work = [[Launch(by_descriptor, 2, dict(x=x, y=y, z=z, N=N, PEER=peer))]]
    return Run(work, (), lambda: compare("z", [z], [x]))
