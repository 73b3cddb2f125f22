"""Single-device suites: the plain matmul, and the memory-bound operations.

    matmul      the plain Triton matmul, to which the fused kernels add communication, against the vendor's
    pointwise   RMSNorm (alone and after a residual sum), SwiGLU and rotary embedding, forward and backward

Bytes of `pointwise` are the minimum: the forward reads each input once and writes each output once; the backward reads
the gradient of the output and the saved tensors, and writes the gradients. The roof counts a copy's bytes read and
written.

    rms_norm        fwd x -> y                 bwd dy, x -> dx
    add_rms_norm    fwd x, residual -> y, h    bwd dy, dh, h -> dx
    swiglu          fwd gate, up -> y          bwd dy, gate, up -> dgate, dup
    rope            fwd q, k -> q', k'         bwd dq', dk' -> dq, dk
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtp.nn import TokenLayout
from fusedtp.nn.mlp import gated
from fusedtp.nn.norm import rms_norm
from fusedtp.nn.rope import rotary_tables, rotate_pair
from fusedtp.ops import launch, pointwise
from fusedtp.ops import matmul as cpu

from .. import errors, rivals
from ..cases import Case, named
from ..options import Plan
from ..rank import Rank
from ..rivals import matmul as vendor
from ..rows import Row
from ..shapes import MODELS, Model, layers
from ..ways import INTERPRETED, Ways

EPS = 1e-5
Outputs = tuple[Tensor, ...]
OPERATIONS = {  # tensors of full width read or written: forward, backward
    "rms_norm": (2, 3),
    "add_rms_norm": (4, 4),
    "swiglu": (3, 5),
    "rope": (2, 2),
}


# -- matmul ----------------------------------------------------------------------------------------------------------


def matmul_cases(plan: Plan, tp: int) -> list[Case]:
    """All layers of the shapes on one rank of `tp`, and squares; small sizes first."""
    found = []
    for tokens in sorted(plan.tokens):
        for model in plan.shapes:
            for layer in layers(model, tp):
                rows = layer.n if layer.kind == "square" else tokens
                names = named(model=model, layer=layer.name, T=rows, K=layer.k, N=layer.n, tp=tp)
                found += [Case("matmul", dtype, rows, layer.k, layer.n, names=names) for dtype in plan.dtypes]
    return list(dict.fromkeys(found))


@torch.no_grad()
def measure_matmul(rank: Rank, case: Case) -> list[Row]:
    """Result rows of one case."""

    def operands(seed: int) -> tuple[Tensor, ...]:
        x = rank.randn(case.tokens, case.k, dtype=case.dtype, seed=2 * seed)
        return x, rank.randn(case.n, case.k, dtype=case.dtype, seed=2 * seed + 1, scale=case.k**-0.5)

    on_cpu, ways = rank.device.type == "cpu", Ways(rank, "matmul", case)
    ways.add(rivals.vendor_name(rank.device), vendor)
    if on_cpu:
        ways.add("fusedtp (local matmul of chunked)", cpu.linear)
        ways.add("fusedtp triton", None, INTERPRETED)
    else:
        ways.add("fusedtp triton", launch.matmul)
    compiled = rivals.compiled(lambda x, w: x @ w.t(), rank.device, rank.plan.compile)
    ways.add("torch.compile", *compiled)
    sets = rank.copies(operands)
    sampled = errors.sampled(case.tokens).to(rank.device)
    x, w = sets[0]
    want = errors.product(x, w, sampled)
    ways.prepare(sets)
    found = {
        name: {"error": errors.compare(function(*sets[0])[sampled], want, case.k)}
        for name, function in ways.functions.items()
    }
    return ways.rows(found, flops=case.flops, roof=rank.roofs[case.dtype])


# -- pointwise -------------------------------------------------------------------------------------------------------


def pointwise_cases(plan: Plan, tp: int) -> list[Case]:
    """Every operation on every model; swiglu has a rank's part of the intermediate size, rope a rank's heads."""
    models: list[Model] = [MODELS[name] for name in plan.shapes if name in MODELS]
    return [
        pointwise_case(operation, model, tokens, tp, dtype, backward)
        for tokens in sorted(plan.tokens)
        for model in models
        for operation in OPERATIONS
        for dtype in plan.dtypes
        for backward in (False, True)
    ]


def pointwise_case(operation: str, model: Model, tokens: int, tp: int, dtype: str, backward: bool) -> Case:
    """k: elements per token of one input; model: (head_dim, query heads, kv heads) of a rank."""
    queries, keys = model.heads // tp, max(1, model.kv_heads // tp)
    widths = {"swiglu": model.intermediate // tp, "rope": (queries + keys) * model.head_dim}
    width, direction = widths.get(operation, model.hidden), "fwd+bwd" if backward else "fwd"
    names = named(model=model.name, op=operation, T=tokens, width=width, tp=tp, direction=direction)
    heads = model.head_dim, queries, keys
    return Case(operation, dtype, tokens, width, backward=backward, names=names, model=heads)


def moved(case: Case) -> float:
    """Bytes read and written by the case."""
    forward, backward = OPERATIONS[case.operation]
    return float((forward + backward * case.backward) * case.tokens * case.k * case.itemsize)


def operands(rank: Rank, case: Case, seed: int) -> Outputs:
    """Operands of the functions below; inputs require gradients if the case has a backward."""

    def draw(which: int, *shape: int) -> Tensor:
        t = rank.randn(*shape, dtype=case.dtype, seed=4 * seed + which)
        return t.requires_grad_() if case.backward else t

    if case.operation == "rope":
        head_dim, queries, keys = case.model
        tables = rotary_tables(TokenLayout(1, case.tokens), head_dim, device=rank.device)
        q, k = (draw(i, 1, case.tokens, heads, head_dim) for i, heads in enumerate((queries, keys)))
        return q, k, *tables
    x, weight = draw(0, case.tokens, case.k), draw(2, case.k)
    if case.operation == "rms_norm":
        return x, weight
    other = draw(1, case.tokens, case.k)
    return (x, other) if case.operation == "swiglu" else (x, other, weight)


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
    """fusedtp.nn.norm.add_norm as a function."""
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


def liger(operation: str, device: torch.device) -> rivals.Found:
    """Liger-Kernel's version. If it is too old for a fused residual sum, torch adds the residual."""
    if operation == "rope":
        function, why = rivals.liger("rope", "LigerRopeFunction", device)

        def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Outputs:
            # Liger-Kernel has the layout of transformers' models: tables of whole heads [1, S, D], heads before tokens.
            wide = [torch.cat([t, t], -1)[:, :, 0] for t in (cos, sin)]
            turned: Outputs = function.apply(q.transpose(1, 2), k.transpose(1, 2), *wide)
            return turned[0].transpose(1, 2), turned[1].transpose(1, 2)

        return (rope if function is not None else None), why
    if operation == "swiglu":
        function, why = rivals.liger("swiglu", "LigerSiLUMulFunction", device)
        return (None if function is None else lambda gate, up: (function.apply(gate, up),)), why
    if operation == "add_rms_norm":
        both, why = rivals.liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction", device)
        if both is not None:
            return lambda x, residual, weight: both.apply(x, residual, weight, EPS, 0.0, "llama", False), why
    function, why = rivals.liger("rms_norm", "LigerRMSNormFunction", device)
    if function is None:
        return None, why

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = function.apply(x, weight, EPS, 0.0, "llama", False)
        return y

    if operation == "rms_norm":
        return lambda x, weight: (norm(x, weight),), ""

    def add_then_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
        h = x + residual
        return norm(h, weight), h

    return add_then_norm, ""


