"""What suites share: a case of a layer, local matmuls, and rows that could not be measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..by_hand import widens
from ..errors import Error
from ..options import Plan
from ..ranks import Rank
from ..rows import Row
from ..sample import Spread, Way
from ..shapes import layers


@dataclass(frozen=True)
class Case:
    """y [T, N] = x [T, K] @ w.T on each of `tp` ranks; K and N are a rank's."""

    model: str
    layer: str
    tokens: int
    k: int
    n: int
    tp: int
    dtype: str

    @property
    def shape(self) -> dict[str, int | str]:
        return {
            "model": self.model,
            "layer": self.layer,
            "T": self.tokens,
            "K": self.k,
            "N": self.n,
            "tp": self.tp,
        }

    @property
    def label(self) -> str:
        return f"{self.model} {self.layer} T={self.tokens} K={self.k} N={self.n} tp={self.tp} {self.dtype}"

    @property
    def itemsize(self) -> int:
        size: int = getattr(torch, self.dtype).itemsize
        return size


def layer_cases(plan: Plan, tp: int, *kinds: str) -> list[Case]:
    """A case for each shape's layers of these kinds, tokens and dtype; small before large."""
    found = [
        Case(model, layer.name, layer.n if layer.kind == "square" else tokens, layer.k, layer.n, tp, dtype)
        for tokens in sorted(plan.tokens)
        for model in plan.shapes
        for layer in layers(model, tp)
        for dtype in plan.dtypes
        if layer.kind in kinds
    ]
    return list(dict.fromkeys(found))


def even(cases: list[Case], suite: str) -> list[Case]:
    """The same, if every rank has as many rows as the others, which collectives called by hand ask for."""
    for case in cases:
        if case.tokens % case.tp:
            raise ValueError(
                f"{suite} wants equal rows: {case.tokens} tokens do not split over {case.tp} ranks"
            )
    return cases


def matmul(x: Tensor, w: Tensor) -> Tensor:
    """x [M, K] @ w [N, K].T by the vendor's library; 16 bits through fp32 on a CPU that is faster so."""
    if x.device.type == "cpu" and widens(x.dtype):
        return torch.mm(x.float(), w.float().t()).to(x.dtype)
    return torch.mm(x, w.t())


def row(rank: Rank, suite: str, shape: dict[str, int | str], dtype: str, engine: str, **figures: Any) -> Row:
    """A row of this world. `error` may be an Error."""
    error = figures.pop("error", None)
    if isinstance(error, Error):
        figures |= {"error": error.largest, "error_share": error.share}
    if rank.plan.link_gbps is not None and rank.group is not None:
        shape = {**shape, "link": f"{rank.plan.link_gbps:g}"}
    return Row(suite, shape, dtype, engine, rank.world, rank.world_size, **figures)


def drop_what_fails(ways: dict[str, Way], functions: dict[str, Any], absent: dict[str, str]) -> None:
    """Call each baseline once; one that raises (another version, too little memory) is `absent` with its words."""
    for name in [name for name in ways if not name.startswith("fusedtp")]:
        try:
            ways[name]()
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            absent[name] = f"{type(error).__name__}: {lines[0]}"
            del ways[name], functions[name]


def missing(rank: Rank, suite: str, shape: dict[str, int | str], dtype: str, engine: str, why: str) -> Row:
    """A row of what cannot run here."""
    return row(rank, suite, shape, dtype, engine, note=why)


def median(spreads: dict[str, Spread], *names: str) -> float:
    """The least median of those that were measured."""
    return min(spreads[name].median for name in names if name in spreads)
