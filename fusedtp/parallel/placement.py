"""Turn full parameters into DTensors in place. Every rank has the full tensor (or a meta one): no communication.

    full [V, H] on every rank --slice--> this rank's rows [V_r, H] --DTensor(Shard(0))--> module.weight

Sizes are those of torch.chunk (the last ranks hold fewer rows, or none); names and global shapes do not change. A full
state dict can also be loaded afterwards: a hook slices each of its tensors to the parameter's current placement (also
after FSDP2 has sharded it again). In the `virtual` world, which has no DeviceMesh, a shard is a plain parameter.

Note [Checkpoints of packed parameters]
Several matrices packed in one parameter are split matrix by matrix (_StridedShard), so a rank's part consists of
several regions of the full tensor. torch 2.13 gathers, distributes and redistributes such DTensors correctly if the
matrices divide evenly, but it tells distributed checkpoints (DCP) that the local part is one contiguous region, of the
right size at a wrong offset: saving fails because regions overlap, and loading a checkpoint of plain shards reads wrong
rows. Optimizer states and copies share only the placement with the parameter, so DTensor itself is patched to describe
the regions correctly, once, when the first packed parameter is placed. DTensors with one region are left to torch.

Note [Gradients of replicated parameters]
A rank that sees only some of the tokens or heads has only a partial gradient of such a parameter.
`to_local(grad_placements=[Partial()])` would leave `p.grad` Partial: AdamW would then reduce it again in every one of
its operations (three all-reduces per parameter and step for foreach, one for fused), and clipping once more. So `read`
takes the local tensor and applies `copy_to_group`, whose backward all-reduces: `p.grad` is Replicate and complete,
nothing downstream communicates, and there are no hidden hooks.

A norm has one such parameter, and a model has two norms per layer. So a stack of layers reads all of them through one
autograd node while its forward runs (`opened`). The node's backward runs after the backwards of all of them and sums
their gradients in one call. Large gradients are summed separately, because summing together needs a copy. A layer does
this on its own if its parameters exist only while it runs (FSDP2, a second forward in backward).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise, product
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._python_dispatch import _disable_current_modes

from fusedtp.comm import VirtualGroup
from fusedtp.ops.operation import Lying
from fusedtp.ops.rows import split
from fusedtp.ops.tokens import all_reduce_sum, copy_to_group

TOGETHER_BYTES = 1 << 20  # the largest gradient that is summed together with others

Mesh: TypeAlias = DeviceMesh | VirtualGroup
Placement: TypeAlias = Shard | Replicate | StridedShard


class Way(NamedTuple):
    """The placement of a parameter on ranks arranged in one or more dimensions.

    placements   one per dimension
    shape        number of ranks in each dimension; the last one varies fastest
    """

    placements: tuple[Placement, ...]
    shape: tuple[int, ...]

    def sizes(self, dim: int, size: int) -> list[int]:
        """How a tensor dimension of that size is divided among ranks."""
        found = [size]
        for placement, ranks in zip(self.placements, self.shape, strict=True):
            if not isinstance(placement, Replicate) and placement.dim == dim:
                found = [part for whole in found for part in split(whole, ranks)]
        return found

    def ranges(self, shape: Sequence[int], coordinate: Sequence[int]) -> list[list[range]]:
        """The indices of each dimension of a full tensor that the rank at `coordinate` holds, in its order."""
        found = [[range(size)] for size in shape]
        for placement, ranks, at in zip(self.placements, self.shape, coordinate, strict=True):
            if isinstance(placement, StridedShard):  # several packed matrices: take a part of each
                total = sum(map(len, found[placement.dim]))
                each, longer = divmod(total, int(placement.split_factor))
                ends = [each * i + min(i, longer) for i in range(int(placement.split_factor) + 1)]
                found[placement.dim] = _merged(
                    part
                    for begin, end in pairwise(ends)
                    for part in share(_cut(found[placement.dim], begin, end), ranks, at)
                )
            elif isinstance(placement, Shard):
                found[placement.dim] = share(found[placement.dim], ranks, at)
        return found

    def part(self, full: Tensor, coordinate: Sequence[int]) -> Tensor:
        """The part of a full tensor that the rank at `coordinate` holds: a copy of its slice, or the tensor itself."""
        ranges = self.ranges(full.shape, coordinate)
        own = full
        for dim, parts in enumerate(ranges):
            if sum(map(len, parts)) < full.shape[dim]:
                own = torch.cat([own.narrow(dim, part.start, len(part)) for part in parts], dim)
        return own.contiguous()


def way_of(parameter: DTensor) -> Way:
    """The Way of a DTensor."""
    return Way(tuple(parameter.placements), tuple(parameter.device_mesh.shape))  # type: ignore[arg-type]


def _cut(parts: Sequence[range], begin: int, end: int) -> list[range]:
    """Positions `begin` to `end` of the concatenated ranges."""
    found, first = [], 0
    for part in parts:
        found.append(part[max(begin - first, 0) : max(end - first, 0)])
        first += len(part)
    return [part for part in found if part] or [range(0)]


def share(parts: Sequence[range], ranks: int, at: int) -> list[range]:
    """The share of rank `at` of `ranks` in the concatenated ranges."""
    sizes = split(sum(map(len, parts)), ranks)
    return _cut(parts, sum(sizes[:at]), sum(sizes[: at + 1]))


def _merged(parts: Iterable[range]) -> list[range]:
    """Merge adjacent ranges."""
    found: list[range] = []
    for part in parts:
        if found and found[-1].stop == part.start:
            part = range(found.pop().start, part.stop)
        found.append(part)
    return [part for part in found if part] or [range(0)]


def local(parameter: Tensor) -> Tensor:
    """This rank's part as a plain tensor; its gradient is complete for that part."""
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return parameter.to_local()
    return _Local.apply(parameter, None)


