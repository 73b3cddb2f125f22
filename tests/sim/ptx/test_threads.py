"""Threads of one program that do different things, and numbers that only one rounding gives."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedtp.sim import Case, Launch, Run, Schedule, compare, explore, symmetric
from fusedtp.sim.explore import schedules
from fusedtp.sim.ptx import TARGETS
from fusedtp.sim.ptx.parse import UnsupportedPtx
from tests.sim.ptx.running import BEFORE_3_8, run_text

I32 = torch.int32

# Warps 0 and 1 meet and set a flag for which warps 2 and 3 poll.
MEETS = tl.constexpr("""{ .reg .pred p, q; .reg .b32 t, v; mov.u32 t, %tid.x; setp.ge.u32 p, t, 64; @p bra SPIN;
    bar.sync 1, 64; setp.eq.u32 q, t, 0; @q st.release.gpu.global.b32 [$1], 1; bra DONE;
    SPIN: ld.acquire.gpu.global.b32 v, [$1]; setp.eq.s32 q, v, 0; @q bra SPIN;
    DONE: mov.b32 $0, 0; }""")
# Warp 1 polls for what warp 0 makes by code that stands behind the loop.
BEHIND = tl.constexpr("""{ .reg .pred p, q; .reg .b32 t, v; mov.u32 t, %tid.x; setp.lt.u32 p, t, 32; @p bra MAKE;
    SPIN: ld.acquire.gpu.global.b32 v, [$1]; setp.eq.s32 q, v, 0; @q bra SPIN; ld.global.b32 $0, [$2]; bra DONE;
    MAKE: setp.eq.u32 q, t, 0; @q st.global.b32 [$2], 7; @q st.release.gpu.global.b32 [$1], 1; mov.b32 $0, 7;
    DONE: }""")
# Every lane of a warp takes one lock: the one that holds it goes on while the others poll.
LOCK = tl.constexpr("""{ .reg .pred p; .reg .b32 v, old; L: atom.acquire.gpu.global.cas.b32 old, [$1], 0, 1;
    setp.ne.s32 p, old, 0; @p bra L; ld.global.b32 v, [$2]; add.s32 v, v, 1; st.global.b32 [$2], v;
    atom.release.gpu.global.exch.b32 old, [$1], 0; mov.b32 $0, old; }""")


@triton.jit
def parts(flag, data, out, TEXT: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    got = tl.inline_asm_elementwise(
        TEXT, "=r,l,l", [flag + at * 0, data + at * 0], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(out + at, got)


@triton.jit
def scatter(src, index, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + tl.load(index + at), tl.load(src + at))


@triton.jit
def clamps(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.clamp(tl.load(x + at), -1.0, 1.0))


@triton.jit
def multiplies(a, b, c, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.fma(tl.load(a + at), tl.load(b + at), tl.load(c + at)))


@triton.jit
def adds_towards_zero(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, libdevice.add_rz(tl.load(x + at), 1.0))


@triton.jit
def divides_towards_zero(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, libdevice.div_rz(tl.load(x + at), 3.0))


@triton.jit
def cuts(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, libdevice.int2float_rz(tl.load(x + at)))


@triton.jit
def puts(box, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.atomic_xchg(box + at, at)
    tl.store(out + at, tl.load(box + at))


@triton.jit
def far_store(x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.inline_asm_elementwise(
        "{\n.reg .b32 t;\n.reg .b32 u;\n\nst.global.b32 [$1+1048576], 1;\nmov.b32 $0, 0;\n}",
        "=r,l", [x + at], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def specialized(a, c, M, B: tl.constexpr):
    """Triton gives the loop warps that load and two groups of warps that multiply; each group stores all of c."""
    total = tl.zeros((B, B), tl.float32)
    for t in tl.range(0, M // B, warp_specialize=True):
        x = a.load([t * B, 0])
        total = tl.dot(x, x.T, total)
    rows, cols = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    tl.store(c + rows * B + cols, total)


def case(kernel: Any, args: dict[str, Any], want: torch.Tensor, warps: int = 4, **options: int) -> Case:
    def make() -> Run:
        given = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in args.items()}
        out = given.get("out", given.get("x"))
        launch = Launch(kernel, 1, given, options=dict(num_warps=warps, **options))
        return Run([[launch]], [], lambda: compare("out", [out], [want]))

    return Case(kernel.__name__, make)


def tried(made: Case, target: str, count: int = 12) -> Any:
    return explore(made, schedules(count, target=target), shrink=False)


def flags(text: Any, width: int, warps: int, want: int) -> Case:
    zeros = {name: torch.zeros(1, dtype=I32) for name in ("flag", "data")}
    args = dict(**zeros, out=torch.zeros(width, dtype=I32), TEXT=text, N=width)
    return case(parts, args, torch.full((width,), want, dtype=I32), warps)


def locked() -> Case:
    def make() -> Run:
        lock, total = torch.zeros(1, dtype=I32), torch.zeros(1, dtype=I32)
        args = dict(flag=lock, data=total, out=torch.zeros(32, dtype=I32), TEXT=LOCK, N=32)
        launch = Launch(parts, 1, args, options=dict(num_warps=1))
        return Run([[launch]], [], lambda: compare("total", [total], [torch.full((1,), 32, dtype=I32)]))

    return Case("lock", make)


RIGHT: dict[str, Callable[[], Case]] = {
    "a barrier of some warps while others poll": lambda: flags(MEETS, 128, 4, 0),
    "a warp that polls for one whose code stands behind": lambda: flags(BEHIND, 64, 2, 7),
    "a lock of every lane": locked,
    "copies of one value": lambda: scattered(torch.arange(128) // 2 * 1.0, torch.arange(64.0)),
    "clamp between equal limits": lambda: case(
        clamps,
        dict(x=torch.linspace(-3, 3, 32), out=torch.zeros(32), N=32),
        torch.linspace(-3, 3, 32).clamp(-1, 1),
    ),
    "fma of fp64": lambda: fma_of_doubles(),
    "fma of bf16": lambda: fma_of_halves(),
}


def scattered(values: torch.Tensor, want: torch.Tensor) -> Case:
    args = dict(src=values, index=torch.arange(128) // 2, out=torch.zeros(64), N=128)
    return case(scatter, args, want)


def fma_of_doubles() -> Case:
    """The exact error of a product, which a separate product and sum lose."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(64, dtype=torch.float64, generator=generator) for _ in range(2))
    want = [float(Fraction(x) * Fraction(y) - Fraction(x * y)) for x, y in zip(a.tolist(), b.tolist())]
    args = dict(a=a, b=b, c=-(a * b), out=torch.zeros_like(a), N=64)
    return case(multiplies, args, torch.tensor(want, dtype=torch.float64))


