"""The kernels of an exchange's plan equal the torch formulas, on any device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fusedtp.ops.moe.plan import (
    Exchange,
    RoutingPlan,
    index_formula,
    index_lengths,
    index_size,
    places_of,
    plan_index,
    plan_sort,
    sort_choices,
    unpacked,
)
from fusedtp.ops.moe.rounds import Windows, plan_window

UNDEFINED_PAST_THE_LAST_ROW = ("arrivals", "origins", "to", "to_places")


def drawn(sizes: list[int], here: int, top_k: int, dropped: float, skewed: bool, seed: int) -> list[Tensor]:
    """The ids of every rank's tokens: distinct within a token, some dropped; with `skewed` mostly the first experts."""
    generator = torch.Generator().manual_seed(seed)
    experts = here * len(sizes)
    likes = torch.rand(sum(sizes), experts, generator=generator) + skewed * torch.arange(experts, 0, -1) / 8
    ids = likes.topk(top_k).indices
    return list(torch.where(torch.rand(ids.shape, generator=generator) < dropped, -1, ids).split(sizes))


def sort_law(ids: Tensor, experts: int, block: int = 2048) -> Tensor:
    """The kernel's sort of ids [T, k] equals the formula's; return the counts."""
    launch, words, places = plan_sort(ids, experts, block)
    launch.start(ids.device)
    counts, order = sort_choices(ids, experts)
    torch.testing.assert_close(words, torch.cat([counts, order]), rtol=0, atol=0)
    torch.testing.assert_close(places.long(), places_of(order), rtol=0, atol=0)
    return counts


def index_law(table: Tensor, at: Exchange, block: int = 1024) -> None:
    """Check every defined part of one rank's index."""
    index = unfilled_index(table, at)
    launch, _ = plan_index(table, index, at, block)
    launch.start(table.device)
    check_index(index, table, at)


def unfilled_index(table: Tensor, at: Exchange) -> Tensor:
    return torch.full((index_size(at),), -7, dtype=torch.int32, device=table.device)


def check_index(index: Tensor, table: Tensor, at: Exchange) -> None:
    """Compare with the formula; undefined parts must not be written."""
    places = torch.arange(at.tokens * at.top_k, device=table.device)
    want = unpacked(index_formula(table, places, at), at)
    rows = min(int(want.offsets[at.experts_here]), at.recv_capacity)
    for name, got, length in zip(want._fields, unpacked(index, at), index_lengths(at), strict=True):
        known = rows if name in UNDEFINED_PAST_THE_LAST_ROW else 0 if name == "places" else length
        torch.testing.assert_close(got[:known], getattr(want, name)[:known], rtol=0, atol=0, msg=name)
        assert (got[known:] == -7).all(), f"{name}: what is undefined was written"


def window_law(plan: RoutingPlan, at: Exchange, rounds: Iterable[int], block: int = 256) -> None:
    """The kernel's plans of these rounds on one rank equal the formula's, wherever they are read."""
    windows, r, each = Windows(plan, at._replace(engine="local")), at.rank, at.experts_here
    for i in rounds:
        launch, made = plan_window(plan, i, at, block)
        for part in made:
            part.fill_(-7)
        launch.start(plan.table.device)
        want = windows.plan(i, at._replace(engine="local"))
        same = lambda name, got, want: torch.testing.assert_close(got, want, rtol=0, atol=0, msg=name)  # noqa: E731
        same("table", made.table, want.table)
        for s, of_source in enumerate(want.table.tolist()):
            begin, end = (0, sum(of_source)) if s == r else (sum(of_source[: e * each]) for e in (r, r + 1))
            got, of_formula = (part.orders[at.choices_of(s)] for part in (made, want))
            same(f"order of {s}", got[begin:end], of_formula[begin:end])
            assert (got[:begin] == -7).all() and (got[end:] == -7).all(), "what nobody reads was written"
        choices, moved = at.tokens * at.top_k, int(want.table[r].sum())
        places = places_of(want.orders[at.choices_of(r)]).int()
        places[places >= moved] = choices
        *others, own = unpacked(made.packed, at)
        same("places", own[:choices], places)
        assert all((part == -7).all() for part in (*others, own[choices:])), "the index was written"


def plan_law(
    group: object, device: str, dtype: torch.dtype, sizes: list[int], here: int, top_k: int, dropped: float,
    skewed: bool, bound: float, block: int, seed: int,
) -> None:  # fmt: skip
    """Check all kernels on every rank. bound: capacity as a share of what any routing needs."""
    ids = [each.to(device, dtype) for each in drawn(sizes, here, top_k, dropped, skewed, seed)]
    experts = here * len(sizes)
    table = torch.stack([sort_law(each, experts, block) for each in ids])
    orders = torch.cat([sort_choices(each, experts)[1] for each in ids])
    table = table if seed % 2 else table.t().contiguous().t()  # the strides it has in rounds
    for rank in range(len(sizes)):
        at = Exchange("", rank, tuple(sizes), experts, top_k, 0, "triton")
        rows = int(bound * at.max_recv_rows)
        at = at._replace(bound=rows)
        index_law(table, at, block)
        if rows and rank == seed % len(sizes):
            last = -(-at.max_recv_rows // rows)  # a round without rows
            window_law(RoutingPlan(table, orders, orders.new_empty(0)), at, {seed % last, last - 1, last}, block)


def stray_law(group: object, device: str) -> None:
    """Ids of nonexistent experts, which a GPU does not reject: they are treated as dropped, and places stay unique."""
    for dtype, stray in ((torch.int32, 2**31 - 1), (torch.int64, 2**32 + 1), (torch.int64, -(2**40))):
        ids = torch.tensor([[0, stray], [3, 2], [stray, 4]], dtype=dtype, device=device)
        launch, words, places = plan_sort(ids, 4, 16)
        launch.start(ids.device)
        assert words[:4].tolist() == [1, 0, 1, 1]
        assert words[4:].tolist() == [0, 3, 2, 1, 4, 5]
        assert places.tolist() == [0, 3, 2, 1, 4, 5]
