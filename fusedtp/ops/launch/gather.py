"""Launchers of what starts with an all-gather."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusedtp.comm.copies import Copies, Sending
from fusedtp.comm.device_view import odd, peers_of

from . import tuned
from .config import VECTOR, Config, Machine, gather_chunk, gather_programs, tiles
from .operands import picked
from .run import Launch, check, machine_for


def all_gather_bytes(rows: Any, k: int, dtype: torch.dtype) -> int:
    """What all_gather_matmul and all_gather_wgrad need in a slot: the gathered tensor."""
    return rows.batch * sum(rows.sizes) * k * dtype.itemsize


def all_gather_matmul(
    view: Any,
    rank: int,
    world_size: int,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    rows: Any,
    sig: int,
    keep_gathered: bool,
    config: Config | None = None,
    copies: Copies | None = None,
) -> tuple[list[Tensor], Tensor | None]:
    """y_i = all_gather(x) @ w_i.T + bias_i, see kernels/all_gather_matmul.py. `copies` send x in place of programs.

    x        [R_r, K]   any strides
    w_i      [N_i, K]   any strides
    bias_i   [N_i] or None
    return   [T, N_i] each, and the gathered x [T, K] in global row order or None
    """
    total = rows.batch * sum(rows.sizes)
    check(view, all_gather_bytes(rows, x.shape[1], x.dtype), x, [*weights, *biases], total)
    machine, x = machine_for(view, x), x if copies is None else x.contiguous()
    where = view, rank, world_size
    launch, outputs, gathered = plan_matmul(
        *where, x, weights, biases, rows, sig, keep_gathered, config, machine, copies is not None
    )
    launch.run(view, x.device, sending_of(copies, rank, x, rows, launch.config))
    return outputs, gathered


def plan_matmul(
    view: Any,
    rank: int,
    world_size: int,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    rows: Any,
    sig: int,
    keep_gathered: bool,
    config: Config | None,
    machine: Machine,
    copied: bool = False,
) -> tuple[Launch, list[Tensor], Tensor | None]:
    """The launch of all_gather_matmul, not yet run, and its outputs. copied: x travels beside it."""
    from fusedtp.kernels.all_gather_matmul import all_gather_matmul_kernel

    k = x.shape[1]
    total = rows.batch * sum(rows.sizes)
    cols = sum(w.shape[0] for w in weights)
    if config is None:
        even = all(w.shape[0] % VECTOR == 0 for w in weights)
        at = dict(rows=total, cols=cols, k=k, even=even)
        config = _config("all_gather_matmul", machine, x.dtype, rows, view.flags_per_source, k, **at)
    config = without_senders(config, machine) if copied else config
    outputs = [x.new_empty(total, w.shape[0]) for w in weights]
    gathered = x.new_empty(total, k) if keep_gathered else None
    args = dict(
        **gather_args(view, rank, world_size, x, rows, sig, config, machine),
        **(by_tma := picked(config, weights, (config.block_n, config.block_k))),
        HALVES=by_tma["TMA"] and config.block_n == 256,
        weights=tuple(weights),
        widths=tuple(w.shape[0] for w in weights),
        strides_wn=tuple(w.stride(0) for w in weights),
        strides_wk=tuple(w.stride(1) for w in weights),
        biases=tuple(None if b is None else b.contiguous() for b in biases),
        outputs=tuple(outputs),
        gathered=gathered,
        NUM_WEIGHTS=len(weights),
        EVEN_K=k % config.block_k == 0,
    )
    programs = config.send_programs + config.other_programs
    return Launch(all_gather_matmul_kernel, programs, args, config), outputs, gathered


@tuned.remembered
def _config(
    kernel: str, machine: Machine, dtype: torch.dtype, shards: Any, flags: int, width: int, **output: int
) -> Config:
    """Of a kernel with this output; x is `width` wide, and `shards` are its rows."""
    found = tuned.lookup(kernel, machine, dtype, world=len(shards.sizes), **output)
    default = tiles(machine, dtype, output["rows"], output["cols"], bool(output["even"]))
    return with_senders(tuned.tile(default, found), machine, shards, flags, dtype, width)


def with_senders(
    shape: Config, machine: Machine, rows: Any, flags: int, dtype: torch.dtype | None = None, width: int = 0
) -> Config:
    """Tile sizes plus how many programs send, in chunks of how many rows: tuned for x of `dtype`, if one is given."""
    longest = rows.batch * max(rows.sizes)
    senders, others = gather_programs(machine)
    chunk = gather_chunk(longest, flags)
    if dtype is not None:
        found = tuned.lookup("all_gather", machine, dtype, rows=longest, k=width, world=len(rows.sizes))
        senders, others = tuned.gather_split(found, machine, (senders, others))
        chunk = tuned.chunk(found, chunk, least=-(-longest // (flags - 1)))
    return replace(shape, send_programs=senders, other_programs=others, chunk=chunk)


def without_senders(config: Config, machine: Machine) -> Config:
    """The same where copies send: all programs multiply. What a flag covers stays, for peers whose programs send.

    On a GPU that ranks share the senders' place stays free, lest a copy within one GPU, which may be a kernel of the
    driver's, finds no room beside kernels that wait for it.
    """
    others = config.other_programs + (0 if machine.shared_gpu else config.send_programs)
    return replace(config, send_programs=0, other_programs=others)


def sending_of(copies: Copies | None, rank: int, x: Tensor, rows: Any, config: Config) -> Sending | None:
    """x [R_r, K], contiguous, on its way to where the kernel looks for it: the gathered tensor in the peers' slots."""
    if copies is None:
        return None
    begin = rows.batch * sum(rows.sizes[:rank]) * x.shape[1] * x.element_size()
    return copies.of(x, begin, config.chunk)


