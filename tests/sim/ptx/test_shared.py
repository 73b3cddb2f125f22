"""Shared memory: its stamps against a list of all events, races of two warps, fences removed from kernels."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedtp.sim import Launch, SimulationFault, Site
from fusedtp.sim.ptx.cause import NO_BARRIER
from fusedtp.sim.ptx.clocks import Known, Slot, Source, Space
from fusedtp.sim.ptx.descriptors import TensorMap
from fusedtp.sim.ptx.shadow import Event
from fusedtp.sim.ptx.shared import FENCES_COPIES, READ, WRITE, SharedShadow
from tests.sim.ptx.running import once, run_all, run_text
from tests.sim.ptx.test_kernels import flat_case, product_case
from tests.sim.ptx.test_litmus import WithMap
from tests.sim.ptx.test_warps import by_wgmma

THREADS, WORDS = 96, 8  # three warps
ACCESS = st.tuples(
    st.sampled_from([READ, WRITE]),
    st.sampled_from([0, 1, 31, 32, 64, 95]),
    st.integers(0, WORDS - 4),
    st.sampled_from([2, 4, 8, 16]),
    st.booleans(),  # by the generic proxy
)
STEPS = st.one_of(
    ACCESS,
    st.tuples(st.just("tma"), st.integers(0, WORDS - 1)),
    st.tuples(st.just("fence"), st.integers(0, THREADS - 1)),
    st.tuples(st.just("meet"), st.sampled_from([[0], [0, 1], [1, 2], [0, 1, 2]])),  # warps
)
SITE = Site("", 0, "", 0)


class Watching:
    """A window that records races."""

    def __init__(self) -> None:
        self.known, self.where, self.line = Known(Space(), Slot(1, THREADS), Source(0, 0, "cta")), (0, "", 0), self
        self.steps, self.raced = [-1], list[tuple[int, int]]()  # of events; step and byte

    def event(self, event: Event) -> int:
        self.steps.append(-1)
        return len(self.steps) - 1

    def race_in(self, memory: str, earlier: int, place: int, now: Event) -> None:
        self.raced.append((self.steps[earlier], place))


class Done(NamedTuple):
    """An access of a word, with the number of its step."""

    step: int
    kind: int
    thread: int
    generic: bool


@given(st.lists(STEPS, max_size=30), ACCESS)
def test_stamps_say_what_the_history_says(steps: list[tuple], now: tuple) -> None:
    """For each warp's last read and last write of a word:

    a generic one lacks a fence if its thread has not fenced since, nor a thread after warps have met in between
    one by another warp races with an access of the other kind that does not know it, unless the own warp has written
    the word since all warps met
    """
    window = Watching()
    shadow = SharedShadow(window, 4 * WORDS, THREADS)
    last: dict[tuple[int, int, int], Done] = {}  # word, kind, warp
    knows: list[set[int]] = [set() for _ in range(THREADS)]  # steps
    everyone, copied = -1, set[int]()  # the last meeting of all; what TMA wrote
    for number, step in enumerate(steps):
        match step:
            case "tma", word:
                shadow.end_copy(np.array([[word]]), np.array([0]), "", SITE, window.known.over() + 1, by_tma=True)
                window.steps[-1] = number
                last = {key: done for key, done in last.items() if key[0] != word}
                last[word, WRITE, THREADS // 32] = Done(number, WRITE, THREADS, generic=False)
                copied.add(number)
            case "fence", thread:
                shadow.fence(np.array([thread]))
            case "meet", warps:
                threads = np.concatenate([np.arange(32 * warp, 32 * warp + 32) for warp in warps])
                window.known.meet(threads)
                shadow.meet(everyone=len(warps) == 3)
                together = set().union(*(knows[thread] for thread in threads), copied if len(warps) == 3 else ())
                for thread in threads:
                    knows[thread] = set(together)
                everyone = number if len(warps) == 3 else everyone
            case kind, thread, word, nbytes, generic:
                cells = shadow.cells(np.array([4 * word]), nbytes)
                shadow.note(kind, cells, np.array([thread]), "", SITE, generic)
                window.steps[-1] = number
                knows[thread].add(number)
                done = Done(number, kind, thread, generic)
                last |= {(each, kind, thread // 32): done for each in range(word, word + max(1, nbytes // 4))}
    for word, kind in itertools.product(range(WORDS), (READ, WRITE)):
        mine = [done for (at, of, _), done in last.items() if (at, of) == (word, kind) and done.generic]
        assert shadow.lacking(kind, np.array([[word]])) == any(_lacks(done, steps) for done in mine), (word, kind)

    kind, thread, word, nbytes, _ = now
    racing = set()
    for each in range(word, word + max(1, nbytes // 4)):
        own = last.get((each, WRITE, thread // 32))
        if kind == READ and own is not None and own.step > everyone:
            continue
        others = [
            done for (at, of, warp), done in last.items() if (at, of) == (each, 1 - kind) and warp != thread // 32
        ]
        racing |= {(done.step, each) for done in others if done.step not in knows[thread]}
    shadow.follow(1 - kind, shadow.cells(np.array([4 * word]), nbytes), np.array([thread]), "", SITE)
    assert bool(window.raced) == bool(racing)
    assert {(step, place // 4) for step, place in window.raced} <= racing


def _lacks(done: Done, steps: list[tuple]) -> bool:
    met = False
    for step in steps[done.step + 1 :]:
        met |= step[0] == "meet"
        if step[0] == "fence" and (met or step[1] == done.thread):
            return False
    return True


# -- races -------------------------------------------------------------------------------------------------------------


# %r1: a word of each lane's, the same in both warps; %r6: a row of 16 bytes
BY_FIRST = {
    "st": ("st.shared.b32 [%r1], 7;", WRITE),
    "atom": ("atom.shared.exch.b32 %r5, [%r1], 7;", WRITE),
    "cp.async": ("cp.async.ca.shared.global [%r1], [%rd8], 4; cp.async.wait_all;", WRITE),
    "stmatrix": ("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r6], {%r7};", WRITE),
    "ld": ("ld.shared.b32 %r5, [%r1];", READ),
    "ldmatrix": ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [%r6];", READ),
}
ORDERED = {
    "nothing": ("", "", False),
    "a barrier of each warp": ("bar.warp.sync 0xffffffff;",) * 2 + (False,),
    "two barriers": ("bar.sync 1, 32;", "bar.sync 2, 32;", False),
    "a barrier": ("bar.sync 0;",) * 2 + (True,),
    "a barrier with a number": ("bar.sync 3, 64;",) * 2 + (True,),
    "an arrival": ("bar.arrive 3, 64;", "bar.sync 3, 64;", True),
    "strong accesses": ("st.volatile.shared.b32 [%r3+8], 1;", "ld.volatile.shared.b32 %r5, [%r3+8];", True),
    "an mbarrier": (
        "mbarrier.arrive.shared::cta.b64 _, [%r3];",
        "$w: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0; @!%p2 bra $w;",
        True,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("between", ORDERED)
@pytest.mark.parametrize("first, second", [*itertools.product(BY_FIRST, ("st", "ld", "cp.async", "ldmatrix"))])
def test_warps_race_in_shared_memory_where_nothing_orders_them(first: str, second: str, between: str) -> None:
    """The first warp is ahead: the second one polls a word of global memory until then, which orders nothing."""
    (does, kind), (then, other) = BY_FIRST[first], BY_FIRST[second]
    leaves, enters, enough = ORDERED[between]
    x, flag = torch.zeros(32, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    body = f"""and.b32 %r4, %r0, 31; shl.b32 %r1, %r4, 2; shl.b32 %r6, %r4, 4; and.b32 %r6, %r6, 127; mov.b32 %r3, 512;
        add.s64 %rd8, %rd0, 0; mov.b32 %r7, 7; setp.lt.u32 %p1, %r0, 32; setp.eq.u32 %p3, %r0, 0;
        @%p3 mbarrier.init.shared::cta.b64 [%r3], 32; bar.sync 0;
        @!%p1 bra $second;
        {does} atom.global.relaxed.gpu.exch.b32 %r9, [%rd1], 1; {leaves} ret;
        $second: ld.relaxed.gpu.global.b32 %r8, [%rd1]; setp.eq.s32 %p4, %r8, 0; @%p4 bra $second;
        {enters} {then}"""
    fault = None
    try:
        run_text(body, x, flag, threads=64, shared=1024, weak=True, fine=True)
    except SimulationFault as error:
        fault = error.fault
    if enough or kind == other:
        assert fault is None, fault
    else:
        assert fault is not None and fault.rule == "read-write race" and fault.cause == NO_BARRIER
        assert [end.tensor for end in fault.accesses] == ["shared memory"] * 2


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize(
    "before, meanwhile, wanted",
    [
        (("bar.sync 0;",) * 2, False, ""),
        (("", ""), False, "read-write race"),
        (("bar.sync 0;",) * 2, True, "read-write race"),
    ],
    ids=["behind a barrier", "unordered", "under way"],
)
def test_a_copy_over_what_another_warp_reads(before: tuple[str, str], meanwhile: bool, wanted: str, tma: bool) -> None:
    """The first warp reads before the second one copies, or while its copy is in flight; then they meet."""
    if tma:
        copies = """fence.proxy.async.shared::cta; setp.ne.u32 %p5, %r0, 32; @%p5 ret;
            mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128;
            cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd0, {%r3}], [%r2];"""
        lands = "$w: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra $w;"
    else:
        copies, lands = "cp.async.ca.shared.global [%r1], [%rd1], 4;", "cp.async.wait_all;"
    x, flags = torch.zeros(32, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    described = TensorMap(x.data_ptr(), (32,), (1,), (32,), "s32", 0)
    reads, meets, first, second = "ld.shared.b32 %r5, [%r1];", "bar.sync 0;" * meanwhile, *before
    body = f"""and.b32 %r4, %r0, 31; shl.b32 %r1, %r4, 2; mov.b32 %r2, 512; mov.b32 %r3, 0; setp.eq.u32 %p3, %r0, 0;
        @%p3 mbarrier.init.shared::cta.b64 [%r2], 1; bar.sync 0; setp.lt.u32 %p1, %r0, 32; @!%p1 bra $second;
        {"" if meanwhile else reads} st.relaxed.gpu.global.b32 [%rd2], 1; {first}
        $first: ld.relaxed.gpu.global.b32 %r8, [%rd2+4]; setp.eq.s32 %p4, %r8, 0; @%p4 bra $first;
        {reads if meanwhile else ""} st.relaxed.gpu.global.b32 [%rd2], 2; {meets} ret;
        $second: ld.relaxed.gpu.global.b32 %r8, [%rd2]; setp.lt.s32 %p4, %r8, 1; @%p4 bra $second;
        {second} {copies} st.relaxed.gpu.global.b32 [%rd2+4], 1;
        $last: ld.relaxed.gpu.global.b32 %r8, [%rd2]; setp.lt.s32 %p4, %r8, 2; @%p4 bra $last; {meets} {lands}"""
    work = [[Launch(WithMap(body, 3, 64, 1024), 1, dict(map=described, x=x, flags=flags))]]
    if not wanted:
        return run_all(work, weak=True, fine=True)
    with pytest.raises(SimulationFault) as error:
        run_all(work, weak=True, fine=True)
    assert error.value.fault.rule == wanted and error.value.fault.accesses[0].tensor == "shared memory"


WAITS = "$w{}: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra $w{};"


@pytest.mark.parametrize(
    "leaves, enters, ordered",
    [("", "", False), ("bar.sync 0;", "bar.sync 0;", True), ("", WAITS.format(2, 2), True)],
    ids=["nothing", "a barrier", "its own wait"],
)
def test_what_tma_brought_is_there_for_those_who_have_waited(leaves: str, enters: str, ordered: bool) -> None:
    """The first warp waits for the copy and tells the second one by a word that orders nothing."""
    x, flag = torch.arange(32, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    described = TensorMap(x.data_ptr(), (32,), (1,), (32,), "s32", 0)
    body = f"""and.b32 %r4, %r0, 31; shl.b32 %r1, %r4, 2; mov.b32 %r2, 512; mov.b32 %r3, 0; setp.ne.u32 %p3, %r0, 0;
        @!%p3 mbarrier.init.shared::cta.b64 [%r2], 1; bar.sync 0; setp.lt.u32 %p1, %r0, 32; @!%p1 bra $second;
        @%p3 bra $wait; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128;
        cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd0, {{%r3}}], [%r2];
        $wait: {WAITS.format(1, 1)} st.relaxed.gpu.global.b32 [%rd2], 1; {leaves} ret;
        $second: ld.relaxed.gpu.global.b32 %r8, [%rd2]; setp.eq.s32 %p4, %r8, 0; @%p4 bra $second;
        {enters} ld.shared.b32 %r5, [%r1];"""
    work = [[Launch(WithMap(body, 3, 64, 1024), 1, dict(map=described, x=x, flag=flag))]]
    if ordered:
        return run_all(work, weak=True, fine=True)
    with pytest.raises(SimulationFault, match="its tensor load and its load of shared memory are not ordered"):
        run_all(work, weak=True, fine=True)


@pytest.mark.parametrize("between, ordered", [("", False), ("bar.warp.sync 0xffffffff;", False), ("bar.sync 0;", True)])
def test_what_wgmma_reads_is_read_until_its_wait(between: str, ordered: bool) -> None:
    """After the wait each warp overwrites data that all warps have read."""
    stores = f"wgmma.wait_group.sync.aligned 0; {between} st.shared.b32 [%r2], 7;"
    if ordered:
        out, _ = by_wgmma("s8", -128, True, stores)
        assert out.any()
    else:
        with pytest.raises(SimulationFault, match="its wgmma and its store of shared memory are not ordered"):
            by_wgmma("s8", -128, True, stores)


@pytest.mark.parametrize("value, races", [(0, False), (7, True)])
def test_a_copy_of_what_stands_there_may_be_stored_whoever_has_read_it(value: int, races: bool) -> None:
    """Threads that hold copies of a value each store it, as in Triton's layouts."""
    flag = torch.zeros(1, dtype=torch.int32)
    body = f"""and.b32 %r4, %r0, 31; shl.b32 %r1, %r4, 2; setp.lt.u32 %p1, %r0, 32; mov.b32 %r2, 0;
        st.shared.b32 [%r1], %r2; bar.sync 0; @!%p1 bra $second;
        ld.shared.b32 %r5, [%r1]; st.relaxed.gpu.global.b32 [%rd0], 1; ret;
        $second: ld.relaxed.gpu.global.b32 %r8, [%rd0]; setp.eq.s32 %p4, %r8, 0; @%p4 bra $second;
        st.shared.b32 [%r1], {value};"""
    if not races:
        return run_text(body, flag, threads=64, shared=128, weak=True, fine=True)
    with pytest.raises(SimulationFault, match="its load and its store of shared memory are not ordered"):
        run_text(body, flag, threads=64, shared=128, weak=True, fine=True)


