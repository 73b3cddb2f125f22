"""A whole run on one rank: build, resume, train, verify, sample, and write the results.

Note [Determinism]
--determinism: two runs on the same machines give bitwise the same losses.

    source of differences                       fixed by
    order of sums inside torch's operations     torch.use_deterministic_algorithms; raises if there is no such form
    split of cuBLAS matmuls                     CUBLAS_WORKSPACE_CONFIG
    NCCL's sums inside a switch                 NCCL_ALGO=^NVLS
    order of sums over ranks                    fused operations always sum in rank order
    engines and kernel configurations           chosen by shapes and by tables on disk, never by timings during the run
    random numbers, order of tokens             always drawn from the seed and the step

This does not hold across another number of ranks or threads, another kind of device, other versions or other tables.
Must be set before the first operation on a GPU, because both variables are read once; existing values are kept.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.distributed.fsdp import FSDPModule

from fusedtp.commands import elastic
from fusedtp.commands.build import build_stages, num_parameters
from fusedtp.commands.results import (
    METRICS,
    json_lines,
    layout_in_words,
    pipeline_in_words,
    plot_experts,
    plot_losses,
    records_of,
    screen,
    show,
    show_sample,
    sinks_for,
    summarize,
    write_json,
)
from fusedtp.commands.verify import VerificationFailed, verify
from fusedtp.environment import environment
from fusedtp.nn import CausalLM, generate
from fusedtp.train.bubbles import shares
from fusedtp.train.checkpoint import Checkpoints, Saved, Saver, TrainingState
from fusedtp.train.config import CHECKPOINTS, CONFIG, TrainConfig
from fusedtp.train.data import Batches, Microbatch, left_out
from fusedtp.train.foreign import Model, TransformersModel
from fusedtp.train.loop import Metrics, Trainer, adamw, for_batch, learning_rate, loss_scale_of
from fusedtp.train.mesh import World, placement
from fusedtp.train.pulse import Pulse
from fusedtp.train.stages import Action, Pipeline
from fusedtp.train.watch import Guard, Lines, Watch

PROMPT_TOKENS = 160
INCIDENTS, PIPELINE, SAVES = "incidents.jsonl", "pipeline.json", "saves.jsonl"
IN_ORDER = "ended in order"
BEGIN, END = "begin", "end"  # kinds of incidents
WITHOUT_A_WORD = "the previous run ended without a message"


def run(config: TrainConfig, tokens: Path, world: World, asked: TrainConfig | None = None) -> None:
    """Train as configured; rank 0 writes the run folder. Raises VerificationFailed after all results are written.

    asked   the configuration before it was fitted to the available ranks; config.json stores this one
    """
    data, folder, console = config.data, config.run.folder, screen(quiet=world.rank != 0)
    batches = batches_of(config, tokens, world)
    torch.manual_seed(config.run.seed + world.rank)  # torch's own dropout must differ from rank to rank
    model, pipeline = build_stages(config, world, weights=not config.run.resume)
    parameters = num_parameters(config)
    tokenizer, unit = data.vocabulary, data.unit
    console.print(
        f"{parameters:,} parameters, {layout_in_words(world)} on {world.device.type}, "
        f"{len(batches.train.tokens):,} {unit}s" + (" of text" if data.vocab_size is None else ""),
        highlight=False,
    )
    if isinstance(model, TransformersModel) and model.dropout:
        rates = ", ".join(f"{name} {rate:g}" for name, rate in model.dropout.items())
        console.print(f"dropout stays off; the model's configuration has {rates}", highlight=False, soft_wrap=True)
    if data.data and (others := left_out(tokens)):
        console.print(others, highlight=False, soft_wrap=True)
    if batches.repeats:
        console.print(batches.repeats, highlight=False, soft_wrap=True)
    for line in placement(world, world.machines()):
        console.print(line, highlight=False)
    if pipeline is not None:
        parts = ", ".join(f"{part.start}-{part.stop - 1}" for part in pipeline.parts)
        console.print(f"{pipeline.schedule}, layers of the stages: {parts}", highlight=False)
        record_step(pipeline, config, world, console)

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    def tell(line: str) -> None:
        say(line)
        note_incident(folder, line)

    saver = saver_of(config, world, tokens, tell, say)
    watch = Watch(world, config.watch.watch_every, folder, tell)
    guard = Guard(world, config.watch.on_nan, tell)
    trainer = trainer_of(config, world, batches, model, pipeline, saver, watch, guard)
    earlier, changed = resume(trainer, config, tokens, console) if config.run.resume else ([], [])
    agents = elastic.agents(world)
    if world.rank == 0:
        write_json(folder / CONFIG, (asked or config).to_dict())
        elastic.note_job(folder, agents)
        write_json(folder / "versions.json", environment())
    sinks = sinks_for(config, world, console, earlier, trainer.step)
    pulse = Pulse(world, watch.clocks, lambda: trainer.step, folder)
    signals = saver.signals() if saver else nullcontext()
    with Metrics(world, sinks, earlier) as metrics, signals, pulse:
        trainer.metrics = metrics
        finished = trainer.train(config.optim.steps)
    if saver is not None:
        saver.checkpoints.close()
    if not finished:
        if world.rank == 0:
            note_incident(folder, IN_ORDER, END)
            if config.checkpoint.save and not config.parallel.elastic:
                say("--resume continues from there")
        if config.parallel.elastic and saver is not None and not saver.asked(elastic.NEWS_SECONDS):
            raise elastic.RanksLeft("ranks of another node were asked to end, and the run was saved")
        return
    engines = world.engine_calls()
    prompt = batches.prompt(PROMPT_TOKENS)
    written = None
    if pipeline is None and config.run.sample:  # for a pipeline, use `fusedtp generate` on the checkpoint
        written = sample(model, prompt, config.run.sample, length=data.length, seed=config.run.seed)
    verification = None
    if config.run.verify and changed:
        say(f"not compared with one process: the first steps were trained with another {', '.join(changed)}")
    elif config.run.verify and metrics.steps:
        console.print(
            f"training the first {min(config.run.verify_steps, len(metrics.steps))} steps again in one process ...",
            highlight=False,
        )
        verification = verify(config, tokens, metrics.steps, world)
    if world.rank == 0 and not metrics.steps:
        say(f"no step was trained, and {METRICS} holds none: there is nothing to summarize")
    elif world.rank == 0:
        summary = summarize(config, world, metrics, engines, parameters, verification)
        write_json(folder / "summary.json", summary)
        plot_losses(folder / "loss.png", metrics, unit)
        if config.model.experts:
            plot_experts(folder / "experts.png", metrics.steps)
        show(console, summary, verification, unit)
        console.print(watch.verdict(), highlight=False, soft_wrap=True)
        if written is not None:
            show_sample(console, tokenizer.decode(prompt), tokenizer.joint + tokenizer.decode(written))
        console.print(f"written to {folder}", highlight=False)
    world.wait_for_all()
    if verification is not None and not verification.passed:
        raise VerificationFailed("the parallel run differs from the run of one process: " + verification.in_words())


def record_step(pipeline: Pipeline, config: TrainConfig, world: World, console: Console) -> None:
    """Record the step of --record-step in the run's folder, and print its idle share."""

    def tell(actions: Sequence[Action]) -> None:
        if world.rank == 0:
            found: dict[str, Any] = {"step": step, "schedule": pipeline.schedule, "actions": actions}
            with suppress(ValueError):  # an order that deadlocks in the simulation should not end the run
                found["idle"], found["ideal"] = shares(actions, pipeline.ran)
            try:
                write_json(path, found)
            except OSError as error:
                console.print(f"{path} could not be written: {error.strerror}", highlight=False, soft_wrap=True)
            console.print(pipeline_in_words(found), highlight=False)

    path = config.run.folder / PIPELINE
    step = min(config.parallel.record_step, config.optim.steps) - 1
    if step >= 0:
        pipeline.record(step, tell)


