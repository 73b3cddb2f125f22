"""A printable table of the engine that every layer gets, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fusedtp.comm import Communicator, communicator
from fusedtp.nn.experts import Experts
from fusedtp.ops import engines, fp8
from fusedtp.ops.launch import tuned
from fusedtp.ops.moe import plan as routing
from fusedtp.ops.operation import OPERATIONS as DECLARED
from fusedtp.ops.operation import Spec
from fusedtp.ops.rows import Rows, split

from .expert_parallel import ExpertParallel
from .foreign import Columns, Own
from .foreign_styles import is_conv1d
from .layers import PLAIN, ColumnParallel, Member, Replica, RowParallel, VocabParallel, operations_of
from .local_view import LocalOwn
from .placement import is_compiled

OPERATIONS = {
    (ColumnParallel, True): "all_gather_matmul",
    (ColumnParallel, False): "matmul",
    (RowParallel, True): "matmul_reduce_scatter",
    (RowParallel, False): "matmul_all_reduce",
    (VocabParallel, True): "lookup, reduce_scatter",
    (VocabParallel, False): "lookup, all_reduce",
    (ExpertParallel, True): "moe_dispatch, moe_combine",
    (ExpertParallel, False): "moe_dispatch, moe_combine, all_gather",
}


@dataclass(frozen=True)
class Layer:
    """One parallel layer; `engine` runs its forward for the given number of tokens.

    transport   how a fused gather moves rows: "programs" of its kernel send them, or "copy", the copy engine;
                "" for other layers
    """

    name: str
    operation: str
    engine: str
    reason: str
    transport: str = ""


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`; print it."""

    layers: tuple[Layer, ...]
    tokens: int
    calls: dict[str, dict[str, dict[str, int]]]  # group -> operation -> engine that actually ran -> calls
    configurations: str = ""  # how many of the kernels that have run are tuned for this GPU, how many use defaults
    whole: dict[str, str] = field(default_factory=dict)  # module that is not split, or tokens -> why
    local: dict[str, str] = field(default_factory=dict)  # module -> values that its code sees divided by world size
    gathered: dict[str, int] = field(default_factory=dict)  # operation of the model's own code -> gathers of all tokens

    def __str__(self) -> str:
        rows = [("layer", "operation", "engine", "why"), *(_row(layer) for layer in self.layers)]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
        for group, operations in self.calls.items():
            for operation, engine_calls in operations.items():
                counted = ", ".join(f"{engine} {n}" for engine, n in engine_calls.items())
                lines.append(f"calls so far in group {group}: {operation}: {counted}")
        lines += [f"whole on every rank: {name or 'the model'}: {why}" for name, why in self.whole.items()]
        lines += [f"changed to local values in {name}: {what}" for name, what in self.local.items()]
        if self.gathered:
            counted = ", ".join(f"{name} {n}" for name, n in self.gathered.items())
            lines.append(f"gathered so far, for the model's own code: {counted}")
        lines += [self.configurations] if self.configurations else []
        return "\n".join([f"forward of {self.tokens} tokens", *lines])


