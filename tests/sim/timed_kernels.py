"""Small kernels for the tests of timed runs: right ones, and ones that cannot be timed or never end."""

import triton
import triton.language as tl


@triton.jit
def exchange(src, inboxes, flags, dst, rank, W: tl.constexpr, N: tl.constexpr, PUBLISH: tl.constexpr):
    """A block goes to the next rank, then a flag; the block from the previous rank is copied out."""
    at = tl.arange(0, N)
    to = (rank + 1) % W
    out = tl.load(inboxes + to).to(tl.pointer_type(tl.float32))
    tl.store(out + at, tl.load(src + at))
    if PUBLISH:
        flag = tl.load(flags + to).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flag, 1, sem="release", scope="sys")
    mine = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    while tl.atomic_add(mine, 0, sem="acquire", scope="sys") < 1:
        pass
    box = tl.load(inboxes + rank).to(tl.pointer_type(tl.float32))
    tl.store(dst + at, tl.load(box + at))


@triton.jit
def reads_after_a_flag(src, flags, dst, rank, W: tl.constexpr, N: tl.constexpr, LINES: tl.constexpr):
    """Sets a flag at the next rank. After the previous rank's flag it reads a block, LINES of it prefetched."""
    at = tl.arange(0, N)
    if LINES > 0:
        ahead = src + tl.arange(0, LINES) * 32
        tl.inline_asm_elementwise("prefetch.global.L2 [$1];", "=r,l", [ahead], dtype=tl.int32, is_pure=False, pack=1)
    flag = tl.load(flags + (rank + 1) % W).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flag, 1, sem="release", scope="sys")
    mine = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    while tl.atomic_add(mine, 0, sem="acquire", scope="sys") < 1:
        pass
    tl.store(dst + at, tl.load(src + at), mask=at < 1)


@triton.jit
def tell_all(flags, dst, rank, W: tl.constexpr, P: tl.constexpr):
    """Set one flag at every rank in one instruction, then poll all own flags at once until they are set."""
    other = tl.arange(0, P)
    theirs = tl.load(flags + other, mask=other < W, other=0).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(theirs + rank, 1, mask=other < W, sem="release", scope="sys")
    mine = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    late = W
    while late > 0:
        seen = tl.atomic_add(mine + other, 0, mask=other < W, sem="acquire", scope="sys")
        late = tl.sum(tl.where((other < W) & (seen < 1), 1, 0), 0)
    tl.store(dst + other, seen)


@triton.jit
def gather_rows(src, rows, dst, counter, K: tl.constexpr, M: tl.constexpr):
    """dst[i] = src[rows[i]], and the number of finished programs: indices and counters are real, rows are not."""
    first = tl.program_id(0) * M
    i = first + tl.arange(0, M)
    at = tl.load(rows + i)
    k = tl.arange(0, K)
    mask = (at >= 0)[:, None] & (k < K)[None, :]
    tl.store(dst + i[:, None] * K + k[None, :], tl.load(src + at[:, None] * K + k[None, :], mask=mask))
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def branches_on_data(src, dst, N: tl.constexpr):
    """Branches on numbers that a timed run does not have."""
    if tl.load(src) > 0:
        tl.store(dst + tl.arange(0, N), tl.load(src + tl.arange(0, N)))


@triton.jit
def sorts(src, dst, N: tl.constexpr):
    """Uses a function that a timed run does not know."""
    at = tl.arange(0, N)
    tl.store(dst + at, tl.sort(tl.load(src + at)))


@triton.jit
def past_the_end(src, N: tl.constexpr):
    """Stores one element too far."""
    tl.store(src + 1 + tl.arange(0, N), tl.load(src + tl.arange(0, N)))


@triton.jit
def walks(src, counter, N: tl.constexpr, B: tl.constexpr):
    """Copies blocks in place, then stores N before the end of the walk, and how far it came."""
    at = src + tl.arange(0, B)
    steps = 0
    blocks = 0
    for k in range(0, N, B):
        tl.store(at, tl.load(at))
        at += B
        steps += 3
        blocks += k
    tl.store(at - N, tl.load(at - N))
    tl.store(counter, steps)
    tl.store(counter + 1, blocks)


@triton.jit
def strides(src, counter, N: tl.constexpr, B: tl.constexpr):
    """Like `walks`, but carries nothing that grows unevenly: its loop is one event."""
    at = src + tl.arange(0, B)
    steps = 0
    for _ in range(0, N, B):
        tl.store(at, tl.load(at))
        at += B
        steps += 3
    tl.store(at - N, tl.load(at - N))
    tl.store(counter, steps)


@triton.jit
def polls_by_ptx(src, dst, N: tl.constexpr):
    """A wait that the timed run cannot see, so it would never end."""
    flag = src.to(tl.pointer_type(tl.int32))
    while (
        tl.inline_asm_elementwise("ld.acquire.sys.b32 $0, [$1];", "=r,l", [flag], tl.int32, is_pure=False, pack=1) != 1
    ):
        pass
    tl.store(dst, 1.0)


@triton.jit
def branches_on_ptx(src, dst, N: tl.constexpr):
    if tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [N], tl.int32, is_pure=True, pack=1) > 0:
        tl.store(dst, 1.0)


@triton.jit
def takes_no_attribute(src, dst, N: tl.constexpr):
    at = tl.arange(0, N)
    box = tl.make_tensor_descriptor(dst, [N], [1], [N])
    box.atomic_add([0], tl.load(src + at))


@triton.autotune([triton.Config({"B": 4}), triton.Config({"B": 8})], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["B"] == 0})
@triton.jit
def tuned(src, dst, counter, n, B: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.atomic_add(counter, 1, sem="relaxed")
    if EVEN:
        tl.store(dst + at, tl.load(src + at))
    else:
        tl.store(dst + at, tl.load(src + at, mask=at < n), mask=at < n)