@pytest.mark.parametrize("value, races", [(3, False), (4, True)])
def test_two_tensor_stores_of_one_value_are_one(value: int, races: bool) -> None:
    """Two partitions of a specialised kernel make such stores. With different values they race."""
    y = torch.zeros(32, dtype=torch.int32)
    described = TensorMap(y.data_ptr(), (32,), (1,), (32,), "s32", 0)
    body = f"""and.b32 %r4, %r0, 31; shl.b32 %r1, %r0, 2; mov.b32 %r3, 0; setp.lt.u32 %p1, %r0, 32;
        mov.b32 %r5, {value}; @%p1 mov.b32 %r5, 3; st.shared.b32 [%r1], %r5; fence.proxy.async;
        bar.warp.sync 0xffffffff; setp.ne.u32 %p2, %r4, 0; @%p2 ret;
        cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%rd0, {{%r3}}], [%r1];
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    work = [[Launch(WithMap(body, 2, 64, 256), 1, dict(map=described, y=y))]]
    if not races:
        return run_all(work, weak=True)
    with pytest.raises(SimulationFault, match="write-write race"):
        run_all(work, weak=True)


# -- proxy fences ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fence", ["", "fence.proxy.async.global;", "fence.proxy.alias;"])
@pytest.mark.parametrize("seed", range(2))
def test_a_missing_fence_is_found(seed: int, fence: str) -> None:
    """Before TMA stores a tile that threads wrote, and before wgmma reads data of cp.async. A fence for global memory
    does not count for shared memory.
    """

    def changed(text: str) -> str:
        found = re.sub(r"fence\.proxy\.async[^;]*;", fence, text)
        assert found != text
        return found

    for case in (flat_case(72, 4), *[product_case()] * FENCES_COPIES):
        fault = once(case, "sm_90", seed, edit=changed)
        assert fault is not None and fault.rule == "missing proxy fence", case.name
        assert once(case, "sm_90", seed) is None


STORES = """cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%rd0, {%r3}], [%r1];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
LOADS = """mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2+8], 128;
    cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd0, {%r3}], [%r2+8];
    $l: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2+8], 0; @!%p2 bra $l;"""
