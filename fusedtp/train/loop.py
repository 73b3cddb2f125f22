"""The training loop: what happens in a step, in the order in which it happens; and when it is saved."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fusedtp.nn import CausalLM, MoE
from fusedtp.nn.balance import max_violation, update_bias_
from fusedtp.nn.router import Routing
from fusedtp.parallel import clip_grad_norm_
from fusedtp.train.build import Model
from fusedtp.train.checkpoint import (
    CheckpointError,
    Checkpoints,
    Saved,
    TrainingState,
    as_bytes,
    save_interval,
)
from fusedtp.train.clocks import APART
from fusedtp.train.data import Batches, FromLoader, Microbatch
from fusedtp.train.metrics import Metrics
from fusedtp.train.optim import LossScale, set_learning_rate
from fusedtp.train.shard import accumulate_
from fusedtp.train.stages import Pipeline
from fusedtp.train.watch import Guard, Watch
from fusedtp.train.world import World

if TYPE_CHECKING:
    pass

FIRST_SAVE_SECONDS = 60.0  # until the first checkpoint, which shows what a save takes


class Trainer:
    """Trains a model in place. `step` is how many steps are done; `state` is all that the next ones depend on.

    model       a fusedtp.nn.CausalLM, or a model of transformers in a TransformersModel; parallelized and sharded
    batches     Batches, or any iterable of what Note [Loaders] in fusedtp.train.data says, `accumulate` of them a step
    optimizer   torch's, over the model's parameters
    mesh        of all ranks, with the axes that there are of pp, dp (or dp_replicate, dp_shard) and tp; or a World
    pipeline    runs the model where the mesh has pp
    rate        learning rate of a step; default: as the optimizer has it
    clip        largest norm of the gradients, of which clip_norm says the kind: 2 or inf
    kind        of data parallelism, as given to fusedtp.train.shard
    seed        of dropout
    saver       saves after a step, and stops after a signal
    validate    the validation loss, after every val_every steps and the last
    watch       times the ranks; guard: what becomes of steps that are not finite. Default: stop
    Collective: all ranks make one together. Raises TypeError, ValueError for a model or a mesh that it cannot train.
    """

    def __init__(
        self,
        model: Model,
        batches: Batches | Iterable[Mapping[str, Tensor]],
        optimizer: torch.optim.Optimizer,
        mesh: DeviceMesh | World | None = None,
        *,
        pipeline: Pipeline | None = None,
        accumulate: int = 1,
        rate: Callable[[int], float] | None = None,
        clip: float = 1.0,
        clip_norm: float = 2.0,
        scale: LossScale | None = None,
        kind: str = "zero3",
        seed: int = 0,
        balance_bias: float = 0.0,
        saver: Saver | None = None,
        metrics: Metrics | None = None,
        validate: Callable[[], float] | None = None,
        val_every: int = 0,
        watch: Watch | None = None,
        guard: Guard | None = None,
    ) -> None:
        if not isinstance(model, Model):
            raise TypeError(
                f"{type(model).__name__} is no fusedtp.nn.CausalLM; one of transformers goes into a "
                "fusedtp.train.foreign.TransformersModel"
            )
        device = next(model.parameters()).device
        self.world = world = mesh if isinstance(mesh, World) else World.of(mesh, device)
        self.batches = batches if isinstance(batches, Batches) else FromLoader(batches, world, accumulate)
        self.model, self.optimizer, self.pipeline, self.rate = model, optimizer, pipeline, rate
        self.clip_to, self.clip_norm, self.scale = clip, clip_norm, scale or LossScale()
        self.kind, self.seed, self.load = kind, seed, ExpertLoad(model, world, balance_bias)
        self.saver, self.metrics = saver, metrics or Metrics(world)
        self.validate, self.val_every, self.step = validate, val_every, 0
        self.watch, self.guard = watch or Watch(world), guard or Guard(world)
        self.watch.attach(model, pipeline, self.batches)
        self._taken: list[Microbatch] = []
        self.state = TrainingState(
            model, optimizer, {"trainer": self, "data": self.batches, "loss_scale": self.scale}, world.rank,
            seed, optional=("loss_scale",),
        )  # fmt: skip

    def train(self, steps: int) -> bool:
        """Train until so many steps are done; whether they are, or a signal ended the run before."""
        while self.step < steps:
            last = self.step + 1 == steps
            self.train_step(last)
            if self.validate is not None and (last or self.step % self.val_every == 0):
                with self.watch.clocks(APART):
                    loss = self.validate()
                self.metrics.validation(self.step - 1, loss)
            if self.saver is not None and self.saver.after(self.step, self.state, last):
                return last
        return True

    def train_step(self, last: bool = False) -> None:
        """One step: gradients, clipping, update, record. last: of the run."""
        self.watch.begin()
        if self.rate is not None:
            set_learning_rate(self.optimizer, self.rate(self.step))
        own_loss = self.backward(_Kept(self.batches, self._taken), self.load)
        self.watch.computed()
        self.scale.unscale_(self.model)
        with self.watch.clocks("norm", "the gradients' norm"):
            norm = self.clip()  # returns when all of the step's kernels have run, so that
            self.world.check()  # one which failed is found before it reaches a parameter
            loss = self.world.mean(own_loss)
        numbers = {"grad_norm": norm, "lr": self.optimizer.param_groups[0]["lr"]} | self.scale.numbers
        if self.is_finite(loss, norm) and self.scale.takes(norm):
            with self.watch.clocks("optimizer"):
                self.optimizer.step()
        else:
            numbers["grad_norm"] = math.inf
        self.optimizer.zero_grad()
        numbers |= {"loss": loss} | self.load.step() | self.watch.step(self.step, loss, last)
        self.metrics.step(self.step, self.batches.tokens, **numbers)
        self.step += 1

    def backward(self, batches: Any, load: ExpertLoad) -> Tensor:
        """Accumulate the gradients of this step; its loss on this data-parallel rank."""
        return backward(
            self.model, batches, self.step, load, self.seed, self.pipeline, self.kind, self.scale.value
        )

    def is_finite(self, loss: float, norm: float) -> bool:
        """Whether the step is; see Guard.takes. Runs it again, on the same batches, to find out where it is not."""

        def again() -> None:
            kept = _Kept(self.batches, self._taken, again=True)
            self.backward(kept, ExpertLoad(self.model, self.world, 0.0))

        scaled = self.scale.window is not None
        return self.guard.takes(self.step, loss, norm, self.model, again, scaled)

    def clip(self) -> float:
        """Clip the gradients of the whole model; their norm before."""
        limit, kind, of = self.clip_to, self.clip_norm, self.pipeline
        if of is None:
            return clip_grad_norm_(self.model, limit, kind).item()
        return clip_grad_norm_(self.model, limit, kind, others=of.group, uncounted=of.uncounted).item()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


@dataclass
class _Kept:
    """Data whose last step is kept, so that it can be had again."""

    of: Batches | FromLoader
    taken: list[Microbatch]
    again: bool = False

    def step(self, scale: float = 1.0) -> Iterator[Microbatch]:
        if self.again:
            yield from self.taken
            return
        self.taken.clear()
        for batch in self.of.step(scale):
            self.taken.append(batch)
            yield batch

    @property
    def accumulate(self) -> int:
        return self.of.accumulate

    @property
    def device(self) -> str | torch.device:
        return self.of.device


def backward(
    model: Model,
    batches: Batches | FromLoader,
    step: int,
    load: ExpertLoad,
    seed: int,
    pipeline: Pipeline | None = None,
    kind: str = "zero3",
    scale: float = 1.0,
) -> Tensor:
    """Accumulate the gradients of a step, and its experts' load; return its loss: a mean over ranks is that of all.

    kind    of data parallelism; see fusedtp.train.shard
    scale   what the gradients are multiplied by, and the loss that is returned is not
    """
    if pipeline is not None:
        loss = pipeline.step(list(batches.step(scale)), seed, step) / scale
        for routings in pipeline.routings():
            load.add(routings)
        return loss
    total = torch.zeros((), device=batches.device)
    for number, batch in enumerate(batches.step(scale), 1):
        accumulate_(model, kind, number == batches.accumulate)
        model.set_dropout(seed, step, batch.first_token)
        out = model(**batch.arguments())
        load.add(out.routings)
        out.loss.backward()
        total += out.loss.detach() / scale
    return total


class Saver:
    """Decides after every step whether to save, and whether to stop: on a signal, after a save.

    every             steps between two saves; None: by the clock of the first rank, as save_interval says
    stop_on_error     a save that fails ends the run; else `tell` says so and the run goes on
    tell, done        called on the first rank, with a line, and with a checkpoint that is on disk
    All ranks must decide alike, so each step takes one small all-reduce on host memory.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        world: World,
        *,
        every: int | None = None,
        failure_seconds: float = 86400.0,
        stop_on_error: bool = False,
        about: dict[str, Any] | None = None,
        tell: Callable[[str], None] = print,
        done: Callable[[Saved], None] = lambda saved: None,
    ) -> None:
        self.checkpoints, self.world, self.every = checkpoints, world, every
        self.failure_seconds, self.stop_on_error, self.about = failure_seconds, stop_on_error, about or {}
        self._tell = tell if world.rank == 0 else lambda line: None
        self._done = done if world.rank == 0 else lambda saved: None
        self._asked = threading.Event()
        self._interval, self._last = FIRST_SAVE_SECONDS, time.monotonic()
        self._told = False
        self.saved: list[Saved] = []

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Within, SIGTERM asks for a last save and an orderly end."""
        before = signal.signal(signal.SIGTERM, lambda number, frame: self._asked.set())
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def asked(self, patience: float = 0.0) -> bool:
        """Whether this rank itself was asked to end, or is within so many seconds."""
        until = time.monotonic() + patience
        while not self._asked.is_set() and time.monotonic() < until:
            time.sleep(0.05)
        return self._asked.is_set()

    def after(self, step: int, state: TrainingState, last: bool) -> bool:
        """After a step, the last or another: save if it is time. Whether training ends here. Collective."""
        by_clock = self.every is None and self.world.rank == 0 and self._due()
        stop, due, writing = self.world.largest([self._asked.is_set(), by_clock, self.checkpoints.writing])
        ends = bool(stop or last)
        if ends or due or (self.every is not None and step % self.every == 0):
            self._finish()
            self._last = time.monotonic()
            self._guarded(lambda: self.checkpoints.save(step, state, **self.about), ends)
        if ends or not writing:
            self._finish(ends)
        if stop:
            self._tell(f"asked to end by SIGTERM: saved after step {step}; --resume goes on from there")
        return ends

    def _due(self) -> bool:
        return time.monotonic() - self._last >= self._interval

    def _finish(self, always: bool = False) -> None:
        """Wait for the save that is on its way, if any, and take note of it."""
        saved: list[Saved | None] = []
        self._guarded(lambda: saved.append(self.checkpoints.wait()), always)
        for each in filter(None, saved):
            self.saved.append(each)
            self._done(each)
            self._interval = save_interval(each.blocked, self.failure_seconds)
            if self.every is None and not self._told:
                self._told = True
                self._tell(
                    f"saved step {each.step}: {as_bytes(each.size)}, training waited {each.blocked:.2f} s of "
                    f"{each.seconds:.2f} s; with a failure every {self.failure_seconds / 3600:g} h, saving every "
                    f"{self._interval:.0f} s loses least"
                )

    def _guarded(self, action: Callable[[], Any], always: bool) -> None:
        try:
            action()
        except CheckpointError as error:
            self._tell(str(error))
            if self.stop_on_error or always:
                raise


# -- the load of experts -----------------------------------------------------------------------------------------------


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
