"""Measurements of the suite `train` on CPU ranks: pipeline bubbles, overhead of the training loop, async checkpoints.

bubble       every schedule on 2 and 4 ranks, 8 microbatches. Stages sleep instead of computing, because four of them
             may share two cores: 200 ms each for a stage's forward, input gradients and weight gradients (1 : 1 : 1).
             The rest is torch's schedule and our Pipeline, which records its passes. The theory is in
             bench/bubbles.py. Gloo and Python take about 1 ms between two passes, and theory predicts idle shares as
             low as 2 %, so a pass must be much longer
overhead     2 ranks, the model of `make train`. A step of our trainer as in `fusedtp train` (learning rate, check,
             metrics to a file, TensorBoard and a screen, a query of the saver) against a hand-written loop around the
             same model, optimizer and data: forward, backward, clipping, optimizer, loss to the host
checkpoint   one rank on one thread, so that a core is left for writing. Ten steps with a save after the first one
             against ten without, alternating; at least 1 GB of weights and moments

Each case repeats until its spread is small or its time is up. `figures` of a row hold the measured quantity, its
quartiles and the theory.
"""

from __future__ import annotations

import gc
import io
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from fusedtp.commands.build import build
from fusedtp.commands.results import sinks_for
from fusedtp.commands.run import trainer_of
from fusedtp.nn import CausalLM, ModelConfig, init_
from fusedtp.ops.operation import wanted
from fusedtp.parallel import clip_grad_norm_
from fusedtp.train.bubbles import ideal, measured, order_of, recorded_order
from fusedtp.train.checkpoint import Checkpoints, Saver
from fusedtp.train.config import TrainConfig
from fusedtp.train.data import Batches, Microbatch, build_tokens
from fusedtp.train.loop import Metrics, Trainer
from fusedtp.train.mesh import World
from fusedtp.train.stages import Action, Pipeline, stage_count, stages_of

from .bubbles import Costs, formula
from .cases import Case
from .rank import Rank
from .rows import Row
from .sample import Spread, interleave

SUITE = "train"
PASS_SECONDS, SMOKE_PASS_SECONDS = 0.200, 0.002
STEPS_A_SAVE = 10
STEADY = 0.05  # a case stops when the interquartile range is at most this share of the median


def steady(values: Sequence[float], least: int = 5) -> bool:
    """Whether the interquartile range is at most STEADY times the median."""
    if len(values) < least:
        return False
    spread = Spread.of(list(values))
    return spread.high - spread.low <= STEADY * spread.median


# -- bubbles -----------------------------------------------------------------------------------------------------------