def batches_of(config: TrainConfig, tokens: Path, world: World) -> Batches:
    """This rank's batches."""
    data = config.data
    return Batches(
        tokens,
        length=data.length,
        batch=data.batch,
        accumulate=data.accumulate,
        seed=config.run.seed,
        dp=world.dp,
        dp_rank=world.dp_rank,
        device=world.device,
        documents=data.documents,
    )


def trainer_of(
    config: TrainConfig,
    world: World,
    batches: Batches,
    model: Model,
    pipeline: Pipeline | None = None,
    saver: Saver | None = None,
    watch: Watch | None = None,
    guard: Guard | None = None,
) -> Trainer:
    """The trainer of these options."""
    options = for_batch(config.optim, config.data.batch)
    pieces = 1 if pipeline is None else config.data.accumulate

    def validate() -> float:
        held_out = batches.validation(config.data.val_batches, pieces)
        return validation_loss(model, held_out, world, pipeline, pieces)

    return Trainer(
        model,
        batches,
        adamw(model, options, **{options.adamw: True}),
        world,
        pipeline=pipeline,
        rate=partial(learning_rate, options),
        clip=options.clip,
        clip_norm=float(options.clip_norm),
        scale=loss_scale_of(config),
        kind=config.parallel.kind,
        seed=config.run.seed,
        balance_bias=config.model.balance_bias,
        saver=saver,
        validate=validate,
        val_every=config.run.val_every,
        watch=watch,
        guard=guard,
    )


