"""multimem through multicast addresses: what it computes, and which fence it needs. PTX ISA 8.8, 9.7.9.14 and 8.3."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fusedtp.sim import Case, Launch, Run, SimulationFault, compare, symmetric
from tests.sim.ptx.running import Text, once, run_all

W = 3
REGISTERS = {16: "%rs", 32: "%r1", 64: "%rd1"}  # by bits, one a value
AT = "mad.wide.u32 %rd8, %r0, {}, %rd{};"  # %rd8: this thread's elements of so many bytes


def on_rank_0(body: str, kept: list[Tensor], out: Tensor, threads: int = 32) -> list[Tensor]:
    """Run on rank 0, with %rd0 the multicast address of the ranks' tensors, %rd1 that of `out`. Returns the tensors."""
    memory = symmetric("x", len(kept), kept[0].shape, kept[0].dtype, poisoned=False)
    for tensor, value in zip(memory.tensors, kept, strict=True):
        tensor.copy_(value)
    launch = Launch(Text(body, 2, threads), 1, dict(at=memory.multicast, out=out))
    run_all([[launch], *[[] for _ in kept[1:]]], [memory])
    return list(memory.tensors)


SUMS: dict[str, tuple[torch.dtype, int, Callable[[Tensor, Tensor], Tensor]]] = {
    "add.u32": (torch.int32, 1, torch.add),
    "add.s32": (torch.int32, 1, torch.add),
    "add.u64": (torch.int64, 1, torch.add),
    "add.f32": (torch.float32, 1, torch.add),
    "add.v4.f32": (torch.float32, 4, torch.add),
    "add.f64": (torch.float64, 1, torch.add),
    "add.f16": (torch.float16, 1, torch.add),
    "add.acc::f32.v4.f16x2": (torch.float16, 8, torch.add),
    "add.bf16": (torch.bfloat16, 1, torch.add),
    "add.v2.bf16x2": (torch.bfloat16, 4, torch.add),
    "add.acc::f32.v4.bf16x2": (torch.bfloat16, 8, torch.add),
    "min.s32": (torch.int32, 1, torch.minimum),
    "max.u64": (torch.int64, 1, torch.maximum),
    "max.v8.bf16": (torch.bfloat16, 8, torch.maximum),
    "min.f16x2": (torch.float16, 2, torch.minimum),
    "and.b32": (torch.int32, 1, torch.bitwise_and),
    "or.b64": (torch.int64, 1, torch.bitwise_or),
    "xor.b32": (torch.int32, 1, torch.bitwise_xor),
}


def registers_of(suffix: str) -> tuple[str, str]:
    """The operand for a value of this type, with braces around several registers, and the type of its bits."""
    *_, vector, t = ("", *suffix.split("."))
    bits = 16 if t in ("f16", "bf16") else 64 if t.endswith("64") else 32
    names = [f"{REGISTERS[bits]}{n}" for n in range(int(vector[1:]) if vector[0] == "v" else 1)]
    if vector[0] != "v":
        return names[0], f"b{bits}"
    return "{" + ", ".join(names) + "}", f"{vector}.b{bits}"


@pytest.mark.slow
@pytest.mark.parametrize("suffix", SUMS)
@given(data=st.data())
def test_a_load_reduces_what_all_ranks_have(suffix: str, data: st.DataObject) -> None:
    """Integers are so small that neither the order of ranks nor rounding shows; only some lanes may take part."""
    dtype, per_lane, function = SUMS[suffix]
    numbers = st.lists(st.integers(0, 40), min_size=32 * per_lane, max_size=32 * per_lane)
    kept = [torch.tensor(data.draw(numbers), dtype=dtype) for _ in range(W)]
    lanes = data.draw(st.integers(0, 32))
    (value, stored), nbytes = registers_of(suffix), per_lane * dtype.itemsize
    body = f"""{AT.format(nbytes, 0)} setp.lt.u32 %p1, %r0, {lanes};
        @%p1 multimem.ld_reduce.relaxed.sys.global.{suffix} {value}, [%rd8];
        {AT.format(nbytes, 1)} @%p1 st.global.{stored} [%rd8], {value};"""
    out = torch.zeros(32 * per_lane, dtype=dtype)
    after = on_rank_0(body, kept, out)
    part = lanes * per_lane
    assert torch.equal(out[:part], reduce(function, kept)[:part]) and not out[part:].any()
    assert all(torch.equal(a, b) for a, b in zip(after, kept, strict=True))


