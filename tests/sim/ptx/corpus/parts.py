# mypy: ignore-errors
"""Shared parts of all kernels of the corpus: their arguments, the usual signals and waits, and how a case is made.

boxes   int64 [W]   address of each rank's box, rows of N numbers that nobody has written yet
flags   int64 [W]   address of each rank's int32 words, all 0 before the first call
src     [rows, N]   of this call and rank; numbers encode rank, call and place
dst     [rows, N]   of this call and rank
BUG     the mistake to make; "": none
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedtp.sim import Launch, Run, compare, symmetric

N = 64
kernel = triton.jit(do_not_specialize=("rank", "call"))  # compiled once for all ranks and calls


@triton.jit
def floats(table, rank):
    return tl.load(table + rank).to(tl.pointer_type(tl.float32))


@triton.jit
def words(table, rank):
    return tl.load(table + rank).to(tl.pointer_type(tl.int32))


@triton.jit
def longs(table, rank):
    return tl.load(table + rank).to(tl.pointer_type(tl.int64))


@triton.jit
def post(word, value, SEM: tl.constexpr = "release", SCOPE: tl.constexpr = "sys"):
    """Set the word after everything that this program has done."""
    tl.debug_barrier()
    tl.atomic_xchg(word, value, sem=SEM, scope=SCOPE)


@triton.jit
def arrive(word, SEM: tl.constexpr = "release", SCOPE: tl.constexpr = "sys"):
    """Count this program, after everything that it has done."""
    tl.debug_barrier()
    tl.atomic_add(word, 1, sem=SEM, scope=SCOPE)


@triton.jit
def wait(word, value, SEM: tl.constexpr = "acquire", SCOPE: tl.constexpr = "sys"):
    """Wait until the word is at least `value`."""
    while tl.atomic_add(word, 0, sem=SEM, scope=SCOPE) < value:
        pass
    tl.debug_barrier()


@triton.jit
def fence_sys():
    tl.inline_asm_elementwise("fence.acq_rel.sys; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fence_gpu():
    tl.inline_asm_elementwise("fence.acq_rel.gpu; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fence_sc():
    tl.inline_asm_elementwise("fence.sc.sys; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load_relaxed(word):
    """Relaxed load by every thread."""
    return tl.inline_asm_elementwise(
        "ld.relaxed.sys.global.b32 $0, [$1];", "=r,l", [word], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def load_acquire(word):
    """Acquire load by every thread."""
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [word], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def store_relaxed(word, value):
    """Relaxed store by every thread, of one value or of its own."""
    tl.inline_asm_elementwise(
        "st.relaxed.sys.global.b32 [$1], $2; mov.u32 $0, 0;", "=r,l,r", [word, value], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def store_release(word, value):
    """Release store by every thread."""
    tl.inline_asm_elementwise(
        "st.release.sys.global.b32 [$1], $2; mov.u32 $0, 0;", "=r,l,r", [word, value], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def thread():
    return tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)


class World:
    """The memory of a case and its launches.

    box     number of rows of the box; dtype: of the box; poisoned: reading unwritten numbers is a fault
    out     number of rows of dst; None: as many as src
    count   number of words per rank
    """

    def __init__(
        self, bug="", *, world=2, grid=1, calls=1, rows=1, out=None, box=1, dtype=torch.float32, poisoned=True,
        count=8, num_warps=2,
    ):  # fmt: skip
        self.ranks, self.calls, self.grid, self.options = range(world), calls, grid, dict(num_warps=num_warps)
        self.boxes = symmetric("box", world, (box, N), dtype, poisoned=poisoned)
        self.flags = symmetric("flag", world, (count,), torch.int32, poisoned=False)
        numbers = torch.arange(calls * rows * N, dtype=torch.float32).view(calls, rows, N)
        self.src = [numbers + 10000 * r for r in self.ranks]
        self.dst = [torch.full((calls, rows if out is None else out, N), -1.0) for _ in self.ranks]
        self.shared = dict(boxes=self.boxes.pointers, flags=self.flags.pointers, W=world, N=N, BUG=bug)

    def launch(self, of, rank, call=0, **more):
        args = dict(src=self.src[rank][call], dst=self.dst[rank][call], rank=rank, call=call + 1)
        return Launch(of, self.grid, args | self.shared, options=self.options, **more)

    def run(self, work, want) -> Run:
        """want: src of all ranks, each [calls, rows, N] -> dst of all ranks, each [calls, out, N]"""
        return Run(work, [self.boxes, self.flags], lambda: compare("dst", self.dst, want(self.src)))


def case(of, want, bug="", **sizes) -> Run:
    """The run of this kernel: its launches in a row, on one stream of each rank."""
    made = World(bug, **sizes)
    return made.run([[made.launch(of, r, c) for c in range(made.calls)] for r in made.ranks], want)


def previous(src):
    """Each rank gets what the previous rank has."""
    return [src[r - 1] for r in range(len(src))]


def total(src):
    """Each rank gets the sum."""
    return [sum(src[1:], src[0]) for _ in src]
