"""The training loop: what happens in a step, in the order in which it happens; and when it is saved."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

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
from fusedtp.train.config import TrainConfig
from fusedtp.train.data import Batches
from fusedtp.train.evaluate import validation_loss
from fusedtp.train.experts import ExpertLoad
from fusedtp.train.metrics import Metrics
from fusedtp.train.nonfinite import Guard
from fusedtp.train.optim import adamw, for_batch, set_learning_rate
from fusedtp.train.precision import loss_scale_of
from fusedtp.train.shard import accumulate_
from fusedtp.train.stages import Pipeline
from fusedtp.train.watch import Watch
from fusedtp.train.world import World

FIRST_SAVE_SECONDS = 60.0  # until the first checkpoint, which shows what a save takes


class Trainer:
    """Trains a model in place. `step` is how many steps are done; `state` is all that the next ones depend on."""

    def __init__(
        self,
        model: Model,
        batches: Batches,
        config: TrainConfig,
        world: World,
        metrics: Metrics,
        saver: Saver | None = None,
        pipeline: Pipeline | None = None,
        watch: Watch | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.model, self.batches, self.config, self.world = model, batches, config, world
        self.metrics, self.saver, self.pipeline, self.step = metrics, saver, pipeline, 0
        self.watch, self.guard = watch or Watch(world), guard or Guard(world)
        self.watch.attach(model, pipeline, batches)
        self.options = for_batch(config.optim, config.data.batch)
        self.optimizer, self.scale = adamw(model, self.options, fused=True), loss_scale_of(config)
        self.load = ExpertLoad(model, world, config.model.balance_bias)
        self.state = TrainingState(
            model, self.optimizer, {"trainer": self, "data": batches, "loss_scale": self.scale}, world.rank,
            config.run.seed, optional=("loss_scale",),
        )  # fmt: skip

    def train(self) -> bool:
        """Train for all steps that are left; whether they are all done, or a signal ended the run before."""
        options, world = self.options, self.world
        while self.step < options.steps:
            self.watch.begin()
            rate = set_learning_rate(self.optimizer, options, self.step)
            own_loss = self.backward(self.load)
            self.watch.computed()
            self.scale.unscale_(self.model)
            with self.watch.clocks("norm", "the gradients' norm"):
                norm = self.clip()  # returns when all of the step's kernels have run, so that
                world.check()  # one which failed is found before it reaches a parameter
                loss = world.mean(own_loss)
            numbers = {"grad_norm": norm, "lr": rate} | self.scale.numbers
            if self.is_finite(loss, norm) and self.scale.takes(norm):
                with self.watch.clocks("optimizer"):
                    self.optimizer.step()
            else:
                numbers["grad_norm"] = math.inf
            self.optimizer.zero_grad()
            last = self.step + 1 == options.steps
            times = self.watch.step(self.step, loss, last)
            self.metrics.step(self.step, loss=loss, **numbers, **self.load.step(), **times)
            self.step += 1
            if self.step % self.config.run.val_every == 0 or last:
                self.metrics.validation(self.step - 1, self.validate())
            if self.saver is not None and self.saver.after(self.step, self.state, last):
                return last
        return True

    def backward(self, load: ExpertLoad) -> Tensor:
        """Accumulate the gradients of this step; its loss on this data-parallel rank."""
        return backward(
            self.model, self.batches, self.step, load, self.config.run.seed, self.pipeline,
            self.config.parallel.kind, self.scale.value,
        )  # fmt: skip

    def is_finite(self, loss: float, norm: float) -> bool:
        """Whether the step is; see Guard.takes. Runs it again, on the same samples, to find out where it is not."""

        def again() -> None:
            self.batches.samples -= self.batches.batch
            self.backward(ExpertLoad(self.model, self.world, 0.0))

        return self.guard.takes(
            self.step, loss, norm, self.model, again, scaled=self.scale.window is not None
        )

    def clip(self) -> float:
        """Clip the gradients of the whole model; their norm before."""
        limit, kind, of = self.options.clip, float(self.options.clip_norm), self.pipeline
        if of is None:
            return clip_grad_norm_(self.model, limit, kind).item()
        return clip_grad_norm_(self.model, limit, kind, others=of.group, uncounted=of.uncounted).item()

    def validate(self) -> float:
        """The loss on held-out text."""
        pieces = 1 if self.pipeline is None else self.config.data.accumulate
        held_out = self.batches.validation(self.config.data.val_batches, pieces)
        with self.watch.clocks(APART):
            return validation_loss(self.model, held_out, self.world, self.pipeline, pieces)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


def backward(
    model: Model,
    batches: Batches,
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
