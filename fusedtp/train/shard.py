"""Data parallelism: FSDP2 over the "dp" axis, after tensor parallelism has sharded over "tp".

FSDP2 shards dim 0 of every rank's part. A rank whose shard would be empty hangs in its collectives, so such
a model is refused by name before it is sharded.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard

from fusedtp.nn import TransformerBlock
from fusedtp.ops.rows import split


def empty_shards(model: nn.Module, placements: Mapping[str, Placement], dp: int, tp: int) -> list[str]:
    """What is wrong with sharding over dp ranks a model whose parameters lie over tp ranks as said (default: whole).

    One message that names all parameters which would leave a rank without rows, with their shapes; none if none would.
    """
    found = []
    for name, parameter in model.named_parameters():
        rows = parameter.shape[0] if parameter.ndim else 0
        parts = split(rows, tp) if placements.get(name) == Shard(0) else (rows,)
        if any(0 in split(part, dp) for part in parts):
            found.append(f"{name} {list(parameter.shape)}")
    if not found:
        return []
    return [
        f"with {dp} data-parallel x {tp} tensor-parallel ranks a rank would hold no row of "
        + ", ".join(found)
        + ": use fewer ranks or a larger model"
    ]


def shard(model: nn.Module, mesh: DeviceMesh, tp: int = 1) -> FSDPModule:
    """Shard a model's parameters, gradients and optimizer state over a 1-D mesh, block by block, in place.

    Gradients are means over the mesh. Raises ValueError naming the parameters that would leave a rank empty.
    """
    placements = {name: p.placements[0] for name, p in model.named_parameters() if isinstance(p, DTensor)}
    if found := empty_shards(model, placements, mesh.size(), tp):
        raise ValueError(found[0])
    for block in (module for module in model.modules() if isinstance(module, TransformerBlock)):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo cannot average; a sum of scaled gradients is right on every backend.
            module.set_force_sum_reduction_for_comms(True)
    return model
