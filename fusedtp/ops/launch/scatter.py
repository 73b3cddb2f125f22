"""Launchers of what ends with a sum over ranks."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusedtp.comm.device_view import odd, peers_of

from . import tuned
from .config import VECTOR, Config, Machine, reduce_programs, tiles
from .operands import unshared
from .run import Launch, check, machine_for


def reduce_scatter_bytes(rows: Any, n: int, dtype: torch.dtype) -> int:
    """What matmul_reduce_scatter needs in a slot: every source's partial of the largest shard."""
    return len(rows.sizes) * rows.batch * max(rows.sizes) * n * dtype.itemsize


def matmul_reduce_scatter(
    view: Any,
    rank: int,
    world_size: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Any,
    sig: int,
    config: Config | None = None,
) -> Tensor:
    """y = reduce_scatter(x @ w.T) + bias, see kernels/matmul_reduce_scatter.py.

    x        [T, K]     rows in global order, any strides; K is this rank's own
    weight   [N, K]     any strides
    bias     [N] or None, the same on all ranks, added once
    return   [R_r, N]
    """
    check(view, reduce_scatter_bytes(rows, weight.shape[0], x.dtype), x, [weight, bias])
    launch, y = plan_reduce_scatter(
        view, rank, world_size, x, weight, bias, rows, sig, config, machine_for(view, x)
    )
    launch.run(view, x.device)
    return y


def plan_reduce_scatter(
    view: Any,
    rank: int,
    world_size: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Any,
    sig: int,
    config: Config | None,
    machine: Machine,
) -> tuple[Launch, Tensor]:
    """The launch of matmul_reduce_scatter, not yet run, and its output."""
    from fusedtp.kernels.matmul_reduce_scatter import matmul_reduce_scatter_kernel

    n, owned = weight.shape[0], rows.batch * max(rows.sizes)
    config = config or reduction(
        machine,
        x.dtype,
        owned,
        n,
        view.flags_per_source - 1,
        kernel="matmul_reduce_scatter",
        world_size=world_size,
        owners=world_size,
    )
    y = x.new_empty(rows.batch * rows.sizes[rank], n)
    args = dict(
        peers=peers_of(view, rank, world_size, sig, machine.clock),
        sizes=tuple(odd(size) for size in rows.sizes),
        batch=rows.batch,
        **matmul_args(x, weight, bias, config, rows.batch),
        y=y,
        group=config.chunk,
        send_programs=config.send_programs,
    )
    return Launch(matmul_reduce_scatter_kernel, config.send_programs + config.other_programs, args, config), y


