"""How torch's symmetric memory is called; a fake replaces torch, because the real one needs GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusedtp.comm import memory

RANK, WORLD_SIZE = 1, 3


class Torch:
    """A fake torch: its allocations, and which of them ranks have met for.

    cached   the device is full until torch's cache is emptied
    full     and stays full after that
    fails    the error that a meeting raises on this rank alone
    """

    def __init__(self, offset: int = 0) -> None:
        self.offset, self.met = offset, []
        self.cached, self.full, self.fails = False, False, ""

    def empty_strided_p2p(self, size: tuple[int], stride: tuple[int], dtype: torch.dtype, device: Any) -> Any:
        assert stride == (1,)
        if self.cached or self.full:
            raise RuntimeError("CUDA driver error: out of memory")
        return torch.empty(self.offset + size[0], dtype=dtype, device=device)[self.offset :]

    def empty_cache(self) -> None:
        self.cached = False

    def rendezvous(self, local: torch.Tensor, group_name: str) -> Any:
        self.met.append(group_name)
        if self.fails:
            raise RuntimeError(self.fails)
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


class Exchange:
    """A fake exchange between ranks: every other rank sends `tells`, or where that is None, what this rank sends."""

    def __init__(self, *tells: dict[int, Any] | None) -> None:
        self.tells, self.told = tells, []

    def __call__(self, mine: Any) -> list[Any]:
        others = self.tells[len(self.told)] if len(self.told) < len(self.tells) else None
        self.told.append(mine)
        return [mine if p == RANK else (others or {}).get(p, mine) for p in range(WORLD_SIZE)]


def asked(monkeypatch: pytest.MonkeyPatch, offset: int = 0) -> Torch:
    from torch._C import _distributed_c10d
    from torch.distributed import _symmetric_memory as symmetric

    def pooled(*_: Any, **__: Any) -> None:
        raise AssertionError("ranks would meet with blocks that a pool gave them")

    torch_ = Torch(offset)
    monkeypatch.setattr(_distributed_c10d, "_SymmetricMemory", torch_)
    monkeypatch.setattr(symmetric, "rendezvous", torch_.rendezvous)
    monkeypatch.setattr(symmetric, "empty", pooled)
    monkeypatch.setattr(torch.cuda, "empty_cache", torch_.empty_cache)
    monkeypatch.setattr(memory, "_meetings", 0)
    monkeypatch.setattr(memory, "torch_version", lambda: (2, 13))
    return torch_


def test_a_region_is_an_allocation_of_its_own_and_its_addresses_are_its_buffers(monkeypatch):
    torch_ = asked(monkeypatch)
    region = memory.allocate_symmetric(5000, torch.device("cpu"), "tp", Exchange())
    assert region.nbytes == 8192 and torch_.met == ["tp"]
    assert [len(buffer) for buffer in region.buffers] == [8192] * WORLD_SIZE
    assert list(region.addresses) == [buffer.data_ptr() for buffer in region.buffers]
    assert region.addresses[RANK] == region.handle[1].data_ptr()


def test_a_part_of_a_larger_allocation_is_refused(monkeypatch):
    asked(monkeypatch, offset=512)
    with pytest.raises(RuntimeError, match="a part of a larger allocation"):
        memory.allocate_symmetric(4096, torch.device("cpu"), "tp", Exchange())


@pytest.mark.parametrize("others, want", [((1, 2), Handle.multicast_ptr), ((1, 0), 0), ((0, 0), 0)])
def test_all_ranks_have_a_multicast_address_or_none(monkeypatch, others, want):
    """If one rank could not bind its address, no rank uses one. Each rank keeps its own."""
    asked(monkeypatch)
    exchange = Exchange(None, {0: ("", others[0]), 2: ("", others[1])})
    assert memory.allocate_symmetric(4096, torch.device("cpu"), "tp", exchange).multicast == want


def test_memory_that_torch_s_cache_holds_is_had_by_emptying_it(monkeypatch):
    """The driver allocates symmetric memory and cannot use what torch's caching allocator holds free."""
    torch_ = asked(monkeypatch)
    torch_.cached = True
    assert memory.allocate_symmetric(4096, torch.device("cpu"), "tp", Exchange()).nbytes == 4096


@pytest.mark.parametrize("whose", [0, RANK])
def test_a_rank_without_memory_is_named_on_all_ranks_before_any_waits_for_it(monkeypatch, whose):
    torch_ = asked(monkeypatch)
    torch_.full = whose == RANK
    exchange = Exchange({0: ("it is full" if whose == 0 else "", 0), 2: ("", 0)})
    with pytest.raises(RuntimeError, match=f"rank {whose}.*" + ("out of memory" if whose == RANK else "it is full")):
        memory.allocate_symmetric(4096, torch.device("cpu"), "tp", exchange)
    assert len(exchange.told) == 1 and not torch_.met, "its peers would wait in torch's rendezvous"


def test_a_rank_that_cannot_map_its_peers_tells_them(monkeypatch):
    """The peers have mapped this rank's memory and would go on with their next collective."""
    torch_ = asked(monkeypatch)
    torch_.fails = "cannot map"
    exchange = Exchange(None, {0: ("", 4096), 2: ("", 4096)})
    with pytest.raises(RuntimeError, match=f"rank {RANK}.*cannot map"):
        memory.allocate_symmetric(4096, torch.device("cpu"), "tp", exchange)
    assert len(exchange.told) == 2


@pytest.mark.parametrize("version, waits", [((2, 13), True), ((2, 14), False)])
def test_ranks_that_have_met_in_unequal_numbers_say_so_where_torch_would_wait(monkeypatch, version, waits):
    """torch numbers rendezvous keys per process, across all of its groups: pytorch issue 196082."""
    torch_ = asked(monkeypatch)
    monkeypatch.setattr(memory, "torch_version", lambda: version)
    for group, others in (("tp", None), ("tp", {0: ("", 1), 2: ("", 1)})):
        memory.allocate_symmetric(4096, torch.device("cpu"), group, Exchange(others))
    exchange = Exchange({0: ("", 2), 2: ("", 3)})
    if waits:
        with pytest.raises(RuntimeError, match=r"\[2, 2, 3\] times .*fusedtp.reserve"):
            memory.allocate_symmetric(4096, torch.device("cpu"), "ep", exchange)
    else:
        memory.allocate_symmetric(4096, torch.device("cpu"), "ep", exchange)
    assert torch_.met == ["tp", "tp"] + ["ep"] * (not waits)
