"""The ranks of the kernel tests: processes that interpret the fused kernels over shared memory.

Started by conftest.py with one socket per rank and one memory file per world size (1, 2, ... ranks). A rank makes a
device view of plain tensors, runs the calls it is sent and compares each with the single-device formula. After a call
it poisons the slot that peers may still write two calls later, and allocations start filled with NaN, so leaks show.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import mmap
import sys
import time
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from fusedtp.comm.copies import Copies
from fusedtp.comm.device_view import DeviceView, epoch_words
from fusedtp.kernels import tiles
from fusedtp.ops import launch
from fusedtp.ops.all_gather_gated_matmul import plan_all_gather_gated_matmul
from fusedtp.ops.all_gather_matmul import (
    gather_slot_bytes,
    plan_all_gather_matmul,
    sending_of,
)
from fusedtp.ops.all_gather_wgrad import plan_all_gather_wgrad
from fusedtp.ops.launch import operands
from fusedtp.ops.launch.config import block
from fusedtp.ops.launch.run import check, machine_for
from fusedtp.ops.matmul_all_reduce import (
    all_reduce_slot_bytes,
    is_one_shot,
    plan_few_rows,
    plan_one_shot,
    plan_two_shot,
)
from fusedtp.ops.matmul_reduce_scatter import (
    FEW_ROWS,
    plan_few_rows_reduce_scatter,
    plan_matmul_reduce_scatter,
    scatter_slot_bytes,
)
from fusedtp.ops.rows import Rows
from tests.harness.quick import quick

SLOT = 1 << 19
FLAGS = 4096


new_empty = torch.Tensor.new_empty


def poisoned(like: torch.Tensor, *shape: int, **on: object) -> torch.Tensor:
    made = new_empty(like, *shape, **on)
    return made.fill_(torch.nan) if made.is_floating_point() else made


described, made = operands.described, []


def counted(x: torch.Tensor, block: list[int], across: bool = False) -> object:
    made.append(x)
    return described(x, block, across)


class World:
    """This rank's view of a world of `size` ranks whose memory is the file `fd`."""

    def __init__(self, fd: int, size: int, rank: int) -> None:
        self.size, self.rank = size, rank
        self.data_bytes, flag_bytes, arrival_bytes = 2 * SLOT, size * FLAGS * 4, 2 * size * 8
        stride = self.data_bytes + flag_bytes + (arrival_bytes + 63) // 64 * 64
        os.ftruncate(fd, stride * size)
        self.memory = torch.frombuffer(mmap.mmap(fd, stride * size), dtype=torch.uint8)
        self.stride = stride
        base = [self.memory.data_ptr() + r * stride for r in range(size)]
        self.data = self.memory[rank * stride :][: self.data_bytes]
        table = torch.tensor(base, dtype=torch.int64)
        status = torch.zeros(8, dtype=torch.int64)
        self.view = DeviceView(
            data_ptrs=table,
            flag_ptrs=table + self.data_bytes,
            arrival_ptrs=table + self.data_bytes + flag_bytes,
            epoch=torch.tensor([1] + [0] * (epoch_words(len(base)) - 1), dtype=torch.int32),
            status=status,
            failure=status,
            slot_bytes=SLOT,
            flags_per_source=FLAGS,
            timeout_s=60.0,
            ranks_per_device=1,
            meet=None,
        )
        self.flags = self.memory[rank * stride + self.data_bytes :][:flag_bytes].view(torch.int32)
        self.arrivals = self.memory[rank * stride + self.data_bytes + flag_bytes :][:arrival_bytes].view(torch.int64)
        self.data.fill_(0xFF)  # NaN in every dtype

    def copies(self, c: SimpleNamespace) -> Copies | None:
        """The copies that bring this rank's rows to its peers in the next call, or None if the kernel does."""
        if self.rank not in c.copied:
            return None
        slot, own = int(self.view.epoch[0]) % 2 * SLOT, self.rank * self.view.flags_per_source * 4
        bases = [r * self.stride for r in range(self.size)]
        slots = [self.memory[base + slot :][:SLOT] for base in bases]
        words = [self.memory[base + self.data_bytes + own :] for base in bases]
        flags = [w[: self.view.flags_per_source * 4].view(torch.int32) for w in words]
        return Copies(self.rank, slots, flags, self.view.epoch, None)

    def operand(self, x: torch.Tensor, c: SimpleNamespace) -> tuple[torch.Tensor, Copies | None, Any]:
        """The rows to gather as the launch takes them, the copies that bring them, and the machine."""
        copies = self.copies(c)
        return x if copies is None else x.contiguous(), copies, machine_for(self.view, x)

    def run(self, launch: Any, x: torch.Tensor, copies: Copies | None, rows: Rows) -> None:
        """Start a gather's launch, and the copies of x beside it if they bring the rows."""
        sending = None if copies is None else sending_of(copies, self.rank, x, rows, launch.config)
        launch.run(self.view, x.device, sending)

    def poison(self) -> None:
        slot = (int(self.view.epoch[0]) - 1) & 1  # of the last call
        self.data[slot * SLOT : (slot + 1) * SLOT].fill_(0xFF)


