"""The suite of decoding: a layer's matmuls for a few tokens, with their communication, eager and in a CUDA graph.

    h = x @ qkv.T       a = all_reduce(h' @ o.T)         h': the first columns of h, as many as o needs; no attention
    g = a @ gate_up.T   y = all_reduce(silu(g1) * g2 @ down.T)

    fusedtp ENGINE             matmul_all_reduce
    NCCL + torch.matmul        torch.mm, then the process group's all_reduce, without our checks; gloo on a CPU
    ..., graph                 the same call captured once; a sample replays it: one graph, no host work

A sample is calls back to back without a gate: if the host is slower than the device, its time counts, as in real
decoding. Bytes are the weights of all ranks, each read once. Ranks of a virtual world are threads of one interpreter,
so their eager calls wait for each other on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fusedtp
from fusedtp.nn.mlp import gated

from .. import errors, rivals
from ..cases import Case, named
from ..options import Plan
from ..rank import Rank
from ..rivals import matmul
from ..rows import Row
from ..sample import Spread, interleave
from ..shapes import layers, model_of
from ..ways import INTERPRETED, NO_SWITCH, Ways

SUITE = "decode"
TOKENS, SMOKE_TOKENS = (1, 16, 64), (2,)
# and the group's collectives; engines that exchange on the host cannot be captured
GRAPHS = ("fusedtp triton", "fusedtp multimem")
AllReduce = Callable[[Tensor, Tensor], Tensor]  # (x [T, K], w [N, K]) -> [T, N], summed over ranks


def cases(plan: Plan, tp: int) -> list[Case]:
    """Few tokens of each model, regardless of --tokens. Raises ValueError for a model that does not split."""
    found = []
    for tokens in SMOKE_TOKENS if plan.smoke else TOKENS:
        for model in plan.shapes:
            if not model.startswith("square-"):
                shape = named(model=model, T=tokens, tp=tp)
                found += [Case(SUITE, dtype, tokens, tp=tp, names=shape, model=model) for dtype in plan.dtypes]
    return found


def layer(x: Tensor, weights: dict[str, Tensor], summed: AllReduce) -> Tensor:
    """x [T, H] -> [T, H], see the module docstring."""
    h = matmul(x, weights["qkv"])
    a = summed(h[:, : weights["o"].shape[1]], weights["o"])
    g = matmul(a, weights["gate_up"])
    half = g.shape[1] // 2
    return summed(gated(g[:, :half], g[:, half:], "silu"), weights["down"])


class Graph:
    """Captures a function in a CUDA graph at the first call (collective), and replays it at each call.

    The function must have run before. Nothing else may run on the device during capture, so ranks that share a device
    take turns.
    """

    def __init__(self, rank: Rank, function: Callable[[], Tensor]) -> None:
        self.rank, self.function = rank, function
        self.graph: torch.cuda.CUDAGraph | None = None
        self.y: Tensor | None = None

    def __call__(self) -> Tensor:
        if self.graph is None:
            self._capture()
        assert self.graph is not None and self.y is not None
        self.graph.replay()
        return self.y

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        raised: Exception | None = None
        shared = self.rank.world == "virtual"
        for turn in range(self.rank.world_size if shared else 1):
            torch.cuda.synchronize()
            self.rank.meeting.barrier()
            if turn == self.rank.rank or not shared:
                try:
                    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                        self.y = self.function()
                except Exception as error:
                    raised = error
            self.rank.meeting.barrier()
        (failed,) = self.rank.worst(float(raised is not None))  # replays of its peers would wait for it
        if raised is not None:
            raise raised
        if failed:
            raise RuntimeError("another rank failed to capture the graph")
        self.graph = graph


@torch.no_grad()
def measure(rank: Rank, case: Case) -> list[Row]:
    """Result rows of one case. Collective."""
    comm, group = rank.comm, rank.group
    assert comm is not None
    hidden = model_of(case.model).hidden
    generator = torch.Generator(rank.device).manual_seed(0)  # the same tokens on every rank
    x = torch.randn(case.tokens, hidden, generator=generator, device=rank.device).to(getattr(torch, case.dtype))
    weights = {
        of.name: rank.randn(of.n, of.k, dtype=case.dtype, seed=seed, scale=of.k**-0.5)
        for seed, of in enumerate(layers(case.model, case.tp))
    }
    ways = Ways(rank, SUITE, case)

    def add(name: str, summed: AllReduce, has_graph: bool) -> None:
        def run() -> Tensor:
            return layer(x, weights, summed)

        ways.add(name, run)
        if has_graph:
            graph = Graph(rank, run) if rank.device.type == "cuda" else None
            ways.add(f"{name}, graph", graph, "CUDA graphs need a GPU")

    for engine in rank.plan.engines:
        name = f"fusedtp {engine}"
        if engine in ("triton", "multimem") and rank.device.type == "cpu":
            ways.add(name, None, INTERPRETED)
        elif engine == "multimem" and rank.world != "virtual" and not comm.has_switch:
            ways.add(name, None, NO_SWITCH)
        elif engine != "triton-copy":  # for gathers only
            add(name, _ours(group, engine), name in GRAPHS)
    hand, why = rivals.by_hand(group, rank.device)
    name = f"{rivals.collective_name(rank.device)} + torch.matmul"
    if hand is not None:
        add(name, lambda x, w: hand.all_reduce(matmul(x, w)), True)
    else:
        ways.add(name, None, why)
    ways.prepare([()])
    allowed = 4 * (errors.unit(x.dtype) + max(w.shape[1] for w in weights.values()) * errors.unit(torch.float32))

    def exact(a: Tensor, b: Tensor) -> Tensor:
        return comm.all_reduce(a.double() @ b.double().t())

    want = layer(x.double(), {name: w.double() for name, w in weights.items()}, exact)
    allowed *= comm.world_size * max(1.0, float(want.abs().max()))
    found = {}
    for name, function in ways.functions.items():
        off = float((function().double() - want).abs().max())
        found[name] = errors.Error(*rank.worst(off, off / allowed))
    calls = {way: rank.calls(way) for way in ways.timed.values()}
    times = interleave(ways.timed, rank.seconds, rank.meeting, lambda _, way: rank.once(way, calls[way]))
    moved = comm.world_size * sum(w.numel() * w.element_size() for w in weights.values())
    return [
        ways.row(name, Spread.of(seconds), error=found[name], moved_bytes=moved, roof=rank.roofs["copy"])
        for name, seconds in times.items()
    ] + ways.missing()


def _ours(group: Any, engine: str) -> AllReduce:
    return lambda x, w: fusedtp.matmul_all_reduce(x, w, group, engine=engine)