def measure_pointwise(rank: Rank, case: Case) -> list[Row]:
    """Result rows of one case."""
    ways, plain = Ways(rank, "pointwise", case), TORCH[case.operation]
    ways.add("torch", plain)
    ways.add("fusedtp", OURS[case.operation])
    ways.add("torch.compile", *rivals.compiled(plain, rank.device, rank.plan.compile))
    ways.add("Liger-Kernel", *liger(case.operation, rank.device))
    # Liger-Kernel overwrites its inputs with gradients, so it gets separate inputs.
    inputs: dict[str, list[tuple[Any, ...]]] = {
        name: rank.copies(lambda seed: operands(rank, case, seed))
        for name in ("", "Liger-Kernel")
        if name in ("", *ways.functions)
    }
    ways.prepare(inputs, lambda _, fn: _both(fn) if case.backward else _forward(fn))
    found = {name: {"error": error(case, fn, inputs.get(name, inputs[""])[0])} for name, fn in ways.functions.items()}
    return ways.rows(found, moved_bytes=moved(case), roof=rank.roofs["copy"])


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
    """The error of the forward at sampled tokens, against the formula in fp64 on the same inputs."""
    tokens = errors.sampled(case.tokens).to(tensors[0].device)
    dim = 1 if case.operation == "rope" else 0
    with torch.no_grad():
        # The reference comes first: a kernel may compute in place.
        some = [t.detach().index_select(dim, tokens).double() if t.dim() > 1 else t.detach().double() for t in tensors]
        if case.operation == "add_rms_norm":
            # The sum is rounded to the dtype before it is normalized, as in torch.
            h = (tensors[0].detach() + tensors[1].detach()).index_select(0, tokens).double()
            want: Outputs = (*TORCH["rms_norm"](h, some[2]), h)
        else:
            want = TORCH[case.operation](*some)
    with torch.set_grad_enabled(case.backward):  # as when it was compiled
        got = [y.detach().index_select(dim, tokens) for y in fn(*tensors)]
    # On a CPU, silu(gate) is rounded before it is multiplied by up.
    roundings = 2 if case.operation == "swiglu" and tokens.device.type == "cpu" else 1
    found = [
        errors.elementwise(y, exact, _magnitude(case, some, exact), case.k + 16, roundings)
        for y, exact in zip(got, want)
    ]
    return errors.Error(max(e.largest for e in found), max(e.share for e in found))


def _magnitude(case: Case, inputs: list[Tensor], exact: Tensor) -> Tensor:
    """The magnitude that rounding errors scale with: the result; for rope, sums of two products, the inputs."""
    if case.operation != "rope":
        return exact.abs()
    most = max(float(t.abs().max()) for t in inputs[:2])
    return torch.full_like(exact, 2 * most)