def read(parameter: Tensor, group: Any) -> Tensor:
    """A replicated parameter as a plain tensor, its gradient summed over the group."""
    for_group, part = getattr(parameter, "_fusedtp_part", (None, parameter))
    if for_group == group:
        return part
    plain = not isinstance(parameter, DTensor)
    if plain or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return copy_to_group(local(parameter), group)
    return _Local.apply(parameter, group)


@contextmanager
def opened(
    places: Iterable[tuple[nn.Module, str]], group: str, takes: Callable[[nn.Module], bool] = lambda module: True
) -> Iterator[None]:
    """A context in which replicated parameters of some modules are plain tensors, read by one autograd node.

    places   (outer module, name of such a module in it)
    takes    whether the module that currently has this name can read plain tensors
    """
    together = [found for outer, name in places for found in _replicas(outer, name, takes)]
    owns = locals_of([parameter for _, _, parameter in together], group)
    for (parameters, name, _), own in zip(together, owns, strict=True):
        parameters[name] = own
    try:
        yield
    finally:
        for parameters, name, parameter in together:
            parameters[name] = parameter


def _replicas(
    module: Any, path: str, takes: Callable[[nn.Module], bool]
) -> Iterator[tuple[dict[str, Any], str, DTensor]]:
    """Trainable parameters that every rank holds whole, with their dict and name; none if there is no such module.

    Skips a module that is compiled by itself, since its graph reads them, and one managed by FSDP2, which reduces
    gradients when that module's own backward ends.
    """
    for name in path.split("."):
        module = module._modules.get(name)
        if module is None or reads_itself(module):
            return
    if not takes(module):
        return
    for name, parameter in module._parameters.items():
        trained = parameter is not None and parameter.requires_grad and getattr(parameter, "main_grad", None) is None
        if trained and is_replicated(parameter) and parameter.device_mesh.ndim == 1:
            yield module._parameters, name, parameter


def reads_itself(module: nn.Module) -> bool:
    """Whether the module must read its own parameters: FSDP2 manages them, or its compiled graph reads them."""
    return isinstance(module, FSDPModule) or is_compiled(module)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch compiles the module's call, or its forward."""
    compiled = module._compiled_call_impl is not None
    return compiled or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")


def is_replicated(parameter: Tensor) -> bool:
    """Whether the parameter is a DTensor that every rank holds whole."""
    return isinstance(parameter, DTensor) and all(p.is_replicate() for p in parameter.placements)


def locals_of(parameters: Sequence[Tensor], group: str) -> Sequence[Tensor]:
    """`local` of each replicated parameter, through one node; `read` of the results sums all gradients in one call.

    The node's backward runs once all these gradients are there. All ranks must pass parameters in the same order.
    """
    if len(parameters) < 2 or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return [local(parameter) for parameter in parameters]
    made = _Locals.apply(group, *parameters)
    owns, parts = made[: len(parameters)], made[len(parameters) :]
    for own, part in zip(owns, parts, strict=True):
        own._fusedtp_part = group, part
    return owns


