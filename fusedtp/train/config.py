"""The configuration of a training run: the command line, config.json and the code all read it.

Options are grouped by what they are about; each group lists its own faults. `faults(config, dp, tp)` adds those that
need several of them, all messages at once, so that a user mends a command line in one go. Nothing here touches the disk
or starts a process.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
import tyro

from fusedtp.nn.heads import heads_split, sizes_that_split
from fusedtp.parallel import ExpertSplit
from fusedtp.train.checkpoint import CheckpointError, about, path_of, steps_in
from fusedtp.train.data import Ids, Tokenizer, tokenizer_of
from fusedtp.train.stages import pipeline_faults, two_passes

# -- options, by what they are about -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelOptions:
    """Shape of the Llama-style model."""

    width: int = 256
    """Features of a token between the layers."""
    layers: int = 4
    """Transformer blocks."""
    heads: int = 8
    """Query heads of a block."""
    kv_heads: int = 4
    """Key and value heads of a block; each serves heads / kv_heads query heads."""
    mlp_width: int = 704
    """Features inside the SwiGLU MLP; need not divide by tp."""
    tie_embeddings: bool = False
    """Use the embedding as the output projection too."""
    qk_norm: bool = False
    """Normalise queries and keys per head."""
    dropout: float = 0.0
    """Probability of dropping a feature of the embedding and of each residual branch."""
    experts: int = 0
    """Experts in the place of each layer's MLP, split over the tensor-parallel ranks; 0: none."""
    top_k: int = 2
    """Experts that a token goes to."""
    expert_width: int = 352
    """Features inside each expert."""
    shared_width: int = 0
    """Features inside an expert that all tokens go to; 0: none."""
    dense_layers: int = 0
    """First layers that keep their MLP."""
    balance: float = 0.01
    """Coefficient of the loss that evens out the experts' load."""
    balance_bias: float = 0.0
    """Or without a loss: what an expert's bias changes by in a step in which it had more or less than its share."""
    capacity: float | None = None
    """Rows an expert takes, as a multiple of an even share; further ones are dropped. Default: all."""
    recv_capacity: float | None = None
    """Rows a rank's experts take at a time, as a multiple of an even share; further ones come in rounds after the
    first. Default: all at once, or on GPUs two shares where any routing would need much more."""

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def faults(self) -> list[str]:
        found = _not_positive(self, "width", "layers", "heads", "kv_heads", "mlp_width")
        if found:
            return found
        if self.width % self.heads:
            found.append(f"--width {self.width} does not divide into --heads {self.heads}")
        elif self.head_dim % 2:
            found.append(
                f"--width {self.width} with --heads {self.heads} gives heads of {self.head_dim} "
                "features; rotary positions need an even number"
            )
        if self.heads % self.kv_heads:
            found.append(f"--kv-heads {self.kv_heads} does not divide --heads {self.heads}")
        if not 0 <= self.dropout < 1:
            found.append(f"--dropout {self.dropout} is not in [0, 1)")
        return found + self._expert_faults()

    def _expert_faults(self) -> list[str]:
        found = [
            f"--{name.replace('_', '-')} {getattr(self, name)} is negative"
            for name in ("experts", "shared_width", "dense_layers", "balance", "balance_bias")
            if not getattr(self, name) >= 0
        ]
        if found or not self.experts:
            return found
        found = _not_positive(self, "top_k", "expert_width")
        if self.capacity is not None and not self.capacity > 0:
            found.append(f"--capacity {self.capacity} is not positive")
        if self.recv_capacity is not None and not self.recv_capacity > 0:
            found.append(f"--recv-capacity {self.recv_capacity} is not positive")
        if self.top_k > self.experts:
            found.append(f"--top-k {self.top_k} of only {self.experts} --experts")
        if self.dense_layers >= self.layers:
            found.append(f"--dense-layers {self.dense_layers} of {self.layers} --layers leaves none for experts")
        return found


@dataclass(frozen=True)
class ForeignOptions:
    """A model of transformers in the place of the library's own."""

    model: str | None = None
    """Folder of a checkpoint; or a config.json, or a model type such as llama, which starts small: random weights."""
    lora: int = 0
    """With --model: train adapters (PEFT's LoRA) of this rank on all linear layers instead of the weights; 0: none."""

    def faults(self) -> list[str]:
        if self.lora < 0:
            return [f"--lora {self.lora} is negative"]
        return ["--lora needs a --model"] if self.lora and self.model is None else []


