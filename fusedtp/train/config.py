"""The configuration of a training run: the command line, config.json and the code all read it.

`faults(config, dp, tp)` returns what is wrong with it, the options' own faults and those that need several of them, all
messages at once, so that a user mends a command line in one go. Nothing here touches the disk or starts a process.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import tyro

from fusedtp.nn.heads import heads_split, sizes_that_split
from fusedtp.parallel import ExpertSplit
from fusedtp.train.options import (
    BlockOptions,
    CheckpointOptions,
    DataOptions,
    ForeignOptions,
    ModelOptions,
    OptimOptions,
    ParallelOptions,
    RunOptions,
    WatchOptions,
)
from fusedtp.train.stages import V_SHAPED, pipeline_faults, two_passes

CONFIG = "config.json"  # of a run's folder
RETIRED = ("reshard",)  # options that older runs have in it


@dataclass(frozen=True)
class TrainConfig:
    """Train a Transformer with fused tensor parallelism."""

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    run: RunOptions = field(default_factory=RunOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    foreign: ForeignOptions = field(default_factory=ForeignOptions)
    blocks: BlockOptions = field(default_factory=BlockOptions)
    watch: WatchOptions = field(default_factory=WatchOptions)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, ready for JSON. What one call asks of a run is no part of it: resume, step, replace."""
        once = dataclasses.replace(self.run, resume=False, step=None, replace=False)
        nested = dataclasses.asdict(dataclasses.replace(self, run=once))
        plain: dict[str, Any] = json.loads(json.dumps(nested, default=str))
        return plain

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> TrainConfig:
        """What to_dict made; options that it lacks have their defaults. Raises ValueError for unknown ones."""
        made = {}
        for part in dataclasses.fields(TrainConfig):
            kind: Any = part.default_factory
            values = dict(plain.get(part.name, {}))
            for name in RETIRED:
                values.pop(name, None)
            if unknown := values.keys() - {each.name for each in dataclasses.fields(kind)}:
                raise ValueError(f"unknown options of {part.name}: {', '.join(sorted(unknown))}")
            for name in ("runs", "tokenizer"):
                if values.get(name) is not None:
                    values[name] = Path(values[name])
            if "data" in values:
                values["data"] = tuple(map(Path, values["data"]))
            made[part.name] = kind(**values)
        return TrainConfig(**made)


def parse(argv: list[str]) -> TrainConfig:
    """Read a command line; prints help or what is unknown, and exits, as command-line programs do.

    With --resume, what is not given is as it was in the run of that name.
    """
    config = _parse(argv, TrainConfig())
    saved = config.run.folder / CONFIG
    if not config.run.resume or not saved.is_file():
        return config
    try:
        return _parse(argv, TrainConfig.from_dict(json.loads(saved.read_text())))
    except (ValueError, TypeError, AttributeError) as error:
        print(f"fusedtp train: error: {saved} is no configuration of a run: {error}", file=sys.stderr)
        sys.exit(2)


def _parse(argv: list[str], default: TrainConfig) -> TrainConfig:
    made = tyro.cli(tyro.conf.OmitArgPrefixes[TrainConfig], prog="fusedtp train", args=argv, default=default)
    return with_tokenizer(made)


C = TypeVar("C", bound=TrainConfig)


def with_tokenizer(config: C) -> C:
    """With the tokenizer of its model's folder, where it names none."""
    folder = Path(config.foreign.model or "")
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if config.data.tokenizer is not None or config.foreign.model is None:
        return config
    if not any((folder / file).exists() for file in files):
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=folder))