ACCESSES = {
    "st, TMA stores": ("st.shared.b32 [%r4], 7;", STORES),
    "atom, TMA stores": ("atom.shared.exch.b32 %r5, [%r4], 7;", STORES),
    "st, TMA loads": ("st.shared.b32 [%r4], 7;", LOADS),
    "ld, TMA loads": ("ld.shared.b32 %r5, [%r4];", LOADS),
    "ldmatrix, TMA loads": ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [%r6];", LOADS),
}
MEETS = {
    "bar.sync": "bar.sync 0;",
    "bar.warp": "bar.warp.sync 0xffffffff;",
    "mbarrier": """mbarrier.arrive.shared::cta.b64 _, [%r2];
        $w: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra $w;""",
}
FENCE = "fence.proxy.async.shared::cta;"


@pytest.mark.slow
@pytest.mark.parametrize("access, copy", ACCESSES.values(), ids=ACCESSES)
@pytest.mark.parametrize("meet", MEETS.values(), ids=MEETS)
@pytest.mark.parametrize(
    "before, theirs, behind, enough",
    [
        ("", "", "", False),
        (FENCE, "", "", False),
        ("", FENCE, "", True),
        ("", "", FENCE, True),
        ("", "fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster;", "", True),
        ("", "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;", "", False),
    ],
    ids=["none", "before the access", "of those threads", "behind the meeting", "one way", "the other way"],
)
def test_where_a_fence_counts(
    before: str, theirs: str, behind: str, enough: bool, meet: str, access: str, copy: str
) -> None:
    """A warp accesses 32 words and meets; its first thread copies them by TMA, or overwrites them."""
    y = torch.zeros(32, dtype=torch.int32)
    described = TensorMap(y.data_ptr(), (32,), (1,), (32,), "s32", 0)
    body = f"""mov.b32 %r1, 0; mov.b32 %r2, 128; mov.b32 %r3, 0; shl.b32 %r4, %r0, 2; setp.ne.b32 %p1, %r0, 0;
        and.b32 %r6, %r0, 7; shl.b32 %r6, %r6, 4;
        @!%p1 mbarrier.init.shared::cta.b64 [%r2], 32; @!%p1 mbarrier.init.shared::cta.b64 [%r2+8], 1; bar.sync 0;
        {before} {access} {theirs} {meet} {behind} @%p1 ret; {copy}"""
    work = [[Launch(WithMap(body, 2, 32, 256), 1, dict(map=described, y=y))]]
    if enough:
        run_all(work, weak=True)
        assert (y == 7).all() or copy is LOADS
    else:
        with pytest.raises(SimulationFault) as error:
            run_all(work, weak=True)
        assert error.value.fault.rule == "missing proxy fence"