def test_sums_of_halves_are_rounded_as_they_are_asked_to() -> None:
    """2048 + 1 + 1: in fp32 2050; in fp16 2048 or 2050 by the order of ranks, which the instruction leaves open."""
    kept = [torch.tensor([value] * 64, dtype=torch.float16) for value in (2048, 1, 1)]
    shown = {}
    for accumulated in ("", ".acc::f32"):
        body = f"""{AT.format(4, 0)} multimem.ld_reduce.weak.global.add{accumulated}.f16x2 %r1, [%rd8];
            {AT.format(4, 1)} st.global.b32 [%rd8], %r1;"""
        out = torch.zeros(64, dtype=torch.float16)
        on_rank_0(body, kept, out)
        shown[accumulated] = set(out.tolist())
    assert shown[".acc::f32"] == {2050.0} and shown[""] <= {2048.0, 2050.0} and len(shown[""]) == 1


@pytest.mark.parametrize("order", ["", ".weak", ".relaxed.sys", ".release.sys"])
def test_a_store_reaches_every_rank(order: str) -> None:
    body = f"""{AT.format(16, 0)} mov.u32 %r1, 7; add.s32 %r2, %r0, 1; mov.u32 %r3, 0; setp.ge.u32 %p1, %r0, 8;
        @%p1 multimem.st{order}.global.v4.f32 [%rd8], {{%r0, %r1, %r2, %r3}};"""
    kept = [torch.full((32, 4), -1, dtype=torch.int32) for _ in range(W)]
    want = torch.stack([torch.tensor([n, 7, n + 1, 0]) if n >= 8 else torch.full((4,), -1) for n in range(32)])
    for tensor in on_rank_0(body, kept, torch.zeros(1)):
        assert torch.equal(tensor, want.int())


@pytest.mark.parametrize("suffix", ["u32", "v2.f32", "bf16x2"])
def test_an_atomic_adds_to_every_rank_s(suffix: str) -> None:
    dtype = {"u32": torch.int32, "v2.f32": torch.float32, "bf16x2": torch.bfloat16}[suffix]
    kept = [torch.arange(4).to(dtype) + 10 * rank for rank in range(W)]
    one = {"u32": "1", "v2.f32": "0f3F800000", "bf16x2": "0x3F803F80"}[suffix]
    value = "{%r1, %r1}" if suffix[0] == "v" else "%r1"
    body = f"mov.b32 %r1, {one}; multimem.red.release.sys.global.add.{suffix} [%rd0], {value};"
    changed = {"u32": 1, "v2.f32": 2, "bf16x2": 2}[suffix]
    for rank, tensor in enumerate(on_rank_0(body, kept, torch.zeros(1))):
        want = kept[rank].clone()
        want[:changed] += 32
        assert torch.equal(tensor, want)


# -- which fence it needs ----------------------------------------------------------------------------------------------

ALIAS, NOTHING = "fence.proxy.alias;", ""
MEET = """bar.sync 0; setp.eq.b32 %p1, %r0, 0;
    @%p1 atom.global.release.sys.add.u32 %r2, [%rd3], 1; @%p1 atom.global.release.sys.add.u32 %r2, [%rd4], 1;
    @!%p1 bra $met{n}; $spin{n}: ld.global.acquire.sys.b32 %r2, [%rd5]; setp.lt.u32 %p2, %r2, {n}; @%p2 bra $spin{n};
    $met{n}: bar.sync 0;"""


def reduced_by_each(before: str, after: str, seed: int, store: str = "st.global.b32 [%rd8], %r1;") -> None:
    """Each rank stores numbers by its own address, meets the other rank, and reads the sum by the multicast address."""
    x, flags = (symmetric(name, 2, (64,), torch.int32, poisoned=False) for name in ("x", "flags"))
    outs = [torch.zeros(64, dtype=torch.int32) for _ in range(2)]
    body = f"""{AT.format(4, 0)} add.s32 %r1, %r0, 5; {store} {before} {MEET.format(n=2)} {after}
        {AT.format(4, 1)} multimem.ld_reduce.weak.global.add.u32 %r3, [%rd8];
        {AT.format(4, 2)} st.global.b32 [%rd8], %r3;"""
    work = [
        [
            Launch(
                Text(body, 6, 64), 1,
                dict(x=x.tensors[r], many=x.multicast, out=outs[r], f0=flags.tensors[0], f1=flags.tensors[1],
                     own=flags.tensors[r]),
            )
        ]
        for r in range(2)
    ]  # fmt: skip
    run_all(work, [x, flags], seed, weak=True, fine=seed % 2 == 1)
    assert all(torch.equal(out, 2 * (torch.arange(64) + 5).int()) for out in outs)


