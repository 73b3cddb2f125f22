"""The same initial model at any world size.

Every parameter is drawn in full from its own generator, seeded by (seed, name), and then sliced by its
DTensor placements. So no draw depends on another draw, on the order of modules, or on the number of ranks.
Norms are ones, biases zeros, matrices normal; for projections that write to the residual stream the
standard deviation is divided by sqrt(2 * layers) (Radford et al. 2019).
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor, nn

RESIDUAL = ("o_proj", "down_proj")
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")


def init_(model: nn.Module, seed: int, std: float | None = None) -> nn.Module:
    """Initialize every parameter in place, plain or DTensor; also works after to_empty from the meta device.

    std: None uses config.initializer_range, or 0.02 for a model without a config.
    """
    config = getattr(model, "config", None)
    std = getattr(config, "initializer_range", 0.02) if std is None else std
    depth = getattr(config, "num_hidden_layers", 0)
    tie: Any = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            name = original_name(name)
            full = draw(name, tuple(parameter.shape), seed, std, depth)
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.copy_(local_slice(full, parameter))
    return model


def original_name(name: str) -> str:
    """A parameter's name without the parts that torch's wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def draw(name: str, shape: tuple[int, ...], seed: int, std: float, num_layers: int) -> Tensor:
    """The full initial value of one parameter, fp32 on the CPU."""
    parts = name.split(".")
    if parts[-1] == "bias":
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    if num_layers and len(parts) > 1 and parts[-2] in RESIDUAL:
        std = std / math.sqrt(2 * num_layers)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(shape, generator=generator).mul_(std)


def local_slice(full: Tensor, parameter: Any) -> Tensor:
    """This rank's part of `full`, by the placements of a DTensor (sizes of torch.chunk), or all of it."""
    if not hasattr(parameter, "placements"):
        return full
    mesh = parameter.device_mesh
    # If FSDP2 shards a dim that tensor parallelism has split, it is a strided shard: it has a dim like any shard, but
    # is_shard() is False in torch 2.13, and it splits the part that later mesh dims left.
    steps = [step for step in enumerate(parameter.placements) if hasattr(step[1], "dim")]
    steps.sort(key=lambda step: hasattr(step[1], "split_factor"))
    for mesh_dim, place in steps:
        full = chunk_of(full, place.dim, mesh.get_local_rank(mesh_dim), mesh.size(mesh_dim))
    return full


def chunk_of(x: Tensor, dim: int, rank: int, world_size: int) -> Tensor:
    """Chunk `rank` of torch.chunk(x, world_size, dim); empty if there are fewer chunks."""
    size = x.shape[dim]
    chunk = -(-size // world_size)
    start = min(rank * chunk, size)
    return x.narrow(dim, start, min(chunk, size - start))
