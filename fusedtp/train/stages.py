"""Pipeline stages: each rank of "pp" holds consecutive layers of a model, and torch's schedules run them.

    model on meta --parallelize(tp)--> cut, prune_ --> this rank's layers --shard(dp)--> memory --init_--> Pipeline.step

A stage sends the output of its last layer: this tensor-parallel rank's tokens [T_r, H], a plain tensor. The first stage
embeds, the last computes the loss. Every rank reads the whole batch, so that masks, positions and labels need no
transfer. Parameters keep their names in the whole model, so that a checkpoint of any mesh loads on any other.

    single    gpipe, 1f1b                                              stage = rank
    looped    looped_bfs, interleaved_1f1b, interleaved_zero_bubble    stages rank, rank + pp, ...
    v         zbv_zero_bubble, dualpipev                               stages rank and 2 pp - 1 - rank

Note [Losses of routers]
MoE layers produce router losses in every stage. A stage starts their backward together with that of its output
(_WithLoss), and keeps their values, which are added to the step's loss.

Note [Tied embeddings]
The embedding is also the head. If the first and the last stage are on two ranks, both hold the weight, the last one as
`embed_tokens.weight` too. Each computes a part of its gradient; the parts are summed after backward, and the gradient
norm counts them once. In a V schedule both stages are on one rank. The last stage then borrows the weight, which
belongs to the FSDP2 unit of the first stage. A step gathers it for the first stage's forward, which comes first, keeps
it gathered, and reduces its gradient after the first stage's last backward, which comes last.

Note [Timeline]
The actions of one pipeline step: when each rank ran which pass of which stage and microbatch.
torch's schedules call three methods of a stage, one per kind of pass. _TimedStage overrides them, books their time, and
appends to a timeline in a step that is recorded. Sends and receives happen outside these methods: the time between two
actions of a rank was spent waiting, sending and receiving.

Ranks meet in a barrier before the recorded step, and times count from there. On CPU the clock is the host's, which all
ranks of a machine share. On GPU, events are recorded on the compute stream and read after the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor

from fusedtp.nn import CausalLM, ModelConfig
from fusedtp.nn.dropout import dropout_state
from fusedtp.nn.router import Routing
from fusedtp.ops.rows import split
from fusedtp.parallel.foreign import sum_apart
from fusedtp.train.clocks import Clocks
from fusedtp.train.data import Microbatch

# -- schedules and cuts ------------------------------------------------------------------------------------------------

SINGLE = {"gpipe": "GPipe", "1f1b": "1F1B"}
LOOPED = {
    "looped_bfs": "LoopedBFS",
    "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
}
V_SHAPED = {"zbv_zero_bubble": "ZBVZeroBubble", "dualpipev": "DualPipeV"}
SCHEDULES = SINGLE | LOOPED | V_SHAPED
TWO_PASSES = ("interleaved_zero_bubble", *V_SHAPED)
# Before 2.13, torch's split backward fails on non-tensor arguments of a stage. `make gpu` uses the installed torch.
SPLITS_BACKWARD = torch.__version__ >= "2.13"


# -- the cut -----------------------------------------------------------------------------------------------------------


def costs(config: ModelConfig, length: int) -> tuple[list[float], float]:
    """(multiply-adds per token of every layer, of the head). An MoE layer counts only the experts that a token visits.

    The first layer includes the embedding: H additions in backward.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = config.head_dim or hidden // heads
    kv_heads = config.num_key_value_heads or heads
    attention = 2 * hidden * head_dim * (heads + kv_heads) + length * heads * head_dim  # half of S keys, twice
    found = []
    for layer in range(config.num_hidden_layers):
        width = config.intermediate_size
        if config.moe is not None and layer >= config.moe.first_dense:
            width = config.moe.top_k * config.moe.hidden + config.moe.shared
        found.append(float(attention + 3 * hidden * width))
    found[0] += hidden
    return found, float(hidden * config.vocab_size)


