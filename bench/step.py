"""One training step of a small model: forward, loss, backward, AdamW.

    gap closed   (t_torch - t_ours) / (t_torch - t_ceiling)

`collective` is ours with the process group's own collectives: what it gains or loses against torch is no fusion but
other host operations between the matmuls, so gains are split there.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fusedtp.nn import ModelConfig, TokenLayout
from fusedtp.ops.rows import split

from . import models
from .errors import unit
from .rank import Rank, pin

TOKENS = 2048
SHAPE = {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 1408, "num_hidden_layers": 4}


class Step:
    """A call is one training step on this rank's rows of the same batch."""

    def __init__(self, model: models.Stack, layout: TokenLayout, config: ModelConfig) -> None:
        self.model, self.layout = model, layout
        x = torch.randn(layout.tokens, config.hidden_size, generator=torch.Generator().manual_seed(1))
        self.x = layout.take(x).to(config.compute_dtype).requires_grad_()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def __call__(self) -> torch.Tensor:
        loss = self.model(self.x, self.layout).float().pow(2).sum() / self.layout.tokens
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.x.grad = None
        return loss.detach()


def _alone(step: Step, threads: int) -> Callable[[], object]:
    """On rank 0, with that many threads and cores, while the others wait."""

    def run() -> None:
        if dist.get_rank() != 0:
            return
        cores = os.sched_getaffinity(0)
        if threads > 1:
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
            torch.set_num_threads(threads)
        step()
        pin(0) if threads > 1 else None
        os.sched_setaffinity(0, cores)

    return run


def _difference(steps: dict[str, Step]) -> dict[str, float]:
    """Relative difference of each way's first loss to the unparallelized one's."""
    losses = {}
    for name, step in steps.items():
        loss = step().double()
        if name != "single":
            dist.all_reduce(loss)
        losses[name] = float(loss)
    return {name: abs(loss / losses["single"] - 1) for name, loss in losses.items()}


def _ways(rank: int, mesh: DeviceMesh, config: ModelConfig, engine: str, tokens: int) -> dict[str, Step]:
    """Every way to run the step, `single` on one process. Collective."""
    world_size = mesh.size()
    whole = TokenLayout(1, tokens)
    shared = TokenLayout(1, tokens, split(tokens, world_size), rank)
    return {
        "single": Step(models.single(config), whole, config),
        "torch": Step(models.by_torch(config, mesh), shared, config),
        "collective": Step(models.ours(config, mesh, "collective"), shared, config),
        "ours": Step(models.ours(config, mesh, engine), shared, config),
        "ceiling": Step(models.ceiling(config, rank, world_size), shared, config),
    }


def tolerance(config: ModelConfig) -> float:
    """How far two orders of the same sums may be apart, relatively.

    8 operations a layer round to the dtype, after fp32 sums with up to `intermediate` (or `hidden`) terms; roundings
    are independent, and so add as a random walk does.
    """
    terms = max(config.hidden_size, config.intermediate_size)
    return (8 * config.num_hidden_layers) ** 0.5 * (
        unit(config.compute_dtype) + terms**0.5 * unit(torch.float32)
    )


def measure(
    rank: Rank, dtype: str, engine: str, budget: float, tokens: int = TOKENS, shape: Mapping[str, int] = SHAPE
) -> dict[str, Any]:
    """Times of each way as Spreads, and what was checked. Collective.

    Raises RuntimeError where the first loss of a way is not the unparallelized one's.
    """
    config = ModelConfig(**shape, dtype=dtype, param_dtype=dtype)  # type: ignore[arg-type]
    steps = _ways(rank.rank, rank.mesh, config, engine, tokens)
    difference = _difference({name: step for name, step in steps.items() if name != "ceiling"})
    if not max(difference.values()) <= tolerance(config):
        raise RuntimeError(f"the models do not compute the same: {difference}")
    ways: dict[str, Callable[[], object]] = {k: v for k, v in steps.items() if k != "single"}
    times = rank.measure(ways, 0.8 * budget)
    alone = {f"single, {n} thread{'s' * (n > 1)}": _alone(steps["single"], n) for n in (1, 2)}
    times |= rank.measure(alone, 0.2 * budget)
    comm = rank.comm
    assert comm is not None
    gc.collect()
    moved = tokens * config.hidden_size * config.compute_dtype.itemsize
    held, control = (comm.workspace.nbytes, comm.workspace.control.nbytes) if comm.has_workspace else (0, 0)
    return {
        "dtype": dtype,
        "seconds": {name: vars(spread) for name, spread in times.items()},
        "first_loss_difference": difference,
        "symmetric_bytes": held,
        "symmetric_bound_bytes": 2 * moved + control,  # two slots of what is gathered or scattered, and flags
    }