@pytest.mark.parametrize(("before", "after"), [(ALIAS, NOTHING), (NOTHING, ALIAS), (ALIAS, ALIAS)])
def test_one_fence_between_two_addresses_is_enough_on_either_side(before: str, after: str) -> None:
    for seed in range(6):
        reduced_by_each(before, after, seed)


@pytest.mark.parametrize("fence", [NOTHING, "fence.proxy.async;", "fence.acq_rel.sys;", "fence.sc.sys;"])
def test_without_that_fence_two_addresses_of_the_same_memory_are_not_ordered(fence: str) -> None:
    for seed in range(6):
        with pytest.raises(SimulationFault, match=r"with no fence\.proxy\.alias") as caught:
            reduced_by_each(fence, fence, seed)
        assert caught.value.fault.rule == "read-write race"
        assert caught.value.fault.accesses[0].tensor.startswith("x of rank")


def test_ranks_that_do_not_meet_race_whatever_they_fence() -> None:
    meeting = MEET.format(n=2)
    assert "release" in meeting
    for seed in range(6):
        with pytest.raises(SimulationFault, match="are not ordered"), pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "MEET", MEET.replace("release", "relaxed"))
            reduced_by_each(ALIAS, ALIAS, seed)


def test_what_is_stored_by_the_multicast_address_needs_the_fence_to_be_read_by_its_own() -> None:
    body = "add.s32 %r1, %r0, 5; {} multimem.st.weak.global.f32 [%rd8], %r1; {} {} ld.global.b32 %r2, [%rd8]; {} {}"
    for fence in (NOTHING, ALIAS):
        x, out = symmetric("x", 1, (32,), torch.int32), torch.zeros(32, dtype=torch.int32)
        text = body.format(AT.format(4, 1), fence, AT.format(4, 0), AT.format(4, 2), "st.global.b32 [%rd8], %r2;")
        launch = Launch(Text(text, 3), 1, dict(x=x.tensors[0], many=x.multicast, out=out))
        if fence:
            run_all([[launch]], [x])
            assert torch.equal(out, torch.arange(32).int() + 5)
        else:
            with pytest.raises(SimulationFault, match=r"with no fence\.proxy\.alias"):
                run_all([[launch]], [x])


WEAK, STRONG = "multimem.st.weak.global.f32 [%rd0], %r1;", "multimem.st.relaxed.sys.global.f32 [%rd0], %r1;"
AFTER = {
    "ld_reduce.weak": "multimem.ld_reduce.weak.global.add.u32 %r2, [%rd0];",
    "ld_reduce.relaxed": "multimem.ld_reduce.relaxed.sys.global.add.u32 %r2, [%rd0];",
    "red": "multimem.red.global.add.u32 [%rd0], 1;",
    "st.relaxed": STRONG,
}


@pytest.mark.parametrize("then", AFTER)
@pytest.mark.parametrize("own", [False, True])
def test_strong_and_weak_accesses_of_one_thread(own: bool, then: str) -> None:
    """After a weak write by the same address none needs a fence; after one by the memory's own address each does."""
    x = symmetric("x", 1, (1,), torch.int32, poisoned=False)
    first = "st.global.b32 [%rd1], %r1;" if own else WEAK
    body = f"setp.ne.b32 %p1, %r0, 0; @%p1 ret; mov.u32 %r1, 5; {first} {{}} {AFTER[then]}"
    launch = Launch(Text(body.format(""), 2), 1, dict(many=x.multicast, own=x.tensors[0]))
    if own:
        with pytest.raises(SimulationFault, match=r"with no fence\.proxy\.alias"):
            run_all([[launch]], [x])
        launch = Launch(Text(body.format(ALIAS), 2), 1, launch.args)
    run_all([[launch]], [x])