def fma_of_halves() -> Case:
    """9 * 29 + 2**-20 is just above a tie of two bf16 numbers: rounding to fp32 first would make it a tie."""
    a, b, c = (torch.full((32,), x, dtype=torch.bfloat16) for x in (9.0, 29.0, 2.0**-20))
    args = dict(a=a, b=b, c=c, out=torch.zeros_like(a), N=32)
    return case(multiplies, args, torch.full((32,), 262.0, dtype=torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("make", RIGHT.values(), ids=RIGHT)
def test_right_kernels_pass(make: Callable[[], Case], target: str):
    outcome = tried(make(), target)
    outcome.raise_fault()
    assert outcome.schedules == 12


@pytest.mark.slow
def test_warps_that_triton_specializes():
    """Their mbarriers are polled by a parity that is 0 or -1."""

    def make() -> Run:
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(-2, 3, (5 * 64, 64), generator=generator).to(torch.float16)
        c, want = torch.zeros(64, 64), sum(part.float() @ part.float().T for part in x.split(64))
        args = dict(a=TensorDescriptor.from_tensor(x, [64, 64]), c=c, M=5 * 64, B=64)
        launch = Launch(specialized, 1, args, options=dict(num_warps=4))
        return Run([[launch]], [], lambda: compare("c", [c], [want]))

    outcome = tried(Case("specialized", make), "sm_90")
    outcome.raise_fault()
    assert outcome.schedules == 12


@pytest.mark.parametrize("same", [True, False])
def test_warps_that_store_to_one_place_race_unless_they_store_copies(same: bool):
    """A warp at a time: lanes 64 apart are in different warps."""
    values = torch.arange(128) % 64 * 1.0 if same else torch.arange(128.0)
    args = dict(src=values, index=torch.arange(128) % 64, out=torch.zeros(64), N=128)
    made = case(scatter, args, values[64:])
    fine = [Schedule("random", seed, weak=True, fine=True) for seed in range(6)]
    fault = explore(made, fine, shrink=False).fault
    assert fault is None if same else fault is not None and fault.rule == "write-write race", fault


@pytest.mark.parametrize("target", TARGETS)
def test_two_threads_of_one_store_that_write_different_values_race(target: str):
    """The result alone cannot show it: the last of the two wins, as in the reference."""
    values = torch.arange(128.0)
    fault = tried(scattered(values, values[1::2]), target, 1).fault
    assert fault.rule == "write-write race" and "two threads of one store" in fault.message
    assert "tl.store(out + tl.load(index" in open(__file__).read().splitlines()[fault.accesses[0].site.line - 1]


def test_directed_roundings():
    x = torch.full((32,), 2.0**24)
    more = case(adds_towards_zero, dict(x=x, out=torch.zeros(32), N=32), x)  # 2**24 + 1 lies between two
    whole = torch.full((32,), 16777219, dtype=I32)
    for made in (more, case(cuts, dict(x=whole, out=torch.zeros(32), N=32), torch.full((32,), 16777218.0))):
        assert tried(made, "sm_90").passed


def test_a_rounding_that_the_machine_has_not_is_refused():
    made = case(divides_towards_zero, dict(x=torch.ones(32), out=torch.zeros(32), N=32), torch.zeros(32))
    with pytest.raises(UnsupportedPtx, match=r"does not know `div\.rz"):
        tried(made, "sm_90")


def test_a_launch_that_may_overlap_the_one_before_is_refused():
    x = torch.linspace(-3, 3, 32)
    made = case(clamps, dict(x=x, out=torch.zeros(32), N=32), x.clamp(-1, 1), launch_pdl=True)
    with pytest.raises(UnsupportedPtx, match="launch_pdl"):
        tried(made, "sm_90")


def test_an_exchange_of_which_nobody_reads_the_old_value_is_a_write():
    def make() -> Run:
        box, out = symmetric("box", 1, (32,), I32), torch.zeros(32, dtype=I32)
        launch = Launch(puts, 1, dict(box=box.tensors[0], out=out, N=32), options=dict(num_warps=1))
        return Run([[launch]], [box], lambda: compare("out", [out], [torch.arange(32, dtype=I32)]))

    tried(Case("put", make), "sm_90").raise_fault()


def test_inline_ptx_is_named_by_the_line_of_its_call():
    """Its text begins with lines that are not instructions."""
    fault = tried(case(far_store, dict(x=torch.zeros(128, dtype=I32), N=128), torch.zeros(1)), "sm_80", 1).fault
    site = fault.accesses[0].site
    assert fault.rule == "out of bounds" and site.function == "far_store"
    lines = open(__file__).read().splitlines()
    # Triton 3.6 has the call's last line
    assert "inline_asm_elementwise" in "".join(lines[site.line - 1 - 2 * BEFORE_3_8 : site.line])


@pytest.mark.parametrize("seed", range(6))
def test_a_lane_that_is_behind_is_waited_for_while_other_warps_poll(seed: int) -> None:
    """The second warp polls in vain; the first one's lanes meet before the instruction that needs them all."""
    x, flag = torch.zeros(32, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    steps = "".join(f"$s{n}: add.s32 %r9, %r9, 1; setp.eq.s32 %p3, %r9, 99; @%p3 bra $s{n}; " for n in range(9))
    body = f"""setp.lt.u32 %p1, %r0, 32; setp.eq.u32 %p2, %r0, 0; mov.b32 %r2, 0; mov.b32 %r9, 0;
        st.shared.b32 [%r2], 7; @!%p1 bra $poll;
        $more: ld.relaxed.gpu.global.b32 %r8, [%rd0+124]; add.s32 %r9, %r9, 1;
        setp.lt.s32 %p5, %r9, 20; @%p5 bra $more;
        @!%p2 bra $all; {steps}
        $all: bar.warp.sync 0xffffffff;
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r5}}, [%r2];
        st.relaxed.gpu.global.b32 [%rd1], 1; ret;
        $poll: ld.relaxed.gpu.global.b32 %r8, [%rd1]; setp.eq.s32 %p4, %r8, 0; @%p4 bra $poll;"""
    run_text(body, x, flag, threads=64, shared=256, weak=True, fine=True, seed=seed)
    assert flag.item() == 1
