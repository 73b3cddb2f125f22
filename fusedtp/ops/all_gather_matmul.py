"""y_i [T, N_i] = all_gather(x [T_r, K]) @ w_i [N_i, K].T + b_i: column-parallel linear layers, one gather for all.

rank r, chunked     copy x to slot | publish | x @ w      | wait r+1 | x_{r+1} @ w | wait r+2 | ...
rank r+1            copy x to slot | publish | x @ w      | wait r+2 | ...
                                        ^ its flag is set long before rank r asks for it

rank r, triton      some programs push x to every peer, then join the others, which multiply rows as they arrive:
                    own rows first, then those of rank r-1, r-2, ... (kernels/all_gather_matmul.py)
rank r, few rows    all programs push x to every rank, then multiply the rows of all ranks together
                    (kernels/all_gather_few_rows.py)

forward  y_i = all_gather(x) @ w_i.T + b_i
dgrad    dx = matmul_reduce_scatter(dy_i, w_i.T), summed over i before the exchange
wgrad    dw_i = all_gather_wgrad(x, dy_i), or local if the gathered x was kept
both     in one call on CPU ranks: column_backward.py
saved    the shard of x and the weights; with `keep_gathered` the gathered x, copied out of the workspace
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fusedtp.comm import Group
from fusedtp.comm.communicator import copied
from fusedtp.comm.copies import Copies, Sending
from fusedtp.comm.device_view import odd, peers_of
from fusedtp.comm.launching import Launch, layouts

from . import column_backward
from .launch import tuned
from .launch.config import (
    ALL_REGISTERS,
    VECTOR,
    Config,
    Machine,
    deep,
    gather_chunk,
    gather_programs,
    narrowed,
    power_of_two,
    tiles,
)
from .launch.operands import describe_weights, of_vectors, weights_by_tma
from .launch.run import check, machine_for
from .linear_call import LinearCall, linear_call
from .main_grad import accumulate_grad, wgrad_dtype
from .matmul import linear, matmul_as, matmul_into, to_fp32
from .operation import (
    OPERATIONS,
    Example,
    FusedKernel,
    OnRank,
    Operation,
    Plan,
    Shared,
    Spec,
    laid_alike,
    parts,
    wanted,
)
from .rows import Rows, rows_of_shard
from .shards import gathered, shards_as_they_arrive

TOGETHER = 512  # rows, see most_together
PARTS = 16  # pieces that a row is sent in, per destination rank, so that most programs have one to send
COPIED = 16 << 10  # bytes that a program loads at once
WIDEST_FP8 = 128  # columns of a tile: beyond that, sums, scales and addresses exceed the registers of sm_100

Result = list[Tensor]  # y_i, and the gathered x if `keep`


def all_gather_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    group: Group,
    *,
    biases: Sequence[Tensor | None] | None = None,
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    engine: str = "auto",
    keep_gathered: bool = False,
    layer: str = "",
) -> tuple[Tensor, ...]:
    """Column-parallel linear layers on token shards, one gather for all of them.

        x        [T_r, K]    this rank's rows; with dim=1 [B, S_r, K]
        weights  [N_i, K]    this rank's rows of each full weight
        biases   [N_i]       or None, one entry per weight
        sizes    every rank's rows, the same list on all ranks; None: as many as here
        engine   "auto", "collective", "chunked" or "triton"
        layer    the kind of layer that the call and its backward are counted for
        return   [T, N_i]    one per weight; with dim=1 [B, S, N_i]

    A weight or bias may be a DTensor on the group's mesh; each rank uses its shard: Note [DTensors as operands] in
    operation.py. If a weight has an attribute `main_grad`, its gradient is added there: Note [main_grad] in
    main_grad.py.

    Raises ValueError for shapes or dtypes that do not fit, SignatureMismatch naming the rank that differs.
    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4.2.2.
    """
    call, operands = linear_call(op, rows_of_shard, group, x, weights, biases, sizes, dim, engine, layer)
    spec, x, own, n = call.spec, operands.x, operands.own, len(operands.own) // 2
    if spec.needs_grad:
        ys = _ColumnParallel.apply(call, keep_gathered, x, *operands.given)
    else:
        ys = tuple(op(spec, x, own[:n], own[n:], False, plan=call.plan))
    return ys if dim == 0 else tuple(y.view(spec.batch, sum(spec.sizes), y.shape[1]) for y in ys)


class _ColumnParallel(Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: LinearCall,
        keep: bool,
        x: Tensor,
        *operands: Tensor | None,
    ) -> tuple[Tensor, ...]:
        spec, plan, main_grads, backward = call
        n = len(main_grads)
        (x, *own), ctx.lying = parts((x, *operands))
        weights, biases = own[:n], own[n:]
        need_x, need_weights = spec.needs_grad & 1, spec.needs_grad >> 1 & ((1 << n) - 1)
        keep = keep and need_weights != 0
        outs = op(spec, x, weights, biases, keep, plan=plan)
        # save only what a gradient reads: a saved tensor keeps its memory and must not change in place
        saved = (outs[n] if keep else x) if need_weights else None
        ctx.save_for_backward(saved, *(weights if need_x else ()))
        ctx.spec, ctx.main_grads, ctx.has_gathered = backward, main_grads, keep
        return tuple(outs[:n])

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        grads = column_grads(ctx, wanted(ctx)[2:], x, weights, dys)
        return None, None, *(laid_alike(grads, ctx.lying) if ctx.lying else grads)


def column_grads(
    ctx: Any, needs: Sequence[bool], x: Tensor | None, weights: Sequence[Tensor], dys: Sequence[Tensor]
) -> list[Tensor | None]:
    """(dx, dw_0.., db_0..) of a column-parallel layer from the gradients of its products; None where not in `needs`.

    ctx   of its node: spec, main_grads, and has_gathered, i.e. whether x holds the rows of all ranks
    """
    n = len(ctx.main_grads)
    need_x, need_weights = needs[0], any(needs[1 : n + 1])
    dx: Tensor | None = None
    dws: list[Tensor | None] = [None] * n
    dbs: list[Tensor | None] = [None] * n
    made: Sequence[Tensor] = ()
    dtype = torch.float32 if x is None else wgrad_dtype(x, ctx.main_grads)
    both = need_x and need_weights and not ctx.has_gathered
    if both and ctx.spec.engine in column_backward.TOGETHER and column_backward.in_one_call(ctx.spec, x):
        dx, *made = column_backward.op(ctx.spec, x, list(dys), list(weights), dtype)
    else:
        if need_x:
            transposed = list(map(Tensor.t, weights))
            dx = OPERATIONS["matmul_reduce_scatter"](ctx.spec, list(dys), transposed, None)
        if need_weights and ctx.has_gathered:
            assert x is not None
            made = [matmul_as(dy.t(), x, dtype) for dy in dys]
        elif need_weights:
            made = OPERATIONS["all_gather_wgrad"](ctx.spec, x, list(dys), dtype)
    for i, dw in enumerate(made):
        if needs[1 + i]:
            assert x is not None
            main_grad = ctx.main_grads[i]
            plain = main_grad is None and dw.dtype is x.dtype
            dws[i] = dw if plain else accumulate_grad(dw, main_grad, x.dtype)
    for i in range(n):
        if needs[1 + n + i]:
            dbs[i] = dys[i].sum(0)
    return [dx, *dws, *dbs]


# -- engines ---------------------------------------------------------------------------------------------------------


def reference(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Result:
    """The formula on one device: the full x [T, K], full weights."""
    return [torch.nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]


def local(plan: Plan, x: Tensor, weights: list[Tensor], biases: list[Tensor | None], keep: bool) -> Result:
    """A group of one rank."""
    outs = [linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    return [*outs, copied(x)] if keep else outs


def collective(plan: Plan, x: Tensor, weights: list[Tensor], biases: list[Tensor | None], keep: bool) -> Result:
    """The process group's all_gather, then matmuls."""
    full = gathered(plan, x)
    outs = [linear(full, w, b) for w, b in zip(weights, biases, strict=True)]
    return [*outs, full] if keep else outs