def cut(layers: Sequence[float], head: float, stages: int) -> list[range]:
    """Layers of every stage, at least one each, that minimize the cost of the most expensive stage.

    The last stage also has the head. Raises ValueError for more stages than layers.
    """
    count = len(layers)
    if not 1 <= stages <= count:
        raise ValueError(f"{stages} pipeline stages of {count} layers: each stage needs a layer")
    # best[n][i]: (largest cost of a stage, first layer of the last stage) for the first i layers in n stages
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for n in range(1, stages + 1):
        row = {}
        for i in range(n, count - (stages - n) + 1):
            extra = head if n == stages else 0.0
            row[i] = min((max(best[-1][j][0], sum(layers[j:i]) + extra), -j) for j in range(n - 1, i) if j in best[-1])
            row[i] = (row[i][0], -int(row[i][1]))
        best.append(row)
    ends = [count]
    for n in range(stages, 0, -1):
        ends.append(best[n][ends[-1]][1])
    ends.reverse()
    return [range(begin, end) for begin, end in pairwise(ends)]


def stage_costs(layers: Sequence[float], head: float, parts: Sequence[range]) -> list[float]:
    """Costs of stages with these layers; the last stage includes the head."""
    found = [sum(layers[part.start : part.stop]) for part in parts]
    found[-1] += head
    return found


def stages_of(schedule: str, pp: int, rank: int, virtual: int = 2) -> list[int]:
    """The stages that a rank of `pp` runs, in order."""
    if schedule in SINGLE:
        return [rank]
    if schedule in V_SHAPED:
        return [rank, 2 * pp - 1 - rank]
    return [rank + pp * i for i in range(virtual)]


def two_passes(schedule: str, pp: int) -> bool:
    """Whether backward is split into two passes: dgrad first, wgrad later."""
    return pp > 1 and schedule in TWO_PASSES


def stage_count(schedule: str, pp: int, virtual: int = 2) -> int:
    """Number of stages of the whole pipeline."""
    return len(stages_of(schedule, pp, 0, virtual)) * pp


def pipeline_faults(
    schedule: str, pp: int, virtual: int, layers: int, microbatches: int, of: str = "--layers {}"
) -> list[str]:
    """Errors of a pipeline's options, as messages. of: how messages refer to the number of layers."""
    if pp < 2:
        return []
    found, count = [], stage_count(schedule, pp, virtual)
    if count > layers:
        found.append(f"--schedule {schedule} with --pp {pp} has {count} stages, more than {of.format(layers)}")
    least = 2 * pp if schedule == "dualpipev" else pp
    if microbatches < least:
        found.append(
            f"--schedule {schedule} with --pp {pp} needs at least {least} --accumulate microbatches, not {microbatches}"
        )
    if schedule in TWO_PASSES and not SPLITS_BACKWARD:
        found.append(f"--schedule {schedule} needs torch 2.13: its split backward fails in older versions")
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble") and microbatches % pp:
        found.append(f"--schedule {schedule} needs --pp {pp} to divide --accumulate {microbatches}")
    return found


# -- a stage -----------------------------------------------------------------------------------------------------------


class _WithLoss(torch.autograd.Function):
    """Identity on x; its backward also starts the backward of a loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return x.clone()  # schedules detach a stage's output in place, which fails for a view

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy, torch.ones((), dtype=ctx.dtype, device=dy.device)


class Borrows(nn.Module):
    """A stage that uses modules of another stage on the same rank; see Note [Tied embeddings].

    lent   the borrowed modules: their weights get gradients here too, and FSDP2 shards them with the other stage
    """

    lent: Sequence[nn.Module] = ()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Own and borrowed parameters, since torch's backward passes need both."""
        every = [*super().parameters(recurse), *(p for module in self.lent for p in module.parameters())]
        yield from {id(p): p for p in every}.values()