@dataclass(frozen=True)
class DataOptions:
    """What is trained on, and how much of it in a step."""

    data: tuple[Path, ...] = ()
    """Text files, token ids (.npy) or folders; default: the source of the Python standard library of this machine."""
    tokenizer: Path | None = None
    """Folder of a tokenizer of transformers; default: that of --model, or else a token is a byte."""
    vocab_size: int | None = None
    """In the place of a tokenizer: --data is token ids (.npy) below this number, and no text."""
    documents: Literal["joined", "separate"] = "joined"
    """separate: attention, positions and labels of a sequence end where a document does."""
    length: int = 256
    """Tokens of a sequence."""
    batch: int = 16
    """Sequences of a step, over all ranks and accumulated microbatches."""
    accumulate: Annotated[int, tyro.conf.arg(aliases=("--microbatches",))] = 1
    """Microbatches whose gradients are summed before a step; with --pp, those that go through the pipeline."""
    val_batches: int = 12
    """Batches of held-out text that measure the validation loss."""

    @property
    def vocabulary(self) -> Tokenizer:
        """What the ids of these options stand for. Raises ValueError where --tokenizer cannot be read."""
        return tokenizer_of(self.tokenizer) if self.vocab_size is None else Ids(self.vocab_size)

    def faults(self) -> list[str]:
        found = _not_positive(self, "length", "batch", "accumulate", "val_batches")
        if self.vocab_size is not None:
            found += self._vocab_size_faults(self.vocab_size)
        try:
            tokenizer_of(self.tokenizer)
        except (ValueError, ModuleNotFoundError) as error:
            found.append(str(error))
        return found

    def _vocab_size_faults(self, size: int) -> list[str]:
        if not 0 < size <= 1 << 31:
            return [f"--vocab-size {size} is not from 1 to {1 << 31}"]
        if self.tokenizer is not None:
            return [f"--vocab-size {size} with --tokenizer {self.tokenizer}, which has a vocabulary of its own"]
        return [] if self.data else ["--vocab-size takes token ids (.npy) only: give some with --data"]


@dataclass(frozen=True)
class OptimOptions:
    """AdamW with linear warm-up, a decay and clipping of the gradient's norm."""

    steps: int = 80
    """Optimizer steps."""
    lr: float = 3e-3
    """Highest learning rate, reached after the warm-up."""
    warmup: int = 30
    """Steps over which the learning rate rises linearly."""
    decay: Literal["cosine", "linear", "wsd"] = "cosine"
    """How it falls after that; wsd: it stays, and falls linearly at the end."""
    decay_share: float = 0.2
    """wsd: share of all steps over which it falls."""
    min_lr: float = 0.1
    """Learning rate of the last step, as a share of the highest."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; vectors (norm weights, biases) have none."""
    beta1: float = 0.9
    """Decay of AdamW's running mean of gradients."""
    beta2: float = 0.95
    """Decay of AdamW's running mean of squared gradients."""
    adamw: Literal["fused", "foreach"] = "fused"
    """torch's implementation of the step: one kernel, or one operation after the other over lists of parameters."""
    clip: float = 1.0
    """Largest norm of the whole gradient; larger ones are scaled down to it."""
    clip_norm: Literal["2", "inf"] = "2"
    """Which norm: the square root of the sum of squares, or the largest absolute value."""
    batch_rule: Literal["none", "linear", "sqrt"] = "none"
    """What the learning rate is multiplied by, for a --batch of b times --base-batch: 1, b, or the square root of b."""
    base_batch: int = 16
    """The --batch that --lr is meant for."""
    loss_scale: float = 65536.0
    """fp16: what the loss is multiplied by at first; halved where gradients overflow, and that step is left out."""
    loss_scale_window: int = 2000
    """fp16: steps without overflow after which it is doubled."""

    def faults(self) -> list[str]:
        found = _not_positive(self, "steps", "lr", "clip", "base_batch", "loss_scale", "loss_scale_window")
        if self.warmup < 0:
            found.append(f"--warmup {self.warmup} is negative")
        if not 0 <= self.min_lr <= 1:
            found.append(f"--min-lr {self.min_lr} is not in [0, 1]: it is a share of --lr")
        if not 0 < self.decay_share <= 1:
            found.append(f"--decay-share {self.decay_share} is not in (0, 1]: it is a share of --steps")
        if not self.weight_decay >= 0:
            found.append(f"--weight-decay {self.weight_decay} is negative")
        found += [
            f"--{name} {value} is not in [0, 1)"
            for name, value in (("beta1", self.beta1), ("beta2", self.beta2))
            if not 0 <= value < 1
        ]
        return found


