"""What programs see of each other's stores, and what ends a run: bounds, a deadlock, the step limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fusedtp.sim import DEFAULT, Launch, Run, Schedule, SimulationFault, Site, run_schedule, symmetric
from fusedtp.sim.faults import Fault
from fusedtp.sim.memory import Memory
from fusedtp.sim.ptx.cause import cause
from fusedtp.sim.ptx.clocks import Known, Slot, Source, Space
from fusedtp.sim.ptx.machine import Machine
from fusedtp.sim.ptx.memory import Line
from fusedtp.sim.ptx.parse import UnsupportedPtx
from fusedtp.sim.ptx.shadow import Event, Operation, Word, Write
from fusedtp.sim.report import report
from fusedtp.sim.strategies import STRATEGIES
from tests.sim.ptx.running import Given, Text, run_all, run_text

every_lane_or_half = pytest.mark.parametrize("half", [False, True], ids=["every lane", "half"])
ATOMICS = {
    "add.s32": lambda old, x: old + x, "max.s32": max, "min.s32": min, "exch.b32": lambda old, x: x,
    "and.b32": lambda old, x: old & x, "or.b32": lambda old, x: old | x, "xor.b32": lambda old, x: old ^ x,
    "inc.u32": lambda old, x: 0 if old >= x else old + 1,
    "dec.u32": lambda old, x: x if old == 0 or old > x else old - 1,
}  # fmt: skip


@triton.jit
def sine_and_cosine(x, y):
    at = tl.arange(0, 32)
    v = tl.load(x + at)
    tl.store(y + at, tl.sin(v) + tl.cos(v))


@pytest.mark.parametrize("name", ATOMICS)
def test_atomics(name: str) -> None:
    """9.7.13.5: lanes go one after another, and each gets the previous value."""
    x = torch.randint(0, 50, (32,), dtype=torch.int32)
    word, old = torch.tensor([17], dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    operation, _, t = name.partition(".")
    body = f"""mad.wide.u32 %rd8, %r0, 4, %rd0; ld.global.b32 %r1, [%rd8];
        atom.global.gpu.relaxed.{operation}.{t} %r2, [%rd1], %r1;
        mad.wide.u32 %rd8, %r0, 4, %rd2; st.global.b32 [%rd8], %r2;"""
    run_text(body, x, word, old)
    now = 17
    for lane in range(32):
        assert old[lane] == now
        now = ATOMICS[name](now, int(x[lane]))
    assert word[0] == now


def test_compare_and_swap_makes_a_lock() -> None:
    """Two programs of two ranks count to 8 under a lock of atom.cas, in every interleaving."""
    body = """setp.ne.b32 %p1, %r0, 0; @%p1 ret; mov.b32 %r5, 0;
        $next:
        $spin: atom.acquire.sys.global.cas.b32 %r1, [%rd0], 0, 1; setp.ne.b32 %p2, %r1, 0; @%p2 bra $spin;
        ld.global.b32 %r2, [%rd1]; add.s32 %r2, %r2, 1; st.global.b32 [%rd1], %r2;
        atom.release.sys.global.exch.b32 %r1, [%rd0], 0;
        add.s32 %r5, %r5, 1; setp.lt.s32 %p3, %r5, 4; @%p3 bra $next;"""
    for seed in range(5):
        lock, count = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        launch = Launch(Text(body, 2), 1, dict(lock=lock, count=count))
        run_all([[launch], [launch]], seed=seed, weak=True)
        assert count[0] == 8
        unlocked = Launch(Text(body.replace(".release.", ".relaxed."), 2), 1, dict(lock=lock, count=count))
    for seed in range(5):
        with pytest.raises(SimulationFault) as caught:  # a lock that is not released in order
            run_all([[unlocked], [unlocked]], seed=seed, weak=True)
        assert caught.value.fault.rule in ("read-write race", "write-write race")


def message(
    release: str, acquire: str, seed: int, barrier: str = "bar.sync 0;", load: str = "ld.global.b32", **options: bool
) -> bool:
    """Whether rank 1 gets all 64 words that rank 0 wrote before its flag."""
    data, flag, out = (
        torch.zeros(64, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(64, dtype=torch.int32),
    )
    sender = f"""mad.wide.u32 %rd8, %r0, 4, %rd0; add.s32 %r1, %r0, 100; st.global.b32 [%rd8], %r1; {barrier}
        setp.eq.b32 %p1, %r0, 0; @%p1 {release}"""
    receiver = f"""setp.ne.b32 %p1, %r0, 0; @%p1 bra $met;
        $spin: {acquire} setp.ne.b32 %p2, %r1, 1; @%p2 bra $spin;
        $met: bar.sync 0;
        mad.wide.u32 %rd8, %r0, 4, %rd0; {load} %r1, [%rd8];
        mad.wide.u32 %rd8, %r0, 4, %rd2; st.global.b32 [%rd8], %r1;"""
    args = dict(data=data, flag=flag, out=out)
    work = [[Launch(Text(text, 3, 64), 1, args)] for text in (sender, receiver)]
    run_all(work, seed=seed, **{"weak": True, **options})
    return torch.equal(out, torch.arange(100, 164, dtype=torch.int32))


RELEASES = {
    "red.release": "red.global.release.sys.exch.b32 [%rd1], 1;".replace("red", "atom").replace(" [", " %r2, ["),
    "st.release": "st.global.release.sys.b32 [%rd1], 1;",
    "fence": "bra $send; ret; $send: fence.acq_rel.sys; st.global.relaxed.sys.b32 [%rd1], 1;",
}
ACQUIRES = {
    "ld.acquire": "ld.global.acquire.sys.b32 %r1, [%rd1];",
    "atom.acquire": "atom.global.acquire.sys.add.u32 %r1, [%rd1], 0;",
    "fence": "ld.global.relaxed.sys.b32 %r1, [%rd1]; fence.acq_rel.sys;",
}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("acquire", ACQUIRES)
def test_messages_arrive(release: str, acquire: str) -> None:
    """Messages by every kind of release and acquire, lanes in lockstep and warp by warp: PTX ISA section 8."""
    for seed in range(4):
        assert message(RELEASES[release], ACQUIRES[acquire], seed, fine=seed % 2 == 1)


@pytest.mark.parametrize("broken", ["relaxed release", "relaxed acquire", "volatile", "no barrier"])
def test_messages_without_order_are_lost(broken: str) -> None:
    """Every seed shows a race, weak or not, in lockstep or warp by warp."""
    release, acquire, barrier = RELEASES["st.release"], ACQUIRES["ld.acquire"], "bar.sync 0;"
    if broken == "relaxed release":
        release = release.replace("release", "relaxed")
    elif broken == "relaxed acquire":
        acquire = acquire.replace("acquire", "relaxed")
    elif broken == "volatile":
        acquire = "ld.volatile.global.b32 %r1, [%rd1];"
    else:
        barrier = ""
    for seed in range(6):
        with pytest.raises(SimulationFault) as caught:
            message(release, acquire, seed, barrier, weak=seed % 3 != 0, fine=seed % 2 == 1)
        fault = caught.value.fault
        assert fault.rule == "read-write race" and fault.accesses[0].tensor == "data of rank 0"


def test_a_load_of_constants_does_not_see_what_a_message_brings() -> None:
    """Its cache is not coherent: data that it reads may not be written while its kernel runs."""
    release, acquire = RELEASES["st.release"], ACQUIRES["ld.acquire"]
    for seed in range(4):
        with pytest.raises(SimulationFault, match=r"are ordered, but ld\.global\.nc reads") as caught:
            message(release, acquire, seed, load="ld.global.nc.L1::no_allocate.b32", weak=seed % 2 == 1)
        assert caught.value.fault.rule == "read-write race"


@pytest.mark.parametrize("launches", [1, 2])
def test_a_load_of_constants_sees_what_the_launch_before_has_written(launches: int) -> None:
    """In the same launch it may not read even the thread's own stores."""
    store, load = "st.global.b32 [%rd0], 7;", "ld.global.nc.b32 %r1, [%rd0]; st.global.b32 [%rd1], %r1;"
    x, y = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    texts = [store, load] if launches == 2 else [store + load]
    work = [Launch(Text(text, 2, 1), 1, dict(x=x, y=y)) for text in texts]
    if launches == 1:
        with pytest.raises(SimulationFault, match=r"are ordered, but ld\.global\.nc reads"):
            run_all([work])
    else:
        run_all([work])
        assert y.item() == 7