def test_a_scalar_that_all_threads_load_may_be_written_by_one() -> None:
    """Note [Loads in every thread], by either address."""
    x = symmetric("x", 1, (1,), torch.int32, poisoned=False)
    for store in ("st.global.b32 [%rd1], %r2;", "multimem.st.weak.global.f32 [%rd0], %r2;"):
        body = f"ld.global.b32 %r1, [%rd1]; add.s32 %r2, %r1, 1; setp.eq.b32 %p1, %r0, 0; @%p1 {store}"
        launch = Launch(Text(body, 2, 128), 1, dict(many=x.multicast, own=x.tensors[0]))
        for seed in range(6):
            run_all([[launch]], [x], seed, fine=True)


def test_an_atomic_without_a_scope_reaches_other_devices() -> None:
    x = symmetric("x", 2, (1,), torch.int32, poisoned=False)
    adds = "setp.ne.b32 %p1, %r0, 0; @%p1 ret; multimem.red.release.global.add.u32 [%rd0], 1;"
    waits = "$spin: ld.acquire.sys.global.b32 %r1, [%rd1]; setp.eq.b32 %p1, %r1, 0; @%p1 bra $spin;"
    args = dict(many=x.multicast, own=x.tensors[1])
    run_all([[Launch(Text(adds, 2), 1, args)], [Launch(Text(waits, 2), 1, args)]], [x])


def test_the_next_launch_of_a_stream_needs_no_fence() -> None:
    x, out = symmetric("x", 1, (32,), torch.int32), torch.zeros(32, dtype=torch.int32)
    args = dict(x=x.tensors[0], many=x.multicast, out=out)
    first = Text(f"{AT.format(4, 0)} st.global.b32 [%rd8], %r0;", 3)
    second = Text(
        f"""{AT.format(4, 1)} multimem.ld_reduce.weak.global.add.u32 %r1, [%rd8];
        {AT.format(4, 2)} st.global.b32 [%rd8], %r1;""",
        3,
    )
    run_all([[Launch(first, 1, args), Launch(second, 1, args)]], [x])
    assert torch.equal(out, torch.arange(32).int())


# -- addresses ---------------------------------------------------------------------------------------------------------


def fault_of(body: str, **arguments: Any) -> str:
    x = symmetric("x", 2, (32,), torch.int32, poisoned=False)
    given = dict(many=x.multicast, own=x.tensors[0])
    with pytest.raises(SimulationFault) as caught:
        run_all([[Launch(Text(body, 2), 1, given)], []], [x])
    return f"{caught.value.fault.rule}: {caught.value.fault}"


def test_addresses_that_are_not_multicast_ones() -> None:
    load = "multimem.ld_reduce.weak.global.add.u32 %r1, [%rd{}+{}];"
    assert "out of bounds" in (said := fault_of(load.format(1, 0))) and "all multicast addresses" in said
    assert "out of bounds" in fault_of(load.format(0, 128))
    assert "misaligned" in fault_of(load.format(0, 2))
    assert "out of bounds" in fault_of("ld.global.b32 %r1, [%rd0];"), "only multimem may use it"


def test_each_memory_has_its_own_multicast_address() -> None:
    kept = [symmetric(name, 2, (32,), torch.int32, poisoned=False) for name in "xyz"]
    for n, memory in enumerate(kept):
        for tensor in memory.tensors:
            tensor.fill_(10**n)
    out = torch.zeros(3, dtype=torch.int32)
    body = "".join(
        f"multimem.ld_reduce.weak.global.add.u32 %r1, [%rd{n}+124]; st.global.b32 [%rd3+{4 * n}], %r1;"
        for n in range(3)
    )
    given = {memory.name: memory.multicast for memory in kept}
    run_all([[Launch(Text(f"setp.ne.b32 %p1, %r0, 0; @%p1 ret; {body}", 4), 1, dict(**given, out=out))], []], kept)
    assert out.tolist() == [2, 20, 200]


def test_lanes_of_one_instruction_choose_among_multicast_addresses() -> None:
    a, b = (symmetric(name, 2, (32,), torch.int32, poisoned=False) for name in "ab")
    for tensor in (*a.tensors, *b.tensors):
        tensor.fill_(1 if any(tensor is each for each in a.tensors) else 10)
    out = torch.zeros(32, dtype=torch.int32)
    body = f"""setp.lt.u32 %p1, %r0, 7; selp.b64 %rd9, %rd0, %rd1, %p1; mad.wide.u32 %rd8, %r0, 4, %rd9;
        multimem.ld_reduce.weak.global.add.u32 %r1, [%rd8]; {AT.format(4, 2)} st.global.b32 [%rd8], %r1;"""
    run_all([[Launch(Text(body, 3), 1, dict(a=a.multicast, b=b.multicast, out=out))], []], [a, b])
    assert out.tolist() == [2] * 7 + [20] * 25