@dataclass(frozen=True)
class BlockOptions:
    """How the layers run, and what they keep for backward."""

    recompute: Literal["none", "selective", "full"] = "none"
    """What backward computes again instead of keeping it: all but matmuls, attention and communication, or whole layers
    from their inputs."""
    compile: bool = False
    """Compile each layer with torch.compile."""
    compile_backend: str = "inductor"
    """torch.compile's backend."""
    memory_budget: float = 1.0
    """--compile: the share of activations to keep, from 0, layers' inputs alone, to 1; the compiler chooses which."""

    def faults(self) -> list[str]:
        found = []
        if not 0 <= self.memory_budget <= 1:
            found.append(f"--memory-budget {self.memory_budget} is not in [0, 1]")
        elif self.memory_budget < 1 and not self.compile:
            found.append(f"--memory-budget {self.memory_budget} needs --compile")
        if self.compile and self.recompute == "selective":
            found.append("--recompute selective with --compile: what is compiled is chosen from by --memory-budget")
        if self.compile and self.compile_backend not in (known := torch.compiler.list_backends(())):
            found.append(f"--compile-backend {self.compile_backend} is none of {', '.join(known)}")
        return found


@dataclass(frozen=True)
class ParallelOptions:
    """How ranks share the model and the batch: pipeline x data parallel x tensor parallel on one device mesh."""

    pp: int = 1
    """Pipeline ranks; each holds some of the layers. --accumulate is the number of microbatches."""
    schedule: Literal[
        "gpipe",
        "1f1b",
        "looped_bfs",
        "interleaved_1f1b",
        "interleaved_zero_bubble",
        "zbv_zero_bubble",
        "dualpipev",
    ] = "1f1b"
    """In which order stages take microbatches forward and backward."""
    virtual_stages: int = 2
    """Stages of a rank in the looped schedules: looped_bfs, interleaved_1f1b, interleaved_zero_bubble."""
    record_step: int = 3
    """With --pp: the step whose forward and backward passes are timed, one by one, for pipeline.json; 0: none."""

    tp: int | None = None
    """Tensor-parallel ranks; default: all ranks of a machine (2 on CPU, every GPU otherwise) / dp."""
    dp: int | None = None
    """Data-parallel ranks, sharded by FSDP2; default: what tp leaves of all ranks."""
    dp_replicate: int = 1
    """Of those, groups that hold the same shards (HSDP)."""
    dp_shard: int | None = None
    """In place of --dp: ranks of such a group, so that dp is dp-replicate x dp-shard."""
    data_parallel: Literal["zero3", "zero2", "zero1", "ddp"] | None = None
    """What data-parallel ranks share out: optimizer state (zero1), and gradients (zero2), and parameters (zero3), or
    nothing (ddp). Default: zero3; zero1 with --pp, whose schedules keep parameters and gradients whole in a step."""
    param_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype that sharded parameters are gathered in; bf16 halves the message, and gradients then come in bf16."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype that gradients are summed over data-parallel ranks in."""
    ep: int | None = None
    """Ranks that share the experts: the tensor-parallel ones of so many / tp data-parallel ranks; default: tp."""
    expert_tp: int = 1
    """Of those, ranks that share each expert."""
    sequence_parallel: bool = True
    """Shard the tokens between the sharded matmuls too."""
    engine: Literal["auto", "collective", "chunked", "triton", "multimem"] = "auto"
    """Implementation of the fused operations."""
    elastic: bool = False
    """Under a torchrun of few to many nodes: dp follows the ranks that are there, --accumulate makes up for those that
    are not, and the run goes on from its newest good checkpoint by itself."""

    def faults(self) -> list[str]:
        return [
            f"--{name} {value} is not positive"
            for name, value in (
                ("pp", self.pp),
                ("virtual-stages", self.virtual_stages),
                ("dp-replicate", self.dp_replicate),
                ("tp", self.tp),
                ("dp", self.dp),
                ("ep", self.ep),
                ("expert-tp", self.expert_tp),
            )
            if value is not None and value < 1
        ] + self._sharing_faults()

    @property
    def kind(self) -> Literal["zero3", "zero2", "zero1", "ddp"]:
        """data_parallel, or its default."""
        return self.data_parallel or ("zero1" if self.pp > 1 else "zero3")

    def copies(self, dp: int) -> int:
        """Data-parallel ranks that hold the same shards, of `dp`."""
        return dp if self.kind == "ddp" else self.dp_replicate

    def _sharing_faults(self) -> list[str]:
        found = [f"--record-step {self.record_step} is negative"] if self.record_step < 0 else []
        if self.pp > 1 and self.kind in ("zero2", "zero3"):
            found.append(
                f"--data-parallel {self.kind} with --pp {self.pp}: schedules keep parameters and gradients whole in a "
                "step; use zero1 or ddp"
            )
        if self.kind == "ddp" and self.dp_replicate > 1:
            found.append(f"--dp-replicate {self.dp_replicate} with --data-parallel ddp, which shards nothing")
        return found + self._shard_faults()

    def _shard_faults(self) -> list[str]:
        copies, shards = self.dp_replicate, self.dp_shard
        if shards is None:
            return []
        if shards < 1:
            return [f"--dp-shard {shards} is not positive"]
        if self.dp != copies * shards:
            return [f"--dp {self.dp} is not --dp-replicate {copies} x --dp-shard {shards}"]
        if self.kind == "ddp" and shards > 1:
            return [f"--dp-shard {shards} with --data-parallel ddp, which shards nothing"]
        return []