def chunked(plan: Plan, x: Tensor, weights: list[Tensor], biases: list[Tensor | None], keep: bool) -> Result:
    """Shard by shard as they arrive, own rows first. On CPU a peer's rows are read in place."""
    rows, comm, width = plan.rows, plan.comm, x.shape[1]
    outs = [x.new_empty(rows.total, w.shape[0]) for w in weights]
    full = x.new_empty(rows.total, width) if keep else None
    transposed = [to_fp32(w).t() for w in weights]
    blocks = [rows.parts(out) for out in outs]
    with plan.call() as call:
        for p, shard in shards_as_they_arrive(call, comm, x, rows):
            with comm.span(f"matmul {p}"):
                runs = rows.runs(shard, p)
                for of_out, w, b in zip(blocks, transposed, biases, strict=True):
                    for block, run in zip(of_out[p], runs, strict=True):
                        matmul_into(block, [run], [w], b)
            if full is not None:
                rows.put(full, shard, p)
    return outs if full is None else [*outs, full]


def triton(plan: Plan, x: Tensor, weights: list[Tensor], biases: list[Tensor | None], keep: bool) -> Result:
    """One launch: some programs push x, or copies bring it, while the others multiply. With few rows all push first."""
    rows = plan.rows
    with plan.call() as call:
        copies = call.copies() if plan.copies else None
        x = x if copies is None else x.contiguous()
        view = call.kernel_view()
        key = copies is None, keep, None if plan.alike else layouts(x, *weights, *biases)
        launch = plan.launches.get(key)
        if launch is None:
            check(view, plan.slot_bytes, x, [*weights, *biases], rows.total)
            machine = machine_for(view, x)
            if come_together(rows, x.dtype):
                launch = prepare_together(x, weights, rows, None, machine)
            else:
                launch = prepare(view, x, weights, rows, None, machine, copies is not None)
            plan.launches[key] = launch
        outputs = []
        for w in weights:
            outputs.append(x.new_empty(plan.total_rows, w.shape[0]))
        gathered = x.new_empty(plan.total_rows, x.shape[1]) if keep else None
        sending = None if copies is None else sending_of(copies, plan.comm.rank, x, rows, launch.config)
        given = pointers(launch, plan.peers(view), x, weights, biases, outputs, gathered)
        launch.run(view, x.device, sending, given, alike=True)
    return outputs if gathered is None else [*outputs, gathered]


