"""torch's symmetric memory as it is asked for; torch itself is played by a stand-in, for it needs GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusedtp.comm import memory

RANK, WORLD_SIZE = 1, 3


class Torch:
    """What torch keeps: allocations, and which of them ranks have met for."""

    def __init__(self, offset: int = 0) -> None:
        self.offset, self.met = offset, []

    def empty_strided_p2p(self, size: tuple[int], stride: tuple[int], dtype: torch.dtype, device: Any) -> Any:
        assert stride == (1,)
        return torch.empty(self.offset + size[0], dtype=dtype, device=device)[self.offset :]

    def rendezvous(self, local: torch.Tensor, group_name: str) -> Any:
        self.met.append(group_name)
        whole = [torch.empty(self.offset + len(local), dtype=torch.uint8) for _ in range(WORLD_SIZE)]
        whole[RANK] = local.as_strided((self.offset + len(local),), (1,), 0)
        return Handle(whole)


class Handle:
    rank = RANK
    multicast_ptr = 4096

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self.buffers = buffers

    def get_buffer(self, p: int, size: tuple[int], dtype: torch.dtype) -> torch.Tensor:
        return self.buffers[p][: size[0]].view(dtype)


def asked(monkeypatch: pytest.MonkeyPatch, offset: int = 0) -> Torch:
    from torch._C import _distributed_c10d
    from torch.distributed import _symmetric_memory as symmetric

    def pooled(*_: Any, **__: Any) -> None:
        raise AssertionError("ranks would meet with blocks that a pool gave them")

    torch_ = Torch(offset)
    monkeypatch.setattr(_distributed_c10d, "_SymmetricMemory", torch_)
    monkeypatch.setattr(symmetric, "rendezvous", torch_.rendezvous)
    monkeypatch.setattr(symmetric, "empty", pooled)
    return torch_


def test_a_region_is_an_allocation_of_its_own_and_its_addresses_are_its_buffers(monkeypatch):
    torch_ = asked(monkeypatch)
    region = memory.allocate_symmetric(5000, torch.device("cpu"), "tp", lambda mine: [mine] * WORLD_SIZE)
    assert region.nbytes == 8192 and torch_.met == ["tp"]
    assert [len(buffer) for buffer in region.buffers] == [8192] * WORLD_SIZE
    assert list(region.addresses) == [buffer.data_ptr() for buffer in region.buffers]
    assert region.addresses[RANK] == region.handle[1].data_ptr()


def test_a_part_of_a_larger_allocation_is_refused(monkeypatch):
    asked(monkeypatch, offset=512)
    with pytest.raises(RuntimeError, match="a part of a larger allocation"):
        memory.allocate_symmetric(4096, torch.device("cpu"), "tp", lambda mine: [mine] * WORLD_SIZE)


@pytest.mark.parametrize("others, want", [((1, 2), Handle.multicast_ptr), ((1, 0), 0), ((0, 0), 0)])
def test_all_ranks_have_a_multicast_address_or_none(monkeypatch, others, want):
    """One that a single rank could not bind is used by nobody. Each rank keeps its own."""
    asked(monkeypatch)
    first, last = others
    region = memory.allocate_symmetric(4096, torch.device("cpu"), "tp", lambda mine: [first, mine, last])
    assert region.multicast == want
