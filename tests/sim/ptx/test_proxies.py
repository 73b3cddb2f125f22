"""Proxy fences of shared memory: the stamps against a list of all that happened, and fences taken out of kernels."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusedtp.sim.ptx.proxies import GenericWrites
from tests.sim.ptx.running import once
from tests.sim.ptx.test_kernels import flat_case, product_case

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


def without_fences(text: str) -> str:
    changed = re.sub(r"fence\.proxy\.async[^;]*;", "", text)
    assert changed != text
    return changed


@pytest.mark.parametrize("seed", range(3))
def test_a_missing_fence_is_found(seed: int) -> None:
    """Before TMA stores a tile that threads wrote, and before wgmma reads what cp.async brought."""
    for case in (flat_case(72, 4), product_case()):
        fault = once(case, "sm_90", seed, edit=without_fences)
        assert fault is not None and fault.rule == "missing proxy fence", case.name
        assert once(case, "sm_90", seed) is None
