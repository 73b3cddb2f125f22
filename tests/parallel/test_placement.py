"""A rank's part of a full parameter is one copy of its slice, with memory of its own."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from fusedtp.parallel.placement import Way


class NewBytes(TorchDispatchMode):
    """The size of all memory that operations allocate."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.total, self.known = 0, {known.data_ptr()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, list | tuple) else [made]:
            memory = x.untyped_storage()
            if memory.data_ptr() not in self.known:
                self.known.add(memory.data_ptr())
                self.total += memory.nbytes()
        return made


PLACEMENTS = [
    Shard(0),
    Shard(1),
    StridedShard(0, split_factor=2),
    StridedShard(1, split_factor=2),
    StridedShard(2, split_factor=3),
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_is_copied_once(placement: Any, rank: int):
    full = torch.arange(8.0 * 4 * 12).view(8, 4, 12)
    with NewBytes(full) as new:
        part = Way((placement,), (2,)).part(full, [rank])
    assert part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes == new.total
    assert part.nbytes == full.nbytes // 2
    packed = full.chunk(getattr(placement, "split_factor", 1), placement.dim)
    want = torch.cat([each.chunk(2, placement.dim)[rank] for each in packed], placement.dim)
    assert torch.equal(part, want)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_part_of_a_packed_part_has_memory_of_its_own(rank: int):
    full = torch.arange(8.0 * 4).view(8, 4)
    part = Way((StridedShard(0, split_factor=2), Shard(1)), (2, 2)).part(full, divmod(rank, 2))
    rows = torch.cat([half.chunk(2)[rank // 2] for half in full.chunk(2)])
    assert torch.equal(part, rows.chunk(2, 1)[rank % 2])
    assert part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes


def test_a_replicated_parameter_is_not_copied():
    full = torch.ones(3, 4)
    assert Way((Replicate(),), (2,)).part(full, [1]).data_ptr() == full.data_ptr()
