"""The configuration of a training run, shared by the command line, config.json and the code.

Options are grouped by topic, and each group validates its own options. `faults(config, dp, tp)` adds the checks that
span groups. It returns all messages together, so that a user can fix a command line in one go. Validation writes no
files and starts no processes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import tyro

from fusedtp.nn.heads import heads_split, sizes_that_split
from fusedtp.parallel import ExpertSplit
from fusedtp.train.checkpoint import ABOUT, path_of, steps_in
from fusedtp.train.data import Ids, Tokenizer, tokenizer_of
from fusedtp.train.stages import pipeline_faults, two_passes

# -- options, by topic -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelOptions:
    """Shape of the Llama-style model."""

    width: int = 256
    """Hidden size of the residual stream."""
    layers: int = 4
    """Number of Transformer blocks."""
    heads: int = 8
    """Query heads per block."""
    kv_heads: int = 4
    """Key and value heads per block; each serves heads / kv_heads query heads."""
    mlp_width: int = 704
    """Intermediate size of the SwiGLU MLP; it need not be divisible by tp."""
    tie_embeddings: bool = False
    """Share the embedding's weight with the output projection."""
    qk_norm: bool = False
    """Normalise queries and keys per head."""
    dropout: float = 0.0
    """Probability of dropping a feature of the embedding and of each residual branch."""
    experts: int = 0
    """Experts that replace each layer's MLP, split over the tensor-parallel ranks; 0: none."""
    top_k: int = 2
    """Experts that each token is routed to."""
    expert_width: int = 352
    """Intermediate size of each expert."""
    shared_width: int = 0
    """Intermediate size of a shared expert that all tokens go through; 0: none."""
    dense_layers: int = 0
    """Number of first layers that keep a dense MLP."""
    balance: float = 0.01
    """Coefficient of the load-balancing loss."""
    balance_bias: float = 0.0
    """Balance without a loss: change of an expert's router bias after a step with more or less than its even share."""
    capacity: float | None = None
    """Rows that an expert accepts, as a multiple of an even share; rows beyond that are dropped. Default: no limit."""
    recv_capacity: float | None = None
    """Rows that a rank's experts receive per round, as a multiple of an even share; more rows need more rounds.
    Default: all rows in one round, or on GPUs two shares if the worst-case routing would need much more."""

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
            found.append(f"--top-k {self.top_k} is larger than --experts {self.experts}")
        if self.dense_layers >= self.layers:
            found.append(f"--dense-layers {self.dense_layers} with --layers {self.layers} leaves no layer for experts")
        return found


@dataclass(frozen=True)
class ForeignOptions:
    """Train a model of Hugging Face transformers instead of the library's own."""

    model: str | None = None
    """Checkpoint folder; or a config.json or a model type such as llama (then a small one), with random weights."""
    lora: int = 0
    """With --model: train LoRA adapters (PEFT) of this rank on all linear layers instead of the weights; 0: none."""

    def faults(self) -> list[str]:
        if self.lora < 0:
            return [f"--lora {self.lora} is negative"]
        return ["--lora needs a --model"] if self.lora and self.model is None else []


@dataclass(frozen=True)
class DataOptions:
    """The training data, and how much of it a step takes."""

    data: tuple[Path, ...] = ()
    """Text files, token ids (.npy) or folders; default: the source code of this machine's Python standard library."""
    tokenizer: Path | None = None
    """Folder of a transformers tokenizer; default: the one in the folder of --model, otherwise each byte is a token."""
    vocab_size: int | None = None
    """Replaces a tokenizer: --data holds token ids (.npy) below this number and no text."""
    documents: Literal["joined", "separate"] = "joined"
    """separate: attention, positions and labels stop at document boundaries."""
    length: int = 256
    """Sequence length in tokens."""
    batch: int = 16
    """Global batch size: sequences per step, over all ranks and accumulated microbatches."""
    accumulate: int = 1
    """Microbatches whose gradients are accumulated per optimizer step; with --pp, the pipeline's microbatches."""
    val_batches: int = 12
    """Batches of held-out text used for the validation loss."""

    @property
    def vocabulary(self) -> Tokenizer:
        """The tokenizer of these options. Raises ValueError if --tokenizer cannot be read."""
        return tokenizer_of(self.tokenizer) if self.vocab_size is None else Ids(self.vocab_size)

    @property
    def unit(self) -> str:
        """What a token is: a byte, or a token of a tokenizer or of --vocab-size."""
        return "byte" if self.tokenizer is None and self.vocab_size is None else "token"

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
        return [] if self.data else ["--vocab-size works with token ids (.npy) only: pass them with --data"]