@dataclass(frozen=True)
class RunOptions:
    """The run itself: where it writes, what it proves, and what it draws."""

    name: str = "main"
    """Name of the run; its results replace those of an earlier run, its checkpoints only with --replace."""
    runs: Path = Path("runs")
    """Folder of all runs and of the token cache."""
    seed: int = 0
    """Seed of parameters, batches and the sample."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of activations and matmuls; parameters and optimizer stay fp32. fp16 scales the loss."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes the GPUs if there are any."""
    determinism: bool = False
    """Two runs on the same machines give the same losses, bit for bit; slower. See docs/train.md."""
    verify: bool = False
    """Train the first steps again in one plain process and compare; exit 1 if they differ."""
    verify_steps: int = 20
    """Steps that --verify compares."""
    val_every: int = 40
    """Steps between validations; the last step always validates."""
    sample: int = 200
    """Tokens that the trained model writes at the end."""
    resume: bool = False
    """Go on from the newest good checkpoint of the run of this name, with its options; those given here come first."""
    step: int | None = None
    """With --resume: from the checkpoint of this step; newer ones are set aside."""
    replace: bool = False
    """Remove the checkpoints of an earlier run of this name."""
    max_restarts: int = 0
    """Where this command starts the ranks: how often it starts them again, from the newest checkpoint, if one dies."""

    def faults(self) -> list[str]:
        found = _not_positive(self, "verify_steps", "val_every")
        if not self.name or self.name != Path(self.name).name or self.name.startswith("."):
            found.append(f"--name {self.name!r} is no plain folder name")
        if not 0 <= self.seed < 2**63:
            found.append(f"--seed {self.seed} is not in [0, 2**63)")
        if self.sample < 0:
            found.append(f"--sample {self.sample} is negative")
        if self.max_restarts < 0:
            found.append(f"--max-restarts {self.max_restarts} is negative")
        if self.resume and self.replace:
            found.append("--resume goes on with a run, --replace removes it: give one of them")
        if self.step is not None and not self.resume:
            found.append("--step says which checkpoint to go on from: it needs --resume")
        return found

    @property
    def folder(self) -> Path:
        return self.runs / self.name


