"""Faults seeded into the PTX of the library's kernels, and products in every layout."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedtp.checks.cases import compiled_cases, fused_case
from fusedtp.checks.dense import Call
from fusedtp.checks.workers import schedule_of
from fusedtp.ops.launch.config import Config
from fusedtp.ops.launch.config import Machine as Gpu
from fusedtp.ops.launch.plain import plan_matmul
from fusedtp.sim import (
    Await,
    Case,
    Copy,
    Launch,
    Run,
    Schedule,
    Signal,
    SimulationFault,
    compare,
    explore,
    run_schedule,
    symmetric,
)
from fusedtp.sim.explore import schedules
from fusedtp.sim.report import report
from tests.sim.ptx.running import BEFORE_3_8, once

Edit = Callable[[str], str]


# -- seeded faults -----------------------------------------------------------------------------------------------------


def relaxed_release(text: str) -> str:
    return text.replace(".sys.release.exch", ".sys.relaxed.exch")


def relaxed_acquire(text: str) -> str:
    return text.replace(".sys.acquire", ".sys.relaxed")


def longer_wait(text: str) -> str:
    """After each wait, one more group of copies may still be in flight."""
    return re.sub(r"(cp\.async\.wait_group\s+)(0x)?(\d+)", lambda m: f"{m[1]}{int(m[3]) + 1}", text)


def longer_wgmma_wait(text: str) -> str:
    return re.sub(r"(wgmma\.wait_group\.sync\.aligned )(\d+)", lambda m: f"{m[1]}{int(m[2]) + 1}", text)


def without_barriers_after(pattern: str) -> Edit:
    def edit(text: str) -> str:
        lines = text.split("\n")
        for n, line in enumerate(lines):
            if re.search(pattern, line):
                following = range(n, min(n + 12, len(lines)))
                at = next((k for k in following if "bar.sync" in lines[k]), None)
                if at is not None:
                    lines[at] = ""
        return "\n".join(lines)

    return edit


no_barrier_after_copies = without_barriers_after(r"cp\.async\.wait_group")
no_barrier_after_acquire = without_barriers_after(r"\.sys\.acquire")

GATHER = Call("all_gather_matmul", (40, 24), (40,), k=144, dtype=torch.float16, tile=32, block_k=32)
SCATTER = Call("matmul_reduce_scatter", (24, 24), (40,), k=136, dtype=torch.float16, tile=32, block_k=32, chunk=1)
WIDE = Call("all_gather_wgrad", (72, 56), (64,), k=64, dtype=torch.float16, tile=64, block_k=32)


def small_case(call: Call, target: str) -> Case:
    """Two calls of several tiles and several steps over K, two ranks."""
    gpu = Gpu("cuda", 3, 160 * 1024, capability=int(target[3:]))
    return fused_case(call.operation, [call, call], seed=3, machine=gpu)


FAULTS: list[tuple[Call, str, Edit, bool]] = [
    (GATHER, "sm_80", relaxed_release, False),
    (GATHER, "sm_80", relaxed_acquire, False),
    (GATHER, "sm_80", longer_wait, False),
    (GATHER, "sm_80", no_barrier_after_copies, True),
    (GATHER, "sm_80", no_barrier_after_acquire, True),
    (SCATTER, "sm_80", relaxed_release, False),
    (SCATTER, "sm_80", relaxed_acquire, False),
    (WIDE, "sm_90", longer_wgmma_wait, False),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "call, target, edit, fine",
    FAULTS,
    ids=[f"{c.operation}-{t}-{e.__name__}-{n}" for n, (c, t, e, _) in enumerate(FAULTS)],
)
def test_seeded_faults_are_found(call: Call, target: str, edit: Edit, fine: bool) -> None:
    """At least two of three seeds find each fault. The code as compiled shows none with any seed."""
    case = small_case(call, target)
    assert [once(case, target, seed, fine=fine) for seed in range(3)] == [None] * 3
    found = [once(case, target, seed, fine=fine, edit=edit) for seed in range(3)]
    assert sum(fault is not None for fault in found) >= 2, found


@triton.jit
def wait_for(flag, limit):
    """Wait until the flag is set, at most `limit` polls."""
    polls = 0
    while (tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1) & (polls < limit):
        polls += 1


@triton.jit
def gated_matmul(
    inbox, w, y, flags, limit, K, M: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, OUTSIDE: tl.constexpr
):  # fmt: skip
    """y [M, M] = inbox [M, K] @ w [M, K].T while a peer fills the inbox, with a flag for each CHUNK columns.

    Without OUTSIDE, the wait for a chunk is in the loop that loads it, and the compiler's software pipeliner issues
    loads of later iterations early. With OUTSIDE, it is in a loop over chunks, and the inner loop contains no wait.
    """
    ms, ks = tl.arange(0, M), tl.arange(0, BLOCK_K)
    acc = tl.zeros((M, M), tl.float32)
    if OUTSIDE:
        for first in range(0, K, CHUNK):
            wait_for(flags + first // CHUNK, limit)
            for k in range(first, first + CHUNK, BLOCK_K):
                a = tl.load(inbox + ms[:, None] * K + k + ks[None, :])
                acc = tl.dot(a, tl.load(w + k + ks[:, None] + ms[None, :] * K), acc)
    else:
        for k in range(0, K, BLOCK_K):
            if k % CHUNK == 0:
                wait_for(flags + k // CHUNK, limit)
            a = tl.load(inbox + ms[:, None] * K + k + ks[None, :])
            acc = tl.dot(a, tl.load(w + k + ks[:, None] + ms[None, :] * K), acc)
    tl.store(y + ms[:, None] * M + ms[None, :], acc)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_a_wait_inside_a_pipelined_loop_is_found(target: str) -> None:
    """The pipeliner loads before the wait. No schedule of the kernel's source shows this."""
    k, m, chunk, ranks = 256, 32, 64, range(2)

    def make(outside: bool, stages: int) -> Case:
        def run() -> Run:
            torch.manual_seed(0)
            inbox = symmetric("inbox", 2, (m, k), torch.float16, poisoned=False)
            flags = symmetric("flags", 2, (k // chunk,), torch.int32, poisoned=False)
            src = [torch.randint(-2, 3, (m, k)).half() for _ in ranks]
            w = torch.randint(-2, 3, (m, k)).half()
            y = [torch.zeros(m, m) for _ in ranks]
            shared = dict(limit=10**6, K=k, M=m, BLOCK_K=32, CHUNK=chunk, OUTSIDE=outside)
            work: list[list[Launch | Copy | Signal]] = [[], []]
            for rank in ranks:
                peer = 1 - rank
                args = dict(inbox=inbox.tensors[rank], w=w, y=y[rank], flags=flags.tensors[rank], **shared)
                work[rank].append(Launch(gated_matmul, 1, args, options=dict(num_warps=4, num_stages=stages)))
                for n in range(k // chunk):
                    for row in range(m):
                        part = slice(n * chunk, n * chunk + chunk)
                        work[rank].append(Copy(inbox.tensors[peer][row, part], src[rank][row, part], stream="copy"))
                    work[rank].append(Signal(flags.tensors[peer][n : n + 1], 1, "copy"))
            want = [src[1 - rank].float() @ w.float().T for rank in ranks]
            return Run(work, [inbox, flags], lambda: compare("y", y, want))

        return Case("gated", run)

    for outside, stages, expected in ((True, 3, 0), (False, 1, 0), (False, 3, 3)):
        found = [once(make(outside, stages), target, seed) for seed in range(3)]
        assert sum(fault is not None for fault in found) == expected, (outside, stages, found)


@triton.jit
def copied(dst, src, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(dst + at, tl.load(src + at))


@pytest.mark.parametrize("fence", [True, False])
@pytest.mark.parametrize("by", ["stream", "kernel"])
def test_the_end_of_a_kernel_is_known_elsewhere_by_a_release_of_its_stream(fence: bool, by: str) -> None:
    """By a write of the stream, with a fence, or by the release of the next kernel on it."""

    def make() -> Run:
        box, flags = symmetric("box", 2, (64,)), symmetric("flags", 2, (1,), torch.int32, poisoned=False)
        src, dst = torch.arange(64.0), torch.zeros(64)
        raised = dict(box=flags.tensors[0], flag=flags.tensors[1], src=flags.tensors[0], N=1)
        tells = Launch(send, 1, raised | dict(SEM="release" if fence else "relaxed"))
        sends = [Launch(copied, 1, dict(dst=box.tensors[1], src=src, N=64))]
        sends.append(Signal(flags.tensors[1], 1, fence=fence) if by == "stream" else tells)
        receives = [Await(flags.tensors[1], 1), Launch(copied, 1, dict(dst=dst, src=box.tensors[1], N=64))]
        return Run([sends, receives], [box, flags], lambda: compare("dst", [dst], [src]))

    faults = {(fault := once(Case("end", make), "sm_90", seed)) and fault.rule for seed in range(3)}
    assert faults == ({None} if fence else {"read-write race"})


# -- laws that the lint of compiled code leaves to execution -----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all_gather_matmul", "two_shot_all_reduce", "moe_combine", "meet"])
def test_a_wait_for_a_lost_peer_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 launches nothing. Each loop of rank 1 that polls for it has a second exit: no deadlock, but a record."""
    monkeypatch.setattr("fusedtp.sim.ptx.machine.MOST_TURNS", 30_000)
    (case,) = [case for case in compiled_cases(2, "sm_80") if case.name == name]

    def alone() -> Run:
        run = case.make()
        launches = [each for each in run.work[1] if isinstance(each, Launch)]
        for each in launches:
            if "peers" in each.args:
                each.args["peers"] = each.args["peers"]._replace(timeout_ns=1)
        garbage = [replace(each, poisoned=False) for each in run.memory]  # after a timeout anything may be read
        return replace(run, work=[[], launches], memory=garbage)

    fault = once(Case(name, alone), "sm_80")
    assert fault is not None and fault.rule == "timed out", fault
    assert "rank 1 recorded status" in str(fault)


@triton.jit
def send_block(x, out, flag):
    """Send a block by a TMA store, with descriptors from the host."""
    out.store([0, 0], x.load([0, 0]))
    tl.debug_barrier()
    tl.atomic_xchg(flag, 1, sem="release", scope="sys")


def block_case() -> Case:
    def make() -> Run:
        box, flag = (
            symmetric("box", 2, (32, 64), torch.float16),
            symmetric("flag", 2, (1,), torch.int32, poisoned=False),
        )
        x, y = torch.randn(32, 64).half(), torch.full((32 * 64,), torch.nan, dtype=torch.float16)
        blocks = [TensorDescriptor.from_tensor(each, [32, 64]) for each in (x, box.tensors[1])]
        send = Launch(send_block, 1, dict(x=blocks[0], out=blocks[1], flag=flag.tensors[1]))
        take = Launch(receive, 1, dict(dst=y, box=box.tensors[1], flag=flag.tensors[1], N=32 * 64))
        return Run([[send], [take]], [box, flag], lambda: compare("y", [y], [x.flatten()]))

    return Case("block", make)


def wait_to_reuse(text: str) -> str:
    """Like Triton before 3.8: wait until the source may be reused, not until the data have landed."""
    changed = re.sub(r"(cp\.async\.bulk\.wait_group)(\s)", r"\1.read\2", text)
    assert changed != text or "cp.async.bulk" not in text
    return changed


def test_a_tensor_store_has_landed_when_its_flag_is_released() -> None:
    edit = None if BEFORE_3_8 else wait_to_reuse
    assert BEFORE_3_8 or [once(block_case(), "sm_90", seed) for seed in range(3)] == [None] * 3
    found = [once(block_case(), "sm_90", seed, edit=edit) for seed in range(3)]
    assert sum(fault is not None for fault in found) >= 2, found


# -- products in every layout ------------------------------------------------------------------------------------------


@triton.jit
def product(x, w, y, K, SX: tl.constexpr, SW: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """y [M, N] = x [M, K] @ w [K, N]; S: strides of rows and columns."""
    ms, ns, ks = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK)
    acc = tl.zeros((M, N), tl.float32)
    for k in range(0, K, BLOCK):
        a = tl.load(x + ms[:, None] * SX[0] + (k + ks)[None, :] * SX[1])
        b = tl.load(w + (k + ks)[:, None] * SW[0] + ns[None, :] * SW[1])
        acc = tl.dot(a, b, acc, input_precision="tf32")
    tl.store(y + ms[:, None] * N + ns[None, :], acc)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    "dtype, x_major, w_major",
    [
        (torch.float16, "k", "k"),
        (torch.bfloat16, "m", "n"),
        (torch.float16, "m", "k"),
        (torch.float32, "k", "n"),
        (torch.float8_e5m2, "k", "k"),
    ],
)
def test_products_of_every_layout(target: str, dtype: torch.dtype, x_major: str, w_major: str) -> None:
    """Descriptors and swizzles as the compiler makes them: operands with K or rows innermost."""
    assert once(product_case(dtype, x_major, w_major), target, fine=dtype == torch.bfloat16) is None


def product_case(dtype: torch.dtype = torch.float16, x_major: str = "k", w_major: str = "k") -> Case:
    m, n, k = 64, 32, 128
    torch.manual_seed(0)
    a, b = torch.randint(-2, 3, (m, k)).to(dtype), torch.randint(-2, 3, (k, n)).to(dtype)
    x = a if x_major == "k" else a.t().contiguous().t()
    w = b if w_major == "n" else b.t().contiguous().t()
    y = torch.zeros(m, n)
    args = dict(x=x, w=w, y=y, K=k, SX=x.stride(), SW=w.stride(), M=m, N=n, BLOCK=64)
    launch = Launch(product, 1, args, options=dict(num_warps=4, num_stages=3))
    return Case("product", lambda: Run([[launch]], (), lambda: compare("y", [y], [a.float() @ b.float()])))


def flat_case(k: int, programs: int) -> Case:
    """The plain matmul of 3 x 3 tiles, the last ones partial, in one loop over tiles and K; y is stored by TMA."""
    m, n = 150, 136
    torch.manual_seed(0)
    x, w, bias = (torch.randint(-2, 3, shape).bfloat16() for shape in ((m, k), (n, k), (n,)))
    config = Config(64, 64, 64, num_warps=4, num_stages=3, group=2, tma=True, halves=True)

    def make() -> Run:
        launch, y = plan_matmul(x, w, bias, torch.bfloat16, config, "ieee", Gpu("cuda", 9, 232448, capability=90))
        assert launch.args["FLAT"]
        y.fill_(torch.nan)
        wanted = (x.float() @ w.float().t() + bias.float()).bfloat16()
        work = [[Launch(launch.kernel, programs, launch.args, options=launch.options)]]
        return Run(work, (), lambda: compare("y", [y], [wanted]))

    return Case("flat matmul", make)


@pytest.mark.slow
@pytest.mark.parametrize("k, programs", [(40, 2), (72, 4), (200, 3), (72, 9)])
def test_one_loop_over_tiles_and_k(k: int, programs: int) -> None:
    """Tiles with one block of K, with fewer than are in flight at once, and with more; a program may have one tile."""
    assert once(flat_case(k, programs), "sm_90", fine=k == 72) is None


def test_half_a_tile_over_one_that_is_still_read_is_found() -> None:
    """A TMA store may still be reading its source while the next half is written there."""

    def longer(text: str) -> str:
        return re.sub(r"(cp\.async\.bulk\.wait_group\S*\s+)0;", r"\g<1>1;", text)

    fault = once(flat_case(72, 4), "sm_90", edit=longer)
    assert fault is not None and fault.rule == "wrong value"


def tiles_case(k: int) -> Case:
    """The plain matmul by pointers: one program computes nine tiles, one after the other."""
    torch.manual_seed(0)
    x, w = (torch.randint(-2, 3, (48, k)).float() for _ in range(2))
    config = Config(16, 16, 16, num_warps=4, num_stages=3)

    def make() -> Run:
        launch, y = plan_matmul(x, w, None, torch.float32, config, "ieee", Gpu("cuda", 1, 160 * 1024, capability=80))
        y.fill_(torch.nan)
        work = [[Launch(launch.kernel, 1, launch.args, options=launch.options)]]
        return Run(work, (), lambda: compare("y", [y], [x @ w.t()]))

    return Case("tiles", make)


def test_a_copy_that_nobody_waited_for_races_with_the_next_tiles() -> None:
    """A copy still in flight after the loop over K shows in each schedule."""

    def unfinished(text: str) -> str:
        changed = re.sub(r"(cp\.async\.wait_group\s+)0;", r"\g<1>1;", text)
        assert changed != text
        return changed

    for seed in range(6):
        fault = once(tiles_case(56), "sm_80", seed, edit=unfinished)
        assert fault is not None and fault.rule == "write-write race" and fault.cause == "both are in flight"
        assert once(tiles_case(56), "sm_80", seed) is None


# -- through the library's interface -----------------------------------------------------------------------------------


@triton.jit
def send(src, box, flag, SEM: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(box + at, tl.load(src + at))
    tl.debug_barrier()
    tl.atomic_xchg(flag, 1, sem=SEM, scope="sys")


@triton.jit
def receive(dst, box, flag, N: tl.constexpr):
    at = tl.arange(0, N)
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
        pass
    tl.debug_barrier()
    tl.store(dst + at, tl.load(box + at))


def message_case(sem: str) -> Case:
    def make() -> Run:
        box, flag = symmetric("box", 2, (256,)), symmetric("flag", 2, (1,), torch.int32, poisoned=False)
        src, dst = torch.randn(256), torch.full((256,), torch.nan)
        at = dict(box=box.tensors[1], flag=flag.tensors[1], N=256)
        work = [[Launch(send, 1, dict(src=src, SEM=sem, **at))], [Launch(receive, 1, dict(dst=dst, **at))]]
        return Run(work, [box, flag], lambda: compare("dst", [dst], [src]))

    return Case("message", make)


def test_explore_finds_and_replays_a_fault_of_compiled_code() -> None:
    def chosen() -> Iterator[Schedule]:
        return schedules(8, target="sm_80")

    assert explore(message_case("release"), chosen()).passed
    fault = explore(message_case("relaxed"), chosen()).fault
    assert fault is not None and fault.rule == "read-write race" and fault.target == "sm_80"
    access = fault.accesses[1]
    lines, first = inspect.getsourcelines(receive.fn)
    load = first + next(n for n, line in enumerate(lines) if "tl.load(box + at)" in line)
    assert access.tensor == "box of rank 1" and access.site.file == __file__
    assert access.site.line == load
    assert "--target sm_80" in report(fault, name="message.py::case")
    with pytest.raises(SimulationFault) as again:
        run_schedule(message_case("relaxed").make(), schedule_of(fault))
    assert again.value.fault.name == fault.name