@dataclass(frozen=True)
class OptimOptions:
    """AdamW with linear warm-up, learning rate decay and gradient clipping."""

    steps: int = 80
    """Number of optimizer steps."""
    lr: float = 3e-3
    """Peak learning rate, reached after the warm-up."""
    warmup: int = 30
    """Steps over which the learning rate rises linearly."""
    decay: Literal["cosine", "linear", "wsd"] = "cosine"
    """Learning rate decay after the warm-up; wsd: constant, then linear at the end (warmup-stable-decay)."""
    decay_share: float = 0.2
    """wsd: share of all steps over which the learning rate decays."""
    min_lr: float = 0.1
    """Learning rate of the last step, as a share of the peak."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; vectors (norm weights, biases) have none."""
    beta1: float = 0.9
    """Decay of AdamW's running mean of gradients."""
    beta2: float = 0.95
    """Decay of AdamW's running mean of squared gradients."""
    adamw: Literal["fused", "foreach"] = "fused"
    """torch's implementation of the optimizer step: one fused kernel, or a sequence of foreach operations."""
    clip: float = 1.0
    """Maximum norm of the whole gradient; a larger gradient is scaled down to it."""
    clip_norm: Literal["2", "inf"] = "2"
    """Norm used for clipping: 2 is the Euclidean norm, inf the largest absolute value."""
    batch_rule: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate scales with b = --batch / --base-batch: multiplied by 1, b, or the square root of b."""
    base_batch: int = 16
    """The --batch that --lr was tuned for."""
    loss_scale: float = 65536.0
    """fp16: initial loss scale. It is halved when gradients overflow, and that step is skipped."""
    loss_scale_window: int = 2000
    """fp16: number of steps without overflow after which the loss scale doubles."""

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
    """How the layers run, and which activations they save for backward."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing. selective: recompute everything except matmuls, attention and communication.
    full: recompute whole layers from their inputs."""
    compile: bool = False
    """Compile each layer with torch.compile."""
    compile_backend: str = "inductor"
    """Backend of torch.compile."""
    memory_budget: float = 1.0
    """With --compile: share of activations to save, from 0 (only the layers' inputs) to 1; the compiler picks which."""

    def faults(self) -> list[str]:
        found = []
        if not 0 <= self.memory_budget <= 1:
            found.append(f"--memory-budget {self.memory_budget} is not in [0, 1]")
        elif self.memory_budget < 1 and not self.compile:
            found.append(f"--memory-budget {self.memory_budget} needs --compile")
        if self.compile and self.recompute == "selective":
            found.append("--recompute selective with --compile: compiled layers use --memory-budget instead")
        if self.compile and self.compile_backend not in (known := torch.compiler.list_backends(())):
            found.append(f"--compile-backend {self.compile_backend} is not one of {', '.join(known)}")
        return found


@dataclass(frozen=True)
class ParallelOptions:
    """How ranks split the model and the batch: pipeline x data parallel x tensor parallel on one device mesh."""

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
    """Pipeline schedule: the order in which stages run forward and backward on the microbatches."""
    virtual_stages: int = 2
    """Stages per rank in the looped schedules: looped_bfs, interleaved_1f1b, interleaved_zero_bubble."""
    record_step: int = 3
    """With --pp: time each forward and backward pass of this step, for pipeline.json; 0: none."""

    tp: int | None = None
    """Tensor-parallel ranks; default: (ranks of a machine: 2 on CPU, else one per GPU) / dp."""
    dp: int | None = None
    """Data-parallel ranks, sharded by FSDP2; default: all ranks / (pp x tp)."""
    dp_replicate: int = 1
    """HSDP: number of replicas, that is groups of data-parallel ranks that each hold all shards."""
    data_parallel: Literal["zero3", "zero2", "zero1", "ddp"] | None = None
    """Sharded over data-parallel ranks: zero1: optimizer state; zero2: gradients too; zero3: parameters too; ddp: none.
    Default: zero3; with --pp zero1, since schedules keep parameters and gradients whole in a step."""
    param_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype in which sharded parameters are all-gathered; bf16 halves the traffic, and gradients are then bf16 too."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which gradients are reduced over data-parallel ranks."""
    ep: int | None = None
    """Expert-parallel ranks: the tensor-parallel ranks of ep / tp data-parallel ranks; default: tp."""
    expert_tp: int = 1
    """Ranks, out of ep, that each single expert is sharded over."""
    sequence_parallel: bool = True
    """Also shard the tokens in the regions between the sharded matmuls."""
    engine: Literal["auto", "collective", "chunked", "triton", "multimem"] = "auto"
    """Implementation of the fused operations."""
    elastic: bool = False
    """For torchrun with --nnodes MIN:MAX: dp adapts to the available ranks, --accumulate makes up for missing ranks.
    The run resumes by itself from its newest good checkpoint."""

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
        """data_parallel, or its default if not set."""
        return self.data_parallel or ("zero1" if self.pp > 1 else "zero3")

    def copies(self, dp: int) -> int:
        """Number of replicas of each shard among `dp` data-parallel ranks."""
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
        return found


@dataclass(frozen=True)
class RunOptions:
    """The run itself: output folder, seed, precision, verification and resuming."""

    name: str = "main"
    """Name of the run. Results of an earlier run of this name are overwritten; its checkpoints only with --replace."""
    runs: Path = Path("runs")
    """Folder that holds all runs and the token cache."""
    seed: int = 0
    """Seed for the parameters, the order of batches and the sampled text."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype of activations and matmuls; parameters and optimizer state stay fp32. fp16 uses loss scaling."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto uses the GPUs if there are any."""
    determinism: bool = False
    """Make runs on the same machines bitwise reproducible; slower. See docs/train.md."""
    verify: bool = False
    """Repeat the first steps in a single plain process and compare the results; exit 1 if they differ."""
    verify_steps: int = 20
    """Steps that --verify compares."""
    val_every: int = 40
    """Steps between validations; the last step always validates."""
    sample: int = 200
    """Number of tokens to generate from the trained model at the end."""
    resume: bool = False
    """Resume the run of this name from its newest good checkpoint, with its options; those given here override them."""
    step: int | None = None
    """With --resume: start from the checkpoint of this step; newer ones are set aside."""
    replace: bool = False
    """Remove the checkpoints of an earlier run of this name."""
    max_restarts: int = 0
    """If this command starts the ranks: how often to restart them from the newest checkpoint after a rank dies."""

    def faults(self) -> list[str]:
        found = _not_positive(self, "verify_steps", "val_every")
        if not self.name or self.name != Path(self.name).name or self.name.startswith("."):
            found.append(f"--name {self.name!r} is not a plain folder name")
        if not 0 <= self.seed < 2**63:
            found.append(f"--seed {self.seed} is not in [0, 2**63)")
        if self.sample < 0:
            found.append(f"--sample {self.sample} is negative")
        if self.max_restarts < 0:
            found.append(f"--max-restarts {self.max_restarts} is negative")
        if self.resume and self.replace:
            found.append("--resume continues a run, --replace removes it: give only one of them")
        if self.step is not None and not self.resume:
            found.append("--step selects the checkpoint to resume from: it needs --resume")
        return found

    @property
    def folder(self) -> Path:
        return self.runs / self.name


@dataclass(frozen=True)
class WatchOptions:
    """Detection of hangs, slow ranks and NaNs."""

    timeout: float = 600.0
    """Seconds that a rank waits for the others in a step before the run ends and names the rank that is missing."""
    watch_every: int = 10
    """Steps between comparisons of the ranks' timings."""
    on_nan: Literal["stop", "skip"] = "stop"
    """When the loss or the gradients of a step are not finite: end the run, or skip the step on all ranks.
    The module or parameter where it began is named. In fp16, the loss scale handles gradients that overflow."""

    def faults(self) -> list[str]:
        return _not_positive(self, "timeout", "watch_every")


@dataclass(frozen=True)
class CheckpointOptions:
    """When checkpoints are saved, and which ones are kept."""

    save: bool = True
    """Save checkpoints; without them a run cannot be resumed."""
    save_every: int | None = None
    """Steps between checkpoints; default: what loses least time, by the measured time of a save and --failure-hours."""
    failure_hours: float = 24.0
    """Mean time between failures of the whole job, in hours."""
    keep_last: int = 2
    """Number of newest checkpoints to keep."""
    keep_every: int | None = None
    """Also keep older checkpoints whose step is a multiple of this."""
    async_save: bool = True
    """Write checkpoints in the background while training continues."""
    on_save_error: Literal["continue", "stop"] = "continue"
    """What to do when a save fails; the final save, after training, always fails the run."""

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

CONFIG, CHECKPOINTS = "config.json", "checkpoints"  # in a run's folder
RETIRED = ("reshard", "dp_shard")  # removed options that config.json of older runs still has


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
        """Nested plain values, ready for JSON; resume, step and replace apply to one call only and are left out."""
        once = dataclasses.replace(self.run, resume=False, step=None, replace=False)
        nested = dataclasses.asdict(dataclasses.replace(self, run=once))
        plain: dict[str, Any] = json.loads(json.dumps(nested, default=str))
        return plain

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> TrainConfig:
        """Inverse of to_dict; missing options get their defaults. Raises ValueError for unknown options."""
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
    """Parse a command line. Exits after printing help, or an error for unknown options.

    With --resume, options that are not given are taken from the run of that name. Raises ValueError if they cannot be.
    """
    config = _parse(argv, TrainConfig())
    before = resumed(config)
    return config if before is None else _parse(argv, before)


def resumed(config: TrainConfig) -> TrainConfig | None:
    """The options of the run that `config` resumes; None if it resumes none. Raises ValueError as `saved` does."""
    before = saved(config.run.folder) if config.run.resume else None
    if before is None:
        return None
    run = dataclasses.replace(before.run, name=config.run.name, runs=config.run.runs)  # the folder may be a copy
    return dataclasses.replace(before, run=run)


def saved(folder: Path) -> TrainConfig | None:
    """The configuration in a run's folder; None without one. Raises ValueError for one that cannot be read."""
    path = folder / CONFIG
    if not path.is_file():
        return None
    try:
        config = TrainConfig.from_dict(json.loads(path.read_text()))
        faults(config, 1, 1)  # reads every value, so that one of a wrong type raises here
        return config
    except (OSError, ValueError, TypeError, AttributeError) as error:
        why = f"{path} is not the configuration of a run: {error}"
    if steps := steps_in(folder / CHECKPOINTS):
        why += f'; {path_of(folder / CHECKPOINTS, steps[-1]) / ABOUT} has a copy, as "config"'
    raise ValueError(why)


def _parse(argv: list[str], default: TrainConfig) -> TrainConfig:
    made = tyro.cli(tyro.conf.OmitArgPrefixes[TrainConfig], prog="fusedtp train", args=argv, default=default)
    return with_tokenizer(made)


C = TypeVar("C", bound=TrainConfig)


def with_tokenizer(config: C) -> C:
    """Use the tokenizer in the folder of --model, unless --tokenizer or --vocab-size is given."""
    folder = Path(config.foreign.model or "")
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if config.foreign.model is None or (config.data.tokenizer, config.data.vocab_size) != (None, None):
        return config
    if not any((folder / file).exists() for file in files):
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=folder))