def test_a_program_sees_its_own_stores_at_once() -> None:
    """Words are stored by halves and read whole, before any other program may see them."""
    x = torch.zeros(32, dtype=torch.int32)
    body = """mad.wide.u32 %rd8, %r0, 4, %rd0; mov.b16 %rs1, 7; cvt.u16.u32 %rs2, %r0;
        st.global.b32 [%rd8], 99; st.global.b16 [%rd8], %rs1; st.global.b16 [%rd8+2], %rs2;
        ld.global.b32 %r1, [%rd8]; add.s32 %r1, %r1, 1; st.global.b32 [%rd8], %r1;"""
    run_text(body, x, weak=True)
    assert x.tolist() == [(n << 16) + 8 for n in range(32)]


def test_cp_async_lands_at_its_wait() -> None:
    """Groups of a thread complete in order: after wait_group 1 the first of two has landed, the second has not."""
    src, out = torch.arange(1, 65, dtype=torch.int32), torch.zeros(3, 32, dtype=torch.int32)
    body = """mad.wide.u32 %rd8, %r0, 4, %rd0; shl.b32 %r1, %r0, 2;
        cp.async.ca.shared.global [%r1], [%rd8], 4; cp.async.commit_group;
        cp.async.ca.shared.global [%r1+128], [%rd8+128], 4; cp.async.commit_group;
        cp.async.wait_group 1; ld.shared.b32 %r2, [%r1]; ld.shared.b32 %r3, [%r1+128];
        cp.async.wait_group 0; ld.shared.b32 %r4, [%r1+128];
        mad.wide.u32 %rd9, %r0, 4, %rd1;
        st.global.b32 [%rd9], %r2; st.global.b32 [%rd9+128], %r3; st.global.b32 [%rd9+256], %r4;"""
    run_text(body, src, out, shared=256, weak=True)
    assert torch.equal(out[0], src[:32]) and torch.equal(out[2], src[32:]) and not (out[1] == src[32:]).any()
    zeros = body.replace("[%rd8+128], 4;", "[%rd8+128], 4, 0;")  # no byte of it is read: 9.7.9.25.3
    run_text(zeros, src, out, shared=256, weak=True)
    assert not out[2].any()