@dataclass(frozen=True)
class WatchOptions:
    """What a run notices about itself."""

    timeout: float = 600.0
    """Seconds that a rank waits for others in a step; then the run ends and the rank that did not come is named."""
    watch_every: int = 10
    """Steps between two comparisons of all ranks' times."""
    on_nan: Literal["stop", "skip"] = "stop"
    """A step whose loss or gradients are not finite ends the run, or is left out on all ranks. Where it began is named
    in either case. Of fp16's gradients that overflow, the loss scale is the judge."""

    def faults(self) -> list[str]:
        return _not_positive(self, "timeout", "watch_every")


@dataclass(frozen=True)
class CheckpointOptions:
    """When the state of a run is saved, and what stays of it."""

    save: bool = True
    """Save checkpoints; without them a run cannot be resumed."""
    save_every: int | None = None
    """Steps between two of them; default: as many as lose least time, by what a save takes and --failure-hours."""
    failure_hours: float = 24.0
    """Mean time between failures of the whole job."""
    keep_last: int = 2
    """How many of the newest stay."""
    keep_every: int | None = None
    """Of the older ones, those whose step divides by this stay too."""
    async_save: bool = True
    """Write while training goes on."""
    on_save_error: Literal["continue", "stop"] = "continue"
    """What a save that fails does to the run; the last one, when training is done, fails the run in any case."""

    def faults(self) -> list[str]:
        found = _not_positive(self, "failure_hours", "keep_last")
        return found + [
            f"--{name.replace('_', '-')} {value} is not positive"
            for name, value in (("save_every", self.save_every), ("keep_every", self.keep_every))
            if value is not None and value < 1
        ]


def _not_positive(options: object, *names: str) -> list[str]:
    return [
        f"--{name.replace('_', '-')} {getattr(options, name)} is not "
        + ("finite" if getattr(options, name) == math.inf else "positive")
        for name in names
        if not 0 < getattr(options, name) < math.inf
    ]


# -- the whole ---------------------------------------------------------------------------------------------------------

CONFIG, CHECKPOINTS = "config.json", "checkpoints"  # of a run's folder
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


def parse(argv: list[str], command: str = "train", description: str | None = None) -> TrainConfig:
    """Read a command line; prints help or what is unknown, and exits, as command-line programs do.

    With --resume, what is not given is as it was in the run of that name; see saved.
    """
    config = _parse(argv, TrainConfig(), command, description)
    before = resumed(config)
    return config if before is None else _parse(argv, before, command, description)


def resumed(config: TrainConfig) -> TrainConfig | None:
    """The options of the run that this one goes on with; None where there are none to be read."""
    before = saved(config.run.folder)[0] if config.run.resume else None
    if before is None:
        return None
    run = dataclasses.replace(before.run, name=config.run.name, runs=config.run.runs)  # the folder may be a copy
    return dataclasses.replace(before, run=run)


def saved(folder: Path) -> tuple[TrainConfig | None, str]:
    """The configuration that a run's folder holds, and why its config.json cannot be read.

    Then that of the newest checkpoint stands in for it, where one can be read.
    """
    path = folder / CONFIG
    if not path.is_file():
        return None, ""
    try:
        return _sound(json.loads(path.read_text())), ""
    except (OSError, ValueError, TypeError, AttributeError) as error:
        why = f"{path} is no configuration of a run: {error}"
    for step in reversed(steps_in(folder / CHECKPOINTS)):
        try:
            found = _sound(about(path_of(folder / CHECKPOINTS, step))["config"])
        except (CheckpointError, KeyError, ValueError, TypeError, AttributeError):
            continue
        return found, f"{why}; its options are taken from the checkpoint of step {step}"
    return None, why


def saved_faults(folder: Path) -> list[str]:
    """Why no configuration of a run's folder can be read."""
    config, why = saved(folder)
    return [why] if config is None and why else []


def _sound(plain: Mapping[str, Any]) -> TrainConfig:
    config = TrainConfig.from_dict(plain)
    faults(config, 1, 1)  # which read every value
    return config


def _parse(argv: list[str], default: TrainConfig, command: str, description: str | None) -> TrainConfig:
    made = tyro.cli(
        tyro.conf.OmitArgPrefixes[TrainConfig], prog=f"fusedtp {command}", description=description, args=argv,
        default=default,
    )  # fmt: skip
    return with_tokenizer(with_dp(made, argv))


C = TypeVar("C", bound=TrainConfig)