def _fake(spec: Spec, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], keep: bool) -> Result:
    total = spec.batch * sum(spec.sizes)
    outs = [x.new_empty(total, w.shape[0]) for w in weights]
    return [*outs, x.new_empty(total, x.shape[1])] if keep else outs


def _launched(
    together: bool, at: OnRank, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], keep: bool,
    copied: bool, _: Any,
) -> tuple[Launch, dict[str, Tensor]]:  # fmt: skip
    launch, ys, gathered = plan_all_gather_matmul(
        at.view, at.rank, at.world_size, x, weights, biases, at.rows, at.sig, keep, at.config, at.machine, copied,
        together,
    )  # fmt: skip
    outputs = {f"y{i}": y for i, y in enumerate(ys)}
    return launch, outputs if gathered is None else {**outputs, "gathered": gathered}


op = Operation(
    "all_gather_matmul",
    "Tensor x, Tensor[] weights, Tensor?[] biases, bool keep",
    "Tensor[]",
    fake=_fake,
    reference=reference,
    shared=lambda x, weights, biases, keep: Shared(x.dtype, x.shape[1], len(weights)),
    linear=lambda x, weights, biases: (x, weights, biases, False),
    engines=dict(local=local, collective=collective, chunked=chunked, triton=triton),
    slot_bytes=dict(
        chunked=lambda rows, shared: rows.longest * shared.features * shared.dtype.itemsize,
        triton=lambda rows, shared: gather_slot_bytes(rows, shared.features, shared.dtype),
    ),
    copied=lambda rows, dtype: not come_together(rows, dtype),
    example=Example(
        "column",
        "gather",
        shapes=lambda own, total, k, n: ((own, k), (n, k)),
        factors=lambda x, w: (x, w),
        call=lambda x, w, group, sizes, engine: all_gather_matmul(x, [w], group, sizes=sizes, engine=engine)[0],
    ),
    kernels=tuple(
        FusedKernel(
            name,
            f"{name}_kernel",
            partial(_launched, together),
            gathers=True,
            keeps=True,
            in_runs=True,
            example=dict(widths=(17, 5), keep=True),
        )
        for name, together in (("all_gather_matmul", False), ("few_rows_gather", True))
    ),
)


