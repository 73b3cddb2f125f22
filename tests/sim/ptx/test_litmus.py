"""Litmus tests of PTX's memory model on the machine: forbidden outcomes never appear, allowed ones do.

PTX ISA 8.8, section 8.10 (axioms) and 8.8 (release and acquire patterns). Threads T0, T1, ... are one-thread programs
of ranks 0, 1, ..., or of one rank, or warps of one program. Each register that a test names is a number of an outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from fusedtp.sim import Launch, SimulationFault
from fusedtp.sim.ptx.descriptors import TensorMap
from tests.sim.ptx.running import Text, run_all

SEEDS = 60
Outcome = tuple[int, ...]


def outcomes(
    *threads: str, apart: str = "ranks", seeds: int = SEEDS, weak: bool = True, words: int = 4
) -> set[Outcome]:
    """All values of the registers %r10, %r11 of each thread, in order, that `seeds` schedules show.

    A thread's text may use [x], [y], [z], [w], four words of 0. apart: "ranks", "programs" or "warps".
    """
    shown = set()
    for seed in range(seeds):
        memory = torch.zeros(words, dtype=torch.int32)
        out = torch.full((len(threads), 2), -1, dtype=torch.int32)
        run_all(_work(threads, apart, memory, out), seed=seed, weak=weak, fine=True)
        shown.add(tuple(out.flatten().tolist()))
    return shown


def _work(threads: Sequence[str], apart: str, memory: torch.Tensor, out: torch.Tensor) -> list[list[Launch]]:
    texts = []
    for n, text in enumerate(threads):
        for at, name in enumerate("xyzw"):
            text = text.replace(f"[{name}]", f"[%rd0+{4 * at}]")
        keeps = [r for r in ("%r10", "%r11") if f" {r}," in text]
        stores = " ".join(f"st.global.b32 [%rd1+{8 * n + 4 * k}], {r};" for k, r in enumerate(keeps))
        texts.append(f"{text} {stores}")
    if apart == "ranks":
        bodies = [f"setp.ne.b32 %p1, %r0, 0; @%p1 ret; {text}" for text in texts]
        return [[Launch(Text(body, 2), 1, dict(at=memory, out=out))] for body in bodies]
    which = "mov.u32 %r1, %ctaid.x;" if apart == "programs" else "shr.u32 %r1, %r0, 5;"
    arms = "".join(f"setp.eq.b32 %p2, %r1, {n}; @%p2 bra $T{n}; " for n in range(len(texts)))
    body = f"{which} and.b32 %r2, %r0, 31; setp.ne.b32 %p1, %r2, 0; @%p1 ret; {arms} ret; "
    body += " ".join(f"$T{n}: {text} ret;" for n, text in enumerate(texts))
    if apart == "programs":
        return [[Launch(Text(body, 2), len(texts), dict(at=memory, out=out))]]
    return [[Launch(Text(body, 2, 32 * len(texts)), 1, dict(at=memory, out=out))]]


def st(word: str, value: int, order: str = "relaxed", scope: str = "sys") -> str:
    return f"st.global.{order}.{scope}.b32 [{word}], {value};"


def ld(register: str, word: str, order: str = "relaxed", scope: str = "sys") -> str:
    return f"ld.global.{order}.{scope}.b32 {register}, [{word}];"


A, B = "%r10", "%r11"
PLACES = [
    ("warps", "cta"),
    ("programs", "gpu"),
    ("ranks", "sys"),
]  # threads apart, the scope that just reaches
OVER = [("warps", "sys"), ("programs", "sys"), ("warps", "gpu")]  # more than it takes
TOO_NEAR = [("programs", "cta"), ("ranks", "gpu"), ("ranks", "cta")]


def releases(scope: str) -> dict[str, str]:
    """Ways to release by writing 1 to y: 8.8."""
    return {
        "release": st("y", 1, "release", scope),
        "fence": f"fence.acq_rel.{scope}; {st('y', 1)}",
        "fence.release": f"fence.release.{scope}; {st('y', 1)}",
        "fence.sc": f"fence.sc.{scope}; {st('y', 1)}",
        "membar": f"membar.{dict(cta='cta', gpu='gl', sys='sys')[scope]}; st.volatile.global.b32 [y], 1;",
        "atom": f"atom.global.release.{scope}.exch.b32 %r5, [y], 1;",
        "red": f"red.global.release.{scope}.add.u32 [y], 1;",
        "atom.acq_rel": f"atom.global.acq_rel.{scope}.cas.b32 %r5, [y], 0, 1;",
    }


def acquires(scope: str) -> dict[str, str]:
    """Ways to acquire by reading y into %r10."""
    return {
        "acquire": ld(A, "y", "acquire", scope),
        "fence": f"{ld(A, 'y')} fence.acq_rel.{scope};",
        "fence.acquire": f"{ld(A, 'y')} fence.acquire.{scope};",
        "twice": f"{ld(A, 'y')} {ld('%r6', 'y', 'acquire', scope)}",
        "volatile": f"ld.volatile.global.b32 {A}, [y]; membar.{dict(cta='cta', gpu='gl', sys='sys')[scope]};",
        "atom": f"atom.global.acquire.{scope}.add.u32 {A}, [y], 0;",
    }


# -- message passing: 8.10.6, causality --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("apart, scope", [*PLACES, OVER[0]])
def test_message_passing_is_forbidden_by_release_and_acquire(apart: str, scope: str) -> None:
    """No pair of patterns gives r10 = 1 and r11 = 0."""
    for n, release in enumerate(releases(scope).values()):
        for m, acquire in enumerate(acquires(scope).values()):
            shown = outcomes(f"{st('x', 1)} {release}", f"{acquire} {ld(B, 'x')}", apart=apart, seeds=8 + (n + m) % 2)
            assert (-1, -1, 1, 0) not in shown, (release, acquire)
            assert len(shown) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("apart, scope", PLACES)
@pytest.mark.parametrize("weaker", ["both", "release", "acquire"])
def test_message_passing_by_relaxed_operations_shows(apart: str, scope: str, weaker: str) -> None:
    release = st("y", 1, "relaxed" if weaker != "acquire" else "release", scope)
    acquire = ld(A, "y", "relaxed" if weaker != "release" else "acquire", scope)
    shown = outcomes(f"{st('x', 1, scope=scope)} {release}", f"{acquire} {ld(B, 'x', scope=scope)}", apart=apart)
    assert shown == {(-1, -1, 0, 0), (-1, -1, 0, 1), (-1, -1, 1, 0), (-1, -1, 1, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("apart, scope", TOO_NEAR)
@pytest.mark.parametrize("release", ["fence", "fence.sc"])
def test_a_fence_of_a_scope_that_does_not_reach_orders_nothing(apart: str, scope: str, release: str) -> None:
    """8.7: morally strong. The flag itself has system scope; a weak message is a race, a relaxed one is missed."""
    wide, near = "sys", scope
    for give, take in ((wide, near), (near, wide)):
        sends, gets = releases(give)[release], acquires(take)["fence"]
        shown = outcomes(f"{st('x', 1)} {sends}", f"{gets} {ld(B, 'x')}", apart=apart)
        assert (-1, -1, 1, 0) in shown
        gets = f"$s: {ld(A, 'y')} setp.eq.b32 %p5, {A}, 0; @%p5 bra $s; fence.acq_rel.{take}; ld.global.b32 {B}, [x];"
        with pytest.raises(SimulationFault) as caught:
            outcomes(f"st.global.b32 [x], 1; {sends}", gets, apart=apart, seeds=3)
        assert caught.value.fault.rule == "read-write race"


@pytest.mark.parametrize("apart, scope", TOO_NEAR)
def test_an_acquire_of_a_scope_that_does_not_reach_is_a_race(apart: str, scope: str) -> None:
    """8.7.1: the accesses of the flag itself are not morally strong."""
    with pytest.raises(SimulationFault) as caught:
        outcomes(
            f"\n.loc 1 3 1\n{st('x', 1)} \n.loc 1 4 1\n{st('y', 1, 'release')}",
            f"\n.loc 1 7 1\n{ld(A, 'y', 'acquire', scope)} {ld(B, 'x')}",
            apart=apart,
        )
    fault = caught.value.fault
    assert fault.rule == "scope" and {a.site.line for a in fault.accesses} == {4, 7}


def test_a_reduction_acquires_nothing() -> None:
    """8.8: `red; fence.acquire` is not an acquire pattern."""
    get = f"red.global.relaxed.sys.add.u32 [y], 2; fence.acq_rel.sys; {ld(A, 'x')} {ld(B, 'y')}"
    shown = outcomes(f"{st('x', 1)} {st('y', 1, 'release')}", get)
    assert (-1, -1, 0, 3) in shown


# -- release sequences: 8.8, 8.9.2 -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "between", ["atom.global.relaxed.sys.add.u32 %r5, [y], 1;", "red.global.relaxed.sys.add.u32 [y], 1;"]
)
def test_an_atomic_carries_on_what_it_read(between: str) -> None:
    """8.9.2: observation order passes through atomic operations of other threads."""
    get = f"{ld(A, 'y', 'acquire')} {ld(B, 'x')}"
    shown = outcomes(f"{st('x', 1)} {st('y', 1, 'release')}", between, get, seeds=160)
    assert (-1, -1, -1, -1, 2, 0) not in shown and (-1, -1, -1, -1, 2, 1) in shown


def test_a_store_of_another_thread_ends_a_release_sequence() -> None:
    """A store of the same thread continues it: 8.8, the second form of a release pattern."""
    get = f"{ld(A, 'y', 'acquire')} {ld(B, 'x')}"
    shown = outcomes(f"{st('x', 1)} {st('y', 1, 'release')}", st("y", 2), get, seeds=160)
    assert (-1, -1, -1, -1, 2, 0) in shown
    shown = outcomes(f"{st('x', 1)} {st('y', 1, 'release')} {st('y', 2)}", get)
    assert (-1, -1, 2, 0) not in shown and (-1, -1, 2, 1) in shown


# -- store buffering and fence.sc: 8.10.2 ------------------------------------------------------------------------------


def buffered(between: str, apart: str = "ranks", scope: str = "sys") -> bool:
    shown = outcomes(
        f"{st('x', 1, scope=scope)} {between} {ld(A, 'y', scope=scope)}",
        f"{st('y', 1, scope=scope)} {between} {ld(A, 'x', scope=scope)}",
        apart=apart,
    )
    assert {(1, -1, 0, -1), (0, -1, 1, -1), (1, -1, 1, -1)} & shown
    return (0, -1, 0, -1) in shown


@pytest.mark.slow
@pytest.mark.parametrize("apart, scope", PLACES)
def test_store_buffering(apart: str, scope: str) -> None:
    assert buffered("", apart, scope)
    assert buffered(f"fence.acq_rel.{scope};", apart, scope)
    assert not buffered(f"fence.sc.{scope};", apart, scope)
    assert not buffered(f"membar.{dict(cta='cta', gpu='gl', sys='sys')[scope]};", apart, scope)


@pytest.mark.slow
@pytest.mark.parametrize("apart, scope", TOO_NEAR)
def test_store_buffering_by_fences_that_do_not_reach(apart: str, scope: str) -> None:
    assert buffered(f"fence.sc.{scope};", apart)


def test_store_buffering_by_acquire_and_release() -> None:
    shown = outcomes(
        f"{st('x', 1, 'release')} {ld(A, 'y', 'acquire')}", f"{st('y', 1, 'release')} {ld(A, 'x', 'acquire')}"
    )
    assert (0, -1, 0, -1) in shown


# -- independent reads of independent writes ---------------------------------------------------------------------------


def independent(order: str, between: str) -> bool:
    reads = [f"{ld(A, one, order)} {between} {ld(B, other, order)}" for one, other in ("xy", "yx")]
    shown = outcomes(st("x", 1), st("y", 1), *reads, seeds=250)
    return (-1, -1, -1, -1, 1, 0, 1, 0) in shown


@pytest.mark.slow
def test_independent_reads_of_independent_writes() -> None:
    """PTX is not multi-copy atomic: two readers may disagree, unless fence.sc is between their reads."""
    assert independent("relaxed", "")
    assert independent("acquire", "")
    assert not independent("relaxed", "fence.sc.sys;")


@pytest.mark.slow
@pytest.mark.parametrize("apart, scope", PLACES)
def test_causality_is_transitive(apart: str, scope: str) -> None:
    """ISA2 and WRC: 8.9.5, base causality order."""
    first, last = (
        f"{st('x', 1)} {st('y', 1, 'release', scope)}",
        f"{ld(A, 'z', 'acquire', scope)} {ld(B, 'x')}",
    )
    middle = f"{ld(A, 'y', 'acquire', scope)} mov.b32 %r5, {A}; st.global.release.{scope}.b32 [z], %r5;"
    shown = outcomes(first, middle, last, apart=apart)
    assert not any(o[4:] == (1, 0) for o in shown) and any(o[4:] == (1, 1) for o in shown)
    middle = f"{ld(A, 'x', 'relaxed', scope)} mov.b32 %r5, {A}; st.global.release.{scope}.b32 [z], %r5;"
    last = f"{ld(A, 'z', 'acquire', scope)} {ld(B, 'x', 'relaxed', scope)}"
    shown = outcomes(st("x", 1, scope=scope), middle, last, apart=apart)
    assert not any(o[4:] == (1, 0) for o in shown) and any(o[4:] == (1, 1) for o in shown)


# -- coherence: 8.10.5, sequential consistency per location ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("apart, scope", PLACES)
def test_coherence(apart: str, scope: str) -> None:
    def r(register: str) -> str:
        return ld(register, "x", scope=scope)

    def w(value: int) -> str:
        return st("x", value, scope=scope)

    shown = outcomes(f"{w(1)} {w(2)}", f"{r(A)} {r(B)}", apart=apart)  # CoRR, CoWW
    assert {o[2:] for o in shown} == {(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)}
    shown = outcomes(w(1), f"{w(2)} {r(A)}", f"{r(A)} {r(B)}", apart=apart)  # CoWR: what follows one's own write
    assert {o[2] for o in shown} == {1, 2}
    assert all((o[2], *o[4:]) not in {(1, 1, 2), (1, 2, 0), (1, 1, 0)} for o in shown)
    shown = outcomes(f"{r(A)} {w(1)}", f"{r(A)} {w(2)}", apart=apart)  # CoRW
    assert {o[::2] for o in shown} <= {(0, 0), (0, 1), (2, 0)}


@pytest.mark.parametrize("apart, scope", PLACES)
def test_atomics_of_one_word_lose_nothing(apart: str, scope: str) -> None:
    """8.10.3."""
    add = f"atom.global.relaxed.{scope}.add.u32 {A}, [x], 1;"
    shown = outcomes(add, add, add, apart=apart, seeds=15)
    assert all(sorted(o[::2]) == [0, 1, 2] for o in shown) and len(shown) > 1


# -- allowed, not shown: docs/checking-kernels.md ----------------------------------------------------------------------


def test_what_is_allowed_and_not_shown() -> None:
    """Load buffering, and 2+2W (both words end with their first write): the table in docs/checking-kernels.md."""
    shown = outcomes(f"{ld(A, 'x')} {st('y', 1)}", f"{ld(A, 'y')} {st('x', 1)}")
    assert (1, -1, 1, -1) not in shown
    for seed in range(30):
        memory, out = torch.zeros(4, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
        threads = [f"{st('x', 1)} {st('y', 2)}", f"{st('y', 1)} {st('x', 2)}"]
        run_all(_work(threads, "ranks", memory, out), seed=seed, weak=True)
        assert memory[:2].tolist() != [1, 1]


# -- races of weak accesses --------------------------------------------------------------------------------------------

RACES: list[tuple[str, str, str]] = [
    ("st.global.b32 [x], 1;", "st.global.b32 [x], 2;", "write-write race"),
    ("st.global.b32 [x], 1;", "ld.global.b32 %r10, [x];", "read-write race"),
    ("st.global.relaxed.sys.b32 [x], 1;", "ld.global.b32 %r10, [x];", "read-write race"),
    ("st.global.b32 [x], 1;", "ld.global.relaxed.sys.b32 %r10, [x];", "read-write race"),
    ("atom.global.sys.add.u32 %r5, [x], 1;", "ld.global.b32 %r10, [x];", "read-write race"),
    ("st.global.relaxed.sys.b64 [x], 1;", "ld.global.relaxed.sys.b32 %r10, [x];", "read-write race"),
]


@pytest.mark.parametrize("one, other, rule", RACES)
@pytest.mark.parametrize("apart", ["ranks", "programs", "warps"])
def test_conflicts_that_nothing_orders_are_races(one: str, other: str, rule: str, apart: str) -> None:
    """In every schedule, with both lines: 8.7.1. Words of which one is part of the other race too: 8.7.2."""
    one = one.replace("1;", "%rd5;") if "b64" in one else one
    found = []
    for seed in range(4):
        memory, out = torch.zeros(4, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
        work = _work([f"\n.loc 1 3 1\n{one}", f"\n.loc 1 5 1\n{other}"], apart, memory, out)
        try:
            run_all(work, seed=seed, weak=seed != 0, fine=True)
        except SimulationFault as error:
            found.append(error.fault)
    assert len(found) == 4 if apart != "warps" else found  # Note [Loads in every thread] in shadow.py
    for fault in found:
        assert fault.rule == rule, fault
        assert {a.site.line for a in fault.accesses} == {3, 5}
        assert fault.accesses[0].tensor.startswith("at of rank 0")


def test_a_race_names_all_elements_that_it_concerns() -> None:
    whole = "mad.wide.u32 %rd8, %r0, 4, %rd0; st.global.b32 [%rd8], %r0;"
    part = f"setp.lt.u32 %p1, %r0, 8; @!%p1 ret; {whole}"
    data = torch.zeros(32, dtype=torch.int32)
    work = [[Launch(Text(text, 1), 1, dict(data=data))] for text in (whole, part)]
    with pytest.raises(SimulationFault) as caught:
        run_all(work)
    assert [(a.first, a.last) for a in caught.value.fault.accesses] == [((0,), (7,))] * 2


JOIN, FENCE = "bar.sync 0;", "fence.acq_rel.sys;"
FENCES: dict[str, tuple[str, str, str]] = {  # before the flag is set, after it was seen, the cause
    "right": (f"{JOIN} {FENCE}", f"{FENCE} {JOIN}", ""),
    "sender does not join": (FENCE, f"{FENCE} {JOIN}", "before that fence joins both threads"),
    "sender joins too late": (f"{FENCE} {JOIN}", f"{FENCE} {JOIN}", "before that fence joins both threads"),
    "sender does not fence": (JOIN, f"{FENCE} {JOIN}", "does not release what came before it"),
    "sender's fence is near": (
        f"{JOIN} fence.acq_rel.gpu;",
        f"{FENCE} {JOIN}",
        "the scopes of the fence before the store",
    ),
    "reader does not fence": (f"{JOIN} {FENCE}", JOIN, "does not acquire what it saw, nor does a fence after it"),
    "reader's fence is near": (f"{JOIN} {FENCE}", f"fence.acq_rel.gpu; {JOIN}", "nor does a fence after it"),
    "reader does not join": (f"{JOIN} {FENCE}", FENCE, "no barrier after that fence joins the others"),
    "reader joins too early": (f"{JOIN} {FENCE}", f"{JOIN} {FENCE}", "no barrier after that fence joins the others"),
}


@pytest.mark.parametrize("everyone", [True, False], ids=["all threads", "thread 0"])
@pytest.mark.parametrize("name", FENCES)
def test_the_cause_of_a_race_tells_a_missing_fence_from_a_missing_barrier(name: str, everyone: bool) -> None:
    """64 threads of a rank store and raise a flag by relaxed stores; thread 0 of another rank waits for it."""
    before, after, cause = FENCES[name]
    own = "mad.wide.u32 %rd8, %r0, 4, %rd0;"
    first = "setp.ne.b32 %p1, %r0, 0;"
    sets = f"{own} st.global.b32 [%rd8], 1; {before} {'' if everyone else f'{first} @%p1 ret;'} {st('%rd1', 1)}"
    waits = f"{first} @%p1 bra $over; $L: {ld('%r3', '%rd1')} setp.eq.b32 %p3, %r3, 0; @%p3 bra $L; $over:"
    reads = f"{own} {waits} {after} ld.global.b32 %r10, [%rd8];"
    for seed in range(4):
        data, flag = torch.zeros(64, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        work = [[Launch(Text(text, 2, 64), 1, dict(data=data, flag=flag))] for text in (sets, reads)]
        if not cause:
            run_all(work, seed=seed, weak=True, fine=seed % 2 == 1)
            continue
        with pytest.raises(SimulationFault) as caught:
            run_all(work, seed=seed)
        assert cause in caught.value.fault.cause


def test_a_fence_before_the_data_releases_nothing_of_it() -> None:
    own = "mad.wide.u32 %rd8, %r0, 4, %rd0;"
    sets = f"{own} {FENCE} st.global.b32 [%rd8], 1; {JOIN} setp.ne.b32 %p1, %r0, 0; @%p1 ret; {st('%rd1', 1)}"
    reads = (
        f"{own} $L: {ld('%r3', '%rd1', 'acquire')} setp.eq.b32 %p3, %r3, 0; @%p3 bra $L; ld.global.b32 %r10, [%rd8];"
    )
    data, flag = torch.zeros(64, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    work = [[Launch(Text(text, 2, 64), 1, dict(data=data, flag=flag))] for text in (sets, reads)]
    with pytest.raises(SimulationFault) as caught:
        run_all(work)
    assert "does not release what came before it" in caught.value.fault.cause


@pytest.mark.parametrize(
    ("fences", "cause"),
    [
        (("fence.acquire.sys;", ""), "the store (relaxed, sys) at :0 in k does not release what came before it"),
        ((FENCE, ""), "the load (relaxed, sys) at :0 in k does not acquire what it saw, nor does a fence after it"),
        ((FENCE, FENCE), ""),
    ],
)
def test_the_cause_of_a_race_by_way_of_a_third_knows_of_fences(fences: tuple[str, str], cause: str) -> None:
    """T1 and T2 wait by relaxed loads, each with a fence after it or without."""

    def wait(word: str, fence: str) -> str:
        return f"$L{word}: {ld('%r3', word)} setp.eq.b32 %p3, %r3, 0; @%p3 bra $L{word}; {fence}"

    threads = [
        f"st.global.b32 [x], 1; {st('y', 1, 'release')}",
        f"{wait('y', fences[0])} {st('z', 1)}",
        f"{wait('z', fences[1])} ld.global.b32 %r10, [x];",
    ]
    work = _work(threads, "ranks", torch.zeros(4, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32))
    if not cause:
        run_all(work)
        return
    with pytest.raises(SimulationFault) as caught:
        run_all(work)
    assert caught.value.fault.cause == f"a signal goes through rank 1, k, program 0, but {cause}"


@pytest.mark.parametrize("part", ["sends", "sees", "passes on", "ends", "nothing"])
def test_the_cause_of_a_race_names_the_weak_part_of_a_chain_by_way_of_a_third(part: str) -> None:
    """T0 writes x and signals T1 by y; T1 signals T2 by z; T2 reads x."""

    def by(order: str, this: str) -> str:
        return "relaxed" if part == this else order

    def wait(word: str, this: str) -> str:
        seen = ld("%r3", word, by("acquire", this))
        return f"$L{word}: {seen} setp.eq.b32 %p3, %r3, 0; @%p3 bra $L{word};"

    threads = [
        f"st.global.b32 [x], 1; {st('y', 1, by('release', 'sends'))}",
        f"{wait('y', 'sees')} {st('z', 1, by('release', 'passes on'))}",
        f"{wait('z', 'ends')} ld.global.b32 %r10, [x];",
    ]
    work = _work(threads, "ranks", torch.zeros(4, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32))
    if part == "nothing":
        run_all(work)
        return
    with pytest.raises(SimulationFault) as caught:
        run_all(work)
    said = caught.value.fault.cause
    assert said.startswith("a signal goes through rank 1,"), said
    what = {"sends": "the store (", "sees": "the load (", "passes on": "the store (", "ends": "the load ("}[part]
    assert what in said
    assert ("does not release" if part in ("sends", "passes on") else "does not acquire") in said


@pytest.mark.parametrize("barrier", ["bar.sync 0;", "bar.sync 1, 64;", "barrier.sync 2;"])
def test_a_barrier_orders_the_threads_that_meet(barrier: str) -> None:
    """Lanes of a warp are ordered by bar.warp.sync, not by being in one warp: 8.5, note."""
    body = """xor.b32 %r1, %r0, {}; mad.wide.u32 %rd8, %r0, 4, %rd0; mad.wide.u32 %rd9, %r1, 4, %rd0;
        st.global.b32 [%rd8], %r0; {} ld.global.b32 %r2, [%rd9]; st.global.b32 [%rd8+256], %r2;"""
    cases: list[tuple[int, str, bool]] = [
        (32, barrier, True), (1, barrier, True), (1, "bar.warp.sync -1;", True), (32, "", False), (1, "", False),
        (32, "bar.warp.sync -1;", False),
    ]  # fmt: skip
    for by, between, ordered in cases:
        data = torch.zeros(128, dtype=torch.int32)
        work = [[Launch(Text(body.format(by, between), 1, 64), 1, dict(data=data))]]
        if ordered:
            run_all(work, weak=True)
            assert data[64:].tolist() == [n ^ by for n in range(64)]
        else:
            with pytest.raises(SimulationFault, match="race"):
                run_all(work, weak=True)


@pytest.mark.parametrize("barrier", [0, 1])  # 0 is the barrier of all, so that the warps go in step
def test_a_barrier_opens_for_as_many_threads_as_it_expects(barrier: int) -> None:
    """9.7.13.1: it completes when that many threads have arrived; later ones wait for the next phase."""
    body = """mad.wide.u32 %rd8, %r0, 4, %rd0; xor.b32 %r1, %r0, {}; mad.wide.u32 %rd9, %r1, 4, %rd0;
        st.global.b32 [%rd8], %r0; bar.sync {}, 64; ld.global.b32 %r2, [%rd9];"""

    def racing(by: int, fine: bool) -> int:
        count = 0
        for seed in range(6):
            data = torch.zeros(128, dtype=torch.int32)
            try:
                run_all(
                    [[Launch(Text(body.format(by, barrier), 1, 128), 1, dict(data=data))]],
                    weak=True,
                    fine=fine,
                    seed=seed,
                )
            except SimulationFault as error:
                assert "race" in error.fault.rule
                count += 1
        return count

    for fine in (False, True):
        assert racing(1, fine) == 0  # a warp is of one phase
        assert min(racing(by, fine) for by in (32, 64, 96)) > 0  # any two warps may be of different ones
    with pytest.raises(SimulationFault, match="threads wait at barriers"):
        run_all([[Launch(Text(f"bar.sync {barrier}, 64;", 1, 96), 1, dict(data=torch.zeros(1)))]])


def test_bar_arrive_orders_those_that_wait_only() -> None:
    """8.9.4: `bar.arrive` synchronizes with `bar.sync`, but not the other way."""
    arrives = "st.global.b32 [%rd0], 1; bar.arrive 1, 64;"
    waits = "bar.sync 1, 64;"
    head = "setp.ge.u32 %p1, %r0, 32; and.b32 %r2, %r0, 31; setp.eq.b32 %p3, %r2, 0; @%p1 bra $B;"

    def run(first: str, second: str) -> None:
        word = torch.zeros(2, dtype=torch.int32)
        body = f"{head} {first} ret; $B: {second}"
        for seed in range(3):
            run_all([[Launch(Text(body, 1, 64), 1, dict(word=word))]], weak=True, fine=True, seed=seed)

    run(f"@%p3 {arrives}", f"{waits} @%p3 ld.global.b32 %r5, [%rd0];")
    with pytest.raises(SimulationFault, match="race"):
        run("bar.arrive 1, 64; @%p3 ld.global.b32 %r5, [%rd0];", f"@%p3 st.global.b32 [%rd0], 1; {waits}")


# -- words wider than the hardware's atomicity -------------------------------------------------------------------------


def packed(flags: Callable[[int], bool]) -> bool:
    """Whether four words sent at once, some of them flags, are torn although the flags are right."""
    torn = False
    for seed in range(60):
        memory, out = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
        send = "mov.b32 %r1, 7; st.volatile.global.v4.b32 [%rd0], {%r1, %r1, %r1, %r1};"
        checks = " ".join(f"setp.ne.b32 %p2, %r{n + 1}, 7; @%p2 bra $s;" for n in range(4) if flags(n))
        get = "$s: ld.volatile.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd0]; " + checks
        get += " st.global.v4.b32 [%rd1], {%r1, %r2, %r3, %r4};"
        one = "setp.ne.b32 %p1, %r0, 0; @%p1 ret; "
        args = dict(memory=memory, out=out)
        run_all([[Launch(Text(one + text, 2), 1, args)] for text in (send, get)], seed=seed, weak=True)
        torn |= out.tolist() != [7] * 4
    return torn


def test_vectors_tear_between_words_of_8_bytes() -> None:
    """A flag in each 8 bytes guards them, as in NCCL's LL; one flag for 16 bytes does not."""
    assert not packed(lambda n: n % 2 == 1)
    assert packed(lambda n: n == 3)