def layout(config: TrainConfig, ranks: int, local_ranks: int) -> tuple[int, int]:
    """(dp, tp) for `ranks` processes, `local_ranks` per machine; by default, tp stays within a machine."""
    tp, dp = config.parallel.tp, config.parallel.dp
    pp = max(1, config.parallel.pp)
    ranks, local_ranks = ranks // pp, max(1, min(local_ranks, ranks // pp))
    if tp is None:
        tp = local_ranks if dp is None else max(1, ranks // max(1, dp))
    if dp is None:
        dp = max(1, ranks // max(1, tp))
    return dp, tp


def faults(config: TrainConfig, dp: int, tp: int) -> list[str]:
    """All errors of a config on dp x tp ranks, as messages; an empty list means that it can run."""
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
        found.append("--determinism with --engine multimem: the order in which the switch sums is not fixed")
    if not config.checkpoint.save and not config.run.resume:  # a resumed run has the options of a run that saved
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
    """Errors of the library's own model on dp x tp ranks."""
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
    """Errors of the pipeline options for a model with `layers` layers."""
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
    """Errors of the options that split experts over ranks."""
    model, parallel = config.model, config.parallel
    ep = parallel.ep or tp
    if ep < 1 or parallel.expert_tp < 1:
        return []  # ParallelOptions.faults reports these
    if parallel.copies(dp) > 1 and ep > tp:
        return [
            "--dp-replicate or --data-parallel ddp with --ep beyond --tp: experts are data parallel over fewer ranks "
            "already"
        ]
    if ep % tp or (dp * tp) % ep:
        return [f"--ep {ep} is not a multiple of --tp {tp} that divides the {dp * tp} ranks"]
    if model.expert_width < parallel.expert_tp > 1:
        return [f"--expert-width {model.expert_width} is smaller than --expert-tp {parallel.expert_tp}"]
    try:
        ExpertSplit(tensor_parallel=parallel.expert_tp).shares(model.experts, ep)
    except ValueError as error:
        return [f"--experts {model.experts} with --ep {ep} --expert-tp {parallel.expert_tp}: {error}"]
    return []
