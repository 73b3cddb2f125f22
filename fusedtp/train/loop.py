"""The training loop: the phases of a training step in order.

Note [Learning rate]
Linear warm-up, then a decay:

    lr(step) = lr * (step + 1) / warmup                 step < warmup
    lr(step) = lr * (m + (1 - m) * g(f))                f = (step - begin) / (steps - 1 - begin), at least 0

    cosine   g = (1 + cos(pi f)) / 2     begin = warmup
    linear   g = 1 - f                   begin = warmup
    wsd      g = 1 - f                   begin = the last decay_share of the steps (Hu et al. 2024, MiniCPM, section 4)

with m = min_lr. Step `warmup` has the peak rate, and the last step has m times the peak. `for_batch` scales lr with the
batch size beforehand: linearly (Goyal et al. 2017, section 2.1) or by the square root (Malladi et al. 2022, section 4).

Note [Loss scale]
fp16 has 5 exponent bits: gradients below 6e-8 vanish. So the loss is multiplied by a scale before backward. Scaled
gradients may overflow instead, which is detected by a norm that is not finite. All ranks have the same norm, so all of
them skip the step and halve the scale. The scale doubles after `window` steps without overflow (Micikevicius et al.
2018, Mixed Precision Training, section 3.2). If it starts as a power of two, scaling is exact for values in range.

The scale is applied through the divisor of the loss, num_labels / scale. So it reaches every term of the loss,
including the router losses of all pipeline stages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fusedtp.nn import CausalLM, MoE, advance_fp8_
from fusedtp.nn.balance import max_violation, update_bias_
from fusedtp.nn.router import Routing
from fusedtp.parallel import clip_grad_norm_
from fusedtp.train.checkpoint import Saver, TrainingState
from fusedtp.train.clocks import APART
from fusedtp.train.config import OptimOptions, TrainConfig
from fusedtp.train.data import Batches, FromLoader, Microbatch
from fusedtp.train.foreign import Model
from fusedtp.train.mesh import World
from fusedtp.train.shard import accumulate_
from fusedtp.train.stages import Pipeline
from fusedtp.train.watch import WAITS, Guard, Watch


class Trainer:
    """Trains a model in place. `step` counts completed steps; `state` is everything that the next step depends on.

    model       a fusedtp.nn.CausalLM, or a TransformersModel around a model of transformers; parallelized and sharded
    batches     Batches, or an iterable as in Note [Loaders] of fusedtp.train.data; a step takes `accumulate` batches
    optimizer   a torch optimizer over the model's parameters
    mesh        mesh of all ranks, with those axes of pp, dp (or dp_replicate, dp_shard) and tp that it uses; or a World
    pipeline    runs the model if the mesh has pp
    rate        step -> learning rate; default: the optimizer's own
    clip        maximum norm of the gradients; clip_norm is the kind of norm, 2 or inf
    kind        kind of data parallelism, as given to fusedtp.train.shard
    seed        seed of dropout
    saver       saves checkpoints after steps, and stops training after a signal
    validate    returns the validation loss; called after every val_every steps (0: never) and after the last step
    watch       times the ranks
    guard       handles steps that are not finite; default: stop
    Constructing a Trainer is collective. Raises TypeError, ValueError for a model or a mesh that it cannot train.
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
                f"{type(model).__name__} is not a fusedtp.nn.CausalLM; wrap a model of transformers in a "
                "fusedtp.train.foreign.TransformersModel"
            )
        own = {id(parameter) for parameter in model.parameters()}
        if any(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError(
                "the optimizer has parameters that are not the model's: was it created before parallelize, shard or "
                "to_empty, which replace the parameters?"
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
            seed, optional=("loss_scale",), ranks=world.size,
        )  # fmt: skip

    def train(self, steps: int) -> bool:
        """Train until `steps` steps are done. Returns False if a signal ended the run earlier."""
        while self.step < steps:
            last = self.step + 1 == steps
            self.train_step(last)
            due = last or (self.val_every > 0 and self.step % self.val_every == 0)
            if self.validate is not None and due:
                with self.watch.clocks(APART):
                    loss = self.validate()
                self.metrics.validation(self.step - 1, loss)
            if self.saver is not None and self.saver.after(self.step, self.state, last):
                return last
        return True

    def train_step(self, last: bool = False) -> None:
        """One step: gradients, clipping, update, metrics. last: whether it is the last step of the run."""
        self.watch.begin()
        if self.rate is not None:
            set_learning_rate(self.optimizer, self.rate(self.step))
        own_loss = self.backward(_Kept(self.batches, self._taken), self.load)
        self.watch.computed()
        self.scale.unscale_(self.model)
        with self.watch.clocks("norm", "the gradients' norm"):
            norm = self.clip()  # waits for all kernels of the step, so that check()
            self.world.check()  # finds a failed one before it affects a parameter
            loss = self.world.mean(own_loss)
        numbers = {"grad_norm": norm, "lr": self.optimizer.param_groups[0]["lr"]} | self.scale.numbers
        taken = self.is_finite(loss, norm) and self.scale.takes(norm)
        if taken:
            with self.watch.clocks("optimizer"):
                self.optimizer.step()
                advance_fp8_(self.model)
        else:
            numbers["grad_norm"] = math.inf
        self.optimizer.zero_grad()
        numbers |= {"loss": loss} | self.load.step(taken) | self.watch.step(self.step, loss, last)
        self.metrics.step(self.step, self.batches.tokens, **numbers)
        self.step += 1

    def backward(self, batches: Any, load: ExpertLoad) -> Tensor:
        """Accumulate the gradients of this step; return its loss on this data-parallel rank."""
        return backward(self.model, batches, self.step, load, self.seed, self.pipeline, self.kind, self.scale.value)

    def is_finite(self, loss: float, norm: float) -> bool:
        """Whether the step is finite; see Guard.takes. If not, repeats it on the same batches to find the origin."""

        def again() -> None:
            kept = _Kept(self.batches, self._taken, again=True)
            self.backward(kept, ExpertLoad(self.model, self.world, 0.0))

        scaled = self.scale.window is not None
        return self.guard.takes(self.step, loss, norm, self.model, again, scaled)

    def clip(self) -> float:
        """Clip the gradients of the whole model; return their norm before clipping."""
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
    """Data that remembers the microbatches of the last step, so that the step can be repeated."""

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
    """Accumulate the gradients and the expert load of a step. Return its loss: the mean over ranks is the global loss.

    kind    kind of data parallelism; see fusedtp.train.shard
    scale   factor on the gradients, but not on the returned loss
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


# -- metrics of a step


class Sink(Protocol):
    """Receives the records of Metrics: `write` is called for each, `close` after the last one or after an error."""

    def write(self, record: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class Metrics:
    """Times the steps of a loop and passes their records to sinks. earlier: records from before a run was resumed."""

    def __init__(
        self,
        world: World,
        sinks: tuple[Sink, ...] = (),
        earlier: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.world, self.sinks = world, sinks
        self.steps = [record for record in earlier if "val_loss" not in record]
        self.validations = [record for record in earlier if "val_loss" in record]
        self._mark = time.perf_counter()

    def step(self, step: int, tokens: int, **numbers: Any) -> None:
        """Record a step of `tokens` tokens, timed since the previous record. numbers: includes those of Watch.step."""
        begin, self._mark = self._mark, time.perf_counter()
        seconds, waits = self._mark - begin, [numbers.get(f"{kind}_seconds") for kind in WAITS]
        numbers |= {
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "wait_share": None if None in waits else sum(filter(None, waits)) / seconds,
        }
        self.steps.append({"step": step, **numbers})
        self._write(self.steps[-1])

    def validation(self, step: int, loss: float) -> None:
        """Record a validation loss; its time is not counted towards any step."""
        self.validations.append({"step": step, "val_loss": loss})
        self._write(self.validations[-1])
        self._mark = time.perf_counter()

    def _write(self, record: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.write(record)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for sink in self.sinks:
            sink.close()


# -- the optimizer and its schedule


def for_batch(options: OptimOptions, batch: int) -> OptimOptions:
    """The options for a global batch of `batch` sequences, with the learning rate scaled by batch_rule."""
    times = batch / options.base_batch
    factor = {"none": 1.0, "linear": times, "sqrt": math.sqrt(times)}[options.batch_rule]
    return replace(options, lr=options.lr * factor)


def learning_rate(options: OptimOptions, step: int) -> float:
    """Learning rate of a step, counted from 0."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    begin, last = options.warmup, options.steps - 1
    if options.decay == "wsd":
        begin = max(begin, last - round(options.decay_share * options.steps))
    share = min(1.0, max(0, step - begin) / max(1, last - begin))
    left = (1 + math.cos(math.pi * share)) / 2 if options.decay == "cosine" else 1 - share
    return options.lr * (options.min_lr + (1 - options.min_lr) * left)


def adamw(model: nn.Module, options: OptimOptions, **implementation: Any) -> torch.optim.AdamW:
    """AdamW over a model's parameters; `implementation` takes torch's foreach= or fused=.

    Weight decay applies to matrices, not to vectors (norm weights, biases).
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        **implementation,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


# -- fp16's loss scale -------------------------------------------------------------------------------------------------

SMALLEST = 2.0**-24  # with a smaller scale, overflow cannot explain gradients that are not finite


class LossScale:
    """The factor on the loss. value: the current scale; good: steps since it changed; skipped: steps skipped so far."""

    def __init__(self, value: float = 1.0, window: int | None = None) -> None:
        """window: None keeps the value constant and never skips a step."""
        self.value, self.window, self.good, self.skipped = value, window, 0, 0

    def unscale_(self, model: nn.Module) -> None:
        """Divide a model's gradients by the scale."""
        if self.value == 1:
            return
        found = [p.grad for p in model.parameters() if p.grad is not None]
        local = [g._local_tensor if isinstance(g, DTensor) else g for g in found]
        torch._foreach_mul_(local, 1 / self.value)

    def takes(self, norm: float) -> bool:
        """Whether to take a step whose gradients have this norm. Updates the scale for the next step.

        Raises OverflowError if no scale makes the gradients finite.
        """
        if self.window is None:
            return True
        if not math.isfinite(norm):
            self.value, self.good, self.skipped = self.value / 2, 0, self.skipped + 1
            if self.value < SMALLEST:
                raise OverflowError(
                    f"the gradients are not finite, not even with a loss scale of {2 * self.value}: this is not an "
                    "overflow of fp16"
                )
            return False
        self.good += 1
        if self.good == self.window:
            self.value, self.good = self.value * 2, 0
        return True

    @property
    def numbers(self) -> dict[str, float]:
        """The entries of a step's record about the loss scale."""
        return {} if self.window is None else {"loss_scale": self.value}

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good": self.good, "skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.window is not None:
            self.value, self.good = float(state_dict["value"]), int(state_dict["good"])
            self.skipped = int(state_dict["skipped"])


def loss_scale_of(config: TrainConfig) -> LossScale:
    """A dynamic loss scale for fp16, a constant 1 for other dtypes."""
    if config.run.dtype != "fp16":
        return LossScale()
    return LossScale(config.optim.loss_scale, config.optim.loss_scale_window)


# -- the load of experts -----------------------------------------------------------------------------------------------


class ExpertLoad:
    """Counts how often each expert of each layer was chosen in a step, and updates the routers' biases accordingly.

    rate   change of a router's bias per step, if it has one
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
        """Add the routers' decisions for a microbatch, in the order of layers."""
        for layer, routing in enumerate(routings):
            self.counts[0, layer] += routing.tokens_per_expert
            if routing.dropped is not None:
                self.counts[1, layer] += routing.dropped
            if routing.recv_usage is not None:
                bound, used, rounds = routing.recv_usage
                for i, value in enumerate((bound, used.max(), rounds)):
                    self.recv_usage[i].clamp_(min=value)

    def step(self, taken: bool = True) -> dict[str, Any]:
        """Call after the optimizer: update the biases, reset the counts, return metrics. Collective.

        taken: whether the optimizer took the step; if not, the biases stay too. Without experts there are no metrics.

        expert_load      choices by layer and expert
        max_violation    the busiest expert's excess over an even share, relative to that share; maximum over layers
        dropped_share    dropped choices / all choices
        expert_rows_bound, expert_rows_used, expert_rounds
                         if experts receive rows in rounds: capacity of a rank in rows, the most rows that a rank used
                         in a microbatch, and the most rounds
        """
        if self.group is not None and self.layers:
            dist.all_reduce(self.counts, group=self.group)
            dist.all_reduce(self.recv_usage, dist.ReduceOp.MAX, group=self.group)
        if self.biases and taken:
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
