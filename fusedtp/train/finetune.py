"""`fusedtp finetune`: `fusedtp train --model` with defaults for a short run on a model that is trained already.

--model llama --tp 2 --steps 30 --batch 8 --length 128 --weight-decay 0 --sample 0 --name finetune --replace
--lr       5e-5 for all weights of a folder, else 2e-3
--warmup   a tenth of the steps
--out      the folder that `fusedtp checkpoints export` writes at the end
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from fusedtp.train import launch, runs
from fusedtp.train.checkpoint import CheckpointError
from fusedtp.train.config import TrainConfig, with_tokenizer
from fusedtp.train.options import (
    DataOptions,
    ForeignOptions,
    OptimOptions,
    ParallelOptions,
    RunOptions,
)
from fusedtp.train.world import torchrun_place


@dataclass(frozen=True)
class FinetuneConfig(TrainConfig):
    """Train a causal language model of transformers on text."""

    out: Path | None = None
    """Folder for the trained model (or its adapters), as save_pretrained writes it; default: only checkpoints."""


DEFAULT = FinetuneConfig(
    data=DataOptions(length=128, batch=8, val_batches=2),
    optim=OptimOptions(steps=30, weight_decay=0.0),
    parallel=ParallelOptions(tp=2, dp=1),
    run=RunOptions(name="finetune", verify_steps=5, sample=0),
    foreign=ForeignOptions(model="llama"),
)


def main(argv: list[str]) -> int:
    """Run the job, or one rank of it under torchrun; returns the exit code."""
    config = parse(argv)
    found = launch.folder_faults(config.out) if config.out is not None else []
    if found:
        launch.report(found, "finetune")
        return launch.WRONG_USAGE
    code = launch.start(config, argv, "finetune")
    if code or config.out is None or torchrun_place() is not None:
        return code
    try:
        return runs.export(runs.CheckpointsOptions("export", config.run.folder, config.out))
    except (CheckpointError, ValueError, OSError) as error:
        print(f"fusedtp finetune: error: {error}", file=sys.stderr)
        return launch.FAILED


def parse(argv: list[str]) -> FinetuneConfig:
    """A command line, with the defaults that depend on it."""
    first = _parse(argv, DEFAULT)
    trained = Path(first.foreign.model or "").is_dir() and not first.foreign.lora
    optim = dataclasses.replace(
        DEFAULT.optim, lr=5e-5 if trained else 2e-3, warmup=max(1, first.optim.steps // 10)
    )
    run = dataclasses.replace(DEFAULT.run, replace=not first.run.resume)
    return with_tokenizer(_parse(argv, dataclasses.replace(DEFAULT, optim=optim, run=run)))


def _parse(argv: list[str], default: FinetuneConfig) -> FinetuneConfig:
    return tyro.cli(
        tyro.conf.OmitArgPrefixes[FinetuneConfig], prog="fusedtp finetune", args=argv, default=default
    )