# -- the kernel's launcher; all_gather_wgrad shares parts of it ------------------------------------------------------


def gather_slot_bytes(rows: Rows, k: int, dtype: torch.dtype) -> int:
    """Bytes the kernel needs in a slot: the gathered tensor."""
    return rows.total * k * dtype.itemsize


def prepare(
    view: Any,
    x: Tensor,
    weights: Sequence[Tensor],
    rows: Rows,
    config: Config | None,
    machine: Machine,
    copied: bool = False,
) -> Launch:
    """The launch without its pointers, for operands of these shapes, strides and alignments.

    x        [R_r, K]   any strides
    w_i      [N_i, K]   any strides
    config   None: the tuned one, or the default
    copied   copies send x while the kernel runs
    """
    from fusedtp.kernels.all_gather_matmul import all_gather_matmul_kernel

    k = x.shape[1]
    if config is None:
        cols, even = sum(w.shape[0] for w in weights), all(w.shape[0] % VECTOR == 0 for w in weights)
        at = dict(rows=rows.total, cols=cols, k=k, even=even)
        config = choose_config("all_gather_matmul", machine, x.dtype, rows, view.flags_per_source, k, **at)
        config = gather_tiles(config, machine, x, weights)
    config = without_senders(config, machine) if copied else config
    args = dict(
        **gather_args(x, rows, config, machine),
        **weight_args(config, weights, x.shape[1]),
        HALVES=config.block_n == 256 and weights_by_tma(config, weights)[0],
    )
    return Launch(all_gather_matmul_kernel, config.programs, args, config)


def most_together(world_size: int, dtype: torch.dtype) -> int:
    """Up to how many rows, over all ranks, are gathered completely before they are multiplied.

    A product of more rows takes long enough to hide the sending. In fp32, fewer rows are enough. The limit is also
    lower on few ranks, where the other kernel loads each weight only a few times.
    """
    most = TOGETHER if world_size >= 4 else TOGETHER // 2
    return most if dtype.itemsize <= 2 else most // 2


def come_together(rows: Rows, dtype: torch.dtype) -> bool:
    """Whether these rows are gathered completely first. All ranks must agree, so this uses only shared values."""
    return rows.total <= most_together(len(rows.sizes), dtype)


def prepare_together(
    x: Tensor, weights: Sequence[Tensor], rows: Rows, config: Config | None, machine: Machine
) -> Launch:
    """Like `prepare`, for few rows."""
    from fusedtp.kernels.all_gather_few_rows import few_rows_gather_kernel

    config = together_config(machine, x.dtype, rows, weights, x.shape[1]) if config is None else config
    args = dict(**together_args(x, rows, config, machine), **weight_args(config, weights, x.shape[1]))
    return Launch(few_rows_gather_kernel, config.programs, args, config)