class Nap(Function):
    """x, w -> x. Forward sleeps; backward sleeps for the gradients of x and w, each in the pass that computes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, costs: Costs) -> Tensor:
        ctx.costs, ctx.like = costs, w
        time.sleep(costs.forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        of_x, of_w, _ = wanted(ctx)
        if of_x:
            time.sleep(ctx.costs.input)
        if of_w:
            time.sleep(ctx.costs.weight)
        return dy if of_x else None, torch.zeros_like(ctx.like) if of_w else None, None


class SleepingStage(nn.Module):
    """Called like fusedtp.train.stages.Stage. The first stage embeds, so that its layers need input gradients."""

    def __init__(self, model: Sleeper, first: bool, last: bool) -> None:
        super().__init__()
        self.costs, self.last = model.costs, last
        self.weight = nn.Parameter(torch.zeros(1))
        self.embedding = nn.Parameter(torch.zeros(1)) if first else None

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        if self.embedding is not None:
            x = self.embedding.expand(x.shape).clone()
        y: Tensor = Nap.apply(x, self.weight, self.costs)
        return y.sum().reshape(1) if self.last else y


class Sleeper(nn.Module):
    """A model of sleeping stages, like fusedtp.train.stages.Staged. costs: of one stage."""

    tied = False

    def __init__(self, costs: Costs) -> None:
        super().__init__()
        self.costs, self.embedding = costs, nn.Parameter(torch.zeros(1))

    def stage(self, layers: Sequence[int], first: bool, last: bool, both: bool = False) -> nn.Module:
        return SleepingStage(self, first, last)

    def keep_(self, layers: Sequence[int], first: bool, last: bool) -> None: ...

    def edge(self, batch: int, length: int) -> tuple[int, int, torch.dtype]:
        return batch, length, torch.float32


def measure_bubble(rank: Rank, case: Case) -> list[Row]:
    """Compares recorded steps of a schedule with its theory. Collective."""
    schedule, ranks = str(case.shape["schedule"]), rank.world_size
    count = stage_count(schedule, ranks)
    of_rank, seconds = count // ranks, SMOKE_PASS_SECONDS if rank.plan.smoke else PASS_SECONDS
    of_stage, costs = Costs(*[seconds] * 3), Costs(*[seconds * of_rank] * 3)
    here = stages_of(schedule, ranks, rank.rank)
    mesh = DeviceMesh.from_group(rank.group, "cpu", mesh_dim_names=("pp",))
    pipeline = Pipeline(Sleeper(of_stage), mesh, schedule, [range(i, i + 1) for i in range(count)], here)
    token = torch.zeros(1, 1, dtype=torch.int64)
    microbatches = int(case.shape["m"])
    batches = [Microbatch(token, token, i, 1.0) for i in range(microbatches)]
    told: list[list[Action]] = []
    begin, step = time.perf_counter(), 0
    while True:
        if step:  # not the first step, which connects the ranks
            pipeline.record(step, told.append)
        pipeline.step(batches, 0, step)
        step += 1
        shares = [measured(actions)[0] for actions in told]
        enough = steady(shares, least=3) or (len(told) >= 3 and time.perf_counter() - begin > rank.seconds)
        if rank.worst(-float(enough))[0] == -1.0:
            break
    orders = order_of(pipeline.torch_schedule(batches)) or recorded_order(told[-1])
    share, ideal_seconds = ideal(orders, costs.each(of_rank))
    by_formula = formula(schedule, ranks, of_rank, microbatches, costs)
    bubble, times = Spread.of(shares), Spread.of([measured(actions)[1] for actions in told])
    figures = {
        "bubble": bubble.median, "bubble_low": bubble.low, "bubble_high": bubble.high, "ideal_bubble": share,
        "formula_bubble": by_formula, "bubble_ratio": bubble.median / share if share > 1e-9 else None,
        "step_ratio": times.median / ideal_seconds, "pass_ms": 1e3 * seconds, "stages_of_a_rank": of_rank,
    }  # fmt: skip
    by_hand = "none" if by_formula is None else f"{by_formula:.1%}"
    note = (
        f"idle {bubble.median:.1%} ({bubble.low:.1%} to {bubble.high:.1%}), order {share:.1%}, formula {by_hand}; "
        f"step {times.median / ideal_seconds:.3f} x the order's"
    )
    return [Row(SUITE, case.shape, case.dtype, "fusedtp", rank.world, ranks, times, figures=figures, note=note)]


# -- overhead ----------------------------------------------------------------------------------------------------------


def by_hand(model: Any, batches: Any, optimizer: torch.optim.Optimizer) -> float:
    """A hand-written training step."""
    (batch,) = batches.step()
    loss = model(**batch.arguments()).loss
    loss.backward()
    clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def step_of(trainer: Trainer) -> None:
    """A step of Trainer.train, neither the last one nor one with validation."""
    assert trainer.saver is not None
    trainer.train_step()
    trainer.saver.after(trainer.step, trainer.state, last=False)


@contextmanager
def trainer_as_run(rank: Rank, config: TrainConfig, folder: Path) -> Iterator[Trainer]:
    """The trainer of `fusedtp train`, with its metrics and saver."""
    mesh = DeviceMesh.from_group(rank.group, "cpu", mesh_dim_names=("tp",))
    world = World.of(mesh, torch.device("cpu"))
    tokens = [folder]
    if rank.rank == 0:
        (folder / "book.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(20_000)))
        tokens = [build_tokens((folder / "book.txt",), folder / "tokens")]
        config.run.folder.mkdir(parents=True)
    dist.broadcast_object_list(tokens)
    batches = Batches(tokens[0], length=config.data.length, batch=config.data.batch)
    checkpoints = Checkpoints(folder / "checkpoints", group=world.checkpoint_group)
    saver = Saver(checkpoints, world, every=1 << 60)
    trainer = trainer_of(config, world, batches, build(config, world), None, saver)
    console = Console(file=io.StringIO(), width=110)
    with Metrics(world, sinks_for(config, world, console)) as metrics:
        trainer.metrics = metrics
        yield trainer
    checkpoints.close()


def measure_overhead(rank: Rank, case: Case) -> list[Row]:
    """Alternates steps of the trainer and of the hand-written loop. Collective."""
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig()
        if rank.plan.smoke:
            small = replace(config.model, width=16, mlp_width=8, layers=1)
            config = replace(config, model=small, data=replace(config.data, length=16, batch=2))
        config = replace(config, run=replace(config.run, runs=Path(folder)))
        steps = 1 << 40  # keeps the learning rate at its value after warm-up
        config = replace(config, optim=replace(config.optim, steps=steps, warmup=0, lr=1e-4))
        with trainer_as_run(rank, config, Path(folder)) as trainer:
            ways: dict[str, Callable[[], object]] = {
                "trainer": partial(step_of, trainer),
                "by hand": partial(by_hand, trainer.model, trainer.batches, trainer.optimizer),
            }
            rank.warm(ways["by hand"])
            times = interleave(ways, 5 * rank.seconds, rank.meeting, rank.clock)
    pairs = [ours / theirs for ours, theirs in zip(times["trainer"], times["by hand"], strict=True)]
    spreads, ratios = {way: Spread.of(seconds) for way, seconds in times.items()}, Spread.of(pairs)
    ratio = spreads["trainer"].median / spreads["by hand"].median
    figures = {"ratio": ratio, "pair_ratio": ratios.median, "pair_low": ratios.low, "pair_high": ratios.high}
    note = f"{ratio:.3f} x by hand, by medians; of pairs {ratios.median:.3f} ({ratios.low:.3f} to {ratios.high:.3f})"
    shape, dtype, world, count = case.shape, case.dtype, rank.world, rank.world_size
    return [
        Row(SUITE, shape, dtype, "by hand", world, count, spreads["by hand"]),
        Row(
            SUITE,
            shape,
            dtype,
            "fusedtp trainer",
            world,
            count,
            spreads["trainer"],
            figures=figures,
            note=note,
        ),
    ]


# -- saving beside training --------------------------------------------------------------------------------------------


def large_trainer(smoke: bool, folder: Path) -> Trainer:
    """A trainer on one rank with at least 1 GB of weights and AdamW moments."""
    width, layers = (16, 1) if smoke else (1024, 7)
    sizes = ModelConfig(
        vocab_size=256, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=8, param_dtype="float32",
    )  # fmt: skip
    model = CausalLM(sizes, device="meta").to_empty(device="cpu")
    init_(model, 0)
    ids = torch.randint(0, 256, (1, 8 if smoke else 64), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    trainer = Trainer(model, [{"input_ids": ids}], optimizer)
    trainer.saver = Saver(Checkpoints(folder, keep_last=1), trainer.world, every=1 << 60)
    return trainer


def ten_steps(trainer: Trainer, saving: bool) -> tuple[list[float], list[bool], float]:
    """(seconds of each step, whether a save was being written during the whole step, seconds that the save blocked)."""
    assert trainer.saver is not None
    checkpoints, seconds, beside, blocked = trainer.saver.checkpoints, [], [], 0.0
    for number in range(STEPS_A_SAVE):
        if saving and number == 1:
            begin = time.perf_counter()
            checkpoints.save(trainer.step, trainer.state)
            blocked = time.perf_counter() - begin
        writing, begin = checkpoints.writing, time.perf_counter()
        step_of(trainer)
        seconds.append(time.perf_counter() - begin)
        beside.append(writing and checkpoints.writing)
    return seconds, beside, blocked


def measure_checkpoint(rank: Rank, case: Case) -> list[Row]:
    """Alternates blocks of ten steps with and without a save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))  # a disk: /tmp may be memory
    try:
        trainer = large_trainer(rank.plan.smoke, folder)
        return _checkpoint_rows(rank, case, trainer)
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(folder)
        gc.collect()