class _Locals(torch.autograd.Function):
    """group, DTensors -> local tensors for uses that see all tokens and heads; the same again for all other uses."""

    @staticmethod
    def forward(ctx: Any, group: str, *parameters: DTensor) -> tuple[Tensor, ...]:
        owns = [parameter._local_tensor for parameter in parameters]
        ctx.lying, ctx.group = [Lying.of(parameter) for parameter in parameters], group
        ctx.set_materialize_grads(False)
        # selective checkpointing counts operations, and a recomputed layer would have more of these
        with _disable_current_modes():
            return tuple(own.view_as(own) for own in (*owns, *owns))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[DTensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("double backward of a parameter that is a DTensor is not supported")
        count = len(ctx.lying)
        found = list(grads[:count])
        for i, total in _summed({i: g for i, g in enumerate(grads[count:]) if g is not None}, ctx.group):
            own = found[i]
            found[i] = total if own is None else own + total
        laid = (None if g is None else lying.laid(g) for g, lying in zip(found, ctx.lying, strict=True))
        return None, *laid


def _summed(parts: Mapping[int, Tensor], group: str) -> Iterator[tuple[int, Tensor]]:
    """Sums over all ranks; all small tensors of a dtype are summed in one call."""
    large = [i for i, part in parts.items() if part.numel() * part.element_size() > TOGETHER_BYTES]
    for i in large:
        yield i, all_reduce_sum(parts[i], group)
    for dtype in dict.fromkeys(part.dtype for i, part in parts.items() if i not in large):
        some = {i: part for i, part in parts.items() if part.dtype == dtype and i not in large}
        flat = torch.cat([part.reshape(-1) for part in some.values()])
        totals = all_reduce_sum(flat, group).split([part.numel() for part in some.values()])
        for (i, part), total in zip(some.items(), totals, strict=True):
            # clone: torch cannot deep-copy a DTensor with a local tensor at a nonzero storage offset
            yield i, total.clone().view(part.shape)


class _Local(torch.autograd.Function):
    """DTensor.to_local for a parameter. The gradient has the same placement, so its spec is not derived in every step.

    With a group, the gradient is summed over it. On a CPU, to_local and its backward take about 100 us per parameter,
    half of this library's overhead in a training step.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, group: Any) -> Tensor:
        own = parameter._local_tensor
        ctx.lying, ctx.group = Lying.of(parameter), group
        ctx.set_materialize_grads(False)
        return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[DTensor | None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError("double backward of a parameter that is a DTensor is not supported")
        if grad is None:
            return None, None
        return ctx.lying.laid(grad if ctx.group is None else all_reduce_sum(grad, ctx.group)), None


def place(parameter: nn.Parameter, mesh: Mesh, way: Way) -> nn.Parameter:
    """The parameter placed on the mesh, which has the way's shape. A tied parameter returns the same object again.

    Raises ValueError if the parameter is a DTensor already, or if tied parameters would get different placements.
    """
    if isinstance(parameter, DTensor):
        raise ValueError(f"the parameter is already a DTensor: {parameter.placements} on {parameter.device_mesh}")
    known = getattr(parameter, "_fusedtp_placed", None)
    if known is not None and known[0] == mesh:
        if known[1] != way:
            raise ValueError(f"tied parameters cannot be placed both as {known[1]!r} and as {way!r}")
        return known[2]
    shard = way.part(_on_device(parameter.detach(), mesh), _coordinate(mesh, way))
    if isinstance(mesh, DeviceMesh):
        if any(isinstance(placement, StridedShard) for placement in way.placements):
            describe_packed_shards()
        stride = torch.empty(parameter.shape, device="meta").stride()
        shard = DTensor.from_local(shard, mesh, way.placements, run_check=False, shape=parameter.shape, stride=stride)
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
    """The coordinate of this rank."""
    if not isinstance(mesh, DeviceMesh):
        return [int(i) for i in torch.unravel_index(torch.tensor(mesh.rank()), way.shape)]
    found = mesh.get_coordinate()
    assert found is not None and mesh.shape == way.shape
    return found


def _on_device(tensor: Tensor, mesh: Mesh) -> Tensor:
    wanted = mesh.device_type if isinstance(mesh, DeviceMesh) else mesh.device.type
    return tensor if tensor.device.type in (wanted, "meta") else tensor.to(wanted)


@cache
def describe_packed_shards() -> None:
    """Tell distributed checkpoints every region of a packed DTensor. See Note [Checkpoints of packed parameters]."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    write_items, chunk_list, tensor_shard = (
        DTensor.__create_write_items__, DTensor.__create_chunk_list__, DTensor.__get_tensor_shard__
    )  # fmt: skip

    def regions(tensor: DTensor) -> list[tuple[ChunkStorageMetadata, Tensor]] | None:
        """Regions of the full tensor with this rank's values of each; None if torch describes it correctly."""
        if not any(isinstance(placement, StridedShard) for placement in tensor.placements):
            return None
        ranges = way_of(tensor).ranges(tensor.shape, tensor.device_mesh.get_coordinate() or ())
        if all(len(parts) == 1 for parts in ranges):
            return None
        own = tensor.to_local()
        found = []
        for box in product(*(list(enumerate(parts)) for parts in ranges)):
            values = own
            for dim, (i, part) in enumerate(box):
                values = values.narrow(dim, sum(map(len, ranges[dim][:i])), len(part))
            offsets, sizes = zip(*((part.start, len(part)) for _, part in box), strict=True)
            found.append((ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)), values))
        return found

    def create_write_items(self: DTensor, fqn: str, object: Any) -> Any:
        found = regions(self)
        if found is None:
            return write_items(self, fqn, object)
        properties = TensorProperties.create_from_tensor(self.to_local())
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk, _ in found
        ]

    def create_chunk_list(self: DTensor) -> Any:
        found = regions(self)
        return chunk_list(self) if found is None else [chunk for chunk, _ in found]

    def get_tensor_shard(self: DTensor, index: MetadataIndex) -> Any:
        found = regions(self)
        if found is None:
            return tensor_shard(self, index)
        return next(values for chunk, values in found if chunk.offsets == index.offset)

    DTensor.__create_write_items__ = create_write_items  # type: ignore[method-assign]
    DTensor.__create_chunk_list__ = create_chunk_list  # type: ignore[method-assign]
    DTensor.__get_tensor_shard__ = get_tensor_shard  # type: ignore[method-assign]
