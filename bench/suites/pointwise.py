"""RMSNorm (alone and with the residual sum before it), SwiGLU and rotary embedding, forward and backward.

Bytes are those that must move: each input read once and each output written once, forward; backward reads the gradient
of the output and what the forward kept, and writes the gradients. The roof is a copy's bytes read and written.

    rms_norm        fwd x -> y                 bwd dy, x -> dx
    add_rms_norm    fwd x, residual -> y, h    bwd dy, dh, h -> dx
    swiglu          fwd gate, up -> y          bwd dy, gate, up -> dgate, dup
    rope            fwd q, k -> q', k'         bwd dq', dk' -> dq, dk
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtp.nn import TokenLayout
from fusedtp.nn.mlp import gated
from fusedtp.nn.norm import rms_norm
from fusedtp.nn.rope import rotary_tables, rotate_pair
from fusedtp.ops import pointwise

from .. import baselines, errors
from ..options import Plan
from ..rank import Rank
from ..rows import Row
from ..sample import Rotating, Way
from ..shapes import MODELS, Model
from .common import drop_what_fails, offer, rows_of

NAME, RANKS = "pointwise", "one"
EPS = 1e-5
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """One operation on T tokens of a model; swiglu has a rank's part of the intermediate size, rope of the heads."""

    operation: str
    model: str
    tokens: int
    tp: int
    dtype: str
    backward: bool

    @property
    def shape(self) -> dict[str, int | str]:
        direction = "fwd+bwd" if self.backward else "fwd"
        return {
            "model": self.model, "op": self.operation, "T": self.tokens, "width": self.width, "tp": self.tp,
            "direction": direction,
        }  # fmt: skip

    @property
    def label(self) -> str:
        return " ".join(f"{value}" for value in (*self.shape.values(), self.dtype))

    @property
    def heads(self) -> tuple[int, int, int]:
        """(query heads, kv heads, head_dim) of a rank."""
        model = MODELS[self.model]
        return model.heads // self.tp, max(1, model.kv_heads // self.tp), model.head_dim

    @property
    def width(self) -> int:
        """Elements of a token, of one input."""
        model = MODELS[self.model]
        if self.operation == "swiglu":
            return model.intermediate // self.tp
        if self.operation == "rope":
            queries, keys, head_dim = self.heads
            return (queries + keys) * head_dim
        return model.hidden

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        forward = {"rms_norm": 2, "add_rms_norm": 4, "swiglu": 3, "rope": 2}[self.operation]
        backward = {"rms_norm": 3, "add_rms_norm": 4, "swiglu": 5, "rope": 2}[self.operation]
        tensors = forward + (backward if self.backward else 0)
        return tensors * self.tokens * self.width * int(getattr(torch, self.dtype).itemsize)


def cases(plan: Plan, tp: int) -> list[Case]:
    """Every operation on every model."""
    models: list[Model] = [MODELS[name] for name in plan.shapes if name in MODELS]
    return [
        Case(operation, model.name, tokens, tp, dtype, backward)
        for tokens in sorted(plan.tokens)
        for model in models
        for operation in ("rms_norm", "add_rms_norm", "swiglu", "rope")
        for dtype in plan.dtypes
        for backward in (False, True)
    ]


def operands(rank: Rank, case: Case, seed: int) -> Outputs:
    """What the functions below take; those that need gradients say so where the case has a backward."""

    def draw(which: int, *shape: int) -> Tensor:
        t = rank.randn(*shape, dtype=case.dtype, seed=4 * seed + which)
        return t.requires_grad_() if case.backward else t

    if case.operation == "rope":
        queries, keys, head_dim = case.heads
        tables = rotary_tables(TokenLayout(1, case.tokens), head_dim, device=rank.device)
        return (
            draw(0, 1, case.tokens, queries, head_dim),
            draw(1, 1, case.tokens, keys, head_dim),
            *tables,
        )
    x = draw(0, case.tokens, case.width)
    weight = draw(2, case.width)
    return {
        "rms_norm": lambda: (x, weight),
        "add_rms_norm": lambda: (x, draw(1, case.tokens, case.width), weight),
        "swiglu": lambda: (x, draw(1, case.tokens, case.width)),
    }[case.operation]()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
    h = x + residual
    return F.rms_norm(h, (h.shape[-1],), weight, EPS), h


TORCH: dict[str, Callable[..., Outputs]] = {
    "rms_norm": lambda x, weight: (F.rms_norm(x, (x.shape[-1],), weight, EPS),),
    "add_rms_norm": _add_rms_norm,
    "swiglu": lambda gate, up: (F.silu(gate) * up,),
    "rope": lambda q, k, cos, sin: (_rotate(q, cos, sin), _rotate(k, cos, sin)),
}