def _checkpoint_rows(rank: Rank, case: Case, trainer: Trainer) -> list[Row]:
    assert trainer.saver is not None
    checkpoints = trainer.saver.checkpoints
    ten_steps(trainer, saving=True)  # the first save allocates buffers
    checkpoints.wait()
    plain: list[float] = []
    beside: list[float] = []
    blocks: list[float] = []
    blocked: list[float] = []
    saves = []
    begin = time.perf_counter()
    while len(blocks) < 3 or (time.perf_counter() - begin < 5 * rank.seconds and not steady(blocks)):
        without, _, _ = ten_steps(trainer, saving=False)
        seconds, during, held = ten_steps(trainer, saving=True)
        waited = time.perf_counter()
        saved = checkpoints.wait()  # None if the saver has already recorded it
        waited = time.perf_counter() - waited
        saves.append(saved or trainer.saver.saved[-1])
        plain += without
        beside += [each for each, writing in zip(seconds, during, strict=True) if writing]
        blocked.append(held)
        blocks.append((sum(seconds) + held + waited) / sum(without))
    checkpoints.close()
    alone, ratios = Spread.of(plain), Spread.of(blocks)
    with_save = Spread.of(beside) if len(beside) >= 3 else None
    ratio = None if with_save is None else with_save.median / alone.median
    held, wrote = statistics.median(blocked), statistics.median(each.seconds for each in saves)
    figures = {
        "gigabytes": saves[-1].size / 1e9, "ratio_while_saving": ratio, "ratio_of_ten_steps": ratios.median,
        "ratio_of_ten_steps_low": ratios.low, "ratio_of_ten_steps_high": ratios.high, "blocked_seconds": held,
        "save_seconds": wrote, "steps_while_saving": len(beside) / len(blocks),
    }  # fmt: skip
    beside_it = "too few steps lie within a save" if ratio is None else f"steps beside it {ratio:.3f} x those alone"
    note = (
        f"{saves[-1].size / 1e9:.2f} GB: {beside_it}, {len(beside) / len(blocks):.1f} of ten; ten steps with a save "
        f"{ratios.median:.3f} x ten without ({ratios.low:.3f} to {ratios.high:.3f}); training waits {held:.2f} s of "
        f"{wrote:.1f} s"
    )
    shape, dtype, world = case.shape, case.dtype, rank.world
    return [
        Row(SUITE, shape, dtype, "steps alone", world, 1, alone),
        Row(
            SUITE,
            shape,
            dtype,
            "fusedtp, steps beside a save",
            world,
            1,
            with_save,
            figures=figures,
            note=note,
        ),
    ]


PARTS = {"bubble": measure_bubble, "overhead": measure_overhead, "checkpoint": measure_checkpoint}
