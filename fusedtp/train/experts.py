"""How evenly the experts of a model are used: counted in every step, over all ranks, and drawn at the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusedtp.nn import CausalLM, MoE
from fusedtp.nn.balance import max_violation, update_bias_
from fusedtp.nn.router import Routing
from fusedtp.train.build import Model
from fusedtp.train.world import World

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ExpertLoad:
    """Choices that fell on each expert of each layer in a step; and the biases that follow them.

    rate   what a router's bias changes by in a step, where it has one
    """

    def __init__(self, model: Model, world: World, rate: float) -> None:
        named = {name: module.router for name, module in model.named_modules() if isinstance(module, MoE)}
        routers = list(named.values())
        self.layers = [int(name.split(".")[1]) for name in named]  # layers.N.mlp
        some = world.pp_mesh is not None and isinstance(model, CausalLM) and model.config.moe is not None
        self.pipeline = world.pp_mesh.get_group() if world.pp_mesh is not None and some else None
        self.biases = [router.bias for router in routers if router.bias is not None]
        self.group, self.rate = world.token_ranks(model.token_split[1] > 1), rate
        experts = routers[0].num_experts if routers else 0
        self.counts = torch.zeros(2, len(routers), experts, dtype=torch.int64, device=world.device)
        # bound, most rows used, most rounds
        self.recv_usage = torch.zeros(3, dtype=torch.int64, device=world.device)

    def add(self, routings: Sequence[Routing]) -> None:
        """What the routers decided in a microbatch, in the order of layers."""
        for layer, routing in enumerate(routings):
            self.counts[0, layer] += routing.tokens_per_expert
            if routing.dropped is not None:
                self.counts[1, layer] += routing.dropped
            if routing.recv_usage is not None:
                bound, used, rounds = routing.recv_usage
                for i, value in enumerate((bound, used.max(), rounds)):
                    self.recv_usage[i].clamp_(min=value)

    def step(self) -> dict[str, Any]:
        """After the optimizer: move the biases, and start anew. Collective. Empty of a model without experts.

        expert_load      choices by layer and expert
        max_violation    of the layer where the busiest expert has most beyond its even share, as a part of that
        dropped_share    of all choices
        expert_rows_bound, expert_rows_used, expert_rounds
                         where experts take rounds: rows that a rank has room for, the most that one used in a
                         microbatch, and in how many rounds
        """
        if self.group is not None and self.layers:
            dist.all_reduce(self.counts, group=self.group)
            dist.all_reduce(self.recv_usage, dist.ReduceOp.MAX, group=self.group)
        if self.biases:
            new = update_bias_(torch.stack(self.biases), self.counts[0], self.rate)
            for bias, moved in zip(self.biases, new, strict=True):
                bias.copy_(moved)
        by_layer = dict(zip(self.layers, self.counts.unbind(1), strict=True))
        usage = self.recv_usage
        self.counts, self.recv_usage = torch.zeros_like(self.counts), torch.zeros_like(usage)
        if self.pipeline is not None:
            by_layer, usage = self._of_all_stages(by_layer, usage)
        if not by_layer:
            return {}
        load, dropped = torch.stack([by_layer[layer] for layer in sorted(by_layer)], 1)
        found = {
            "expert_load": load.tolist(),
            "max_violation": float(max_violation(load).max()),
            "dropped_share": float(dropped.sum() / load.sum().clamp(min=1)),
        }
        bound, used, rounds = usage.tolist()
        if bound:
            found |= {"expert_rows_bound": bound, "expert_rows_used": used, "expert_rounds": rounds}
        return found

    def _of_all_stages(self, by_layer: dict[int, Tensor], usage: Tensor) -> tuple[dict[int, Tensor], Tensor]:
        parts: list[Any] = [None] * dist.get_world_size(self.pipeline)
        own = {layer: counts.tolist() for layer, counts in by_layer.items()}
        dist.all_gather_object(parts, (own, usage.tolist()), group=self.pipeline)
        every = {layer: torch.tensor(counts) for layers, _ in parts for layer, counts in layers.items()}
        return every, torch.tensor([used for _, used in parts]).amax(0)


def heat_map(steps: Sequence[dict[str, Any]]) -> Figure:
    """Every layer's load over the steps: an expert's share of the choices, 1 where all are alike."""
    from matplotlib.figure import Figure

    load = torch.tensor(
        [record["expert_load"] for record in steps], dtype=torch.float64
    )  # [steps, layers, E]
    share: Tensor = load / load.mean(-1, keepdim=True).clamp(min=1e-30)
    layers = share.shape[1]
    figure = Figure(figsize=(8, 1 + 1.5 * layers), layout="constrained")
    every = figure.subplots(layers, 1, sharex=True, squeeze=False)[:, 0]
    for layer, axes in enumerate(every):
        image = axes.imshow(
            share[:, layer].t().numpy(), aspect="auto", interpolation="nearest", cmap="coolwarm", vmin=0, vmax=2,
            extent=(0.5, len(steps) + 0.5, share.shape[2] - 0.5, -0.5),
        )  # fmt: skip
        axes.set_ylabel(f"layer {layer}\nexpert")
    every[-1].set_xlabel("step")
    figure.colorbar(image, ax=list(every), label="load / even share", extend="max")
    return figure


def plot(path: Path, steps: Sequence[dict[str, Any]]) -> None:
    """The heat map as a PNG."""
    heat_map(steps).savefig(path, dpi=120)