class Stage(Borrows):
    """Layers of a model as a module: input_ids [B, S] or hidden [T_r, H] -> hidden [T_r, H], or the loss [1].

    losses     router losses of the forwards so far; the last stage includes its own in the loss that it returns
    routings   routing decisions of the forwards so far
    """

    losses: list[Tensor]
    routings: list[tuple[Routing, ...]]

    def __init__(self, model: CausalLM, layers: Sequence[int], first: bool, last: bool, both: bool = False) -> None:
        super().__init__()
        self._model = [model]  # in a list, so that it is not a submodule: it has parameters of other stages
        self.first, self.last = first, last
        self.layers = nn.ModuleList(_layer(model, i) for i in layers)
        tied = model.config.tie_word_embeddings
        borrows = both and tied  # the first stage has both embedding and head, which share a weight
        if first or (last and tied and not borrows):
            self.embed_tokens = model.embed_tokens
        if last:
            self.norm = model.norm
        if first if borrows else last:
            self.lm_head = model.lm_head
        elif last:
            self.lent = (model.lm_head,)
        self.losses, self.routings = [], []

    def forward(
        self,
        x: Tensor,
        *,
        labels: Tensor,
        dropout: Tensor,
        num_labels: float,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        (model,) = self._model
        model._dropout = dropout[0]
        layout = model.layout(labels, positions, document_ids)
        if self.first:
            x = model.embed(x, layout)
        x = model.through(self.layers, x, layout)
        if layout.routings is not None:
            self.routings.append(tuple(layout.routings.found))
        if self.last:
            whole = model.loss_of(model.norm(x), labels, layout, num_labels)
            return torch.stack((whole,))  # not a view: FSDP2 warns about views
        if (loss := model.routers_loss(layout, labels, num_labels)) is None:
            return x
        self.losses.append(loss.detach())
        out: Tensor = _WithLoss.apply(x, loss)
        return out


def _layer(model: CausalLM, index: int) -> nn.Module:
    layers: Any = model.layers
    layer: nn.Module = layers[str(index)] if isinstance(layers, nn.ModuleDict) else layers[index]
    return layer


class Staged(Protocol):
    """What a pipeline requires of a model; see CausalStages and fusedtp.train.foreign.TransformersModel.

    tied   whether the embedding is also the head, and is trained
    """

    @property
    def tied(self) -> bool: ...

    @property
    def embedding(self) -> nn.Parameter: ...

    def stage(self, layers: Sequence[int], first: bool, last: bool, both: bool = False) -> nn.Module:
        """A module of these layers, called like Stage. both: the rank has the first and the last stage."""

    def keep_(self, layers: Sequence[int], first: bool, last: bool) -> None:
        """Remove all layers but these, and what only the first or last stage needs if it is not here. Names stay."""

    def edge(self, batch: int, length: int) -> tuple[int, int, torch.dtype]:
        """Rows, features and dtype of the tensor that one stage sends to the next."""


@dataclass
class CausalStages:
    """A CausalLM as `Staged`. Removed modules become None."""

    model: CausalLM

    @property
    def tied(self) -> bool:
        return self.model.config.tie_word_embeddings

    @property
    def embedding(self) -> nn.Parameter:
        return self.model.embed_tokens.weight

    def stage(self, layers: Sequence[int], first: bool, last: bool, both: bool = False) -> nn.Module:
        return Stage(self.model, layers, first, last, both)

    def keep_(self, layers: Sequence[int], first: bool, last: bool) -> None:
        model = self.model
        kept: Any = nn.ModuleDict({str(layer): _layer(model, layer) for layer in sorted(layers)})
        model.layers = kept
        nothing: Any = None
        if not (first or (last and model.config.tie_word_embeddings)):
            model.embed_tokens = nothing
        if not last:
            model.norm, model.lm_head = nothing, nothing

    def edge(self, batch: int, length: int) -> tuple[int, int, torch.dtype]:
        rank, world_size = self.model.token_split
        config = self.model.config
        return split(batch * length, world_size)[rank], config.hidden_size, config.compute_dtype


def staged(model: Any) -> Staged:
    """The Staged interface of either kind of model."""
    found: Staged = CausalStages(model) if isinstance(model, CausalLM) else model
    return found


def prune_(model: nn.Module, parts: Sequence[range], here: Sequence[int]) -> None:
    """Remove from a model everything that the stages `here` do not use."""
    own = [layer for stage in here for layer in parts[stage]]
    staged(model).keep_(own, 0 in here, len(parts) - 1 in here)


def _arguments(batches: Sequence[Microbatch], seed: int, step: int) -> dict[str, Any]:
    """The arguments of every stage besides hidden states, concatenated over microbatches."""
    found: dict[str, Any] = {
        "labels": torch.cat([batch.labels for batch in batches]),
        "dropout": torch.stack([dropout_state(seed, step, batch.first_token) for batch in batches]),
        "num_labels": batches[0].num_labels,
    }
    for name in ("positions", "document_ids"):
        if getattr(batches[0], name) is not None:
            found[name] = torch.cat([getattr(batch, name) for batch in batches])
    return found


class _TimedStage(PipelineStage):
    """A PipelineStage that books its passes as compute. The rest of a schedule's time is spent sending and waiting."""

    clocks: Clocks
    timeline: Timeline | None = None

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        return self._pass(FORWARD, "forward", super().forward_one_chunk, *args, **options)

    def backward_one_chunk(self, *args: Any, **options: Any) -> Any:
        kind = INPUT if options.get("full_backward") is False else BACKWARD
        return self._pass(kind, "backward", super().backward_one_chunk, *args, **options)

    def backward_weight_one_chunk(self, *args: Any, **options: Any) -> Any:
        return self._pass(WEIGHT, "weights' backward", super().backward_weight_one_chunk, *args, **options)

    def perform_reduce_grad(self, *args: Any) -> Any:
        with self.clocks("compute"):
            return super().perform_reduce_grad(*args)

    def _pass(self, kind: str, name: str, method: Any, microbatch: int, *args: Any, **options: Any) -> Any:
        begin = None if self.timeline is None else self.timeline.now()
        with self.clocks("compute"):
            out = method(microbatch, *args, **options)
        if self.timeline is not None:
            self.timeline.marks.append((self.stage_index, kind, microbatch, begin, self.timeline.now()))
        self.clocks.called(f"the pipeline, after {name} of microbatch {microbatch} in stage {self.stage_index}")
        return out


# -- the pipeline ------------------------------------------------------------------------------------------------------


@dataclass
class Pipeline:
    """This rank's stages of a `model` after `prune_`, and the schedule that runs them.

    mesh       the one-dimensional "pp" mesh
    parts      layers of every stage
    here       indices of this rank's stages
    cost       cost of every stage in any unit, if known
    stages     this rank's stages: index -> module
    ran        torch's schedule of the last step
    """

    model: nn.Module
    mesh: DeviceMesh
    schedule: str
    parts: Sequence[range]
    here: Sequence[int]
    cost: Sequence[float] | None = None

    def __post_init__(self) -> None:
        last = len(self.parts) - 1
        if two_passes(self.schedule, self.mesh.size()):
            sum_apart(self.model)
        self.of = staged(self.model)
        both = {0, last} <= {*self.here}
        self.stages = {i: self.of.stage(self.parts[i], i == 0, i == last, both) for i in self.here}
        self.group = self.mesh.get_group()
        self._schedules: dict[tuple[int, ...], Any] = {}
        self.ran: Any = None
        self.clocks = Clocks()
        self._to_record: dict[int, Callable[[list[Action]], None]] = {}
        self.tied = self._tied_group()

    @property
    def has_first(self) -> bool:
        return 0 in self.stages

    @property
    def has_last(self) -> bool:
        return len(self.parts) - 1 in self.stages

    def step(self, batches: Sequence[Microbatch], seed: int, step: int) -> Tensor:
        """Forward and backward of a step's microbatches. Returns their loss on all ranks of the pipeline. Collective.

        The microbatches of a step must have the same shape; it may differ between steps.
        """
        losses: list[Tensor] = []
        arguments = _arguments(batches, seed, step)
        if self.has_last:
            arguments |= {"target": arguments["labels"], "losses": losses}
        ids = (torch.cat([batch.input_ids for batch in batches]),) if self.has_first else ()
        self.ran = schedule = self.torch_schedule(batches)
        with self._recorded(step, schedule), self.clocks("pp_wait", "the pipeline's first receive"):
            schedule.step(*ids, return_outputs=False, **arguments)
        if self.tied is not None:
            gradient = self.of.embedding.grad
            assert gradient is not None
            own = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
            with self.clocks("pp_wait", "all_reduce of the tied embedding's gradient"):
                dist.all_reduce(own, group=self.tied)
        with self.clocks("pp_wait", "all_reduce of the pipeline's loss"):
            return self._everywhere(losses)

    def record(self, step: int, tell: Callable[[list[Action]], None]) -> None:
        """Time the actions of a future step, and call `tell` with those of all ranks. See Note [Timeline]."""
        self._to_record[step] = tell

    @contextmanager
    def _recorded(self, step: int, schedule: Any) -> Iterator[None]:
        tell = self._to_record.pop(step, None)
        if tell is None:
            yield
            return
        stages = getattr(schedule, "_stages", None) or [schedule._stage]  # a schedule with one stage per rank
        timeline = Timeline(self.mesh, self.device)
        for stage in stages:
            stage.timeline = timeline
        try:
            timeline.start()
            yield
        finally:
            for stage in stages:
                stage.timeline = None
        tell(timeline.gathered())

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Microbatch]) -> Tensor:
        """Sum of the microbatches' losses, without gradients, the same on all ranks of the pipeline. Collective.

        torch's V-shaped schedules cannot run forward only (2.13), so microbatches pass the stages one by one.
        """
        losses: list[Tensor] = []
        holders = {i: rank for rank in range(self.mesh.size()) for i in self._stages_of(rank)}
        own, last = self.mesh.get_local_rank(), len(self.parts) - 1
        for batch in batches:
            arguments, kept = _arguments([batch], 0, 0), batch.input_ids
            for index in sorted(self.stages):
                if index and holders[index - 1] != own:
                    kept = self._edge(tuple(batch.input_ids.shape))
                    dist.recv(kept, group=self.group, group_src=holders[index - 1])
                kept = self.stages[index](kept, **arguments)
                if index < last and holders[index + 1] != own:
                    dist.send(kept, group=self.group, group_dst=holders[index + 1])
            if self.has_last:
                losses.append(kept.sum())
        self.routings()  # discard them: expert load is counted in training only
        return self._everywhere(losses)

    def _stages_of(self, rank: int) -> list[int]:
        return stages_of(self.schedule, self.mesh.size(), rank, len(self.here))

    def _edge(self, shape: tuple[int, ...], device: str | torch.device | None = None) -> Tensor:
        """An empty tensor [T_r, H] like the one that a stage sends to the next for microbatches of this shape."""
        *size, dtype = self.of.edge(*shape)
        return torch.empty(size, dtype=dtype, device=device or self.device)

    def _everywhere(self, losses: Sequence[Tensor]) -> Tensor:
        """The sum of the losses, held by the rank of the last stage, and of the router losses of all stages."""
        every = [loss.detach().reshape(()).float() for loss in losses]
        for stage in self._own_stages():
            every += [loss.float() for loss in stage.losses]
            stage.losses.clear()
        total = torch.stack(every).sum() if every else torch.zeros((), device=self.device)
        dist.all_reduce(total, group=self.group)
        return total

    def routings(self) -> list[list[Routing]]:
        """Routing decisions of this rank's layers, in order, for each microbatch since the last call."""
        stages = self._own_stages()
        found = [
            [routing for stage in of_stages for routing in stage]
            for of_stages in zip(*(stage.routings for stage in stages), strict=True)
        ]
        for stage in stages:
            stage.routings.clear()
        return found

    def _own_stages(self) -> list[Stage]:
        every = [self.stages[i] for i in sorted(self.stages)]
        return [stage for stage in every if isinstance(stage, Stage)]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def torch_schedule(self, batches: Sequence[Microbatch]) -> Any:
        """torch's schedule for microbatches of this shape; its stages know the shapes that they send and receive."""
        shape, count = tuple(batches[0].input_ids.shape), len(batches)
        if any(tuple(batch.input_ids.shape) != shape for batch in batches):
            raise ValueError(
                f"microbatches of a step have different shapes: {[tuple(b.input_ids.shape) for b in batches]}"
            )
        key = (*shape, count)
        if key not in self._schedules:
            stages = [self._torch_stage(index, shape) for index in self.here]
            kind: Any = get_schedule_class(SCHEDULES[self.schedule])
            single = issubclass(kind, PipelineScheduleSingle)
            self._schedules[key] = kind(
                stages[0] if single else stages,
                count,
                loss_fn=lambda loss, labels: loss.sum(),
                scale_grads=False,
            )
        return self._schedules[key]

    def _torch_stage(self, index: int, shape: tuple[int, ...]) -> PipelineStage:
        edge = self._edge(shape, "meta").requires_grad_()
        ids = torch.empty(shape, dtype=torch.int64, device="meta")
        loss = torch.empty(1, device="meta", requires_grad=True)
        made = _TimedStage(
            self.stages[index], index, len(self.parts), self.device, input_args=edge if index else ids,
            output_args=edge if index < len(self.parts) - 1 else loss, group=self.group,
        )  # fmt: skip
        made.clocks = self.clocks
        return made

    def _tied_group(self) -> dist.ProcessGroup | None:
        """Group of the ranks of the first and last stage, if both hold the embedding; see Note [Tied embeddings]."""
        if not self.of.tied or self.schedule in V_SHAPED:
            return None  # a V schedule begins and ends on one rank
        ranks = [int(rank) for rank in self.mesh.mesh.flatten()]
        # every rank of the job must create the groups of all pipelines, in the same order
        every: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, [ranks[0], ranks[-1]])
        found = None
        for pair in sorted({tuple(pair) for pair in every}):
            group = dist.new_group(list(pair))
            if dist.get_rank() in pair:
                found = group
        return found if self.has_first or self.has_last else None

    @property
    def uncounted(self) -> list[Tensor]:
        """Parameters of this rank that the gradient norm counts on another rank."""
        return [] if self.tied is None or self.has_first else [self.of.embedding]


