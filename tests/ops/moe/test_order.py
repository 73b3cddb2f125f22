"""The order of choices by expert, shared by all engines."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedtp.ops.moe.plan import sort_choices


@given(
    st.sampled_from([1, 2, 64, 32767, 32768, 70000]),
    st.integers(0, 60),
    st.integers(1, 8),
    st.sampled_from([torch.int32, torch.int64]),
    st.integers(0, 2**31),
)
def test_slots_are_sorted_by_expert_dropped_ones_last(experts, tokens, k, dtype, seed):
    """Slots of one expert keep their order, for any supported number of experts."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randint(-1, experts, (4,), generator=generator).tolist()  # shared by several slots
    chosen = torch.tensor([-1, experts - 1, *few])[torch.randint(0, 6, (tokens, k), generator=generator)]
    counts, order = sort_choices(chosen.to(dtype), experts)
    slots = chosen.flatten().tolist()
    want = sorted(range(len(slots)), key=lambda slot: slots[slot] if slots[slot] >= 0 else experts)
    assert (order.dtype, order.tolist()) == (torch.int32, want)
    assert (counts.dtype, counts.shape) == (torch.int32, (experts,))
    assert all(counts[e] == slots.count(e) for e in {*slots} - {-1})
    assert counts.sum() == sum(e >= 0 for e in slots)