@pytest.mark.parametrize(
    "body, rule",
    [
        ("ld.global.b32 %r1, [%rd0+256];", "out of bounds"),
        ("st.global.b32 [%rd0+-4], %r0;", "out of bounds"),
        ("ld.global.v2.b32 {%r1, %r2}, [%rd0+252];", "misaligned"),
        ("ld.global.b32 %r1, [%rd0+2];", "misaligned"),
        ("atom.global.add.u32 %r1, [%rd0+1000], 1;", "out of bounds"),
        ("ld.shared.b32 %r1, [%r0+1];", "misaligned"),
        ("ld.shared.v2.b32 {%r1, %r2}, [%r0+4];", "misaligned"),
        ("mov.b32 %r1, 64; st.shared.b32 [%r1], 0;", "out of bounds"),
        (".local .b8 x[8]; st.local.b32 [x+8], 0;", "out of bounds"),
        (".local .b8 x[8]; ld.local.b32 %r1, [x+-4];", "out of bounds"),
        (".local .b8 x[8]; st.local.b32 [x+2], 0;", "misaligned"),
        (
            ".local .b8 x[8]; mov.b64 %rd9, x; cvta.local.u64 %rd8, %rd9; ld.b64 %rd9, [%rd8+8];",
            "out of bounds",
        ),
        ("cp.async.ca.shared.global [%r0], [%rd0+256], 4; cp.async.wait_all;", "out of bounds"),
        ("cp.async.ca.shared.global [%r0], [%rd0+256], 4;", "out of bounds"),  # lands as the program ends
        ("trap;", "assertion"),
        ("mov.b32 %r1, 8; mbarrier.arrive.shared.b64 _, [%r1];", "assertion"),
    ],
)
def test_bad_accesses(body: str, rule: str) -> None:
    with pytest.raises(SimulationFault) as caught:
        run_text(f".loc 1 7 1\n{body}", torch.zeros(64, dtype=torch.int32), shared=64)
    assert caught.value.fault.rule == rule and caught.value.fault.accesses[0].site.line == 7


@dataclass(frozen=True)
class WithTables(Text):
    """A kernel after the module's tables of constants."""

    tables: str = ""

    @property
    def ptx(self) -> str:
        return self.tables + super().ptx


def test_a_read_behind_a_table_of_constants_is_out_of_bounds() -> None:
    """Each table begins at a multiple of 16 bytes; only the tables' own bytes are in bounds."""
    tables = "".join(f".global .align 4 .b8 table_{n}[{4 * n}] = {{{n}, 0, 0, {n}}};\n" for n in (1, 5))
    for at, want in (("table_1", 0x01000001), ("table_5+0", 0x05000005), ("table_5+16", 0), ("table_5+20", None)):
        out = torch.zeros(1, dtype=torch.int32)
        text = WithTables(f"ld.global.b32 %r1, [{at}]; st.global.b32 [%rd0], %r1;", 1, tables=tables)
        if want is None:
            with pytest.raises(SimulationFault, match="constant memory has 36 bytes"):
                run_all([[Launch(text, 1, dict(out=out))]])
        else:
            run_all([[Launch(text, 1, dict(out=out))]])
            assert out.item() == want, at


@pytest.mark.parametrize("t, one", [("f16", 0x3C00), ("bf16", 0x3F80)])
def test_an_atomic_of_16_bits_leaves_a_nan_out(t: str, one: int) -> None:
    """Like min and max without .NaN, 9.7.4.8; packed or not."""
    for old, given in ((one, 0x7FFF), (0x7FFF, one)):
        single, pair = torch.tensor([old], dtype=torch.int16), torch.tensor([old * 0x10001], dtype=torch.int32)
        body = f"""setp.ne.b32 %p1, %r0, 0; @%p1 ret; mov.b16 %rs1, {given}; mov.b32 %r1, {given * 0x10001};
            atom.global.min.noftz.{t} %rs2, [%rd0], %rs1; atom.global.min.noftz.{t}x2 %r2, [%rd1], %r1;"""
        run_text(body, single, pair)
        assert (single.item(), pair.item()) == (one, one * 0x10001)


@pytest.mark.parametrize("t, one", [("f16", 0x3C00), ("bf16", 0x3F80)])
def test_a_packed_atomic_is_one_of_each_half(t: str, one: int) -> None:
    """8.2.3: so it does not race with an atomic of another rank on one half. The whole must be aligned."""
    body = """setp.ne.b32 %p1, %r0, 0; @%p1 ret; mov.b16 %rs1, {0}; mov.b32 %r1, {1};
        atom.global.sys.add.noftz.{2} %{3}, [%rd0+{4}], %{5};"""
    pair, single = (
        body.format(one, one * 0x10001, *rest) for rest in ((t + "x2", "r2", 0, "r1"), (t, "rs2", 2, "rs1"))
    )
    for seed in range(4):
        x = torch.zeros(2, dtype=torch.float16 if t == "f16" else torch.bfloat16)
        run_all([[Launch(Text(text, 1), 1, dict(x=x))] for text in (pair, single)], [Memory("x", (x, x))], seed)
        assert x.tolist() == [1, 2]
    with pytest.raises(SimulationFault, match="misaligned"):
        run_text(body.format(one, one * 0x10001, t + "x2", "r2", 2, "r1"), torch.zeros(4, dtype=torch.float16))


