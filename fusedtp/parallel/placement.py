"""Full parameters become DTensors in place, without communication: every rank holds the full tensor (or a meta one).

    full [V, H] on every rank --slice--> this rank's rows [V_r, H] --DTensor(Shard(0))--> module.weight

Sizes are torch.chunk's (the last ranks hold fewer rows, or none), names and global shapes stay the original's. A full
state dict loads afterwards too: a hook slices each of its tensors to what the module's parameter is by then (also
after FSDP2 has sharded it once more). In the `virtual` world, which has no DeviceMesh, a shard is a plain parameter.

Note [Gradients of replicated parameters]
A rank that sees only part of the tokens or of the heads has only part of such a parameter's gradient.
`to_local(grad_placements=[Partial()])` would leave `p.grad` Partial: then AdamW reduces it again in every one of its
operations (three all-reduces a parameter and step for foreach, one for fused), and clipping once more. So `read`
takes the local tensor and puts `copy_to_group` behind it, whose backward all-reduces: `p.grad` arrives Replicate and
complete, nothing downstream communicates, and there are no hidden hooks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

from fusedtp.comm import VirtualGroup
from fusedtp.ops.rows import split
from fusedtp.ops.tokens import copy_to_group

Mesh: TypeAlias = DeviceMesh | VirtualGroup
Placement: TypeAlias = Shard | Replicate | StridedShard


class Way(NamedTuple):
    """How a parameter lies on ranks that stand in one or more dimensions.

    placements   one a dimension
    shape        how many ranks each dimension has; the last one counts fastest
    """

    placements: tuple[Placement, ...]
    shape: tuple[int, ...]

    def sizes(self, dim: int, size: int) -> list[int]:
        """What ranks hold of a tensor dimension of that size."""
        found = [size]
        for placement, ranks in zip(self.placements, self.shape, strict=True):
            if not isinstance(placement, Replicate) and placement.dim == dim:
                found = [part for whole in found for part in split(whole, ranks)]
        return found

    def part(self, full: Tensor, coordinate: Sequence[int]) -> Tensor:
        """What the rank there holds of a full tensor: a copy of its slice, or the tensor itself."""
        own = full
        for placement, ranks, at in zip(self.placements, self.shape, coordinate, strict=True):
            if isinstance(placement, StridedShard):  # several matrices packed in one: a part of each
                packed = own.tensor_split(placement.split_factor, placement.dim)
                own = torch.cat([_share(each, placement.dim, ranks, at) for each in packed], placement.dim)
            elif isinstance(placement, Shard):
                own = _share(own, placement.dim, ranks, at)
        return full.contiguous() if own is full else own.clone(memory_format=torch.contiguous_format)


def _share(tensor: Tensor, dim: int, ranks: int, at: int) -> Tensor:
    sizes = split(tensor.shape[dim], ranks)
    return tensor.narrow(dim, sum(sizes[:at]), sizes[at])


def local(parameter: Tensor) -> Tensor:
    """This rank's part as a plain tensor; its gradient is complete for that part."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def read(parameter: Tensor, group: Any) -> Tensor:
    """A replicated parameter as a plain tensor, its gradient summed over the group."""
    return copy_to_group(local(parameter), group)


def place(parameter: nn.Parameter, mesh: Mesh, way: Way) -> nn.Parameter:
    """The parameter on the mesh, of the way's shape. A tied one, met a second time, gives the same object again.

    Raises ValueError for a parameter that is a DTensor already, or tied ones that would lie in two ways.
    """
    if isinstance(parameter, DTensor):
        raise ValueError(
            f"the parameter is a DTensor already: {parameter.placements} on {parameter.device_mesh}"
        )
    known = getattr(parameter, "_fusedtp_placed", None)
    if known is not None and known[0] == mesh:
        if known[1] != way:
            raise ValueError(f"tied parameters cannot lie as {known[1]!r} and as {way!r}")
        return known[2]
    shard = way.part(_on_device(parameter.detach(), mesh), _coordinate(mesh, way))
    if isinstance(mesh, DeviceMesh):
        stride = torch.empty(parameter.shape, device="meta").stride()
        shard = DTensor.from_local(
            shard, mesh, way.placements, run_check=False, shape=parameter.shape, stride=stride
        )
    placed = nn.Parameter(shard, parameter.requires_grad)
    placed.__dict__.update(parameter.__dict__)
    parameter._fusedtp_placed = (mesh, way, placed)  # type: ignore[attr-defined]
    return placed


def place_parameters(module: nn.Module, mesh: Mesh, ways: Mapping[str, Way]) -> None:
    """Place the module's own parameters. Buffers move to the mesh's device."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = place(parameter, mesh, ways[name])
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = _on_device(buffer, mesh)
    if isinstance(mesh, DeviceMesh):
        module.register_load_state_dict_pre_hook(_slice_full_tensors)


def _slice_full_tensors(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module._parameters.items():
        full = state.get(prefix + name)
        if not isinstance(parameter, DTensor) or not isinstance(full, Tensor) or isinstance(full, DTensor):
            continue
        if full.shape == parameter.shape:
            full = full.detach().to(parameter.device if parameter.device.type != "meta" else full.device)
            state[prefix + name] = distribute_tensor(
                full, parameter.device_mesh, parameter.placements, src_data_rank=None
            )


def _coordinate(mesh: Mesh, way: Way) -> Sequence[int]:
    """Where this rank stands."""
    if not isinstance(mesh, DeviceMesh):
        return [int(i) for i in torch.unravel_index(torch.tensor(mesh.rank()), way.shape)]
    found = mesh.get_coordinate()
    assert found is not None and mesh.shape == way.shape
    return found


def _on_device(tensor: Tensor, mesh: Mesh) -> Tensor:
    wanted = mesh.device_type if isinstance(mesh, DeviceMesh) else mesh.device.type
    return tensor if tensor.device.type in (wanted, "meta") else tensor.to(wanted)
