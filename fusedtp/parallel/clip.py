"""Gradient clipping over parameters of one or several meshes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    others: dist.ProcessGroup | None = None,
    uncounted: Iterable[Tensor] = (),
) -> Tensor:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)); the norm is that of the whole model. Collective.

        parameters   a module, or parameters: any mix of DTensors on any meshes and plain tensors
        others       ranks that hold other parameters of the model: pipeline stages
        uncounted    parameters that another of these ranks holds and counts too; they are scaled, but not counted here
        return       the norm before clipping, a plain fp32 (fp64 for fp64 gradients) scalar, the same on all ranks

    Each parameter counts once: shards are summed over the mesh dimensions that shard them, replicas are not; plain
    tensors are assumed to be the same on every rank. One all-reduce of one number per mesh and placement.
    Raises RuntimeError for a norm that is not finite, if error_if_nonfinite.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, Tensor):
        parameters = [parameters]
    unique = {id(p): p for p in parameters}.values()
    gradients = [p.grad for p in unique if p.grad is not None]
    left_out = {id(p) for p in uncounted}
    counted = [p.grad for p in unique if p.grad is not None and id(p) not in left_out]
    total = total_norm(counted, float(norm_type), others)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"the norm of the gradients is {total.item()}; they cannot be clipped to {max_norm}")
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for same in _by_device_and_dtype([_local(g) for g in gradients]):
        torch._foreach_mul_(same, scale.to(same[0].device, same[0].dtype))
    return total


def total_norm(gradients: Sequence[Tensor], norm_type: float, others: dist.ProcessGroup | None = None) -> Tensor:
    """The norm of all gradients as one vector, including those of the `others`. Collective."""
    if not gradients and others is None:
        return torch.zeros(())
    groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault(_lies(gradient), []).append(_local(gradient))
    assert gradients, "a pipeline stage without gradients"
    device = _local(gradients[0]).device
    parts = []
    for (mesh, dims), tensors in groups.items():
        part = _power_sum(tensors, norm_type).to(device)
        for dim in dims:
            assert mesh is not None
            op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
            dist.all_reduce(part, op, mesh.get_group(dim))
        parts.append(part)
    stacked = torch.stack([part.to(torch.promote_types(parts[0].dtype, part.dtype)) for part in parts])
    total = stacked.max() if math.isinf(norm_type) else stacked.sum()
    if others is not None:
        dist.all_reduce(total, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, others)
    return total if math.isinf(norm_type) else total ** (1.0 / norm_type)


def _lies(gradient: Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """The gradient's mesh and the mesh dimensions that shard it."""
    if not isinstance(gradient, DTensor):
        return None, ()
    assert not any(p.is_partial() for p in gradient.placements), "a gradient was left Partial"
    return gradient.device_mesh, tuple(i for i, p in enumerate(gradient.placements) if not p.is_replicate())


def _power_sum(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """sum |x| ** norm_type over all tensors (their largest |x| for inf), in fp32 or fp64."""
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    norms: list[Tensor] = []
    for same in _by_device_and_dtype([t for t in tensors if t.numel()]):
        if same[0].is_cuda:  # one or two kernels for all of them
            norms += torch._foreach_norm(same, norm_type, dtype=wide)
        else:
            norms += [torch.linalg.vector_norm(t, norm_type, dtype=wide) for t in same]
    if not norms:
        return torch.zeros((), dtype=wide, device=tensors[0].device)
    stacked = torch.stack([n.to(norms[0].device) for n in norms])
    if math.isinf(norm_type):
        return stacked.max().nan_to_num(math.inf, posinf=math.inf)  # a collective's MAX may drop a NaN
    return (stacked**norm_type).sum()


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _by_device_and_dtype(tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return found.values()