def test_a_race_has_the_same_name_wherever_tensors_lie() -> None:
    """One store of another rank meets two stores, to x and to y: the report names the first lane's first."""
    pool, names = torch.zeros(96, dtype=torch.int32), set()
    to = "mul.wide.u32 %rd5, %r0, 4; add.s64 %rd6, %rd0, %rd5; add.s64 %rd7, %rd1, %rd5;"
    two = Text(f".loc 1 10 1\n{to} st.global.b32 [%rd6], 1;\n.loc 1 11 1\nst.global.b32 [%rd7], 1;", 2)
    half = "setp.lt.u32 %p1, %r0, 16; selp.b64 %rd8, %rd6, %rd7, %p1; st.global.b32 [%rd8], 2;"
    for x, y in ((pool[:32], pool[64:]), (pool[64:], pool[:32])):
        both = [Launch(text, 1, dict(x=x, y=y)) for text in (two, Text(f".loc 1 20 1\n{to} {half}", 2))]
        for seed in range(4):
            with pytest.raises(SimulationFault) as caught:
                run_all([[both[0]], [both[1]]], [Memory("x", (x, x)), Memory("y", (y, y))], seed)
            names.add((seed, caught.value.fault.name))
    assert len(names) == 4


def test_variables_in_shared_memory_have_places_of_their_own() -> None:
    """They lie behind the kernel's own, aligned. A name means the innermost declaration."""
    out = torch.zeros(4, 32, dtype=torch.int32)
    body = """.shared .b8 tag; .shared .align 16 .b32 word, row[32];
        mad.wide.u32 %rd9, %r0, 4, %rd0; shl.b32 %r1, %r0, 2; mov.u32 %r2, row; add.u32 %r3, %r2, %r1;
        st.shared.b32 [%r1], 1; st.shared.b8 [tag], 2; st.shared.b32 [word], 3; st.shared.b32 [%r3], %r0;
        { .shared .b32 word; st.shared.b32 [word], 5; ld.shared.b32 %r4, [word]; st.global.b32 [%rd9+384], %r4; }
        ld.shared.b32 %r4, [%r1]; st.global.b32 [%rd9], %r4;
        ld.shared.b32 %r4, [word]; and.b32 %r5, %r2, 15; add.u32 %r4, %r4, %r5; st.global.b32 [%rd9+128], %r4;
        ld.shared.b32 %r4, [row+12]; st.global.b32 [%rd9+256], %r4;"""
    run_text(body, out, shared=128)
    assert [set(row.tolist()) for row in out] == [{1}, {3}, {3}, {5}]
    with pytest.raises(UnsupportedPtx, match=r"does not know `\.extern \.shared"):
        run_text(".extern .shared .b8 more[];", out, shared=128)
    with pytest.raises(UnsupportedPtx, match=r"does not know `\.shared \.b32 some\[4\*4\]"):
        run_text(".shared .b32 some[4*4];", out, shared=128)


@pytest.mark.parametrize(
    "body, place",
    [
        ("st.global.b64 [%rd0+12], %rd0;", "store a0 of rank 0 [3]"),
        ("ld.global.b32 %r1, [%rd0+-2];", "load address 0x"),
        ("mov.b32 %r1, 6; st.shared.b32 [%r1], 0;", "access shared memory [6]"),
        ("mov.b32 %r1, 68; st.shared.b32 [%r1], 0;", "access shared memory [68]"),
        (".local .b8 x[8]; st.local.b32 [x+2], 0;", "access local memory [2]"),
        (".local .b8 x[0x8]; st.local.b32 [x+4], 0; st.local.b32 [x+8], 0;", "access local memory [8]"),
        (".local .b8 x[8]; ld.b32 %r1, [%rd0+-2];", "load address 0x"),
        ("mov.b32 %r1, 0; st.shared.b32 [%r1+-4], 0;", "access shared memory [-4]"),
        ("trap;", "trap\n"),
    ],
)
def test_the_place_of_a_bad_access_is_named(body: str, place: str) -> None:
    with pytest.raises(SimulationFault) as caught:
        run_text(f".loc 1 7 1\n{body}", torch.zeros(64, dtype=torch.int32), shared=64)
    for said in (report(caught.value.fault), str(caught.value.fault)):
        assert f"program 0: {place}" in said


@every_lane_or_half
def test_local_memory_is_each_lanes_own(half: bool) -> None:
    """By addresses in local memory and by generic ones; other tensors' addresses stay the same."""
    x, out = torch.randint(1, 1 << 30, (2, 32), dtype=torch.int32), torch.zeros(5, 32, dtype=torch.int32)
    body = f""".local .align 8 .b8 depot[24]; .reg .b64 %SP; .reg .b32 %SPL;
        mov.b32 %SPL, depot; mov.b64 %rd9, depot; cvta.local.u64 %SP, %rd9;
        mad.wide.u32 %rd8, %r0, 4, %rd0; mad.wide.u32 %rd7, %r0, 4, %rd1;
        {"setp.ge.u32 %p1, %r0, 16; @%p1 bra $past;" if half else ""}
        ld.global.b32 %r1, [%rd8]; ld.b32 %r2, [%rd8+128]; and.b32 %r3, %r0, 1; shl.b32 %r3, %r3, 2;
        add.s32 %r4, %SPL, %r3; st.local.b32 [%r4+8], %r1; sub.s32 %r5, 4, %r3; st.local.b32 [%r5+8], %r2;
        ld.local.v2.b32 {{%r6, %r7}}, [depot+8]; st.global.b32 [%rd7], %r6; st.b32 [%rd7+128], %r7;
        st.b64 [%SP+16], %rd8; ld.local.b64 %rd6, [depot+16]; ld.b32 %r8, [%rd6]; st.global.b32 [%rd7+256], %r8;
        st.b8 [%SP+8], 0; ld.b32 %r9, [%SP+8]; st.global.b32 [%rd7+384], %r9;
        cvta.to.local.u64 %rd5, %SP; ld.local.u8 %r10, [%rd5+9]; st.global.b32 [%rd7+512], %r10;
        ld.volatile.u8 %r10, [%SP+9]; st.global.b32 [%rd7+512], %r10;
        $past:"""
    run_text(body, x, out)
    odd = torch.arange(32) % 2 == 1
    first, second = torch.where(odd, x[1], x[0]), torch.where(odd, x[0], x[1])
    want = torch.stack([first, second, x[0], first & ~255, (first >> 8) & 255])
    lanes = 16 if half else 32
    assert torch.equal(out[:, :lanes], want[:, :lanes]) and not out[:, lanes:].any()


