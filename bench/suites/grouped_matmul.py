"""The matmul of ragged groups, each row by the weights of its expert, against torch's; one device.

A rank of expert parallelism: of `--tp` ranks it holds E / tp experts, and T k / tp rows come to them.

    up     rows [R, hidden]         weights [E, 2 x intermediate, hidden], gate and up in one
    down   rows [R, intermediate]   weights [E, hidden, intermediate]
    fwd, dgrad, wgrad               y = rows @ w[e].T;  drows = dy @ w[e];  dw[e] = dy[rows of e].T @ rows[rows of e]

Models are all of experts.py, whatever --shapes says; on a CPU those whose weights are below CPU_BYTES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtp.ops.moe import grouped_engines as engines

from .. import errors
from ..experts import EXPERTS, SKEWS, TINY, Experts, shared_out
from ..options import Plan
from ..rank import Rank
from ..rows import Row
from ..sample import Rotating, Way
from .common import drop_what_fails, matmul, rows_of

NAME, RANKS = "grouped-matmul", "one"
CPU_BYTES = 1 << 28
DIRECTIONS = ("fwd", "dgrad", "wgrad")


@dataclass(frozen=True)
class Case:
    """One matmul of a layer's experts on one of `tp` ranks; T tokens of all ranks."""

    model: Experts
    layer: str
    direction: str
    skew: str
    tokens: int
    tp: int
    dtype: str

    @property
    def experts(self) -> int:
        return self.model.experts // self.tp

    @property
    def rows(self) -> int:
        return self.tokens * self.model.top_k // self.tp

    @property
    def sizes(self) -> tuple[int, ...]:
        return shared_out(self.rows, self.experts, self.skew)

    @property
    def k(self) -> int:
        return self.model.hidden if self.layer == "up" else self.model.intermediate

    @property
    def n(self) -> int:
        return 2 * self.model.intermediate if self.layer == "up" else self.model.hidden

    @property
    def weight_bytes(self) -> int:
        return self.experts * self.n * self.k * int(getattr(torch, self.dtype).itemsize)

    @property
    def shape(self) -> dict[str, int | str]:
        return {
            "model": self.model.name, "layer": self.layer, "direction": self.direction, "skew": self.skew,
            "T": self.tokens, "E": self.experts, "R": self.rows, "K": self.k, "N": self.n, "tp": self.tp,
        }  # fmt: skip

    @property
    def label(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.shape.items()) + f" {self.dtype}"


def cases(plan: Plan, tp: int) -> list[Case]:
    """Both layers of every model, in each direction; small before large."""
    models = (TINY,) if plan.smoke else EXPERTS
    found = [
        Case(model, layer, direction, skew, tokens, tp, dtype)
        for tokens in sorted(plan.tokens)
        for model in models
        for layer in (("up",) if plan.smoke else ("up", "down"))
        for direction in DIRECTIONS
        for skew in SKEWS
        for dtype in plan.dtypes
        if model.experts % tp == 0
    ]
    return [case for case in found if plan.device == "cuda" or case.weight_bytes <= CPU_BYTES]


def measure(rank: Rank, case: Case) -> list[Row]:
    """Rows of one case."""
    bounds = [0, *accumulate(case.sizes)]
    offsets = torch.tensor(bounds, dtype=torch.int32, device=rank.device)

    def operands(seed: int) -> tuple[Tensor, ...]:
        def draw(which: int, *shape: int, scale: float = 1.0) -> Tensor:
            return rank.randn(*shape, dtype=case.dtype, seed=3 * seed + which, scale=scale)

        x, dy = (lambda: draw(0, case.rows, case.k)), (lambda: draw(1, case.rows, case.n))
        if case.direction == "wgrad":
            return dy(), x()
        w = draw(
            2, case.experts, case.n, case.k, scale=(case.n if case.direction == "dgrad" else case.k) ** -0.5
        )
        return (x(), w) if case.direction == "fwd" else (dy(), w.mT)

    on_cpu = rank.device.type == "cpu"
    functions: dict[str, Callable[..., Tensor]] = {}
    absent: dict[str, str] = {}
    functions["loop of torch.matmul" if on_cpu else "torch grouped_mm"] = (
        loop(case, bounds) if on_cpu else grouped_mm(case, offsets)
    )
    engine = "chunked" if on_cpu else "triton"
    functions[f"fusedtp {engine}"] = ours(case, offsets, engine)
    if on_cpu:
        absent["fusedtp triton"] = "Triton's interpreter: its time says nothing"
    sets = rank.copies(operands)
    with torch.no_grad():
        ways: dict[str, Way] = {name: Rotating(fn, sets) for name, fn in functions.items()}
        drop_what_fails(rank, ways, functions, absent)
        found = {
            name: {"error": error(case, bounds, fn(*sets[0]), *sets[0])} for name, fn in functions.items()
        }
        flops, roof = 2.0 * case.rows * case.k * case.n, rank.roofs[case.dtype]
        return rows_of(rank, NAME, case, ways, found, absent, flops=flops, roof=roof)


def ours(case: Case, offsets: Tensor, engine: str) -> Callable[..., Tensor]:
    """The engine's matmul, of the operands of the case's direction."""
    if case.direction == "wgrad":
        return lambda dy, x: engines.wgrad(engine, [dy], x, offsets, x.dtype)[0]
    return lambda x, w: engines.matmul(engine, [x], [w], offsets, None)


def grouped_mm(case: Case, offsets: Tensor) -> Callable[..., Tensor]:
    """torch's own, as it comes."""
    ends = offsets[1:]
    if case.direction == "wgrad":
        return lambda dy, x: F.grouped_mm(dy.t(), x, offs=ends)
    return lambda x, w: F.grouped_mm(x, w.mT, offs=ends)


def loop(case: Case, bounds: list[int]) -> Callable[..., Tensor]:
    """One torch.matmul an expert, as one writes it by hand; 16 bits through fp32 on a CPU that is faster so."""
    groups = [slice(begin, end) for begin, end in pairwise(bounds)]
    if case.direction == "wgrad":
        return lambda dy, x: torch.stack([matmul(dy[rows].t(), x[rows].t()) for rows in groups])
    return lambda x, w: torch.cat([matmul(x[rows], w[e]) for e, rows in enumerate(groups)])


def error(case: Case, bounds: list[int], got: Tensor, a: Tensor, b: Tensor) -> errors.Error:
    """Of sampled rows of y, drows, or of all experts' dw."""
    flat = got.flatten(0, -2)
    chosen = errors.sampled(len(flat)).tolist()
    worst = errors.Error(0.0, 0.0)
    for row in chosen:
        if case.direction == "wgrad":
            e, n = divmod(row, got.shape[1])
            rows = slice(bounds[e], bounds[e + 1])
            left, right = a[rows, n][None], b[rows].t()
        else:
            e = next(i for i, end in enumerate(bounds[1:]) if row < end)
            left, right = a[row][None], b[e]
        want = errors.product(left, right, torch.zeros(1, dtype=torch.int64))
        found = errors.compare(flat[row][None], want, left.shape[1])
        worst = errors.Error(*map(max, worst, found))
    return worst
