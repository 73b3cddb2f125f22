"""fusedtp bench host: host time of eager fused calls with known shapes, down to the driver's launch.

Two CPU processes take the code paths of ranks on GPUs, without host signals and waits. Everything runs: checks,
autograd, the plan of the call, the workspace, the prepared launch and its pointers, and Triton's launch of a kernel
compiled for sm_90, including its C code. Only the driver does nothing (idle_driver.py). So only CUDA's own time is
missing: that of a launch and of stream ordering.

With --gpu nothing is missing: the two processes have one GPU each, or share the machine's only GPU. On a shared GPU
kernels take turns, but the host does not wait for them.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import fusedtp
from fusedtp.comm import device_view
from fusedtp.environment import version
from fusedtp.nn import ModelConfig, TokenLayout, TransformerBlock
from fusedtp.nn.attention import prepared
from fusedtp.nn.init import init_
from fusedtp.ops import engines, operation, pointwise
from fusedtp.ops.launch import run as launch
from fusedtp.ops.launch.config import Machine
from fusedtp.ops.moe.plan import Exchange, index_formula, index_size, plan_index

from . import machine
from .idle_driver import c_compiler, install
from .options import Plan, parse
from .output import table
from .rank import Rank, run, run_ranks

RANKS = 2
IN_A_ROW = 20  # as in a tight loop, with everything in the core's caches
BOUND = ", bound by Triton"
H100 = Machine("cuda", 132, 232448, name="H100", capability=90)


@dataclass(frozen=True)
class Options:
    """Host time of eager fused calls with a driver that does nothing. Microseconds, medians."""

    rounds: int = 2000
    """Interleaved repetitions of each call."""
    tokens: int = 64
    """Rows of all ranks; they do not affect host time."""
    gpu: bool = False
    """Measure on GPUs with the real driver. At most 8 rounds."""
    save: bool = False
    """Keep the result in the repository."""
    out: str = ""
    """File of the result."""


Calls = dict[str, Callable[..., Any]]
# Processes that share a GPU take turns: a call that waits for one of the other process takes some ten milliseconds.
MOST_ROUNDS_OF_GPU, IN_A_ROW_OF_GPU = 8, 10


def measure(rank: Rank, rounds: int, tokens: int) -> dict[str, dict[str, float]]:
    """call -> pass -> microseconds on this rank. Collective."""
    with tempfile.TemporaryDirectory() as folder:
        install(folder)
        return _measured(rank, rounds, tokens)


def as_on_gpus(rank: Rank) -> None:
    """Make this CPU rank take the code paths of a GPU rank, with compiled kernels."""
    assert rank.comm is not None
    workspace = rank.comm.workspace
    workspace.on_cpu, workspace.meets = False, True
    here: list[tuple[Any, str, Any]] = [
        (engines, "interpreting", lambda: True),
        (operation, "clock_of", lambda device: "cuda"),
        (device_view, "clock_of", lambda device: "cuda"),
        (launch, "require_triton", lambda device: None),
        (launch, "machine_of", lambda device, ranks: H100),
        (pointwise, "serves", lambda *tensors: True),
    ]
    for module, name, function in here:
        setattr(module, name, function)


def _measured(rank: Rank, rounds: int, tokens: int) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    group = rank.group
    fusedtp.reserve(group, 1 << 20)
    as_on_gpus(rank)
    (x, full, w1), calls = _calls(group, tokens, torch.device("cpu"))
    taken: dict[str, dict[str, list[float]]] = {name: {} for name in (*calls, "block", "plan of experts")}

    def timed(name: str, which: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        made = call()
        taken[name].setdefault(which, []).append(1e6 * (time.perf_counter() - begin))
        return made

    for _ in range(rounds + 10):
        for name, call in calls.items():
            with torch.no_grad():
                timed(name, "no gradients", lambda: call(x, full, w1))  # noqa: B023
                for which, hooks in (("repeated", nullcontext()), ("repeated" + BOUND, bound_by_triton())):
                    with hooks:
                        for _ in range(IN_A_ROW):
                            timed(name, which, lambda: call(x, full, w1))  # noqa: B023
            leaves = x.detach().requires_grad_(), full.detach().requires_grad_(), w1.detach().requires_grad_()
            y = timed(name, "forward", lambda: call(*leaves))  # noqa: B023
            dy = torch.ones_like(y)
            timed(name, "backward", lambda: y.backward(dy))  # noqa: B023
    step, plain = _block(rank, tokens), _block(None, tokens)
    for _ in range(rounds // 4 + 11):
        timed("block", "forward and backward", step)
        timed("block", "the same on one device", plain)
        with bound_by_triton():
            timed("block", "forward and backward" + BOUND, step)
    by_kernels, in_torch = _plan_of_experts()
    for _ in range(rounds // 4 + 11):
        timed("plan of experts", "index by a kernel", by_kernels)
        timed("plan of experts", "index in torch", in_torch)
    return {name: {which: statistics.median(each[10:]) for which, each in of.items()} for name, of in taken.items()}


def _calls(group: Any, tokens: int, device: torch.device) -> tuple[list[torch.Tensor], Calls]:
    """Operands x, full and w, and the calls on them."""
    x, full, w1, w2, w3 = (
        torch.zeros(rows, 64, dtype=torch.bfloat16, device=device) for rows in (tokens // RANKS, tokens, 64, 64, 64)
    )
    return [x, full, w1], {
        "all_gather_matmul": lambda x, full, w: fusedtp.all_gather_matmul(x, [w], group, engine="triton")[0],
        "all_gather_matmul, 3 weights": lambda x, full, w: fusedtp.all_gather_matmul(
            x, [w, w2, w3], group, engine="triton"
        )[0],
        "matmul_reduce_scatter": lambda x, full, w: fusedtp.matmul_reduce_scatter(full, w, group, engine="triton"),
        "matmul_all_reduce": lambda x, full, w: fusedtp.matmul_all_reduce(full, w, group, engine="triton"),
    }


def measure_on_gpu(_rank: int, rounds: int, tokens: int) -> dict[str, dict[str, float]]:
    """Like `measure`, with real launches. Synchronizes after each round; the times do not include that."""
    torch.set_num_threads(1)
    device = torch.device("cuda", torch.cuda.current_device())
    group: Any = dist.group.WORLD
    rank = Rank(Plan(device="cuda", world="processes"), group)
    fusedtp.reserve(group, 1 << 20)
    operands, calls = _calls(group, tokens, device)
    calls = {"torch.nn.functional.linear": lambda x, full, w: F.linear(full, w), **calls}
    taken: dict[str, dict[str, list[float]]] = {name: {} for name in (*calls, "block")}
    step = _block(rank, tokens)

    def timed(name: str, which: str, call: Callable[[], Any], times: int = 1) -> Any:
        begin = time.perf_counter()
        for _ in range(times):
            made = call()
        taken[name].setdefault(which, []).append(1e6 * (time.perf_counter() - begin) / times)
        return made

    warm = 2
    for _ in range(min(rounds, MOST_ROUNDS_OF_GPU) + warm):
        for name, call in calls.items():
            for which, hooks in (("repeated", nullcontext()), ("repeated" + BOUND, bound_by_triton())):
                rank.meeting.barrier()
                with hooks, torch.no_grad():
                    timed(name, which, lambda: call(*operands), IN_A_ROW_OF_GPU)  # noqa: B023
                torch.cuda.synchronize()
            leaves = [t.detach().requires_grad_() for t in operands]
            y = timed(name, "forward", lambda: call(*leaves))  # noqa: B023
            dy = torch.ones_like(y)
            timed(name, "backward", lambda: y.backward(dy))  # noqa: B023
            torch.cuda.synchronize()
        timed("block", "forward and backward", step)
        torch.cuda.synchronize()
    fusedtp.check(group)
    return {name: {which: statistics.median(each[warm:]) for which, each in of.items()} for name, of in taken.items()}


@contextmanager
def bound_by_triton() -> Iterator[None]:
    """Route all launches through Triton, as if a launch hook were set; the difference is the cost of its binding."""
    from triton import knobs

    def watch(_: object) -> None:
        pass

    knobs.runtime.launch_enter_hook.add(watch)
    try:
        yield
    finally:
        knobs.runtime.launch_enter_hook.remove(watch)


def _block(rank: Rank | None, tokens: int) -> Callable[[], object]:
    """Forward and backward of a Transformer block with existing rotary tables, as in all layers but the first.

    torch's own operations run on the CPU, so their compute time is included; the tensors are small.

    rank   None: the block on one device, which shows the share of torch and the local kernels
    """
    sizes: dict[str, Any] = dict(hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    config = ModelConfig(dtype="bfloat16", param_dtype="bfloat16", **sizes)
    device, ranks = (torch.device("cpu"), 1) if rank is None else (rank.device, RANKS)
    block = TransformerBlock(config)
    init_(block, seed=0).to(device)
    if rank is not None:
        fusedtp.parallelize(block, rank.mesh, engine="triton")
    own = tokens // ranks
    of_rank = TokenLayout(1, tokens, (own,) * ranks, 0 if rank is None else rank.rank)
    layout = prepared(of_rank, config, device, torch.bfloat16)
    x = torch.zeros(own, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    inputs = [x, *block.parameters()]

    def step() -> None:
        """Uses backward(), as a trainer does. With torch.autograd.grad, each leaf would cost an exception of 10 us."""
        y = block(x, layout)
        y.backward(y.detach())
        for leaf in inputs:
            leaf.grad = None

    return step


def _plan_of_experts() -> tuple[Callable[[], object], Callable[[], object]]:
    """The index of an exchange of 8 ranks and 64 experts with few tokens: by its kernel, and in torch."""
    at = Exchange("", 1, (8,) * 8, 64, 2, 64, "triton")
    table = torch.ones(8, 64, dtype=torch.int32)
    places = torch.arange(16, dtype=torch.int32)

    def by_kernel() -> None:
        index = torch.empty(index_size(at), dtype=torch.int32)
        prepared, parts = plan_index(table, index, at)
        prepared.start(torch.device("cpu"))
        parts.places[:16].copy_(places)

    return by_kernel, lambda: index_formula(table, places, at)


def main(argv: Sequence[str]) -> int:
    """Measure, print, write."""
    options = parse(Options, argv, "fusedtp bench host")
    if options.gpu and not torch.cuda.is_available():
        print("fusedtp bench host: torch sees no GPU here", file=sys.stderr)
        return 2
    if c_compiler() is None:
        print("fusedtp bench host: found no C compiler ($CC, gcc, clang or cc)", file=sys.stderr)
        return 2
    command = shlex.join(["fusedtp", "bench", "host", *argv])
    about = machine.describe(RANKS, list(argv)) | {"triton": version("triton"), "command": command}
    if options.gpu:
        about |= machine.describe_run("cuda", ["host", *argv])
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # of the processes that this one starts
        found = run_ranks(measure_on_gpu, RANKS, options.rounds, options.tokens, backend="cpu:gloo,cuda:gloo")
    else:
        found = run(Plan(), RANKS, measure, options.rounds, options.tokens)
    lines = []
    for name, of in found.items():
        for which, us in of.items():
            if BOUND not in which:
                bound = of.get(which + BOUND)
                lines.append([name, which, f"{us:.1f}", "" if bound is None else f"{bound:.1f}"])
                name = ""
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    table("host time", ["call", "pass", "us", "bound by Triton"], lines, wide=("pass",))
    if options.save or options.out:
        path = Path(options.out) if options.out else machine.folder_of(about, True) / "host.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dict(about=about, us=found), indent=1) + "\n")
        print(path)
    return 0
