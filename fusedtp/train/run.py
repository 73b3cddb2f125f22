"""A whole run on one rank: build, train, verify, sample, and leave the results."""

from __future__ import annotations

from pathlib import Path

import torch

from fusedtp.train import experts, report
from fusedtp.train.build import build
from fusedtp.train.config import TrainConfig
from fusedtp.train.data import Batches
from fusedtp.train.environment import environment
from fusedtp.train.evaluate import sample
from fusedtp.train.loop import train
from fusedtp.train.metrics import Metrics, screen, sinks_for
from fusedtp.train.verify import VerificationFailed, verify
from fusedtp.train.world import World

PROMPT_BYTES = 160


def run(config: TrainConfig, tokens: Path, world: World) -> None:
    """Train as configured; rank 0 writes the run folder. Raises VerificationFailed last, when all is written."""
    data, folder, console = config.data, config.run.folder, screen(quiet=world.rank != 0)
    batches = Batches(
        tokens,
        length=data.length,
        batch=data.batch,
        accumulate=data.accumulate,
        seed=config.run.seed,
        dp=world.dp,
        dp_rank=world.dp_rank,
        device=world.device,
    )
    if world.rank == 0:
        report.write_json(folder / "config.json", config.to_dict())
        report.write_json(folder / "versions.json", environment())
    torch.manual_seed(config.run.seed + world.rank)  # torch's own dropout must differ from rank to rank
    model = build(config, world)
    parameters = model.num_parameters()
    console.print(
        f"{parameters:,} parameters, {world.dp} data parallel x {world.tp} tensor parallel on "
        f"{world.device.type}, {len(batches.train.tokens):,} bytes of text",
        highlight=False,
    )
    with Metrics(config, world, sinks_for(config, world, console)) as metrics:
        train(model, batches, config, world, metrics)
    engines = world.engine_calls()
    prompt = batches.prompt(PROMPT_BYTES)
    written = sample(model, prompt, config.run.sample, length=data.length, seed=config.run.seed)
    verification = None
    if config.run.verify:
        console.print(
            f"training the first {min(config.run.verify_steps, len(metrics.steps))} steps again in one process ...",
            highlight=False,
        )
        verification = verify(config, tokens, metrics.steps, world)
    if world.rank == 0:
        summary = report.summarize(config, world, metrics, engines, parameters, verification)
        report.write_json(folder / "summary.json", summary)
        report.plot(folder / "loss.png", metrics)
        if config.model.experts:
            experts.plot(folder / "experts.png", metrics.steps)
        report.show(console, summary, verification)
        report.show_sample(console, prompt, written)
        console.print(f"written to {folder}", highlight=False)
    world.wait_for_all()
    if verification is not None and not verification.passed:
        raise VerificationFailed("the parallel run is not the run of one process: " + verification.in_words())