def matmul_args(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: Config, batch: int = 1
) -> dict[str, Any]:
    """The arguments that all kernels here share."""
    n, k = weight.shape
    return dict(
        **unshared(config, x, weight, batch),
        bias=None if bias is None else bias.contiguous(),
        N=n,
        K=k,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP=config.group,
        PART_M=min(config.block_m, max(1, config.part * config.num_warps // config.block_n)),
        EVEN_K=k % config.block_k == 0,
    )


@tuned.remembered
def reduction(
    machine: Machine,
    dtype: torch.dtype,
    owned: int,
    n: int,
    flags: int,
    *,
    kernel: str = "",
    world_size: int = 0,
    owners: int = 1,
) -> Config:
    """Configuration for partial tiles of which each of `owners` ranks owns `owned` rows and has `flags` flags for.

    A rank multiplies the rows of all owners, and these fill the machine; but no tile has rows of two. The owner sums by
    the senders' tiles, so all of this depends only on what ranks share: not on K. Tuned values are those of `kernel`,
    if one is named.
    """
    even, found = n % VECTOR == 0, tuned.NOTHING
    if kernel:
        found = tuned.lookup(kernel, machine, dtype, rows=owned, cols=n, even=even, world=world_size)
    rows = owned * owners if owned >= 128 else owned
    shape = tuned.tile(tiles(machine, dtype, rows, n, even), found)
    senders, reducers = tuned.reduce_split(found, machine, reduce_programs(machine))
    count = -(-owned // shape.block_m) * -(-n // shape.block_n)
    chunk = tuned.chunk(found, 1, least=-(-count // flags))
    return replace(shape, send_programs=senders, other_programs=min(reducers, max(1, count)), chunk=chunk)


ONE_SHOT_BYTES = 1 << 18  # of one partial; beyond it W copies of everything cost more than a second hop


def one_shot(total: int, n: int, dtype: torch.dtype) -> bool:
    """Whether an all-reduce of [total, n] goes in one shot."""
    return total * n * dtype.itemsize <= ONE_SHOT_BYTES


def matmul_all_reduce_bytes(
    total: int, n: int, world_size: int, dtype: torch.dtype, in_one: bool | None = None
) -> int:
    """What matmul_all_reduce needs in a slot: all partials, or those of the own rows and all sums."""
    if one_shot(total, n, dtype) if in_one is None else in_one:
        return world_size * total * n * dtype.itemsize
    return _result_at(total, n, world_size, dtype) + total * n * dtype.itemsize


def _result_at(total: int, n: int, world_size: int, dtype: torch.dtype) -> int:
    each = -(-total // world_size)
    return -(-world_size * each * n * dtype.itemsize // 16) * 16


def matmul_all_reduce(
    view: Any,
    rank: int,
    world_size: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sig: int,
    config: Config | None = None,
    in_one: bool | None = None,
) -> Tensor:
    """y = all_reduce(x @ w.T) + bias, see kernels/matmul_all_reduce.py.

    x        [T, K]     any strides; K is this rank's own
    weight   [N, K]     any strides
    bias     [N] or None, the same on all ranks, added once
    return   [T, N], the same bits on every rank
    """
    total, n = x.shape[0], weight.shape[0]
    if in_one is None:
        in_one = one_shot(total, n, x.dtype)
    check(view, matmul_all_reduce_bytes(total, n, world_size, x.dtype, in_one), x, [weight, bias])
    plan = plan_one_shot if in_one else plan_two_shot
    launch, y = plan(view, rank, world_size, x, weight, bias, sig, config, machine_for(view, x))
    launch.run(view, x.device)
    return y


def plan_one_shot(
    view: Any,
    rank: int,
    world_size: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sig: int,
    config: Config | None,
    machine: Machine,
) -> tuple[Launch, Tensor]:
    """The launch of a one-shot matmul_all_reduce, not yet run, and its output."""
    from fusedtp.kernels.matmul_all_reduce import one_shot_kernel

    total, n = x.shape[0], weight.shape[0]
    flags = view.flags_per_source - 1
    config = config or reduction(machine, x.dtype, total, n, flags, kernel="one_shot", world_size=world_size)
    y = x.new_empty(total, n)
    args = dict(
        peers=peers_of(view, rank, world_size, sig, machine.clock),
        **matmul_args(x, weight, bias, config),
        y=y,
        M=total,
        group=config.chunk,
        send_programs=config.send_programs,
    )
    return Launch(one_shot_kernel, config.send_programs + config.other_programs, args, config), y


def plan_two_shot(
    view: Any,
    rank: int,
    world_size: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sig: int,
    config: Config | None,
    machine: Machine,
) -> tuple[Launch, Tensor]:
    """The launch of a two-shot matmul_all_reduce, not yet run, and its output."""
    from fusedtp.kernels.matmul_all_reduce import two_shot_kernel

    total, n = x.shape[0], weight.shape[0]
    each, flags = -(-total // world_size), view.flags_per_source // 2 - 1
    config = config or reduction(
        machine,
        x.dtype,
        each,
        n,
        flags,
        kernel="two_shot",
        world_size=world_size,
        owners=world_size,
    )
    y = x.new_empty(total, n)
    collectors = config.other_programs
    if machine.shared_gpu:  # all programs of a rank fit its part, see reduce_programs
        config = replace(config, send_programs=max(1, config.send_programs - collectors))
    args = dict(
        peers=peers_of(view, rank, world_size, sig, machine.clock),
        sizes=tuple(odd(max(0, min(each, total - r * each))) for r in range(world_size)),
        **matmul_args(x, weight, bias, config),
        y=y,
        group=config.chunk,
        send_programs=config.send_programs,
        reduce_programs=config.other_programs,
        result_at=_result_at(total, n, world_size, x.dtype),
        flags=flags,
    )
    return Launch(two_shot_kernel, config.send_programs + config.other_programs + collectors, args, config), y
