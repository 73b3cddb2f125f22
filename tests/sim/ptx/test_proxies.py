"""Proxy fences of shared memory: the stamps against a list of all that happened, and fences taken out of kernels."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedtp.sim import Launch, SimulationFault
from fusedtp.sim.ptx.descriptors import TensorMap
from fusedtp.sim.ptx.proxies import FENCES_COPIES, GenericWrites
from tests.sim.ptx.running import once, run_all
from tests.sim.ptx.test_kernels import flat_case, product_case
from tests.sim.ptx.test_litmus import WithMap

THREADS, WORDS = 4, 8
STEPS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, THREADS - 1), st.integers(0, WORDS - 4), st.sampled_from([2, 4, 8, 16])),
    st.tuples(st.just("tma"), st.integers(0, WORDS - 1)),
    st.tuples(st.just("fence"), st.integers(0, THREADS - 1)),
    st.tuples(st.just("meet")),
)  # fmt: skip


@given(st.lists(STEPS, max_size=30))
def test_stamps_say_what_the_history_says(steps: list[tuple]) -> None:
    """A word lacks a fence if its last write is generic, and neither has its thread fenced since, nor another thread
    that has met it at a barrier in between.
    """
    writes = GenericWrites(4 * WORDS, THREADS)
    last: dict[int, int] = {}  # word -> number of the step of its last generic write
    for number, step in enumerate(steps):
        if step[0] == "write":
            _, thread, word, nbytes = step
            writes.write(np.array([4 * word]), nbytes, np.array([thread]))
            last |= dict.fromkeys(range(word, word + max(1, nbytes // 4)), number)
        elif step[0] == "tma":
            writes.write_async(np.array([4 * step[1]]))
            last.pop(step[1], None)
        elif step[0] == "fence":
            writes.fence(np.array([step[1]]))
        else:
            writes.meet()
    for word in range(WORDS):
        fenced = True
        if word in last:
            met, fenced = False, False
            for step in steps[last[word] + 1 :]:
                met |= step[0] == "meet"
                fenced |= step[0] == "fence" and (met or step[1] == steps[last[word]][1])
        assert writes.lacking(np.array([4 * word])) == (not fenced), word


@pytest.mark.parametrize("fence", ["", "fence.proxy.async.global;", "fence.proxy.alias;"])
@pytest.mark.parametrize("seed", range(2))
def test_a_missing_fence_is_found(seed: int, fence: str) -> None:
    """Before TMA stores a tile that threads wrote, and before wgmma reads what cp.async brought; one of global memory
    is none of shared memory.
    """

    def changed(text: str) -> str:
        found = re.sub(r"fence\.proxy\.async[^;]*;", fence, text)
        assert found != text
        return found

    for case in (flat_case(72, 4), *[product_case()] * FENCES_COPIES):
        fault = once(case, "sm_90", seed, edit=changed)
        assert fault is not None and fault.rule == "missing proxy fence", case.name
        assert once(case, "sm_90", seed) is None


WRITES = {"st": "st.shared.b32 [%r4], 7;", "atom": "atom.shared.exch.b32 %r5, [%r4], 7;"}
MEETS = {
    "bar.sync": "bar.sync 0;",
    "bar.warp": "bar.warp.sync 0xffffffff;",
    "mbarrier": """mbarrier.arrive.shared::cta.b64 _, [%r2];
        $w: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra $w;""",
}
FENCE = "fence.proxy.async.shared::cta;"


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("meet", MEETS.values(), ids=MEETS)
@pytest.mark.parametrize(
    "before, writers, behind, enough",
    [
        ("", "", "", False),
        (FENCE, "", "", False),
        ("", FENCE, "", True),
        ("", "", FENCE, True),
        ("", "fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster;", "", True),
        ("", "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;", "", False),
    ],
    ids=["none", "before the write", "of the writers", "behind the meeting", "one way", "the other way"],
)
def test_where_a_fence_counts(before: str, writers: str, behind: str, enough: bool, meet: str, write: str) -> None:
    """A warp writes 32 words and meets; its first thread stores them by TMA."""
    y = torch.zeros(32, dtype=torch.int32)
    described = TensorMap(y.data_ptr(), (32,), (1,), (32,), "s32", 0)
    body = f"""mov.b32 %r1, 0; mov.b32 %r2, 128; mov.b32 %r3, 0; shl.b32 %r4, %r0, 2; setp.ne.b32 %p1, %r0, 0;
        @!%p1 mbarrier.init.shared::cta.b64 [%r2], 32; bar.sync 0;
        {before} {write} {writers} {meet} {behind} @%p1 ret;
        cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%rd0, {{%r3}}], [%r1];
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    work = [[Launch(WithMap(body, 2, 32, 256), 1, dict(map=described, y=y))]]
    if enough:
        run_all(work, weak=True)
        assert (y == 7).all()
    else:
        with pytest.raises(SimulationFault) as error:
            run_all(work, weak=True)
        assert error.value.fault.rule == "missing proxy fence"