# -- proxies: 8.6, 8.9.5 -----------------------------------------------------------------------------------------------


class WithMap(Text):
    """Its first argument is a tensor map, passed by address."""

    @property
    def ptx(self) -> str:
        return super().ptx.replace("ld.param.b64 %rd0, [k_param_0]", "mov.b64 %rd0, k_param_0")


@pytest.mark.parametrize(
    "fence, enough",
    [
        ("", False),
        ("fence.proxy.async.shared::cta;", False),
        ("fence.proxy.async;", True),
        ("fence.proxy.async.global;", True),
    ],
)
def test_a_tensor_copy_of_what_a_store_wrote_needs_a_proxy_fence(fence: str, enough: bool) -> None:
    x, out = torch.zeros(32, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    described = TensorMap(x.data_ptr(), (32,), (1,), (32,), "s32", 0)
    body = f"""setp.ne.b32 %p1, %r0, 0; @%p1 ret; mov.b32 %r1, 0; mov.b32 %r2, 128; mov.b32 %r3, 0;
        mbarrier.init.shared::cta.b64 [%r2], 1; st.global.b32 [%rd1], 5; {fence}
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128;
        cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd0, {{%r3}}], [%r2];
        $w: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra $w;
        ld.shared.b32 %r4, [%r1]; st.global.b32 [%rd2], %r4;"""
    work = [[Launch(WithMap(body, 3, 32, 256), 1, dict(map=described, x=x, out=out))]]
    if enough:
        run_all(work, weak=True)
        assert out[0] == 5
    else:
        with pytest.raises(SimulationFault, match="no proxy fence") as error:
            run_all(work, weak=True)
        waived = {error.value.fault.name: 0}
        run_all(work, weak=True, waived=waived)
        assert list(waived.values()) == [1]


@pytest.mark.parametrize("early", [False, True])
def test_an_asynchronous_copy_reads_as_early_as_it_is_issued(early: bool) -> None:
    """8.9.1.1: an acquire between its issue and its wait orders nothing for it."""
    copy = "mov.b32 %r1, 0; cp.async.ca.shared.global [%r1], [%rd0], 4; cp.async.commit_group;"
    wait = "$s: ld.global.acquire.sys.b32 %r2, [%rd1]; setp.eq.b32 %p2, %r2, 0; @%p2 bra $s;"
    order = f"{copy} {wait}" if early else f"{wait} {copy}"
    one = "setp.ne.b32 %p1, %r0, 0; @%p1 ret; "
    texts = [
        f"{one} st.global.b32 [%rd0], 5; st.global.release.sys.b32 [%rd1], 1;",
        f"{one} {order} cp.async.wait_group 0; ld.shared.b32 %r3, [%r1]; st.global.b32 [%rd2], %r3;",
    ]
    for seed in range(4):
        args = {name: torch.zeros(1, dtype=torch.int32) for name in ("data", "flag", "out")}
        work = [[Launch(Text(text, 3, 32, 64), 1, args)] for text in texts]
        if early:
            with pytest.raises(SimulationFault, match="read-write race"):
                run_all(work, seed=seed, weak=True)
        else:
            run_all(work, seed=seed, weak=True)
            assert args["out"][0] == 5