class Numbers:
    """Small integers, the same stream on every rank."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def draw(self, *shape: int, layout: str = "contiguous") -> torch.Tensor:
        full = torch.randint(-1, 2, shape, generator=self.generator).to(self.dtype)
        if layout == "transposed" and len(shape) == 2:
            return full.t().contiguous().t()
        if layout == "strided" and len(shape) == 2:
            wide = torch.full((shape[0], 2 * shape[1] + 1), float("nan"), dtype=self.dtype)
            wide[:, : 2 * shape[1] : 2] = full
            return wide[:, : 2 * shape[1] : 2]
        if layout == "offset":
            return offset(full)
        if layout == "far" and len(shape) == 2:
            return far(full)
        if layout == "expanded" and len(shape) == 2:
            return full[:1].expand(shape)
        return full


def offset(t: torch.Tensor) -> torch.Tensor:
    """The same numbers, one element past a multiple of 16 bytes."""
    wide = torch.full((t.numel() + 1,), float("nan"), dtype=t.dtype)
    wide[1:] = t.flatten()
    return wide[1:].view(t.shape)


def far(t: torch.Tensor) -> torch.Tensor:
    """The same numbers in rows so far apart that the ninth is past 2**31 elements; only touched pages take memory."""
    stride = (1 << 28) + 8
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    whole = mmap.mmap(-1, max(1, t.shape[0] * stride * t.element_size()), flags=flags)
    made = torch.frombuffer(whole, dtype=t.dtype).as_strided(t.shape, (stride, 1))
    return made.copy_(t)


SPOILED = {"offset": offset, "far": far}


def shard_rows(rank: int, sizes: tuple[int, ...], batch: int) -> torch.Tensor:
    """The global row indices of a rank, in its local order."""
    total, before = sum(sizes), sum(sizes[:rank])
    return torch.cat([b * total + before + torch.arange(sizes[rank]) for b in range(batch)])


def equal(name: str, got: torch.Tensor, want: torch.Tensor) -> list[str]:
    if got.shape == want.shape and got.dtype == want.dtype and torch.equal(got, want):
        return []
    return [f"{name}: got {tuple(got.shape)} {got.dtype} {got.flatten()[:8]}, want {want.flatten()[:8]}"]


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = x.double() @ w.double().t()
    return (y if bias is None else y + bias.double()).to(x.dtype)


def same_everywhere(c: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(
        rows=Rows(tuple(c.sizes), c.batch),
        total=c.batch * sum(c.sizes),
        numbers=Numbers(c.seed, getattr(torch, c.dtype)),
        config=None if c.config is None else launch.Config(**c.config),
    )


def all_gather_matmul(world: World, c: SimpleNamespace) -> list[str]:
    s = same_everywhere(c)
    x = s.numbers.draw(s.total, c.k)
    weights = [s.numbers.draw(n + r, c.k, layout=c.layout) for r in range(world.size) for n in c.widths]
    weights = weights[world.rank * len(c.widths) :][: len(c.widths)]
    biases = [s.numbers.draw(w.shape[0]) if i in c.biased else None for i, w in enumerate(weights)]
    mine, copies, machine = world.operand(shard(world, c, x), c)
    check(world.view, gather_slot_bytes(s.rows, c.k, mine.dtype), mine, [*weights, *biases], s.total)
    given = world.view, world.rank, world.size, mine, weights, biases, s.rows, c.sig, c.keep, s.config, machine
    if c.few:
        launch, ys, gathered = plan_all_gather_matmul(*given, together=True)
        launch.run(world.view, mine.device)
    else:
        launch, ys, gathered = plan_all_gather_matmul(*given, copies is not None)
        world.run(launch, mine, copies, s.rows)
    wrong = equal("gathered", gathered, x) if c.keep else []
    for i, (y, w, b) in enumerate(zip(ys, weights, biases, strict=True)):
        wrong += equal(f"y{i}", y, linear(x, w, b))
    return wrong


def all_gather_gated_matmul(world: World, c: SimpleNamespace) -> list[str]:
    """Both products are exact. y is within one rounding and eight of fp32: exp, a sum, a quotient and two products."""
    s = same_everywhere(c)
    x, n = s.numbers.draw(s.total, c.k), c.widths[0]
    weights = [s.numbers.draw(n + r, c.k, layout=c.layout) for r in range(world.size) for _ in range(2)]
    weights = weights[2 * world.rank :][:2]
    biases = [s.numbers.draw(w.shape[0]) if i in c.biased else None for i, w in enumerate(weights)]
    mine, copies, machine = world.operand(shard(world, c, x), c)
    check(world.view, gather_slot_bytes(s.rows, c.k, mine.dtype), mine, [*weights, *biases], s.total)
    given = world.view, world.rank, world.size, mine, weights, biases, s.rows, c.sig, "silu", True, c.keep, s.config
    if c.few:
        launch, (y, g, u, *gathered) = plan_all_gather_gated_matmul(*given, machine, together=True)
        launch.run(world.view, mine.device)
    else:
        launch, (y, g, u, *gathered) = plan_all_gather_gated_matmul(*given, machine, copies is not None)
        world.run(launch, mine, copies, s.rows)
    want = [linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    wrong = equal("gathered", gathered[0], x) if c.keep else []
    wrong += equal("g", g, want[0]) + equal("u", u, want[1])
    made, of = torch.nn.functional.silu(want[0].double()) * want[1].double(), torch.finfo(y.dtype)
    rtol = of.eps / 2 + 8 * torch.finfo(torch.float32).eps
    near = torch.allclose(y.double(), made, rtol=rtol, atol=of.eps * of.smallest_normal)  # of subnormal numbers
    return wrong if near else [*wrong, f"y: {y.flatten()[:8]}, want {made.flatten()[:8]}"]


def shard(world: World, c: SimpleNamespace, x: torch.Tensor) -> torch.Tensor:
    """This rank's rows of x, in the layout of the call."""
    mine = x[shard_rows(world.rank, c.sizes, c.batch)]
    if c.layout == "transposed":
        mine = mine.t().contiguous().t()
    return SPOILED[c.layout](mine) if c.layout in SPOILED else mine