def pointers(
    launch: Launch,
    peers: Any,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    gathered: Tensor | None,
) -> dict[str, Any]:
    """The remaining arguments of a prepared launch.

    outputs   y_i [T, N_i], contiguous
    gathered  [T, K] in global row order, contiguous, or None
    """
    contiguous = []
    for b in biases:
        contiguous.append(None if b is None else b.contiguous())
    args = dict(
        peers=peers,
        x=x,
        weights=tuple(weights),
        biases=tuple(contiguous),
        outputs=tuple(outputs),
        gathered=gathered,
    )
    if launch.args["TMA"]:
        describe_weights(args, launch, weights)
    return args


def plan_all_gather_matmul(
    view: Any,
    rank: int,
    world_size: int,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    rows: Rows,
    sig: int,
    keep: bool,
    config: Config | None,
    machine: Machine,
    copied: bool = False,
    together: bool = False,
) -> tuple[Launch, list[Tensor], Tensor | None]:
    """The complete launch, not yet run, and its outputs; see `prepare`, `prepare_together` and `pointers`."""
    if together:
        launch = prepare_together(x, weights, rows, config, machine)
    else:
        launch = prepare(view, x, weights, rows, config, machine, copied)
    outputs = [x.new_empty(rows.total, w.shape[0]) for w in weights]
    gathered = x.new_empty(rows.total, x.shape[1]) if keep else None
    peers = peers_of(view, rank, world_size, sig, machine.clock)
    return launch.given(pointers(launch, peers, x, weights, biases, outputs, gathered)), outputs, gathered


def together_config(machine: Machine, dtype: torch.dtype, rows: Rows, weights: Sequence[Tensor], k: int) -> Config:
    """Configuration for few rows and weights [N_i, K]: all programs send, then multiply."""
    cols, even = sum(w.shape[0] for w in weights), all(w.shape[0] % VECTOR == 0 for w in weights)
    config = together_tile(machine, dtype, len(rows.sizes), rows=rows.total, cols=cols, k=k, even=even)
    by_tma, _ = weights_by_tma(config, weights)
    return of_vectors(config, machine, *(() if by_tma else weights))


@tuned.remembered
def together_tile(machine: Machine, dtype: torch.dtype, world: int, **output: int) -> Config:
    """Tiles and stages. `output` has its shape `rows` and `cols`, the depth `k`, and `even` as in `tiles`.

    world   number of ranks to look up in the tuned tables; 0: use the default
    """
    found = tuned.lookup("all_gather_matmul", machine, dtype, world=world, **output) if world else tuned.NOTHING
    rows, cols, even = output["rows"], output["cols"], bool(output["even"])
    if found:
        shape = tuned.tile(tiles(machine, dtype, rows, cols, even), found)
    else:  # start from the widest tile, then narrow it to the columns there are
        shape = tiles(machine, dtype, rows, max(cols, 256 * machine.programs), even)
        if dtype.itemsize == 1 and shape.block_n > WIDEST_FP8:
            shape = replace(shape, block_n=WIDEST_FP8, max_registers=ALL_REGISTERS)
        shape = deep(narrowed(shape, machine, rows, cols), machine, dtype)
    return replace(shape, send_programs=machine.programs, other_programs=0)


@tuned.remembered
def choose_config(
    kernel: str, machine: Machine, dtype: torch.dtype, shards: Rows, flags: int, width: int, **output: int
) -> Config:
    """Configuration of a kernel with this output, for an x with `width` columns and the rows `shards`."""
    found = tuned.lookup(kernel, machine, dtype, world=len(shards.sizes), **output)
    default = tiles(machine, dtype, output["rows"], output["cols"], bool(output["even"]))
    return with_senders(tuned.tile(default, found), machine, shards, flags, dtype, width)


