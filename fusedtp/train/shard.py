"""torch.compile and activation checkpointing of blocks, and FSDP2 over data-parallel ranks.

    forward --torch.compile--> compiled --recompute_--> checkpointed --FSDP2's hooks around it--> called

Checkpointing wraps the compiled code: inside of it, torch 2.13 cannot keep the order of communication.

FSDP2 shards over the "dp" axis, after tensor parallelism has sharded over "tp" and expert parallelism over its ranks.
It shards dim 0 of every rank's part. Of experts it shards dim 1, the features of each expert, if a rank has fewer
experts than there are ranks to shard over. A rank with an empty shard would hang in collectives, so such a model is
rejected before it is sharded, with the names of the parameters.

If experts are spread over data-parallel ranks, their gradient already includes the tokens of all these ranks. So they
are sharded over the remaining ranks only ("outer"), but their gradient is divided by the same number of ranks as all
other gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from fusedtp.nn import TransformerBlock, recompute_
from fusedtp.nn.experts import Experts
from fusedtp.ops.rows import split
from fusedtp.parallel.placement import Way
from fusedtp.train.config import BlockOptions, ParallelOptions

# -- blocks ------------------------------------------------------------------------------------------------------------


def blocks_of(model: nn.Module) -> Sequence[nn.Module]:
    """The layers of either kind of model."""
    found: Sequence[nn.Module] | None = getattr(model, "blocks", None)
    return found or [module for module in model.modules() if isinstance(module, TransformerBlock)]


def prepare_(model: nn.Module, options: BlockOptions, two_passes: bool = False) -> None:
    """Compile and checkpoint a model's blocks in place, according to `options`. Call before FSDP2 shards them.

    two_passes   whether backward is split into dgrad and wgrad, as in zero-bubble schedules
    """
    blocks = blocks_of(model)
    if options.compile:
        # All blocks share one forward function, so every block's graph counts against its recompile limit.
        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, 4 * len(blocks))
        torch._functorch.config.activation_memory_budget = options.memory_budget
        for block in blocks:
            block.forward = torch.compile(block.forward, backend=options.compile_backend)
    if options.recompute != "none":
        recompute_(blocks, options.recompute, two_passes)


# -- FSDP2 -------------------------------------------------------------------------------------------------------------

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtypes_of(options: ParallelOptions) -> MixedPrecisionPolicy:
    """The dtypes in which FSDP2 gathers parameters and reduces gradients."""
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[options.param_dtype],
        reduce_dtype=DTYPES[options.reduce_dtype],
        cast_forward_inputs=False,
    )


def empty_shards(model: nn.Module, ways: Mapping[str, Way], ranks: int) -> list[str]:
    """Errors of sharding a model over `ranks` ranks, given how its parameters are already split (default: not at all).

    Returns one message with the names and shapes of all parameters that would leave a rank without rows, or none.
    """
    found = []
    tp = min((math.prod(way.shape) for way in ways.values()), default=1)
    experts = {
        f"{name}.{own}"
        for name, module in model.named_modules()
        if isinstance(module, Experts)
        for own, _ in module.named_parameters(recurse=False)
    }
    for name, parameter in model.named_parameters():
        way = ways.get(name, Way((Replicate(),), (1,)))
        others = ranks // math.prod(way.shape)
        dims = (0, 1) if name in experts else (0,)
        if shard_dim(way, tuple(parameter.shape), others, dims) is None:
            found.append(f"{name} {list(parameter.shape)}")
    if not found:
        return []
    return [
        f"with {ranks // tp} data-parallel x {tp} tensor-parallel ranks, a rank would hold no row of "
        + ", ".join(found)
        + ": use fewer ranks or a larger model"
    ]


def shard_dim(way: Way, shape: tuple[int, ...], ranks: int, dims: tuple[int, ...] = (0,)) -> int | None:
    """The first of `dims` that FSDP2 can shard over `ranks` ranks, or None. Only dim 0 may be sharded unevenly."""
    if ranks == 1:
        return 0
    for dim in dims:
        parts = way.sizes(dim, shape[dim]) if len(shape) > dim else [1]
        if (dim == 0 and all(0 not in split(part, ranks) for part in parts)) or (
            dim > 0 and all(part and part % ranks == 0 for part in parts)
        ):
            return dim
    return None


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    outer: DeviceMesh | None = None,
    stages: Sequence[nn.Module] = (),
    kind: str = "zero3",
    dtypes: MixedPrecisionPolicy | None = None,
) -> None:
    """Shard a model's parameters, gradients and optimizer state over a mesh, block by block, in place.

    mesh     1-D; or [copies, shards]: sharded over the second dimension, averaged over both
    outer    1-D mesh of the ranks that hold the same experts, if experts are spread over ranks of `mesh`
    stages   pipeline stages: the modules that are called instead of the model
    kind     zero3: free a block's gathered parameters after its forward; otherwise they stay until backward or longer
    dtypes   dtypes of the gathered parameters and of the gradient reduction; default fp32
    Gradients are means over the mesh. Raises ValueError with the names of parameters that would leave a rank empty, and
    for stages with zero2 or zero3, which pipeline schedules do not support; see shard_experts.
    """
    if stages and kind in ("zero2", "zero3"):
        raise ValueError(f"{kind} with pipeline stages, which keep parameters whole in a step: use zero1 or ddp")
    if outer is None or mesh.ndim > 1:
        outer = mesh
    ways = {name: _way(p) for name, p in model.named_parameters() if isinstance(p, DTensor)}
    ranks = outer.size(-1) * max((math.prod(way.shape) for way in ways.values()), default=1)
    if found := empty_shards(model, ways, ranks):
        raise ValueError(found[0])
    dtypes = dtypes or MixedPrecisionPolicy()
    for experts in (module for module in model.modules() if isinstance(module, Experts)):
        shard_experts(experts, mesh, outer, dtypes, kind)
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=kind == "zero3", mp_policy=dtypes)
    for root in stages or [model]:
        fully_shard(root, mesh=mesh, mp_policy=dtypes)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                # gloo cannot average; a sum of scaled gradients works with every backend.
                module.set_force_sum_reduction_for_comms(True)


def accumulate_(model: nn.Module, kind: str, last: bool) -> None:
    """Call before each microbatch: set what its backward reduces and frees. last: it is the last one of the step.

    zero3, zero2   reduce-scatter gradients in every microbatch; zero3 also frees parameters
    zero1, ddp     keep whole gradients, and reduce them once per step
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_is_last_backward(last)
    model.set_reshard_after_backward(last or kind == "zero3")
    model.set_requires_gradient_sync(last or kind in ("zero3", "zero2"))


def shard_experts(
    experts: Experts, mesh: DeviceMesh, outer: DeviceMesh, dtypes: MixedPrecisionPolicy, kind: str
) -> None:
    """Shard experts over `outer`; their gradient is a mean over `mesh`.

    They stay gathered as long as their block does. If they were freed after forward, schedules with a split backward
    would give them no gradient: torch collects a stage's weights before backward has gathered them again.
    """

    def placement(parameter: nn.Parameter) -> Shard:
        way = _way(parameter) if isinstance(parameter, DTensor) else Way((Replicate(),), (1,))
        dim = shard_dim(way, tuple(parameter.shape), outer.size(-1), (0, 1))
        assert dim is not None
        return Shard(dim)

    fully_shard(
        experts,
        mesh=outer,
        reshard_after_forward=kind == "zero3",
        shard_placement_fn=placement,
        mp_policy=dtypes,
    )
    if experts.parallel is not None:  # FSDP2 divides by the ranks of `outer`
        experts.parallel = replace(experts.parallel, averaged=mesh.size() // outer.size())


def _way(parameter: DTensor) -> Way:
    return Way(tuple(parameter.placements), tuple(parameter.device_mesh.shape))  # type: ignore[arg-type]