def with_dp(config: C, argv: list[str]) -> C:
    """With dp in place of dp_shard, which stays only where something is wrong with it, for `faults` to say."""
    parallel = config.parallel
    if parallel.dp_shard is None:
        return config
    folded = dataclasses.replace(parallel, dp=parallel.dp_replicate * parallel.dp_shard)
    if any(word.split("=")[0] == "--dp" for word in argv):
        folded = dataclasses.replace(folded, dp=parallel.dp)
    if not folded._shard_faults():
        folded = dataclasses.replace(folded, dp_shard=None)
    return dataclasses.replace(config, parallel=folded)


def with_tokenizer(config: C) -> C:
    """With the tokenizer of its model's folder, where it names none and its ids are not said otherwise."""
    folder = Path(config.foreign.model or "")
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if config.foreign.model is None or (config.data.tokenizer, config.data.vocab_size) != (None, None):
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
    if config.run.determinism and config.parallel.engine == "multimem":
        found.append("--determinism with --engine multimem: the order in which a switch sums is its own")
    if not config.checkpoint.save and not config.run.resume:  # which has options of a run that saved
        asked, plain = config.checkpoint, CheckpointOptions()
        found += [
            f"--{name.replace('_', '-')} {getattr(asked, name)} with --no-save: nothing is saved"
            for name in ("save_every", "keep_last", "keep_every")
            if getattr(asked, name) != getattr(plain, name)
        ]
    if dp % (copies := max(1, config.parallel.dp_replicate)):
        found.append(f"--dp-replicate {copies} does not divide --dp {dp}")
    if config.parallel.param_dtype not in ("fp32", config.run.dtype):
        found.append(
            f"--param-dtype {config.parallel.param_dtype} with --dtype {config.run.dtype}: parameters are gathered in "
            "fp32 or as they are computed with"
        )
    if min(dp, data.accumulate, data.batch) > 0 and data.batch % (dp * data.accumulate):
        found.append(
            f"--batch {data.batch} does not divide over {dp} data-parallel ranks x {data.accumulate} microbatches"
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
    found += stages_faults(config, model.layers)
    if model.experts > 0 and min(dp, tp) > 0:
        found += sharing_faults(config, dp, tp)
    if not model.experts:
        shared = (("ep", config.parallel.ep, None), ("expert-tp", config.parallel.expert_tp, 1))
        found += [f"--{name} {value} without --experts" for name, value, none in shared if value != none]
    return found


def stages_faults(config: TrainConfig, layers: int) -> list[str]:
    """Whether a model of so many layers can be run as a pipeline as asked."""
    parallel = config.parallel
    if parallel.pp < 2 or parallel.virtual_stages < 1 or config.data.accumulate < 1 or layers < 1:
        return []
    of = "--layers {}" if config.foreign.model is None else "the {} layers of --model"
    found = pipeline_faults(parallel.schedule, parallel.pp, parallel.virtual_stages, layers, config.data.accumulate, of)
    if two_passes(parallel.schedule, parallel.pp) and config.blocks.compile:
        found.append(
            f"--schedule {parallel.schedule} with --compile: compiled blocks have one backward pass, not two "
            "(pytorch issue 161904)"
        )
    return found


def sharing_faults(config: TrainConfig, dp: int, tp: int) -> list[str]:
    """Whether the ranks can share the experts as asked."""
    model, parallel = config.model, config.parallel
    ep = parallel.ep or tp
    if ep < 1 or parallel.expert_tp < 1:
        return []  # ParallelOptions says so
    if parallel.copies(dp) > 1 and ep > tp:
        return [
            "--dp-replicate or --data-parallel ddp with --ep beyond --tp: experts are data parallel over fewer ranks "
            "already"
        ]
    if ep % tp or (dp * tp) % ep:
        return [f"--ep {ep} is no multiple of --tp {tp} that divides the {dp * tp} ranks"]
    if model.expert_width < parallel.expert_tp > 1:
        return [f"--expert-width {model.expert_width} does not divide among --expert-tp {parallel.expert_tp} ranks"]
    try:
        ExpertSplit(tensor_parallel=parallel.expert_tp).shares(model.experts, ep)
    except ValueError as error:
        return [f"--experts {model.experts} with --ep {ep} --expert-tp {parallel.expert_tp}: {error}"]
    return []