def _copy_blocks(machine: Machine, x: Tensor) -> dict[str, int]:
    """A sender's block: whole cache lines of a few rows, and no more than registers hold."""
    if machine.clock == "host":
        return dict(COPY_M=64, COPY_K=256)
    return dict(COPY_M=8, COPY_K=2048 // x.element_size())


def all_gather_wgrad(
    view: Any,
    rank: int,
    world_size: int,
    x: Tensor,
    dys: Sequence[Tensor],
    rows: Any,
    sig: int,
    config: Config | None = None,
    dtype: torch.dtype | None = None,
    copies: Copies | None = None,
) -> list[Tensor]:
    """dw_i = dy_i.T @ all_gather(x), see kernels/all_gather_wgrad.py. `copies` send x in place of programs.

    x        [R_r, K]   any strides
    dy_i     [T, N_i]   rows in global order, any strides
    return   [N_i, K] each, of `dtype` (fp32: as accumulated; None: x's)
    """
    check(view, all_gather_bytes(rows, x.shape[1], x.dtype), x, dys)
    machine, x = machine_for(view, x), x if copies is None else x.contiguous()
    launch, outputs = plan_wgrad(
        view, rank, world_size, x, dys, rows, sig, config, machine, dtype, copies is not None
    )
    launch.run(view, x.device, sending_of(copies, rank, x, rows, launch.config))
    return outputs


def plan_wgrad(
    view: Any,
    rank: int,
    world_size: int,
    x: Tensor,
    dys: Sequence[Tensor],
    rows: Any,
    sig: int,
    config: Config | None,
    machine: Machine,
    dtype: torch.dtype | None = None,
    copied: bool = False,
) -> tuple[Launch, list[Tensor]]:
    """The launch of all_gather_wgrad, not yet run, and its outputs. copied: x travels beside it."""
    from fusedtp.kernels.all_gather_wgrad import all_gather_wgrad_kernel

    k, out_rows = x.shape[1], sum(dy.shape[1] for dy in dys)
    if config is None:
        at = dict(rows=out_rows, cols=k, k=rows.batch * sum(rows.sizes), even=k % VECTOR == 0)
        config = _config("all_gather_wgrad", machine, x.dtype, rows, view.flags_per_source, k, **at)
        if rows.batch > 1 and config.block_n == 256 and config.block_k > 32:
            # Rows in runs have no common stride: beside so wide a tile, 64 addresses do not fit a thread's registers.
            config = replace(config, block_k=32, num_stages=4)
    config = without_senders(config, machine) if copied else config
    widths = [dy.shape[1] for dy in dys]
    dys = [even_columns(dy) for dy in dys]
    outputs = [x.new_empty(dy.shape[1], k, dtype=dtype) for dy in dys]
    even_k = all(size % config.block_k == 0 for size in rows.sizes)
    args = dict(
        **gather_args(view, rank, world_size, x, rows, sig, config, machine),
        **picked(config, dys, (config.block_k, config.block_m), usable=even_k and rows.batch == 1),
        grads=tuple(dys),
        widths=tuple(dy.shape[1] for dy in dys),
        strides_dn=tuple(dy.stride(1) for dy in dys),
        strides_dt=tuple(dy.stride(0) for dy in dys),
        nothing=(None,) * len(dys),
        outputs=tuple(outputs),
        NUM_WEIGHTS=len(dys),
        EVEN_K=even_k,
    )
    launch = Launch(all_gather_wgrad_kernel, config.send_programs + config.other_programs, args, config)
    return launch, [dw[:width] for dw, width in zip(outputs, widths, strict=True)]


def even_columns(dy: Tensor) -> Tensor:
    """dy [T, N], N a multiple of VECTOR: columns of zeros are appended where it is not.

    Rows of another length cannot be copied asynchronously, so the loop over T would not be pipelined. The copy is
    one pass over dy; the matmul reads dy once for each tile of K.
    """
    missing = -dy.shape[1] % VECTOR
    return torch.nn.functional.pad(dy, (0, missing)) if missing else dy


def gather_args(
    view: Any, rank: int, world_size: int, x: Tensor, rows: Any, sig: int, config: Config, machine: Machine
) -> dict[str, Any]:
    """The arguments that both kernels share."""
    return dict(
        peers=peers_of(view, rank, world_size, sig, machine.clock),
        sizes=tuple(odd(size) for size in rows.sizes),
        batch=rows.batch,
        x=x,
        stride_xm=x.stride(0),
        stride_xk=x.stride(1),
        K=x.shape[1],
        chunk_rows=config.chunk,
        send_programs=config.send_programs,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        **_copy_blocks(machine, x),
        GROUP=config.group,
        ALIGNED=x.data_ptr() % 16 == 0 and x.shape[1] * x.element_size() % 16 == 0,
    )
