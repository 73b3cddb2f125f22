"""What suites share: cases of a layer and of a model, local matmuls, baselines that may fail, and rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fusedtp.comm.errors import PeerFailed, SignalTimeout

from ..by_hand import widens
from ..errors import Error
from ..options import Plan
from ..rank import Rank
from ..rows import FAILED, Row
from ..sample import Spread, Way
from ..shapes import MODELS, Model, layers


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


@dataclass(frozen=True)
class OfModel:
    """T tokens through a part of a model that `tp` ranks share."""

    model: str
    tokens: int
    tp: int
    dtype: str

    @property
    def sizes(self) -> Model:
        return MODELS[self.model]

    @property
    def shape(self) -> dict[str, int | str]:
        return {"model": self.model, "T": self.tokens, "tp": self.tp}

    @property
    def label(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.shape.items()) + f" {self.dtype}"


M = TypeVar("M", bound=OfModel)
E = TypeVar("E", bound="Case | OfModel")


def model_cases(kind: type[M], plan: Plan, tp: int) -> list[M]:
    """A case for each model, tokens and dtype; small before large."""
    return [
        kind(model, tokens, tp, dtype)
        for tokens in sorted(plan.tokens)
        for model in plan.shapes
        for dtype in plan.dtypes
        if model in MODELS
    ]


def even(cases: list[E], suite: str) -> list[E]:
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


def offer(
    functions: dict[str, Callable[..., Any]], absent: dict[str, str], name: str, found: tuple[Any, str]
) -> None:
    """Enter what baselines.py found among the functions, or why there is none."""
    function, why = found
    if function is not None:
        functions[name] = function
    else:
        absent[name] = why


def drop_what_fails(
    rank: Rank, ways: dict[str, Way], functions: dict[str, Any], absent: dict[str, str]
) -> None:
    """Call each once; one that raises (another version, too little memory) is `absent` with its words. Collective.

    What fails on one rank is dropped by all. Of ours it is said that it failed, and the case counts as one that did.
    """
    for name in list(ways):
        why = ""
        try:
            ways[name]()
            if rank.device.type == "cuda":
                torch.cuda.current_stream(rank.device).synchronize()
        except (SignalTimeout, PeerFailed):
            raise  # ranks do not know of each other any more
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            why = f"{type(error).__name__}: {lines[0]}"
        if rank.worst(float(bool(why)))[0]:
            why = why or "failed on another rank"
            absent[name] = FAILED + why if name.startswith("fusedtp") else why
            del ways[name], functions[name]


def rows_of(
    rank: Rank,
    suite: str,
    case: Any,
    ways: Mapping[str, Way],
    each: Mapping[str, Mapping[str, Any]],
    absent: Mapping[str, str],
    **figures: Any,
) -> list[Row]:
    """Sample all ways, interleaved: a row a way, and one for what is absent. Collective.

    case      has a shape and a dtype
    each      way -> figures of its own; `figures` are those of all
    """

    def made(name: str, **more: Any) -> Row:
        return row(rank, suite, case.shape, case.dtype, name, **more)

    rows = [
        made(
            name,
            seconds=spread,
            host_seconds=rank.host(ways[name], spread),
            **{**link_of(rank, name), **figures, **each.get(name, {})},
        )
        for name, spread in rank.measure(ways).items()
    ]
    return rows + [made(name, note=why) for name, why in absent.items()]


COPIED = ("communication alone: ours", "fusedtp chunked", "fusedtp triton-copy")  # by the paced copy stream


def held_gbps(rank: Rank, name: str) -> float | None:
    """What all that this way moves was held to; None where there is no link, or nothing holds it."""
    if rank.link is None:
        return None
    if name in COPIED:
        return rank.link.copies
    return rank.link.kernels if name.startswith("fusedtp triton") else None


def link_of(rank: Rank, name: str) -> dict[str, Any]:
    """What a way was held to, and what is to be said of that, or of its last sample."""
    notes, held = [rank.notes.get(name, "")], held_gbps(rank, name)
    if held is not None:
        return {"link_gbps": held, "note": notes[0]}
    if rank.link is not None and name.startswith("fusedtp"):
        notes.insert(0, "not held to the link: only copies by the copy engine and rows that kernels move are")
    return {"note": "; ".join(filter(None, notes))}


def median(spreads: dict[str, Spread], *names: str) -> float:
    """The least median of those that were measured."""
    return min(spreads[name].median for name in names if name in spreads)
