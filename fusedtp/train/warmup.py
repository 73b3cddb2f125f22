"""`fusedtp warmup`: compile once what a configuration needs, before many ranks need it at the same time.

    TRITON_CACHE_DIR=/shared/triton fusedtp warmup OPTIONS      on one machine, with the options of `fusedtp train`
    TRITON_CACHE_DIR=/shared/triton torchrun ... -m fusedtp train OPTIONS

What is compiled depends on the ranks that share a layer and on the shapes that one of them sees, not on how many
layers, stages or copies there are. So one group of these ranks trains on microbatches of the same rows a
model of one layer of each kind, with the trainer's own step and validation. Nothing is kept but the caches; the run's
folder is not touched. The token files are built too. On a CPU nothing is compiled, and the step shows only that the
configuration trains.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import torch

from fusedtp.train import launch
from fusedtp.train.build import build_stages, shard_faults
from fusedtp.train.config import TrainConfig, faults, layout, parse
from fusedtp.train.determinism import deterministic
from fusedtp.train.metrics import screen
from fusedtp.train.run import batches_of, trainer_of
from fusedtp.train.world import World, device_type, torchrun_place, world_of

CACHES = {"TRITON_CACHE_DIR": "kernels", "TORCHINDUCTOR_CACHE_DIR": "attention with a mask of blocks"}


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    config, place = parse(argv), torchrun_place()
    here = launch.default_ranks(replace(config, parallel=replace(config.parallel, dp=None, pp=1)))
    _, tp = layout(config, here, here)
    found = faults(config, config.parallel.dp or 1, tp)
    if config.parallel.tp is None and config.parallel.dp is not None:
        found.append("give --tp: with --dp alone it depends on the ranks of the whole job")
    if not found:
        config = of_one_group(config, tp)
        dp = config.parallel.dp or 1
        found = faults(config, dp, tp) + shard_faults(config, dp, tp)
        ranks, local_ranks = place[2:] if place else (dp * tp, dp * tp)
        found += launch.machine_faults(config, dp, tp, ranks, local_ranks)
        found += launch.data_faults(config) if place is None else []
    if found:
        launch.report(found, "warmup")
        return launch.WRONG_USAGE
    if place is None and dp * tp > 1:
        return launch.launch(argv, dp * tp, "warmup")
    with (
        deterministic(config.run.determinism),
        world_of(dp, tp, device_type(config.run.device), config.parallel.ep) as world,
    ):
        tokens = launch.prepare_data(config)
        before, begin = entries(), time.perf_counter()
        step(config, tokens, world)
        world.wait_for_all()
        console = screen(quiet=world.rank != 0)
        console.print(in_words(config, world, before, time.perf_counter() - begin), highlight=False)
    return 0


def of_one_group(config: TrainConfig, tp: int) -> TrainConfig:
    """The least that has all shapes of this configuration: the ranks that share a layer, a layer of each kind."""
    model, data, parallel, run = config.model, config.data, config.parallel, config.run
    dp = (parallel.ep or tp) // tp
    dense = min(1, model.dense_layers) if model.experts else 0
    pieces = (
        1 if parallel.pp > 1 else data.accumulate
    )  # a validation takes them at once where there are no stages
    rows = data.batch // (data.accumulate * (parallel.dp or 1))
    return replace(
        config,
        model=replace(model, layers=dense + 1, dense_layers=dense),
        data=replace(data, batch=rows * dp * pieces, accumulate=pieces, val_batches=1),
        optim=replace(config.optim, steps=1),
        parallel=replace(parallel, pp=1, tp=tp, dp=dp, dp_replicate=1, elastic=False),
        run=replace(run, replace=True, resume=False, step=None),  # of a run that is there, nothing counts
    )


def step(config: TrainConfig, tokens: Path, world: World) -> None:
    """One step of a model that is thrown away, and a validation."""
    torch.manual_seed(config.run.seed)
    model, pipeline = build_stages(config, world)
    batches = batches_of(config, tokens, world)
    trainer_of(config, world, batches, model, pipeline).train(config.optim.steps)


def entries() -> dict[str, int]:
    """Entries of each compiler's cache that the environment names."""
    folders = {name: Path(os.environ[name]) for name in CACHES if name in os.environ}
    return {name: len(list(path.iterdir())) if path.is_dir() else 0 for name, path in folders.items()}


def in_words(config: TrainConfig, world: World, before: dict[str, int], seconds: float) -> str:
    """What was done, and what a job will find."""
    rows, length = config.data.batch // (world.dp * config.data.accumulate), config.data.length
    did = (
        f"trained one step, {rows} x {length} tokens at a time, on {world.size} ranks, {config.model.layers} layers, "
        f"in {seconds:.1f} s; the token files are there"
    )
    if world.device.type == "cpu":
        return did + "; on a CPU there is nothing to compile"
    lines = [did]
    for name, what in CACHES.items():
        if name in before:
            lines.append(f"{what}: {entries()[name] - before[name]} new entries in {os.environ[name]}")
        else:
            lines.append(
                f"{what}: set {name} to a folder that all machines share; now each has a cache of its own"
            )
    return "\n".join(lines)