def few_rows(c: SimpleNamespace, s: SimpleNamespace) -> tuple[bool, launch.Config | None]:
    """Whether the few-rows kernel is requested and possible, and the configuration; its tile then holds all rows."""
    few = c.few and s.rows.total <= FEW_ROWS and (c.batch == 1 or c.op == "matmul_all_reduce")
    if few and s.config is not None:
        return True, replace(s.config, block_m=block(s.rows.total, s.config.block_m, FEW_ROWS))
    return few, s.config


def matmul_reduce_scatter(world: World, c: SimpleNamespace) -> list[str]:
    s = same_everywhere(c)
    xs = [s.numbers.draw(s.total, c.k + c.step * r, layout=c.layout) for r in range(world.size)]
    layout = "transposed" if c.products > 1 else c.layout  # as in a gradient
    ws = [s.numbers.draw(c.widths[0], c.k + c.step * r, layout=layout) for r in range(world.size)]
    bias = s.numbers.draw(c.widths[0]) if c.biased else None
    x, w, machine = xs[world.rank], ws[world.rank], machine_for(world.view, xs[0])
    check(world.view, scatter_slot_bytes(s.rows, c.widths[0], x.dtype), x, [w, bias])
    width = max(1, -(-x.shape[1] // (8 * c.products)) * 8)
    parts = [each.split(width, 1) for each in (x, w)]
    few, config = few_rows(c, s)
    plan = plan_few_rows_reduce_scatter if few else plan_matmul_reduce_scatter
    launch, y = plan(world.view, world.rank, world.size, *parts, bias, s.rows, c.sig, config, machine)
    launch.run(world.view, x.device)
    want = linear(torch.cat(xs, 1), torch.cat(ws, 1), bias)
    return equal("y", y, want[shard_rows(world.rank, c.sizes, c.batch)])


def matmul_all_reduce(world: World, c: SimpleNamespace) -> list[str]:
    s = same_everywhere(c)
    xs = [s.numbers.draw(s.total, c.k + c.step * r, layout=c.layout) for r in range(world.size)]
    ws = [s.numbers.draw(c.widths[0], c.k + c.step * r, layout=c.layout) for r in range(world.size)]
    bias = s.numbers.draw(c.widths[0]) if c.biased else None
    x, w, machine = xs[world.rank], ws[world.rank], machine_for(world.view, xs[0])
    in_one = is_one_shot(s.total, c.widths[0], x.dtype) if c.in_one is None else c.in_one
    nbytes = all_reduce_slot_bytes(s.total, c.widths[0], world.size, x.dtype, in_one)
    check(world.view, nbytes, x, [w, bias])
    few, config = few_rows(c, s)
    plan = plan_one_shot if in_one else plan_few_rows if few else plan_two_shot
    launch, y = plan(world.view, world.rank, world.size, x, w, bias, c.sig, config, machine)
    launch.run(world.view, x.device)
    return equal("y", y, linear(torch.cat(xs, 1), torch.cat(ws, 1), bias))


def all_gather_wgrad(world: World, c: SimpleNamespace) -> list[str]:
    s = same_everywhere(c)
    x = s.numbers.draw(s.total, c.k)
    dys = [s.numbers.draw(s.total, n + r, layout=c.layout) for r in range(world.size) for n in c.widths]
    dys = dys[world.rank * len(c.widths) :][: len(c.widths)]
    mine = x[shard_rows(world.rank, c.sizes, c.batch)]
    if c.layout in SPOILED:
        mine = SPOILED[c.layout](mine)
    mine, copies, machine = world.operand(mine, c)
    check(world.view, gather_slot_bytes(s.rows, c.k, mine.dtype), mine, dys)
    launch, dws = plan_all_gather_wgrad(
        world.view,
        world.rank,
        world.size,
        mine,
        dys,
        s.rows,
        c.sig,
        s.config,
        machine,
        None,
        copies is not None,
    )
    world.run(launch, mine, copies, s.rows)
    wrong = []
    for i, (dw, dy) in enumerate(zip(dws, dys, strict=True)):
        wrong += equal(f"dw{i}", dw, linear(dy.t(), x.t(), None))
    return wrong


@triton.jit
def narrow_kernel(x, y, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + at, tiles.narrow(tl.load(x + at), y.dtype.element_ty))


def narrow(world: World, c: SimpleNamespace) -> list[str]:
    """Every upper half of an fp32, with lower halves around the tie: rounds as torch does, and NaN stays NaN."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    bits = (torch.arange(1 << 16, dtype=torch.int32) << 16)[None, :] | low[:, None]
    x = bits.view(torch.float32).reshape(-1)
    y = x.new_empty(x.shape, dtype=torch.bfloat16)
    narrow_kernel[(low.numel(),)](x, y, N=1 << 16)
    nan = x.isnan()
    wrong = equal("NaN", y.isnan(), nan)
    return wrong + equal("bits", y[~nan].view(torch.int16), x[~nan].to(torch.bfloat16).view(torch.int16))


def matmul(world: World, c: SimpleNamespace) -> list[str]:
    s = same_everywhere(c)
    x, w = s.numbers.draw(c.sizes[0], c.k, layout=c.layout), s.numbers.draw(c.widths[0], c.k, layout=c.layout)
    bias = s.numbers.draw(c.widths[0]) if c.biased else None
    return equal("y", launch.matmul(x, w, bias, s.config), linear(x, w, bias))


KERNELS = (
    all_gather_matmul,
    all_gather_gated_matmul,
    matmul_reduce_scatter,
    matmul_all_reduce,
    all_gather_wgrad,
    matmul,
    narrow,
)
OPS = {kernel.__name__: kernel for kernel in KERNELS}


def run(world: World, case: dict) -> list[str]:
    c = SimpleNamespace(**case)
    delay = torch.randint(0, 20, (world.size,), generator=torch.Generator().manual_seed(c.seed + 1))
    time.sleep(int(delay[world.rank]) * 1e-4)
    world.view = replace(world.view, flags_per_source=c.flags)
    made.clear()
    wrong = OPS[c.op](world, c)
    world.poison()
    if c.descriptors is not None and len(made) != c.descriptors:
        wrong.append(f"{len(made)} operands by TMA, not {c.descriptors}")
    if int(world.view.status[0]) != 0:
        wrong.append(f"status {world.view.status.tolist()}")
    return [f"rank {world.rank}: {line}" for line in wrong]


def fail(world: World, case: dict) -> dict:
    """A call in which a peer is missing (`absent`) or runs another call (`other`)."""
    c = SimpleNamespace(**case)
    world.view = view = replace(world.view, timeout_s=2.0)
    c.sig += world.rank == c.other
    before = world.memory.clone()
    began = time.monotonic()
    if world.rank != c.absent:
        OPS[c.op](world, c)
    seconds, quiet = time.monotonic() - began, torch.equal(before, world.memory)
    published = world.flags.view(world.size, FLAGS).any(0).nonzero()  # chunks that any rank published here
    highest = int(published.max()) if published.numel() else -1
    return dict(status=view.status.tolist(), seconds=seconds, quiet=quiet, highest_flag=highest)


def serve(channel: Connection, rank: int, files: list[int]) -> None:
    """Serve requests from the channel until it is closed."""
    worlds = {}
    while True:
        try:
            task, size, cases = channel.recv()
        except EOFError:
            return
        try:
            if task == "fail":
                reply = fail(worlds[size], cases[0])
            else:
                if task == "make":
                    worlds[size] = World(files[size - 1], size, rank)
                    reply = []
                elif "epoch" in cases[0]:
                    worlds[size].view.epoch[:1].fill_(cases[0]["epoch"]).add_(1)
                    worlds[size].flags.fill_(cases[0]["epoch"])
                    worlds[size].arrivals.fill_(cases[0]["epoch"] & 0xFFFFFFFF)
                    reply = []
                else:
                    reply = [line for case in cases for line in run(worlds[size], case)]
        except Exception:
            reply = [traceback.format_exc()]
        channel.send(reply)


def main() -> None:
    """Import once, then fork a process for each rank."""
    sockets, files = ([int(fd) for fd in argument.split(",")] for argument in sys.argv[1:])
    torch.set_num_threads(1)
    torch.Tensor.new_empty = poisoned
    operands.described = counted
    with quick(interpreter):
        fork(sockets, files)


def fork(sockets: list[int], files: list[int]) -> None:
    for rank, mine in enumerate(sockets):
        if os.fork() == 0:
            for other in sockets:
                if other != mine:
                    os.close(other)
            serve(Connection(mine), rank, files)
            os._exit(0)
    for fd in sockets:
        os.close(fd)
    for _ in sockets:
        os.wait()


if __name__ == "__main__":
    main()