def explain(model: nn.Module, tokens: int = 4096, dtype: torch.dtype | None = None) -> Explanation:
    """Layer -> engine and reason, for a forward of this many tokens in total.

    dtype: of the activations; None takes model.config.compute_dtype, or else the dtype of the layer's weight.
    Raises ValueError if the model has no parallel layer.
    """
    layers: list[Layer] = []
    groups: dict[str, Communicator] = {}
    dtype = dtype or getattr(getattr(model, "config", None), "compute_dtype", None)
    replicas = 0
    local: dict[str, str] = {}
    compiled = any(map(is_compiled, model.modules()))
    for name, module in model.named_modules():
        parallel = getattr(module, "parallel", None)
        replicas += isinstance(parallel, Replica | Own)
        if isinstance(parallel, LocalOwn):
            local[name] = parallel.describe()
        if isinstance(parallel, Member):
            comm = groups.setdefault(parallel.group, communicator(parallel.group))
            above, _, child = name.rpartition(".")
            joined = getattr(model.get_submodule(above), "gathering", {}).get(child)
            joined = joined if operations_of(module) is PLAIN else None
            of = dtype or weight_of(module).dtype
            foreign = getattr(parallel, "model", None)
            whole_tokens = foreign is not None and (compiled or foreign.compiled)
            split_tokens = parallel.sequence_parallel and not whole_tokens
            layers.append(_explained(name, module, parallel, comm, tokens, of, joined, split_tokens))
    if not layers and not replicas:
        raise ValueError(f"{type(model).__name__} has no parallel layer; call fusedtp.parallelize first")
    calls = {name: engines.calls(comm) for name, comm in groups.items()}
    ours = getattr(model, "_fusedtp", None)
    whole, gathered = (dict(ours.whole), dict(ours.gathered)) if ours is not None else ({}, {})
    if ours is not None and (compiled or ours.compiled):
        whole["tokens between layers"] = "the model or a part of it is or was compiled"
    return Explanation(tuple(layers), tokens, calls, tuned.summary(), whole, local, gathered)


def _explained(
    name: str,
    module: nn.Module,
    parallel: Member,
    comm: Communicator,
    tokens: int,
    dtype: torch.dtype,
    joined: str | None,
    split_tokens: bool,
) -> Layer:
    """joined: the operation with which the parent module gathers for this layer and its siblings."""
    kind = next(each for each in type(parallel).__mro__ if (each, True) in OPERATIONS)
    operation = OPERATIONS[kind, split_tokens]
    if isinstance(parallel, ColumnParallel) and parallel.gather_output:
        operation += ", all_gather"
    elif operation == "all_gather_matmul" and joined:
        operation = joined
    if (
        operation == "all_gather_matmul"
        and isinstance(parallel, Columns)
        and parallel.siblings.of(module)[0] is not module
    ):
        first = parallel.siblings.of(module)[0].parallel.layer
        return Layer(name, operation, "joined", f"one gather and one call with {first}")
    if operation == "matmul":
        operation = operations_of(module).instead_of(operation, tokens)
        return Layer(name, operation, "local", "tokens are whole on every rank; the input's gradient is all-reduced")
    if isinstance(parallel, ExpertParallel):
        chosen = routing.choose(comm, parallel.engine, dtype)
        return Layer(name, operation, chosen.engine, chosen.reason)
    rows = Rows(split(tokens, comm.world_size))
    first, *more = operation.split(", ")
    scaled = operations_of(module).instead_of(first, tokens)
    if scaled != first:
        choice = fp8.choose(scaled, comm, Spec(comm.name, comm.rank, rows.sizes, 1, parallel.engine), rows)
        return Layer(name, ", ".join([scaled, *more]), choice.engine, choice.reason)
    asked = "auto" if isinstance(parallel, VocabParallel) else parallel.engine
    width = weight_of(module).shape[int(isinstance(parallel, ColumnParallel) != is_conv1d(module))]
    known = "" if isinstance(parallel, VocabParallel) else operation.partition(",")[0]
    choice = engines.choose(comm, asked, rows, dtype, known, width)
    transport = ""
    if choice.engine == "triton" and isinstance(parallel, ColumnParallel):
        copied = DECLARED[known].copied
        can_copy = comm.workspace.can_copy and (copied is None or copied(rows, dtype))
        transport = choice.transport if can_copy else "programs"
    return Layer(name, operation, choice.engine, choice.reason, transport)


def weight_of(module: nn.Module) -> torch.Tensor:
    """A parallel layer's weight; one of several for experts and attention."""
    weight: Any = None
    if isinstance(module, Experts):
        weight = module.up_proj
    elif isinstance(module, nn.MultiheadAttention):
        weight = module.q_proj_weight if module.in_proj_weight is None else module.in_proj_weight
    else:
        weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def _row(layer: Layer) -> tuple[str, str, str, str]:
    engine = f"{layer.engine} by {layer.transport}" if layer.transport else layer.engine
    return layer.name, layer.operation, engine, layer.reason