def with_senders(
    shape: Config, machine: Machine, rows: Rows, flags: int, dtype: torch.dtype | None = None, width: int = 0
) -> Config:
    """Add to the tile sizes how many programs send and how many rows a flag covers; tuned for `dtype`, if given."""
    senders, others = gather_programs(machine)
    chunk = gather_chunk(rows.longest, flags)
    if dtype is not None:
        found = tuned.lookup("all_gather", machine, dtype, rows=rows.longest, k=width, world=len(rows.sizes))
        senders, others = tuned.gather_split(found, machine, (senders, others))
        chunk = tuned.chunk(found, chunk, least=-(-rows.longest // flags))
    return replace(shape, send_programs=senders, other_programs=others, chunk=chunk)


def gather_tiles(config: Config, machine: Machine, x: Tensor, weights: Sequence[Tensor]) -> Config:
    """Adapt a default configuration to a gather of x, see `of_vectors`. x [R_r, K] is loaded through pointers."""
    by_tma, _ = weights_by_tma(config, weights)
    return of_vectors(config, machine, x, *(() if by_tma else weights))


def without_senders(config: Config, machine: Machine) -> Config:
    """The same if copies send: all programs multiply. Flags cover the same rows, for peers whose programs send.

    On a GPU shared by ranks, the senders' SMs stay free: a copy within one GPU may be a kernel of the driver, and must
    find SMs next to kernels that wait for it.
    """
    others = config.other_programs + (0 if machine.shared_gpu else config.send_programs)
    return replace(config, send_programs=0, other_programs=others)


def sending_of(copies: Copies, rank: int, x: Tensor, rows: Rows, config: Config) -> Sending:
    """The copies of x [R_r, K], contiguous, to where the kernel expects it: the gathered tensor in the peers' slots."""
    return copies.of(x, rows.batch * rows.offset(rank) * x.shape[1] * x.element_size(), config.chunk)


def weight_args(config: Config, weights: Sequence[Tensor], k: int) -> dict[str, Any]:
    """The arguments of a kernel that takes several weights [N_i, K]; `pointers` adds the rest."""
    tma, across = weights_by_tma(config, weights)
    return dict(
        TMA=tma,
        ACROSS=across,
        widths=tuple(w.shape[0] for w in weights),
        strides_wn=tuple(w.stride(0) for w in weights),
        strides_wk=tuple(w.stride(1) for w in weights),
        NUM_WEIGHTS=len(weights),
        EVEN_K=k % config.block_k == 0,
    )


def row_args(x: Tensor, rows: Rows, config: Config) -> dict[str, Any]:
    """The arguments of every kernel that gathers x [R_r, K]."""
    return dict(
        sizes=tuple(odd(size) for size in rows.sizes),
        batch=rows.batch,
        stride_xm=x.stride(0),
        stride_xk=x.stride(1),
        K=x.shape[1],
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
    )


def together_args(x: Tensor, rows: Rows, config: Config, machine: Machine) -> dict[str, Any]:
    """The arguments of both kernels for few rows.

    A program sends one group of columns of all its rank's rows at a time, in blocks of up to COPIED bytes.
    """
    on_host, item = machine.clock == "host", x.element_size()
    part = power_of_two(-(-x.shape[1] // (2 if on_host else PARTS)))
    part = min(max(part, VECTOR), 2048 // item)
    return dict(
        **row_args(x, rows, config),
        COPY_M=64 if on_host else min(power_of_two(rows.longest), COPIED // (part * item)),
        PART_K=part,
    )


def gather_args(x: Tensor, rows: Rows, config: Config, machine: Machine) -> dict[str, Any]:
    """The arguments of both gather kernels.

    A sender's block is whole cache lines: a part of each of a few rows. It stores one block while it loads the next.
    """
    on_host = machine.clock == "host"
    copy_k = 256 if on_host else 2048 // x.element_size()
    return dict(
        **row_args(x, rows, config),
        chunk_rows=config.chunk,
        send_programs=config.send_programs,
        COPY_M=64 if on_host else 8,
        COPY_K=min(copy_k, max(16, power_of_two(x.shape[1]) // 4)),
        GROUP=config.group,
        ALIGNED=x.data_ptr() % 16 == 0 and x.shape[1] * x.element_size() % 16 == 0,
    )
