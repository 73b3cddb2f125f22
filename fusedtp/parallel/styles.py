"""ParallelStyles for torch's `parallelize_module`; `parallelize` applies the same styles by plan.

    FusedColwise     splits a linear layer's output features; the all-gather of tokens runs inside the matmul
    FusedRowwise     splits its input features; the reduce-scatter runs inside the matmul
    FusedEmbedding   splits the vocabulary
    FusedExperts     splits the experts of an MoE layer
    Replicated       everything else: norms, a module's own parameters

    parallelize_module(block, mesh["tp"], {"up": FusedColwise(), "down": FusedRowwise(), "norm": Replicated()})

A style slices the module's parameters, sets `module.parallel`, and gives the module a `forward` that calls it
(`fusedtp.nn` modules call it themselves). torch's `src_data_rank` is ignored: every rank must hold the same full
parameters (or meta ones) beforehand, and nothing is broadcast.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fusedtp.comm import Communicator, communicator
from fusedtp.ops.engines import ENGINES

from .agree import check_gradients, check_same_ids
from .expert_parallel import ExpertParallel, ExpertSplit, Shares, copies_of, stages_of
from .layers import (
    ColumnParallel,
    Replica,
    RowParallel,
    VocabParallel,
    draws_in_part,
    draws_in_whole,
    unequal,
)
from .placement import Mesh, Placement, Way, place_parameters
from .plain_linear import computes_linear


class Style(ParallelStyle):
    """Base of all styles: check the module, place its parameters, install `module.parallel`."""

    def faults(self, module: Any, world_size: int) -> list[str]:
        """Why this style cannot be applied to this module; empty if it can."""
        return []

    def ranks(self, world_size: int) -> int:
        """Number of ranks that the parameters are placed on, if the model is split over world_size ranks."""
        return world_size

    def placements(self, module: Any, world_size: int) -> dict[str, Placement]:
        """Placements of the module's own parameters; the others are replicated."""
        return {}

    def ways(self, module: Any, ranks: int) -> dict[str, Way]:
        """Parameter name -> Way, for all of the module's own parameters."""
        named = self.placements(module, ranks)
        own = module.named_parameters(recurse=False)
        return {name: Way((named.get(name, Replicate()),), (ranks,)) for name, _ in own}

    def mesh(self, module: Any, device_mesh: Mesh) -> Mesh:
        """The mesh that the parameters are placed on."""
        return device_mesh

    def install(self, module: Any, comm: Communicator, mesh: Mesh) -> None:
        """Set `module.parallel` and, on a third-party module, its forward. `mesh` is the mesh of its parameters."""
        raise NotImplementedError

    def _apply(self, module: nn.Module, device_mesh: Mesh) -> nn.Module:
        comm = communicator(device_mesh)
        ranks = self.ranks(comm.world_size)
        found = already_parallel(module) + self.faults(module, ranks)
        if found:
            raise ValueError(f"{type(self).__name__} of {module}: " + "; ".join(found))
        mesh = self.mesh(module, device_mesh)
        place_parameters(module, mesh, self.ways(module, ranks))
        self.install(module, comm, mesh)
        return module


