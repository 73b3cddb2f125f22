"""The words of plans for third-party modules: what each one splits, which modules it refuses, and what it installs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

from fusedtp.comm import Communicator
from fusedtp.ops.main_grad import Runs
from fusedtp.ops.rows import split

from .by_token import by_token
from .foreign import (
    Columns,
    Model,
    Own,
    Rows,
    Vocabulary,
    columns,
    divided,
    embedding,
    embedding_columns,
    mla_down_projection,
    own_embedding,
    own_forward,
    partial_sum,
    rows,
)
from .layers import unequal
from .placement import Mesh, Placement
from .plain_linear import computes_linear
from .siblings import Siblings
from .styles import FusedEmbedding, Style, computed, set_forward


class Foreign(Style):
    """A module that keeps its forward; also the base class of the styles that replace it.

    model     state shared by the modules of one model
    named     its own parameters that the plan names -> the plan's style name
    forward   runs the module's own forward; see foreign.py
    partial   see Own
    """

    forward: Callable[..., Any] = staticmethod(own_forward)
    partial = False

    def __init__(
        self, model: Model, *, named: Mapping[str, str] | None = None, engine: str = "auto",
        sequence_parallel: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.named = model, dict(named or {})
        self.children: tuple[str, ...] = ()
        self.below: tuple[str, ...] = ()
        self.splits = self.inside = False
        self.options: dict[str, Any] = {"engine": engine, "sequence_parallel": sequence_parallel}

    def faults(self, module: Any, world_size: int) -> list[str]:
        if getattr(module, "max_norm", None) is not None:
            return ["an embedding with max_norm changes its table when it is read; build it without max_norm"]
        placed = self.placements(module, world_size)
        return [
            fault
            for name, parameter in module.named_parameters(recurse=False)
            for found in (_uneven, partial(_unaligned, module))
            for fault in found(name, parameter, placed.get(name, Replicate()), world_size)
        ] + [
            f"{name} has {module._parameters[name].shape[-1]} features in pairs, which {world_size} ranks cannot share"
            for name, word in self.named.items()
            if word == "rowwise_pairs" and module._parameters[name].shape[-1] % (2 * world_size)
        ]

    def placement(self, name: str, parameter: Tensor) -> Placement:
        """The placement of one of the module's own parameters."""
        word = self.named.get(name)
        return Replicate() if word is None else PARAMETERS[word](name, parameter.dim())

    def placements(self, module: Any, world_size: int) -> dict[str, Placement]:
        own = module.named_parameters(recurse=False)
        return {name: self.placement(name, parameter) for name, parameter in own}

    def member(self, comm: Communicator) -> dict[str, Any]:
        """The fields of Member."""
        return {"group": comm.name, "rank": comm.rank, "world_size": comm.world_size, **self.options}

    def own(self, module: Any, comm: Communicator) -> dict[str, Any]:
        """The fields of Own."""
        placed = self.placements(module, comm.world_size)
        sharded = frozenset(name for name, placement in placed.items() if not isinstance(placement, Replicate))
        return {
            "members": comm.name, "world_size": comm.world_size, "children": self.children, "below": self.below,
            "splits": self.splits, "inside": self.inside, "partial": self.partial,
            "sharded": sharded, "divided": frozenset(name for name, word in self.named.items() if word == "divided"),
        }  # fmt: skip

    def install(self, module: Any, comm: Communicator, mesh: Mesh) -> None:
        own = self.own(module, comm)
        plain = type(self) is Foreign and not own["sharded"] and not own["children"]
        install(module, Own(**own, alike=by_token(module) if plain else None), self.forward)


class PartialGradients(Foreign):
    """A replicated module that sees only some of the heads, so that its gradients are partial sums."""

    partial = True


class LatentProjection(Foreign):
    """See mla_down_projection."""

    forward = staticmethod(mla_down_projection)

    def __init__(self, model: Model, rotary_width: int | None, **options: Any) -> None:
        super().__init__(model, **options)
        self.rotary_width = rotary_width

    def faults(self, module: Any, world_size: int) -> list[str]:
        if self.rotary_width is None:
            return ["the model's config has no qk_rope_head_dim, the width of its rotary keys"]
        return super().faults(module, world_size)

    def own(self, module: Any, comm: Communicator) -> dict[str, Any]:
        return {**super().own(module, comm), "rotary_width": self.rotary_width}