def layout(config: TrainConfig, ranks: int, local_ranks: int) -> tuple[int, int]:
    """(dp, tp) for `ranks` processes, `local_ranks` to a machine: tp stays inside a machine."""
    tp, dp = config.parallel.tp, config.parallel.dp
    pp = max(1, config.parallel.pp)
    ranks, local_ranks = ranks // pp, max(1, min(local_ranks, ranks // pp))
    if tp is None:
        tp = local_ranks if dp is None else max(1, ranks // max(1, dp))
    if dp is None:
        dp = max(1, ranks // max(1, tp))
    return dp, tp


def faults(config: TrainConfig, dp: int, tp: int) -> list[str]:
    """Everything wrong with a config laid out on dp x tp ranks; an empty list means that it can run."""
    model, data = config.model, config.data
    parts = (
        data,
        config.optim,
        config.parallel,
        config.run,
        config.checkpoint,
        config.foreign,
        config.blocks,
        config.watch,
    )
    found = model.faults() if config.foreign.model is None else []
    found += [fault for part in parts for fault in part.faults()]
    if config.foreign.model is None:
        found += own_faults(config, dp, tp)
    if dp % (copies := max(1, config.parallel.dp_replicate)):
        found.append(f"--dp-replicate {copies} does not divide --dp {dp}")
    if config.parallel.param_dtype not in ("fp32", config.run.dtype):
        found.append(
            f"--param-dtype {config.parallel.param_dtype} with --dtype {config.run.dtype}: parameters are gathered in "
            "fp32 or as they are computed with"
        )
    if min(dp, data.accumulate, data.batch) > 0 and data.batch % (dp * data.accumulate):
        found.append(
            f"--batch {data.batch} does not divide over {dp} data-parallel ranks "
            f"x {data.accumulate} microbatches"
        )
    return found


def own_faults(config: TrainConfig, dp: int, tp: int) -> list[str]:
    """What the library's own model cannot do on such a mesh."""
    model, found = config.model, []
    if min(tp, model.heads, model.kv_heads) > 0 and not heads_split(tp, model.heads, model.kv_heads):
        found.append(
            f"--tp {tp} with {model.heads} heads and {model.kv_heads} kv heads: tp must divide the heads, and "
            "divide the kv heads or be a multiple of them; "
            f"{sizes_that_split(model.heads, model.kv_heads)} would work"
        )
    found += stages_faults(config, dp, model.layers, model.tie_embeddings)
    if config.parallel.copies(dp) > 1 and (config.parallel.ep or tp) > tp:
        found.append(
            "--dp-replicate or --data-parallel ddp with --ep beyond --tp: experts are data parallel over fewer ranks "
            "already"
        )
    if model.experts > 0 and min(dp, tp) > 0:
        found += sharing_faults(config, dp, tp)
    return found


def stages_faults(config: TrainConfig, dp: int, layers: int, tied: bool) -> list[str]:
    """Whether a model of so many layers, with tied embeddings or without, can be run as a pipeline as asked."""
    parallel = config.parallel
    if parallel.pp < 2 or parallel.virtual_stages < 1 or config.data.accumulate < 1 or layers < 1:
        return []
    of = "--layers {}" if config.foreign.model is None else "the {} layers of --model"
    found = pipeline_faults(
        parallel.schedule, parallel.pp, parallel.virtual_stages, layers, config.data.accumulate, of
    )
    if two_passes(parallel.schedule, parallel.pp) and config.blocks.compile:
        found.append(
            f"--schedule {parallel.schedule} with --compile: compiled blocks have one backward pass, not two "
            "(pytorch issue 161904)"
        )
    if dp > 1 and tied and parallel.schedule in V_SHAPED:
        how = "--tie-embeddings" if config.foreign.model is None else "tied embeddings"
        found.append(
            f"--schedule {parallel.schedule} with --dp {dp} and {how}: two FSDP units share a weight"
        )
    return found


def sharing_faults(config: TrainConfig, dp: int, tp: int) -> list[str]:
    """Whether the ranks can share the experts as asked."""
    model, parallel = config.model, config.parallel
    ep = parallel.ep or tp
    if ep < 1 or parallel.expert_tp < 1:
        return []  # ParallelOptions says so
    if ep % tp or (dp * tp) % ep:
        return [f"--ep {ep} is no multiple of --tp {tp} that divides the {dp * tp} ranks"]
    if model.expert_width < parallel.expert_tp > 1:
        return [
            f"--expert-width {model.expert_width} does not divide among --expert-tp {parallel.expert_tp} ranks"
        ]
    try:
        ExpertSplit(tensor_parallel=parallel.expert_tp).shares(model.experts, ep)
    except ValueError as error:
        return [f"--experts {model.experts} with --ep {ep} --expert-tp {parallel.expert_tp}: {error}"]
    return []