def _ours_add(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
    """fusedtp.nn.norm.add_norm without a module."""
    if pointwise.serves(x, residual, weight):
        return pointwise.add_rms_norm(x, residual, weight, EPS)
    h = residual + x
    return rms_norm(h, weight, EPS), h


OURS: dict[str, Callable[..., Outputs]] = {
    "rms_norm": lambda x, weight: (rms_norm(x, weight, EPS),),
    "add_rms_norm": _ours_add,
    "swiglu": lambda gate, up: (gated(gate, up, "silu"),),
    "rope": rotate_pair,
}


def liger(case: Case, device: torch.device) -> baselines.Found:
    """The same of Liger-Kernel. Where it is too old to have the residual sum before its norm, that is torch's."""
    if case.operation == "rope":
        function, why = baselines.liger("rope", "LigerRopeFunction", device)

        def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Outputs:
            # Tables of whole heads [1, S, D], heads before tokens: as transformers' models hold them.
            wide = [torch.cat([t, t], -1)[:, :, 0] for t in (cos, sin)]
            turned: Outputs = function.apply(q.transpose(1, 2), k.transpose(1, 2), *wide)
            return turned[0].transpose(1, 2), turned[1].transpose(1, 2)

        return (rope if function is not None else None), why
    if case.operation == "swiglu":
        function, why = baselines.liger("swiglu", "LigerSiLUMulFunction", device)
        return (None if function is None else lambda gate, up: (function.apply(gate, up),)), why
    if case.operation == "add_rms_norm":
        both, why = baselines.liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction", device)
        if both is not None:
            return lambda x, residual, weight: both.apply(x, residual, weight, EPS, 0.0, "llama", False), why
    function, why = baselines.liger("rms_norm", "LigerRMSNormFunction", device)
    if function is None:
        return None, why

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = function.apply(x, weight, EPS, 0.0, "llama", False)
        return y

    if case.operation == "rms_norm":
        return lambda x, weight: (norm(x, weight),), ""

    def add_then_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
        h = x + residual
        return norm(h, weight), h

    return add_then_norm, ""


def measure(rank: Rank, case: Case) -> list[Row]:
    """Rows of one case."""
    functions: dict[str, Callable[..., Outputs]] = {
        "torch": TORCH[case.operation],
        "fusedtp": OURS[case.operation],
    }
    absent: dict[str, str] = {}
    compiled = baselines.compiled(TORCH[case.operation], rank.device, rank.plan.compile)
    offer(functions, absent, "torch.compile", compiled)
    offer(functions, absent, "Liger-Kernel", liger(case, rank.device))
    # Liger-Kernel writes gradients over its inputs: it gets its own.
    inputs: dict[str, list[tuple[Any, ...]]] = {
        name: rank.copies(lambda seed: operands(rank, case, seed))
        for name in ("torch", "Liger-Kernel")
        if name in functions
    }
    shared = inputs["torch"]
    ways: dict[str, Way] = {
        name: Rotating(_both(fn) if case.backward else _forward(fn), inputs.get(name, shared))
        for name, fn in functions.items()
    }
    drop_what_fails(rank, ways, functions, absent)
    found = {name: {"error": error(case, fn, inputs.get(name, shared)[0])} for name, fn in functions.items()}
    return rows_of(
        rank, NAME, case, ways, found, absent, moved_bytes=float(case.moved), roof=rank.roofs["copy"]
    )


def _forward(fn: Callable[..., Outputs]) -> Callable[..., object]:
    def run(*tensors: Tensor) -> Outputs:
        with torch.no_grad():
            return fn(*tensors)

    return run


def _both(fn: Callable[..., Outputs]) -> Callable[..., object]:
    def run(*tensors: Tensor) -> Any:
        outputs = fn(*tensors)
        leaves = [t for t in tensors if t.requires_grad]
        return torch.autograd.grad(outputs, leaves, [y.detach() for y in outputs])

    return run


def error(case: Case, fn: Callable[..., Outputs], tensors: Outputs) -> errors.Error:
    """Of the forward, at sampled tokens, against the formula in fp64 on the same inputs."""
    tokens = errors.sampled(case.tokens).to(tensors[0].device)
    dim = 1 if case.operation == "rope" else 0
    with torch.no_grad():
        # First the reference: a kernel may compute in place.
        some = [
            t.detach().index_select(dim, tokens).double() if t.dim() > 1 else t.detach().double()
            for t in tensors
        ]
        if case.operation == "add_rms_norm":
            # The sum is rounded to the dtype before it is normalised, as torch's is.
            h = (tensors[0].detach() + tensors[1].detach()).index_select(0, tokens).double()
            want: Outputs = (*TORCH["rms_norm"](h, some[2]), h)
        else:
            want = TORCH[case.operation](*some)
    with torch.set_grad_enabled(case.backward):  # as it was compiled
        got = [y.detach().index_select(dim, tokens) for y in fn(*tensors)]
    # On a CPU silu(gate) is rounded before it meets up.
    roundings = 2 if case.operation == "swiglu" and tokens.device.type == "cpu" else 1
    found = [
        errors.elementwise(y, exact, _magnitude(case, some, exact), case.width + 16, roundings)
        for y, exact in zip(got, want)
    ]
    return errors.Error(max(e.largest for e in found), max(e.share for e in found))


def _magnitude(case: Case, inputs: list[Tensor], exact: Tensor) -> Tensor:
    """What roundings are relative to: the result itself, but for a rotation's sums of two products, its inputs."""
    if case.operation != "rope":
        return exact.abs()
    most = max(float(t.abs().max()) for t in inputs[:2])
    return torch.full_like(exact, 2 * most)