def saver_of(
    config: TrainConfig,
    world: World,
    tokens: Path,
    tell: Callable[[str], None],
    say: Callable[[str], None] = print,
) -> Saver | None:
    """The Saver of this run; Loads, which only loads, for --resume --no-save; None if neither is needed."""
    options = config.checkpoint
    if not options.save and not config.run.resume:
        return None
    checkpoints = Checkpoints(
        config.run.folder / CHECKPOINTS,
        keep_last=options.keep_last,
        keep_every=options.keep_every,
        group=world.checkpoint_group,
        asynchronous=options.async_save,
    )
    if options.save:
        checkpoints.tidy()
    mesh = {"pp": world.pp, "dp": world.dp, "tp": world.tp}
    return (Saver if options.save else Loads)(
        checkpoints,
        world,
        every=options.save_every,
        failure_seconds=3600 * options.failure_hours,
        stop_on_error=options.on_save_error == "stop",
        about={
            "config": config.to_dict(),
            "tokens": tokens.name,
            "mesh": mesh,
            "versions": environment(),
        },
        tell=tell,
        say=say,
        done=lambda saved: note_save(config.run.folder, saved),
    )


class Loads(Saver):
    """The Saver of a run resumed with --no-save: writes and removes no checkpoint. SIGTERM still ends it in order."""

    def after(self, step: int, state: TrainingState, last: bool) -> bool:
        (stop,) = self.world.largest([self.asked()])
        if stop:
            self._tell(f"asked to end by SIGTERM after step {step}; --no-save: nothing was saved")
        return bool(stop or last)


def resume(
    trainer: Trainer, config: TrainConfig, tokens: Path, console: Console
) -> tuple[list[dict[str, Any]], list[str]]:
    """Load the run's checkpoint into the trainer. Collective.

    Returns (records of the steps before it, options that these steps depend on and that have changed since).
    """
    assert trainer.saver is not None
    checkpoints, folder = trainer.saver.checkpoints, config.run.folder
    loaded = checkpoints.load(
        trainer.state, config.run.step, lambda about: misfits(config, about) + other_tokens(tokens, about)
    )
    aside = checkpoints.set_aside(loaded.step) if config.checkpoint.save else []
    records = records_of(folder)
    lost = max((record["step"] + 1 for record in records), default=loaded.step) - loaded.step
    because = "; ".join(loaded.refused)
    if not because and config.run.step is not None:
        because = f"--step {config.run.step} was asked for"
    if not because:
        again = elastic.because(loaded.about, trainer.world, folder)
        ended = how_it_ended(folder)
        ended = "" if lost <= 0 and ended == IN_ORDER else ended
        because = "; ".join(filter(None, (again, ended))) or (WITHOUT_A_WORD if lost > 0 else "")
    line = f"resumed at step {loaded.step}, lost {max(lost, 0)} steps" + (f", because {because}" if because else "")
    if aside:
        line += f"; newer checkpoints are now {', '.join(path.name for path in aside)}"
    line += elastic.moved(loaded.about, config, trainer.world)
    console.print(line, highlight=False, soft_wrap=True)
    if trainer.world.rank == 0:
        note_incident(folder, line, BEGIN)
    changed = [*dict.fromkeys([*loaded.about.get("changed", ()), *changed_options(config, loaded.about)])]
    trainer.saver.about["changed"] = changed
    return [record for record in records if record["step"] < loaded.step], changed


def changed_options(config: TrainConfig, about: Mapping[str, Any]) -> list[str]:
    """The options that a resumed run has changed and that affect its steps: optimizer, batch size, dtypes."""
    plain, before, found = config.to_dict(), about["config"], []
    for part, names in {
        "optim": plain["optim"], "data": ["batch"], "run": ["dtype"], "parallel": ["param_dtype", "reduce_dtype"],
    }.items():  # fmt: skip
        was = before.get(part, {})
        found += [name for name in names if was.get(name, plain[part][name]) != plain[part][name]]
    return [f"--{name.replace('_', '-')}" for name in found]