def test_functions_that_use_local_memory_and_tables_run() -> None:
    """sin and cos of large numbers: their slow path has a table of 2 / pi and an array per lane."""
    x, y = torch.tensor([0.5, 1e6, -3e9, 1e30] * 8), torch.zeros(32)

    def near() -> None:
        assert torch.allclose(y.double(), x.double().sin() + x.double().cos(), atol=1e-5)

    for target in ("sm_80", "sm_90"):
        run = Run([[Launch(sine_and_cosine, 1, dict(x=x, y=y.fill_(0)), options=dict(num_warps=1))]], (), near)
        run_schedule(run, Schedule(fine=True, target=target))


def test_memory_that_no_one_wrote() -> None:
    box = symmetric("box", 1, (32,), torch.int32)
    launch = Launch(Text("ld.global.b32 %r1, [%rd0+4];", 1), 1, dict(at=box.tensors[0]))
    with pytest.raises(SimulationFault, match=r"never written.*box"):
        run_all([[launch]], [box])


def slices(*bounds: int, poisoned: bool = False) -> tuple[torch.Tensor, list[Memory]]:
    """A heap of 64 words, and slices of it between these bounds."""
    heap = torch.zeros(64, dtype=torch.int32)
    named = zip(("box", "next", "last"), bounds, bounds[1:], strict=False)
    return heap, [Memory(name, (heap[a:b],), poisoned and name == "box") for name, a, b in named]


def stored(at: int, memory: list[Memory], **args: Any) -> Fault | None:
    """The fault, if any, of a store by 8 threads, the first of them at this address."""
    body = "mad.wide.u32 %rd9, %r0, 4, %rd0; setp.lt.u32 %p1, %r0, 8; @%p1 st.global.b32 [%rd9], 7;"
    try:
        run_all([[Launch(Text(body, 1 + len(args)), 1, dict(at=at, **args))]], memory)
    except SimulationFault as error:
        return error.fault
    return None


def test_slices_of_a_heap_have_bounds_of_their_own() -> None:
    """An access that runs from one slice into the next, or into unnamed memory, is out of bounds."""
    heap, memory = slices(8, 16, 32)
    assert stored(heap[8:].data_ptr(), memory) is None and stored(heap[20:].data_ptr(), memory) is None
    for first, said in ((9, "past the end of box"), (25, "past the end of next"), (7, "bytes before box")):
        fault = stored(heap[first:].data_ptr(), memory)
        assert fault is not None and fault.rule == "out of bounds" and said in fault.message
    assert heap.nonzero().flatten().tolist() == [*range(8, 16), *range(20, 28)]


def test_slices_that_ranks_have_of_one_memory_may_be_reached_at_once() -> None:
    """As through a table of addresses."""
    heap = torch.zeros(64, dtype=torch.int32)
    memory = Memory("box", (heap[8:16], heap[16:24]))
    body = "mad.wide.u32 %rd9, %r0, 4, %rd0; setp.lt.u32 %p1, %r0, 8; @%p1 st.global.b32 [%rd9], 7;"
    run_all([[Launch(Text(body, 1), 1, dict(at=heap[12:].data_ptr()))], []], [memory])
    assert heap.nonzero().flatten().tolist() == [*range(12, 20)]
    with pytest.raises(SimulationFault, match="past the end of box of rank 1"):
        run_all([[Launch(Text(body, 1), 1, dict(at=heap[20:].data_ptr()))], []], [memory])


@pytest.mark.parametrize("first", [4, 12, 28, 40])
def test_an_argument_that_spans_slices_of_a_heap_may_be_run_through(first: int) -> None:
    heap, memory = slices(8, 16, 32)
    assert stored(heap[first:].data_ptr(), memory, heap=heap) is None
    assert heap.nonzero().flatten().tolist() == [*range(first, first + 8)]
    assert stored(heap[first:].data_ptr(), [], view=heap[2:3]) is None  # its storage, as everywhere


def test_what_lies_between_slices_is_named_by_the_argument_that_lies_there() -> None:
    heap, memory = slices(8, 16)
    view = heap[40:48]
    assert stored(view.data_ptr(), memory, view=view) is None
    fault = stored(heap[60:].data_ptr(), memory, view=view)
    assert fault is not None and "past the end of view" in fault.message
    fault = stored(heap[12:].data_ptr(), memory, inside=heap[9:10])  # which adds nothing to box
    assert fault is not None and "past the end of box" in fault.message


def test_slices_of_a_heap_are_poisoned_each_by_itself() -> None:
    heap, memory = slices(8, 16, 32, poisoned=True)
    for first, index in ((16, None), (15, 7)):
        launch = Launch(Text("ld.global.b32 %r1, [%rd0];", 1), 1, dict(at=heap[first:].data_ptr()))
        if index is None:
            run_all([[launch]], memory)
            continue
        with pytest.raises(SimulationFault, match=rf"never written.*loads box of rank 0 \[{index}\]"):
            run_all([[launch]], memory)