# -- timeline ----------------------------------------------------------------------------------------------------------

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"  # kinds of passes; B is I and W in one
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # the same for all processes that share CLOCK_MONOTONIC


class Action(NamedTuple):
    """A pass of a stage. rank: pipeline rank. kind: F, B, I or W. begin, end: seconds since the step began."""

    rank: int
    stage: int
    kind: str
    microbatch: int
    begin: float
    end: float


class Timeline:
    """The actions of this rank from `start` on.

    marks   (stage, kind, microbatch, begin, end) of each pass; begin and end are as `now` returns them
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self.mesh, self.device = mesh, device
        self.marks: list[tuple[int, str, int, Any, Any]] = []
        self._start: Any = None

    def start(self) -> None:
        """Wait for the other ranks; times count from here. Collective."""
        group = self.mesh.get_group()
        dist.barrier(group)
        self._start = self.now()
        if self.device.type != "cuda":
            every: list[Any] = [None] * self.mesh.size()
            machine = BOOT_ID.read_text()
            dist.all_gather_object(every, (machine, self._start), group=group)
            self._start = max(start for where, start in every if where == machine)

    def now(self) -> Any:
        """A point in time: on CPU of the host's clock, on GPU an event."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _seconds(self, mark: Any) -> float:
        if self.device.type != "cuda":
            return float(mark - self._start)
        return float(self._start.elapsed_time(mark)) / 1e3

    def actions(self) -> list[Action]:
        """This rank's actions, in order."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        rank = self.mesh.get_local_rank()
        return [
            Action(rank, stage, kind, microbatch, self._seconds(begin), self._seconds(end))
            for stage, kind, microbatch, begin, end in self.marks
        ]

    def gathered(self) -> list[Action]:
        """The actions of all ranks of the pipeline. Collective."""
        every: list[Any] = [None] * self.mesh.size()
        dist.all_gather_object(every, self.actions(), group=self.mesh.get_group())
        return [action for part in every for action in part]