def misfits(config: TrainConfig, about: Mapping[str, Any]) -> list[str]:
    """Why a run with this configuration cannot resume from a checkpoint: another model, fewer steps."""
    plain, found = config.to_dict(), []
    before = about.get("config")
    if not isinstance(before, dict):
        return ["it was not saved by fusedtp train"]
    wanted = {
        "model": plain["model"],
        "foreign": plain["foreign"],
        "data": {name: plain["data"][name] for name in ("length", "documents")},
    }
    wanted["run"] = {"seed": plain["run"]["seed"]}
    for part, values in wanted.items():
        for name, value in values.items():
            was = before.get(part, {}).get(name, value)
            if was != value:
                found.append(f"--{name.replace('_', '-')} was {was}, now it is {value}")
    if int(about["step"]) > config.optim.steps:
        found.append(f"the checkpoint is of step {about['step']}, but --steps is only {config.optim.steps}")
    return found


def note_save(folder: Path, saved: Saved) -> None:
    """Record a checkpoint that is on disk in the run's saves.jsonl."""
    line = {"step": saved.step, "bytes": saved.size, "blocked": saved.blocked, "seconds": saved.seconds}
    Lines(folder / SAVES).append(line | {"time": time.time()})


def other_tokens(tokens: Path, about: Mapping[str, Any]) -> list[str]:
    """An error if a checkpoint was trained on other token files than these."""
    if about.get("tokens", tokens.name) == tokens.name:
        return []
    return ["the files of --data or the tokenizer have changed"]


def note_incident(folder: Path, what: str, kind: str = "") -> None:
    """Append a line to the run's incidents. kind: BEGIN when ranks resume a run, END when they end, or empty."""
    if folder.is_dir():
        Lines(folder / INCIDENTS).append({"time": time.time(), "what": what, "kind": kind})


def how_it_ended(folder: Path) -> str:
    """Why the previous ranks ended, from the incidents; empty if it was not recorded."""
    for line in reversed(json_lines(folder / INCIDENTS)):
        if line.get("kind") in (BEGIN, END):
            return str(line["what"]) if line["kind"] == END else ""
    return ""


def ended_in_order(folder: Path) -> bool:
    """Whether the run's last ranks saved and ended on request."""
    return how_it_ended(folder) == IN_ORDER


# -- validation and samples --------------------------------------------------------------------------------------------

TEMPERATURE = 0.8


def validation_loss(
    model: Model,
    batches: Iterable[Microbatch],
    world: World,
    pipeline: Pipeline | None = None,
    pieces: int = 1,
) -> float:
    """Mean loss in nats per token over this rank's batches, in `pieces` each, then over the data-parallel ranks."""
    model.eval()
    losses, left, count = [], iter(batches), 0
    with torch.no_grad():
        while some := [*islice(left, pieces)]:
            count += len(some)
            if pipeline is None:
                losses += [model(**batch.arguments()).loss.float() for batch in some]
            else:
                losses.append(pipeline.evaluate(some))
    model.train()
    return world.mean(torch.stack(losses).sum() * pieces / count)


def go_on(
    model: Model, tokens: torch.Tensor, size: int, *, temperature: float, seed: int, max_context: int
) -> torch.Tensor:
    """tokens [1, P] and `size` more, drawn from the model; a model of transformers stops at a document's end."""
    options: dict[str, Any] = {"temperature": temperature, "seed": seed, "max_context": max_context}
    if isinstance(model, CausalLM):
        return generate(model, tokens, size, **options)
    return model.generate(tokens, size, **options)


def sample(model: Model, prompt: list[int], size: int, *, length: int, seed: int) -> list[int]:
    """`size` tokens that continue `prompt`, with a context of at most `length` tokens."""
    device = next(model.parameters()).device
    tokens = torch.tensor([prompt], device=device)
    if isinstance(model, FSDPModule):
        model.unshard()  # generation calls parts of the model and bypasses the hooks of its forward
    tokens = go_on(model, tokens, size, temperature=TEMPERATURE, seed=seed, max_context=length)
    if isinstance(model, FSDPModule):
        model.reshard()
    written: list[int] = tokens[0, len(prompt) :].tolist()
    return written


# -- determinism -------------------------------------------------------------------------------------------------------

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS"}


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """If `wanted`, make this process bitwise reproducible in this context; see Note [Determinism]."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    for name, value in DETERMINISTIC.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