def test_slices_of_a_heap_that_overlap_are_refused() -> None:
    heap, memory = slices(8, 16, 32)
    with pytest.raises(ValueError, match="other of rank 0 overlaps box of rank 0"):
        stored(heap.data_ptr(), [*memory, Memory("other", (heap[:9],))])
    assert stored(heap[8:].data_ptr(), [*memory, Memory("again", (heap[8:16],))]) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "loop",
    [
        "$spin: ld.global.acquire.sys.b32 %r1, [%rd0]; setp.eq.b32 %p1, %r1, 0; @%p1 bra $spin;",
        "$spin: ld.volatile.global.b32 %r1, [%rd0]; setp.eq.b32 %p1, %r1, 0; @%p1 bra $spin;",
        "$spin: atom.global.cas.b32 %r1, [%rd0], 5, 6; setp.ne.b32 %p1, %r1, 5; @%p1 bra $spin;",
    ],
)
def test_nothing_hangs(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = endless(loop, monkeypatch)
    assert fault.rule == "deadlock"
    assert [each.site.line for each in (*fault.waits, *fault.accesses)] == [9]


def endless(loop: str, monkeypatch: pytest.MonkeyPatch) -> Fault:
    monkeypatch.setattr("fusedtp.sim.ptx.program.MOST_INSTRUCTIONS", 2000)
    with pytest.raises(SimulationFault) as caught:
        run_text(f".loc 1 9 1\n{loop}", torch.zeros(1, dtype=torch.int32), shared=8, weak=True)
    return caught.value.fault


@pytest.mark.parametrize(
    "loop, after, cause",
    [
        ("add.s32 %r1, %r1, 1;", "2000 steps", "the loop has no load"),
        ("ld.global.b32 %r1, [%rd0];", "2000 steps", "the loop has a plain load at kernel.py:9 in k"),
        ("st.shared.b32 [%r1], %r1; ld.shared.b32 %r1, [%r1];", "2000 steps", "the loop has no load"),
        ("atom.global.add.u32 %r1, [%rd0], 1;", "500 turns", ""),
    ],
)
def test_a_limit_of_steps_or_turns_is_no_deadlock(
    loop: str, after: str, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusedtp.sim.ptx.machine.MOST_TURNS", 500)
    fault = endless(f"mov.b32 %r1, 0; $spin: {loop} bra $spin;", monkeypatch)
    assert fault.rule == "no progress" and fault.cause.startswith(cause) and bool(fault.cause) == bool(cause)
    assert f"no progress at kernel.py:9 in k after {after}" in fault.message
    assert fault.name == "no progress kernel.py:9"
    for said in (report(fault), str(fault)):
        assert "program 0: loops\n" in said and "every live program waits" not in said


def test_residency_decides_whether_a_wait_ends() -> None:
    """Program 0 waits for program 1 of its rank, which starts only if both may be resident."""
    body = """mov.u32 %r1, %ctaid.x; setp.eq.b32 %p1, %r1, 1; @%p1 bra $set;
        $spin: ld.global.acquire.gpu.b32 %r2, [%rd0]; setp.eq.b32 %p2, %r2, 0; @%p2 bra $spin; ret;
        $set: st.global.release.gpu.b32 [%rd0], 1;"""
    work = [[Launch(Text(body, 1), 2, dict(flag=torch.zeros(1, dtype=torch.int32)))]]
    run_all(work, resident=2)
    work[0][0].args["flag"].zero_()
    with pytest.raises(SimulationFault, match="not started yet: 1 programs of rank 0"):
        run_all(work, resident=1)
    work[0][0].args["flag"].zero_()
    work[0][0].options["launch_cooperative_grid"] = True  # CUDA has all of them resident, or starts none
    run_all(work, resident=1)


def counting(
    first: str, second: str, turns: int, monkeypatch: pytest.MonkeyPatch, seed: int = 0, times: int = 3000
) -> None:
    """Program 0 does `first`. Program 1 counts down at %rd1 until it sees a 1 at %rd2 or has done so `times` times,
    does `second`, and counts on.
    """
    monkeypatch.setattr("fusedtp.sim.ptx.machine.MOST_TURNS", turns)
    count = """st.global.relaxed.gpu.b32 [%rd1], %r9; ld.global.relaxed.gpu.b32 %r3, [%rd2];
        setp.ne.b32 %p2, %r3, 0; @%p2 bra $DONE; sub.s32 %r9, %r9, 1; setp.gt.s32 %p2, %r9, 0; @%p2 bra"""
    body = f"""setp.ne.b32 %p1, %r0, 0; @%p1 ret; mov.u32 %r1, %ctaid.x; mov.b32 %r9, {times};
        setp.eq.b32 %p1, %r1, 1; @%p1 bra $count; {first} ret;
        $count: {count.replace("$DONE", "$set")} $count;
        $set: {second} mov.b32 %r9, 3000; $again: {count.replace("$DONE", "$end")} $again; $end:"""
    run_text(body, *torch.zeros(3, 8, dtype=torch.int32), grid=2, weak=True, seed=seed)


def test_a_program_sleeps_until_a_word_that_it_polls_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wake for other words: otherwise it would poll once for every change of any word."""
    waits = """$spin: ld.global.acquire.gpu.b32 %r2, [%rd0]; setp.eq.b32 %p2, %r2, 0; @%p2 bra $spin;
        st.global.relaxed.gpu.b32 [%rd2], 1;"""
    counting(waits, "st.global.release.gpu.b32 [%rd0], 1;", 6200, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 4, 12])
def test_a_sleeper_wakes_when_a_part_of_what_it_polls_changes(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusedtp.sim.ptx.machine.RESTLESS", 1 << 30)
    waits = f"""$spin: ld.global.relaxed.gpu.v4.b32 {{%r2, %r3, %r4, %r5}}, [%rd0];
        setp.eq.b32 %p2, %r{2 + at // 4}, 0; @%p2 bra $spin; st.global.relaxed.gpu.b32 [%rd2], 1;"""
    counting(waits, f"st.global.release.gpu.b32 [%rd0+{at}], 1;", 6200, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("times", [*range(3, 12), 3000])
def test_a_change_between_two_polls_is_not_slept_through(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four words in turn: more words than polls before the program sleeps."""
    monkeypatch.setattr("fusedtp.sim.ptx.machine.LONG_PATIENCE", 3)
    monkeypatch.setattr("fusedtp.sim.ptx.machine.RESTLESS", 1 << 30)
    loads = "".join(f"ld.global.relaxed.gpu.b32 %r{4 + n}, [%rd0+{8 * n}]; " for n in range(4))
    waits = f"""$spin: {loads} or.b32 %r4, %r4, %r5; or.b32 %r4, %r4, %r6; or.b32 %r4, %r4, %r7;
        setp.eq.b32 %p2, %r4, 0; @%p2 bra $spin; st.global.relaxed.gpu.b32 [%rd2], 1;"""
    for seed in range(6):
        counting(waits, "st.global.release.gpu.b32 [%rd0], 1;", 2 * times + 300, monkeypatch, seed, times)


@pytest.mark.parametrize("words, at", [(12, 9), (40, 5)])
def test_who_waits_for_any_of_many_words_wakes_by_each(words: int, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Program 1 reads many words one by one. Program 0 polls for long, sets one of them, and waits for the answer."""
    monkeypatch.setattr("fusedtp.sim.ptx.machine.LAST_PATIENCE", 20)
    monkeypatch.setattr("fusedtp.sim.ptx.machine.RESTLESS", 1 << 30)
    loads = "".join(f"ld.global.relaxed.gpu.b32 %r{20 + n}, [%rd0+{8 * n}]; " for n in range(words))
    ors = "".join(f"or.b32 %r4, %r4, %r{20 + n}; " for n in range(words))
    body = f"""setp.ne.b32 %p1, %r0, 0; @%p1 ret; mov.u32 %r1, %ctaid.x; setp.eq.b32 %p1, %r1, 1; @%p1 bra $any;
        mov.b32 %r7, 0;
        $outer: mov.b32 %r6, 0;
        $inner: ld.global.relaxed.gpu.b32 %r5, [%rd2]; add.s32 %r6, %r6, 1; setp.lt.s32 %p2, %r6, 18; @%p2 bra $inner;
        add.s32 %r7, %r7, 1; st.global.relaxed.gpu.b32 [%rd2+64], %r7; setp.lt.s32 %p2, %r7, 6; @%p2 bra $outer;
        st.global.release.gpu.b32 [%rd0+{8 * at}], 1;
        $reply: ld.global.acquire.gpu.b32 %r5, [%rd1]; setp.eq.b32 %p2, %r5, 0; @%p2 bra $reply; ret;
        $any: mov.b32 %r4, 0; {loads} {ors} setp.eq.b32 %p2, %r4, 0; @%p2 bra $any;
        st.global.release.gpu.b32 [%rd1], 1;"""
    for seed in range(4):
        given = (torch.zeros(n, dtype=torch.int32) for n in (2 * words, 8, 32))
        run_text(body, *given, grid=2, seed=seed)


@pytest.mark.parametrize("bound", [8, 200])
def test_polls_that_are_bounded_run_out_in_some_schedules(bound: int) -> None:
    """In other schedules the flag comes in time."""
    waits = f"""mov.b32 %r4, 0;
        $spin: ld.global.acquire.sys.b32 %r2, [%rd0]; add.s32 %r4, %r4, 1; setp.ge.s32 %p1, %r4, {bound}; @%p1 bra $out;
        setp.eq.b32 %p2, %r2, 0; @%p2 bra $spin;
        $out: st.global.b32 [%rd1], %r2;"""
    sets = "ld.global.relaxed.sys.b32 %r2, [%rd1]; st.global.release.sys.b32 [%rd0], 1;"
    seen = set()
    for seed in range(60):
        flag, other, out = torch.zeros(3, 1, dtype=torch.int32)
        work = [
            [Launch(Text(f"setp.ne.b32 %p1, %r0, 0; @%p1 ret; {sets}", 2), 1, dict(flag=flag, other=other))],
            [Launch(Text(f"setp.ne.b32 %p1, %r0, 0; @%p1 ret; {waits}", 2), 1, dict(flag=flag, out=out))],
        ]
        Machine(Run(work), STRATEGIES[DEFAULT[seed % len(DEFAULT)]], Given(), seed=seed).run()  # type: ignore[arg-type]
        seen.add(out.item())
    assert seen == {0, 1}


def test_what_every_thread_stores_leaves_older_values_to_be_read() -> None:
    """Message passing by relaxed stores of scalars, done by all threads: y may be seen before x."""
    seen = set()
    for seed in range(60):
        x, y, out = (torch.zeros(n, dtype=torch.int32) for n in (1, 1, 2))
        writes = "st.global.relaxed.sys.b32 [%rd0], 1; st.global.relaxed.sys.b32 [%rd1], 1;"
        reads = """setp.ne.b32 %p1, %r0, 0; @%p1 ret; ld.global.relaxed.sys.b32 %r1, [%rd1];
            ld.global.relaxed.sys.b32 %r2, [%rd0]; st.global.v2.b32 [%rd2], {%r1, %r2};"""
        work = [
            [Launch(Text(writes, 2, 128), 1, dict(x=x, y=y))],
            [Launch(Text(reads, 3), 1, dict(x=x, y=y, out=out))],
        ]
        run_all(work, seed=seed, weak=True)
        seen.add(tuple(out.tolist()))
    assert seen == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_programs_that_have_slept_and_ended_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The word is read by all and changed by none."""
    kept: list[int] = []
    monkeypatch.setattr(Line, "land", lambda line: kept.append(len(line.sleepers)))
    body = """mov.b32 %r4, 0;
        $look: ld.global.relaxed.gpu.b32 %r2, [%rd0]; add.s32 %r4, %r4, 1; setp.lt.s32 %p2, %r4, 12; @%p2 bra $look;"""
    run_text(body, torch.zeros(1, dtype=torch.int32), grid=8, resident=4)
    assert kept == [0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "every, how, rule",
    [(1, "st.global.relaxed.gpu.b32", "no progress"), (1024, "red.global.add.u32", "deadlock")],
)
def test_who_notes_the_time_now_and_then_still_waits(
    every: int, how: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five programs poll a word that is never set, and note something at one place once in `every` polls."""
    monkeypatch.setattr("fusedtp.sim.ptx.machine.MOST_TURNS", 60_000)
    body = f"""setp.ne.b32 %p1, %r0, 0; @%p1 ret; mov.b32 %r4, 0;
        $spin: add.s32 %r4, %r4, 1; rem.s32 %r5, %r4, {every}; setp.eq.b32 %p2, %r5, 0;
        @%p2 {how} [%rd1], %r4;
        ld.global.acquire.gpu.b32 %r2, [%rd0]; setp.eq.b32 %p2, %r2, 0; @%p2 bra $spin;"""
    with pytest.raises(SimulationFault) as caught:
        run_text(body, *torch.zeros(2, 8, dtype=torch.int32), grid=5, weak=True)
    assert caught.value.fault.rule == rule


def test_a_program_that_only_looks_at_what_never_changes_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like programs that check a failure flag while they work."""
    looks = """mov.b32 %r4, 0;
        $look: ld.global.relaxed.gpu.b32 %r2, [%rd0]; add.s32 %r4, %r4, 1; setp.lt.s32 %p2, %r4, 12; @%p2 bra $look;
        st.global.release.gpu.b32 [%rd2], 1;"""
    counting(looks, "", 4000, monkeypatch)


@pytest.mark.parametrize("between", ["", "mov.b32 %r1, 0;"])
def test_a_program_that_wakes_polls_before_it_sleeps_again(between: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warp by warp, its first turn may go to a warp that does not poll. `between`: from the barrier to the poll."""
    monkeypatch.setattr("fusedtp.sim.ptx.machine.LAST_PATIENCE", 3)  # no second chance once all sleep
    waits = f"""setp.eq.b32 %p1, %r0, 0; mov.b32 %r5, 0;
        $spin: bar.sync 0; {between}
        @%p1 ld.global.acquire.sys.b32 %r1, [%rd0]; @%p1 st.shared.b32 [%r5], %r1;
        bar.sync 0;
        ld.shared.b32 %r2, [%r5]; setp.eq.b32 %p2, %r2, 0; @%p2 bra $spin;"""
    sets = """setp.ne.b32 %p1, %r0, 0; @%p1 ret; mov.b32 %r1, 0;
        $later: st.global.relaxed.sys.b32 [%rd0], 0; add.s32 %r1, %r1, 1; setp.lt.s32 %p1, %r1, 60; @%p1 bra $later;
        st.global.release.sys.b32 [%rd0], 1;"""
    relays = f"{waits} @!%p1 ret; st.global.release.sys.b32 [%rd1], 1;"
    for seed in range(6):
        first, second = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        work = [
            [Launch(Text(waits, 1, 128, 8), 1, dict(flag=second))],
            [Launch(Text(relays, 2, 128, 8), 1, dict(flag=first, to=second))],
            [Launch(Text(sets, 1), 1, dict(flag=first))],
        ]
        run_all(work, seed=seed, weak=True, fine=True)


def test_the_cause_of_a_race_with_a_thread_that_a_words_clocks_are_too_old_to_know() -> None:
    """A clock has room only for the threads that existed then; the race is with a later one."""
    space, line = Space(), Site("here", 1, "k", 1)
    reads, early = Slot(space.take(33), 32), Source(0, 0, "sys")
    word = Word(0, 4, space.take(1), 0)
    word.writes = [Write(1, 1, {early: np.zeros((2, space.capacity), np.int32)})]
    late = space.take(space.capacity) + space.capacity // 2
    mine, theirs = (0, "k", 0), (1, "k", 0)
    events = [
        None,
        Event(theirs, line, "store", True),
        Event(theirs, line, "store (relaxed, sys)", True),
        Event(mine, line, "load (acquire, sys)", False),
    ]
    word.operations = {
        (late, True): Operation(5, Source(1, 9, "sys"), 0, 4, 2),
        (reads.first, False): Operation(1, early, 0, 4, 3),
    }
    known = Known(space, reads, early)
    said = cause([word], events, known, 1, late, 5, Event(mine, line, "load", False))
    assert said == f"the store (relaxed, sys) at {line} does not release what came before it"