class FusedStyle(Style):
    """Options of the layers that communicate.

    engine                auto, collective, chunked, triton or multimem; see fusedtp.explain
    sequence_parallel     False: every rank holds the whole activations between layers, [T, H]
    dim                   0: tokens are [T_r, H]; 1: [B, S_r, H]
    sizes                 number of tokens on each rank, if they are not equal
    """

    def __init__(
        self,
        *,
        engine: str = "auto",
        sequence_parallel: bool = True,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        if engine not in ENGINES:
            raise ValueError(f"engine is {engine!r}; it must be one of {', '.join(ENGINES)}")
        if dim not in (0, 1):
            raise ValueError(f"dim is {dim}; tokens are split along dim 0 of [T, H] or dim 1 of [B, S, H]")
        self.engine, self.sequence_parallel, self.dim = engine, sequence_parallel, dim
        self.sizes = None if sizes is None else tuple(sizes)

    def member(self, comm: Communicator) -> dict[str, Any]:
        """The fields of Member."""
        shared = {name: getattr(self, name) for name in ("engine", "sequence_parallel", "dim", "sizes")}
        return {"group": comm.name, "rank": comm.rank, "world_size": comm.world_size, **shared}


class FusedColwise(FusedStyle):
    """Output features split over ranks: x [T_r, K] -> [T, N_r].

    gather_output   return all N features of all tokens on every rank
    head_dim        the features are heads of this width: a shard holds whole heads; if there are fewer heads than
                    ranks (kv heads), the weight is replicated and each rank uses the rows of its head
    For further options see FusedStyle.
    """

    def __init__(self, *, gather_output: bool = False, head_dim: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.gather_output, self.head_dim = gather_output, head_dim

    def faults(self, module: Any, world_size: int) -> list[str]:
        found = linear_faults(module)
        if found or self.head_dim is None:
            return found
        heads, rest = divmod(module.weight.shape[0], self.head_dim)
        if rest:
            return [f"{module.weight.shape[0]} features are not a multiple of head_dim {self.head_dim}"]
        if heads % world_size and world_size % heads:
            return [f"{heads} heads cannot be divided evenly among {world_size} ranks"]
        return []

    def _replicates(self, module: Any, world_size: int) -> bool:
        return self.head_dim is not None and module.weight.shape[0] // self.head_dim < world_size

    def placements(self, module: Any, world_size: int) -> dict[str, Placement]:
        return {} if self._replicates(module, world_size) else {"weight": Shard(0), "bias": Shard(0)}

    def install(self, module: Any, comm: Communicator, mesh: Mesh) -> None:
        features = None
        if self.head_dim is not None and self._replicates(module, comm.world_size):
            ranks_a_head = comm.world_size * self.head_dim // module.weight.shape[0]
            features = ((comm.rank // ranks_a_head * self.head_dim, self.head_dim),)
        part = features is None and not self.gather_output
        parallel = ColumnParallel(
            **self.member(comm), gather_output=self.gather_output, features=features,
            unequal=unequal(module.weight.shape[0], comm.world_size) if part else (),
        )  # fmt: skip
        install(module, parallel, linear)


class FusedRowwise(FusedStyle):
    """Input features split over ranks: x [T, K_r] -> [T_r, N], summed; bias added once. For options see FusedStyle."""

    def faults(self, module: Any, world_size: int) -> list[str]:
        return linear_faults(module)

    def placements(self, module: Any, world_size: int) -> dict[str, Placement]:
        return {"weight": Shard(1)}

    def install(self, module: Any, comm: Communicator, mesh: Mesh) -> None:
        features = unequal(module.weight.shape[1], comm.world_size)
        install(module, RowParallel(**self.member(comm), unequal=features), linear)


class FusedEmbedding(FusedStyle):
    """Vocabulary split over ranks: every rank gets the ids of all tokens -> [T_r, H]. For options see FusedStyle."""

    def faults(self, module: Any, world_size: int) -> list[str]:
        if not hasattr(module, "num_embeddings") or getattr(module, "weight", None) is None:
            return [f"{type(module).__name__} is not an embedding"]
        if computed(module):
            return computed(module)
        options = ("max_norm", "scale_grad_by_freq", "sparse")
        return [f"an embedding with {name} cannot be split" for name in options if getattr(module, name, None)]

    def placements(self, module: Any, world_size: int) -> dict[str, Placement]:
        return {"weight": Shard(0)}

    def install(self, module: Any, comm: Communicator, mesh: Mesh) -> None:
        install(module, VocabParallel(**self.member(comm)), embedding)


class FusedExperts(FusedStyle):
    """The experts of a `fusedtp.nn.Experts` split over ranks: x [T_r, H] -> [T_r, H].

    split   which ranks share them, and how
    For further options see FusedStyle.
    """

    def __init__(self, *, split: ExpertSplit | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.split = split or ExpertSplit()
        self._meshes: dict[Shares, Mesh] = {}
        self._stages: tuple[str, ...] = ()

    def ranks(self, world_size: int) -> int:
        return self.split.ranks(world_size)

    def faults(self, module: Any, world_size: int) -> list[str]:
        if not hasattr(module, "num_experts") or not hasattr(module, "down_proj"):
            return [f"{type(module).__name__} is not a fusedtp.nn.Experts"]
        if self.dim != 0:
            return [f"dim is {self.dim}, must be 0: experts take tokens as [T_r, H]"]
        return self.split.faults(module, world_size)

    def ways(self, module: Any, ranks: int) -> dict[str, Way]:
        shares = self.split.shares(module.num_experts, ranks)
        own = [name for name, _ in module.named_parameters(recurse=False)]
        return {name: shares.way(2 if name == "down_proj" else 1) for name in own}

    def mesh(self, module: Any, device_mesh: Mesh) -> Mesh:
        mesh = self.split.mesh or device_mesh
        if isinstance(mesh, DeviceMesh) and self.split.nodes > 1 and not self._stages:
            self._stages = stages_of(mesh, self.split.nodes)
        shares = self.split.shares(module.num_experts, mesh.size())
        if not isinstance(mesh, DeviceMesh) or len(shares.named) == 1:
            return mesh
        if shares not in self._meshes:  # makes a process group per dimension, so share it between layers
            self._meshes[shares] = mesh._unflatten(0, tuple(shares.named.values()), tuple(shares.named))
        return self._meshes[shares]

    def install(self, module: Any, comm: Communicator, mesh: Mesh) -> None:
        everyone = comm if self.split.mesh is None else communicator(self.split.mesh)
        shares = self.split.shares(module.num_experts, everyone.world_size)
        copies, stages = copies_of(mesh, shares), self._stages
        if not isinstance(mesh, DeviceMesh) and self.split.nodes > 1:  # virtual ranks may share this style
            stages = stages_of(mesh, self.split.nodes)
        module.parallel = ExpertParallel(
            **self.member(everyone), shares=shares, copies=copies, stages=stages, tokens=comm.place
        )


class Replicated(Style):
    """Every rank holds the module's own parameters whole.

    partial   True: this rank's input has only some of the tokens or heads, so gradients are summed over ranks.
              False: inputs are the same on every rank, and so are gradients.
    """

    def __init__(self, *, partial: bool = True) -> None:
        super().__init__()
        self.partial = partial

    def faults(self, module: Any, world_size: int) -> list[str]:
        if (
            self.partial
            and world_size > 1
            and isinstance(module, _BatchNorm)
            and not isinstance(module, nn.SyncBatchNorm)
        ):
            return ["it normalizes over tokens, but each rank sees only its own; use SyncBatchNorm, or partial=False"]
        return []

    def install(self, module: Any, comm: Communicator, mesh: Mesh) -> None:
        install(module, Replica(comm.name, self.partial), with_plain_parameters)


def already_parallel(module: Any) -> list[str]:
    """A module is split only once, and before FSDP2 shards the rest."""
    if getattr(module, "parallel", None) is not None:
        return ["it is parallel already"]
    if any(isinstance(p, DTensor) for p in module.parameters(recurse=False)):
        return ["its parameters are DTensors already; apply fully_shard after tensor parallelism"]
    return []


NEVER_CALLED = "nn.MultiheadAttention reads its weight and never calls it; leave it out of the plan"


def linear_faults(module: Any) -> list[str]:
    """Why a module is not a linear layer that this library can split."""
    weight = getattr(module, "weight", None)
    if not hasattr(module, "in_features") or not isinstance(weight, Tensor) or weight.dim() != 2:
        return [f"{type(module).__name__} is not a linear layer with a weight [out_features, in_features]"]
    if isinstance(module, nn.Linear) and not computes_linear(module):
        return [f"{type(module).__name__} has its own forward, which splitting would replace"]
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return [NEVER_CALLED]
    return computed(module)


def computed(module: Any, placed: Iterable[str] = ("weight", "bias")) -> list[str]:
    """Faults for tensors that a plan would split but that are computed: by parametrizations, weight_norm, pruning."""
    return [
        f"its {key} is computed from other parameters, which a plan cannot split; call remove_parametrizations (of "
        "torch.nn.utils.parametrize), remove_weight_norm or prune.remove first, or leave it out of the plan"
        for key in placed
        if key not in module._parameters and isinstance(getattr(module, key, None), Tensor)
    ]


def install(module: Any, parallel: Any, forward: Any) -> None:
    """Set module.parallel. A module that does not have this attribute also gets a forward that calls it."""
    calls_it_itself = hasattr(module, "parallel")
    module.parallel = parallel
    if not calls_it_itself:
        set_forward(module, forward)


class NotPickled:
    """Marker that makes pickling a module with a replaced forward fail.

    pickle would store that forward as a method name, which the module's class does not have.
    """

    def __deepcopy__(self, memo: Any) -> NotPickled:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a split module is one rank's part, and pickle cannot restore it; save its state_dict() with "
            "torch.distributed.checkpoint, or a transformers model with save_pretrained"
        )


def set_forward(module: Any, forward: Any) -> None:
    """Replace the module's forward with a bound method, not a closure, so that each copy of the module has its own.

    It keeps the signature of the class's forward: transformers' generate and Trainer inspect it to choose arguments.
    """
    module.forward = MethodType(_as_if(forward, type(module).forward), module)
    module._fusedtp_not_pickled = NotPickled()


@cache
def _as_if(forward: Any, own: Any) -> Any:
    made = FunctionType(forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__)
    made.__kwdefaults__, made.__wrapped__ = forward.__kwdefaults__, own  # type: ignore[attr-defined]
    return made


def linear(self: Any, x: Tensor, layout: Any = None) -> Tensor:
    """The forward of a split nn.Linear. A DTensor input is redistributed if its placement does not fit."""
    at: ColumnParallel | RowParallel = self.parallel
    gathers = isinstance(at, ColumnParallel)
    if isinstance(x, DTensor):
        wanted: Placement = Shard(at.dim) if gathers and at.sequence_parallel else Replicate()
        wanted = wanted if gathers else Shard(x.dim() - 1)
        x = x.redistribute(placements=[wanted]).to_local()
    if not torch.compiler.is_compiling() and not hasattr(self, "_fusedtp_checked") and x.grad_fn is not None:
        if gathers and at.sequence_parallel:
            check_gradients(x)
        self._fusedtp_checked = True
    if not gathers:
        draws_in_whole(at, self, x)
        return at.linear(x, self, layout)
    y = at.linear(x, self, layout)
    draws_in_part(at, self, y)
    return y


def embedding(self: Any, input: Tensor, layout: Any = None) -> Tensor:
    """The forward of a split nn.Embedding."""
    if not torch.compiler.is_compiling() and not hasattr(self, "_fusedtp_checked"):
        check_same_ids(input, self.parallel.group)
        self._fusedtp_checked = True
    return self.parallel.embed(input, self, layout)


def with_plain_parameters(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of any other module: runs its own forward with its parameters as plain local tensors."""
    kept = dict(self._parameters)
    try:
        for name, parameter in kept.items():
            if parameter is not None:
                self._parameters[name] = self.parallel.read(parameter)
        return type(self).forward(self, *args, **kwargs)
    finally:
        self._parameters.update(kept)
