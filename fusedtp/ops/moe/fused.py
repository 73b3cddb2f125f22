"""Rows to the experts' owners and back by kernels, which read the plan on the device.

See kernels/moe_exchange.py, and kernels/moe_dispatch_matmul.py of a dispatch with the matmul that its rows go into.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedtp.comm import Communicator

from .grouped_engines import fp32_precision
from .homes import homes
from .layout import unpacked
from .plan import Exchange, Plan


def move(
    comm: Communicator, x: Tensor, scalars: Tensor | None, plan: Plan, at: Exchange
) -> tuple[Tensor, Tensor]:
    """As `move` of chunked.py; the scalars travel in a call of their own."""
    rows = _dispatch(comm, x, at.top_k, plan, at)
    return rows, x.new_empty(0) if scalars is None else _of_rows(comm, scalars, plan, at)


def move_matmul(
    comm: Communicator,
    x: Tensor,
    scalars: Tensor | None,
    weights: Sequence[Tensor],
    offsets: Tensor,
    act: str,
    keep: bool,
    plan: Plan,
    at: Exchange,
) -> list[Tensor]:
    """x [T_r, K], scalars [T_r, k], weights [E_r, N, K] -> rows [max_rows, K], scalars [max_rows], and y [max_rows, N].

    Without scalars those of the rows are [0].

    weights   one, or gate and up, with the activation `act`; with `keep` both products come after y
    """
    from .. import launch

    order = plan.orders[at.slots_of(comm.rank)]
    signature = at.signature("moe_move_matmul", "triton", x.dtype, x.shape[1])
    nbytes = launch.moe_matmul.dispatch_matmul_bytes(at.max_rows, x.shape[1], x.dtype)
    with comm.workspace.call(signature, nbytes) as call:
        rows, *products = launch.moe_matmul.dispatch_matmul(
            call.kernel_view(), comm.rank, x, order // at.top_k, weights, offsets, unpacked(plan.words, at), at,
            signature.hash32, act, keep, precision=fp32_precision(),
        )  # fmt: skip
    of_rows = x.new_empty(0) if scalars is None else _of_rows(comm, scalars, plan, at)
    return [rows, of_rows, *products]


def _of_rows(comm: Communicator, scalars: Tensor, plan: Plan, at: Exchange) -> Tensor:
    """[max_rows]: the scalars, of the slots, where their rows are."""
    return _dispatch(comm, scalars.reshape(-1, 1), 1, plan, at)[:, 0]


def _dispatch(comm: Communicator, x: Tensor, slots_per_row: int, plan: Plan, at: Exchange) -> Tensor:
    from .. import launch

    signature = at.signature("moe_move", "triton", x.dtype, x.shape[1])
    nbytes = launch.moe.dispatch_bytes(at, slots_per_row, x.shape[1], x.dtype)
    with comm.workspace.call(signature, nbytes) as call:
        return launch.moe.dispatch(
            call.kernel_view(),
            comm.rank,
            x,
            slots_per_row,
            plan.orders,
            unpacked(plan.words, at),
            at,
            signature.hash32,
        )


def collect(
    comm: Communicator, y: Tensor, choices: Tensor, weights: Tensor | None, plan: Plan, at: Exchange
) -> Tensor:
    """y [max_rows, N] of every owner, choices [T, k'] (places in this rank's order) -> [T, N], their weighted sums."""
    from .. import launch

    signature = at.signature("moe_pull", "triton", y.dtype, y.shape[1], weights=choices.shape[1])
    nbytes = launch.moe.combine_bytes(max(at.sizes), at.top_k, y.shape[1], y.dtype)
    with comm.workspace.call(signature, nbytes) as call:
        return launch.moe.combine(
            call.kernel_view(),
            comm.rank,
            y,
            choices.to(torch.int32),
            weights,
            unpacked(plan.words, at),
            at,
            signature.hash32,
        )


def multiply_and_collect(
    comm: Communicator,
    hs: Sequence[Tensor],
    experts: Sequence[Tensor],
    offsets: Tensor,
    choices: Tensor,
    weights: Tensor | None,
    plan: Plan,
    at: Exchange,
) -> Tensor:
    """hs [max_rows, K] by their experts [E_r, N, K], added up, rounded and collected: [T, N]."""
    from .. import launch

    n, dtype, precision = experts[0].shape[1], hs[0].dtype, fp32_precision()
    signature = at.signature(
        "moe_matmul_pull", "triton", dtype, n, weights=0 if weights is None else choices.shape[1], batch=len(hs),
        tables=int(precision == "tf32"),
    )  # fmt: skip
    nbytes = launch.moe.combine_bytes(max(at.sizes), at.top_k, n, dtype)
    where, sig = homes(plan.table, at), signature.hash32
    with comm.workspace.call(signature, nbytes) as call:
        return launch.moe_matmul_combine.matmul_combine(
            call.kernel_view(), comm.rank, hs, experts, offsets, where, choices.to(torch.int32), weights,
            unpacked(plan.words, at), at, sig, precision=precision,
        )  # fmt: skip