class Summed(Foreign):
    """See partial_sum."""

    forward = staticmethod(partial_sum)


class Shared(Foreign):
    """See divided."""

    forward = staticmethod(divided)


class Colwise(Foreign):
    """Output features split over ranks.

    gather_output   return all features on every rank
    head_dim        the features are heads of this width: if there are fewer heads than ranks (kv heads), the weight is
                    replicated and each rank uses the rows of its head
    packed          number of matrices concatenated along the features; each of them is split
    """

    def __init__(self, model: Model, *, gather_output: bool = False, packed: int = 1, **options: Any) -> None:
        super().__init__(model, **options)
        self.gather_output, self.packed = gather_output, packed
        self.head_dim: int | None = None
        self.kv_heads = 0
        self.vocabulary = False
        self.siblings = Siblings()

    def faults(self, module: Any, world_size: int) -> list[str]:
        found = faults_of_linear(module) if self.gather_output else faults_of_layer(module)
        return found or super().faults(module, world_size)

    def shares_heads(self, module: Any, world_size: int) -> bool:
        return self.head_dim is not None and module.weight.shape[0] // self.head_dim < world_size

    def placements(self, module: Any, world_size: int) -> dict[str, Placement]:
        own = {} if self.shares_heads(module, world_size) else dict(module.named_parameters(recurse=False))
        return {name: _split(p.dim() - 1 if is_conv1d(module) else 0, self.packed) for name, p in own.items()}

    def rows_of_rank(self, module: Any, comm: Communicator) -> Runs | None:
        """The rows of a replicated weight that this rank uses, see ColumnParallel; None: the weight is split."""
        if not self.shares_heads(module, comm.world_size):
            return None
        assert self.head_dim is not None
        ranks_a_head = comm.world_size * self.head_dim // module.weight.shape[0]
        return ((comm.rank // ranks_a_head * self.head_dim, self.head_dim),)

    def install(self, module: Any, comm: Communicator, mesh: Mesh) -> None:
        features = self.rows_of_rank(module, comm)
        self.siblings.linears.append(module)
        part = features is None and not self.gather_output
        parallel = Columns(
            **self.member(comm), gather_output=self.gather_output and not self.vocabulary, features=features,
            vocabulary=self.vocabulary, model=self.model, siblings=self.siblings, transposed=is_conv1d(module),
            unequal=unequal(features_of(module)[1] // self.packed, comm.world_size) if part else (),
        )  # fmt: skip
        install(module, parallel, columns)


class Rowwise(Foreign):
    """Input features split over ranks. split_input: the input is whole."""

    def __init__(self, model: Model, *, split_input: bool = False, packed: int = 1, **options: Any) -> None:
        super().__init__(model, **options)
        self.split_input, self.packed = split_input, packed

    def faults(self, module: Any, world_size: int) -> list[str]:
        return faults_of_layer(module) or super().faults(module, world_size)

    def placements(self, module: Any, world_size: int) -> dict[str, Placement]:
        own = module.named_parameters(recurse=False)
        return {name: _split(0 if is_conv1d(module) else 1, self.packed) for name, _ in own if name != "bias"}

    def install(self, module: Any, comm: Communicator, mesh: Mesh) -> None:
        at = Rows(
            **self.member(comm), split_input=self.split_input, model=self.model, transposed=is_conv1d(module),
            unequal=unequal(features_of(module)[0] // self.packed, comm.world_size),
        )  # fmt: skip
        install(module, at, rows)


def _split(dim: int, packed: int) -> Placement:
    return StridedShard(dim, split_factor=packed) if packed > 1 else Shard(dim)


class Embedding(Foreign):
    """The vocabulary split over ranks."""

    def faults(self, module: Any, world_size: int) -> list[str]:
        return FusedEmbedding().faults(module, world_size) + _patched(module)

    def placement(self, name: str, parameter: Tensor) -> Placement:
        return Shard(0)

    def install(self, module: Any, comm: Communicator, mesh: Mesh) -> None:
        plain = type(module).forward is nn.Embedding.forward
        parallel = Vocabulary(**self.member(comm), model=self.model)
        install(module, parallel, embedding if plain else own_embedding)


class EmbeddingColumns(Embedding):
    """An embedding's features split over ranks."""

    def placement(self, name: str, parameter: Tensor) -> Placement:
        return Shard(1)

    def install(self, module: Any, comm: Communicator, mesh: Mesh) -> None:
        options = {**self.member(comm), "sequence_parallel": False}
        install(module, Vocabulary(**options, model=self.model), embedding_columns)


def _features(name: str, dims: int) -> int:
    """The dimension of output features: the second to last of [out, in] and [experts, out, in]."""
    return max(dims - 2, 0)


# Style name -> placement, for parameters that a plan names directly; the module keeps its own forward.
PARAMETERS: dict[str, Callable[[str, int], Placement]] = {
    "colwise": lambda name, dims: Shard(_features(name, dims)),
    "rowwise": lambda name, dims: Replicate() if name == "bias" else Shard(dims - 1),
    "packed_colwise": lambda name, dims: StridedShard(_features(name, dims), split_factor=2),
    "packed_rowwise": lambda name, dims: Replicate() if dims == 1 else StridedShard(dims - 1, split_factor=2),
    "replicate": lambda name, dims: Replicate(),
    "rowwise_pairs": lambda name, dims: Shard(dims - 1),  # keeps features 0 and 1, 2 and 3, ... together
    "divided": lambda name, dims: Replicate(),  # every rank adds 1 / W of it to a sum
    "grouped_gemm": lambda name, dims: Shard(0),
}


def _uneven(name: str, parameter: Tensor, placement: Placement, world_size: int) -> list[str]:
    """Packed matrices must divide evenly: DTensor reassembles uneven parts wrongly."""
    if not isinstance(placement, StridedShard):
        return []
    each, rest = divmod(int(parameter.shape[placement.dim]), int(placement.split_factor))
    if not rest and each % world_size == 0:
        return []
    packed = f"{name} packs {placement.split_factor} matrices of {each} features"
    return [f"{packed}, which {world_size} ranks cannot share evenly"]


def _unaligned(module: Any, name: str, parameter: Tensor, placement: Placement, world_size: int) -> list[str]:
    """Rows of expert weights must be multiples of 16 bytes for torch's grouped_mm, which transformers uses for them."""
    kind = getattr(getattr(module, "config", None), "_experts_implementation", None)
    split_rows = isinstance(placement, Shard) and placement.dim % parameter.dim() == 2 == parameter.dim() - 1
    if kind != "grouped_mm" or not split_rows:
        return []
    width, size = parameter.shape[2], parameter.element_size()
    if width * size % 16 or not any(part * size % 16 for part in split(width, world_size)):
        return []
    return [
        f"{name}: {width} features split over {world_size} ranks give rows that are not a multiple of 16 bytes, as "
        "grouped_mm needs; pass experts=fusedtp.ExpertSplit() to keep experts whole"
    ]


def install(module: Any, parallel: Any, forward: Callable[..., Any]) -> None:
    """Set module.parallel, and a forward that uses it."""
    inner = module.__dict__.get("forward")
    if inner is not None and isinstance(parallel, Own):
        parallel = replace(parallel, inner=inner)
    module.parallel = parallel
    set_forward(module, forward)


def is_conv1d(module: Any) -> bool:
    """Whether it is transformers' Conv1D: y = x W + b, W [in, out]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def is_linear(module: Any) -> bool:
    """Whether there is a style that can split it."""
    return not faults_of_layer(module)


def features_of(module: Any) -> tuple[int, int]:
    """(in, out) of a linear layer."""
    found = module.weight.shape if is_conv1d(module) else module.weight.shape[::-1]
    return int(found[0]), int(found[1])


def faults_of_layer(module: Any) -> list[str]:
    """As faults_of_linear, but a Conv1D is a linear layer too."""
    return [*computed(module), *_patched(module)] if is_conv1d(module) else faults_of_linear(module)


def faults_of_linear(module: Any) -> list[str]:
    """Why a module's forward cannot be replaced by the forward of a split linear."""
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Linear) or not isinstance(weight, Tensor) or weight.dim() != 2:
        return [f"{type(module).__name__} is not a linear layer with a weight [out_features, in_features]"]
    if not computes_linear(module):
        return [f"{type(module).__name__} has its own forward, which splitting would replace"]
    return computed(module) + _patched(module)


def _patched(module: Any) -> list[str]:
    if "forward" not in module.__dict__:
        return []
    return ["its forward was replaced on the instance; parallelize before patching it"]