def test_ranks_wait_for_all_by_one_load() -> None:
    """A strong load lets others proceed: each rank sets its own word, and polls the sum of all."""
    word = symmetric("word", W, (1,), torch.int32, poisoned=False)
    body = f"""setp.ne.b32 %p1, %r0, 0; @%p1 ret; atom.global.release.sys.add.u32 %r1, [%rd0], 1;
        $spin: multimem.ld_reduce.acquire.sys.global.add.u32 %r1, [%rd1]; setp.lt.u32 %p1, %r1, {W}; @%p1 bra $spin;"""
    work = [[Launch(Text(body, 2), 1, dict(own=tensor, many=word.multicast))] for tensor in word.tensors]
    for seed in range(6):
        for tensor in word.tensors:
            tensor.zero_()
        run_all(work, [word], seed, weak=True)


def test_memory_that_nobody_wrote_is_not_reduced() -> None:
    x = symmetric("x", 2, (32,), torch.int32)
    x.tensors[0].zero_()
    launch = Launch(Text("multimem.ld_reduce.weak.global.add.u32 %r1, [%rd0];", 1), 1, dict(many=x.multicast))
    with pytest.raises(SimulationFault, match="never written"):
        run_all([[launch], []], [x])


# -- a kernel ----------------------------------------------------------------------------------------------------------


@triton.jit
def _all_reduce(own, many, flags, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, FENCE: tl.constexpr):
    """Each rank sums its part of a tile by the switch and stores the sum at all ranks: two-shot, bf16 pairs."""
    lane = tl.arange(0, N)
    tl.store(own + lane, lane + 1)
    for step in tl.static_range(2):
        tl.debug_barrier()
        for peer in tl.static_range(WORLD):
            flag = tl.load(flags + peer).to(tl.pointer_type(tl.int32))
            tl.atomic_add(flag + step, 1, sem="release", scope="sys")
        mine = tl.load(flags + RANK).to(tl.pointer_type(tl.int32)) + step
        while tl.atomic_add(mine, 0, sem="acquire", scope="sys") < WORLD:
            pass
        tl.debug_barrier()
        if FENCE:
            tl.inline_asm_elementwise("fence.proxy.alias; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        if step == 0:
            PART: tl.constexpr = N // WORLD
            at = many + (RANK * PART + tl.arange(0, PART)) * 4
            summed = tl.inline_asm_elementwise(
                "multimem.ld_reduce.weak.global.add.u32 $0, [$1];",
                "=r,l",
                [at],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
            tl.inline_asm_elementwise(
                "multimem.st.weak.global.f32 [$1], $2; // $0",
                "=r,l,r",
                [at, summed],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
            if FENCE:
                tl.inline_asm_elementwise(
                    "fence.proxy.alias; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
                )  # fmt: skip
    tl.store(out + lane, tl.load(own + lane))


def _case(fence: bool, n: int = 256, world: int = 2) -> Case:
    def make() -> Run:
        x = symmetric("x", world, (n,), torch.int32)
        flags = symmetric("flags", world, (2,), torch.int32, poisoned=False)
        outs = [torch.zeros(n, dtype=torch.int32) for _ in range(world)]
        work = [
            [
                Launch(
                    _all_reduce, 1,
                    dict(own=x.tensors[r], many=x.multicast, flags=flags.pointers, out=outs[r], RANK=r, WORLD=world,
                         N=n, FENCE=fence),
                )
            ]
            for r in range(world)
        ]  # fmt: skip
        want = world * (torch.arange(n) + 1).int()
        return Run(work, [x, flags], lambda: compare("out", outs, [want] * world))

    return Case("all_reduce", make)


@pytest.mark.parametrize("fine", [False, True])
def test_a_compiled_all_reduce_through_the_switch(fine: bool) -> None:
    for seed in range(8):
        assert once(_case(True), "sm_90", seed, fine=fine) is None
        fault = once(_case(False), "sm_90", seed, fine=fine)
        assert fault is not None and "with no fence.proxy.alias" in str(fault)
