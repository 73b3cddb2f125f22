"""Adapter that lets the trainer use a causal language model of transformers: forward, pipeline stages, generation.

    TransformersModel(hf).forward(input_ids, labels, ...) -> loss    labels are already shifted, num_labels is given
    .stage(layers, first, last, both)    the model's own forward; modules of other stages return their input
    .generate(tokens, size)        transformers' generate

Note [Stages of others' models]
A model's code computes masks and rotary positions before its layers, and scales and caps logits after them. So a stage
runs that code, not a copy of it: layers of other stages are replaced by modules that return their input, and the one
right before the stage's own layers returns the received tensor. transformers' plan for pipelines (base_model_pp_plan)
tells which modules come before the layers and which come after. Stages exchange this rank's rows of the flattened
tokens, a plain tensor: [T_r, H] if tensor parallelism splits tokens, otherwise [T, H].

Note [Documents in transformers]
transformers separates documents where positions are not consecutive. Its masks do so for every row of a batch (eager,
sdpa, flex_attention); flash attention does so only in a batch of one row (5.23). So with flash attention all rows are
concatenated into one. commands/build.py tests on a small copy whether a model's layers separate documents.

Dropout stays off: the model is never put into training mode, so that every mesh computes the same as one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedtp.comm import communicator
from fusedtp.nn import CausalLM
from fusedtp.nn.router import Routing
from fusedtp.ops.rows import split
from fusedtp.parallel.token_shard import Tokens, TokenShard, shard
from fusedtp.train.stages import Borrows


class NotCut(ValueError):
    """The model cannot be cut into pipeline stages; the message says why."""


class Output(NamedTuple):
    """loss: the sum of the token losses / num_labels. routings: always empty, for the interface of fusedtp.nn."""

    loss: Tensor
    routings: tuple[Routing, ...] = ()


class Anatomy:
    """The parts of a causal model, according to its plan for pipelines.

    base     the model without its head; its children are the list of layers and the other modules
    layers   name of the list of layers in base
    before, after   names of the modules in base that run before and after the layers
    head     name of the head in the causal model
    Raises NotCut.
    """

    def __init__(self, causal: Any) -> None:
        kind = type(causal).__name__
        self.base = causal.base_model
        plan = dict(getattr(self.base.config, "base_model_pp_plan", None) or {})
        if not plan:
            raise NotCut(f"{kind} has no plan for pipelines (base_model_pp_plan)")
        names = [name for name in plan if hasattr(self.base, name)]
        lists = [name for name in names if isinstance(getattr(self.base, name), nn.ModuleList)]
        heads = [name for name, module in causal.named_children() if module is causal.get_output_embeddings()]
        if len(lists) != 1 or len(heads) != 1:
            raise NotCut(f"{kind} needs exactly one list of layers and one head in its plan for pipelines")
        self.layers, self.head = lists[0], heads[0]
        at = names.index(self.layers)
        self.before, self.after = names[:at], names[at + 1 :]
        known = [getattr(self.base, name) for name in names] + [getattr(causal, self.head)]
        covered = {id(p) for module in known for p in module.parameters()}
        if others := [name for name, p in causal.named_parameters() if id(p) not in covered]:
            raise NotCut(f"{kind} has parameters that its plan for pipelines does not cover: {', '.join(others[:3])}")


class TransformersModel(nn.Module):
    """A causal model of transformers, or a PEFT model around one. `hf` is that model, split or not.

    dtype               dtype of matmuls; parameters stay fp32
    sequence_parallel   as given to parallelize
    positions           the most tokens in a row, see most_positions; None: any number
    """

    # part of the interface of models of fusedtp.nn
    token_split: tuple[int, int] = (0, 1)

    def __init__(self, hf: Any, dtype: torch.dtype = torch.float32, sequence_parallel: bool = True) -> None:
        super().__init__()
        self.hf, self.dtype, self.sequence_parallel = hf, dtype, sequence_parallel
        self.causal.loss_function = self._loss
        self._num_labels: float | None = None
        self._own: Any = None  # the last result of _loss
        self.is_tied = self.causal.get_output_embeddings() is not None and (
            self.causal.get_output_embeddings().weight is self.causal.get_input_embeddings().weight
        )
        self.tied = self.is_tied and self.embedding.requires_grad
        self.positions = most_positions(self)
        self.eval()

    @property
    def causal(self) -> Any:
        """The causal model inside adapters."""
        return self.hf.get_base_model() if hasattr(self.hf, "get_base_model") else self.hf

    @property
    def config(self) -> Any:
        return self.causal.config.get_text_config()

    @property
    def dropout(self) -> dict[str, float]:
        """The configuration's dropout rates by name; training ignores them, see above."""
        every = sorted(self.config.to_dict().items())
        named = {
            name: rate for name, rate in every if "drop" in name and not name.startswith(("summary", "classifier"))
        }
        return {name: rate for name, rate in named.items() if isinstance(rate, float) and rate > 0}

    @property
    def embedding(self) -> nn.Parameter:
        weight: nn.Parameter = self.causal.get_input_embeddings().weight
        return weight

    @property
    def blocks(self) -> list[nn.Module]:
        """The modules that FSDP2 shards as units: layers of the classes in the model's _no_split_modules."""
        kinds = set(getattr(self.causal, "_no_split_modules", None) or ())
        named = [(name, each) for name, each in self.causal.named_modules() if type(each).__name__ in kinds]
        return [each for name, each in named if not any(name.startswith(f"{other}.") for other, _ in named)]

    def train(self, mode: bool = True) -> TransformersModel:
        """Stay in evaluation mode, since dropout stays off."""
        return super().train(False)

    def set_dropout(self, seed: int, step: int, first_token: int) -> None:
        """Do nothing, since dropout stays off."""

    # -- forward -------------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        num_labels: float,
    ) -> Output:
        """input_ids, labels [B, S]; positions restart at each document, which keeps documents apart.

        Raises ValueError for rows longer than the model's table of positions.
        """
        x, labels, positions = self._arranged(input_ids, labels, positions)
        with self._autocast():
            return Output(self._loss_of(labels, num_labels, input_ids=x, position_ids=positions))

    def _loss_of(self, labels: Tensor, num_labels: float, **inputs: Any) -> Tensor:
        self._num_labels = num_labels
        loss: Tensor = self.hf(labels=labels, use_cache=False, **inputs).loss
        kind = type(self.causal).__name__
        if self._num_labels is not None:
            raise ValueError(f"{kind} computes its own loss, which does not take shifted labels")
        (own, version, value), self._own = self._own, None
        touched = loss is not own or loss._version != version  # compare values only then: it synchronizes the GPU
        if touched and torch.is_grad_enabled() and not torch.equal(loss, value):
            raise ValueError(
                f"{kind} adds another term to the loss of the labels, in every microbatch and on every data-parallel "
                "rank: set config.output_router_logits = False, or disable the other term"
            )
        return loss

    def _loss(self, logits: Tensor, labels: Tensor, *_: Any, **__: Any) -> Tensor:
        """Replaces transformers' loss_function, which would shift labels and divide by the local number of labels."""
        assert self._num_labels is not None
        num_labels, self._num_labels = self._num_labels, None
        logits = logits.float()
        total = F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1), reduction="sum")
        loss: Tensor = total / num_labels
        self._own = loss, loss._version, loss.detach().clone()
        return loss

    def _arranged(self, x: Tensor, labels: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Concatenate the rows of a batch if attention cannot separate documents otherwise (flash attention)."""
        length, most = labels.shape[1], self.positions
        if positions is None and most is not None and length > most:
            kind = type(self.causal).__name__
            raise ValueError(f"rows of {length} tokens, but {kind} has positions for {most} tokens")
        if positions is None or not self.flattens:
            return x, labels, positions
        return (
            (x if x.is_floating_point() else x.reshape(1, -1)),
            labels.reshape(1, -1),
            positions.reshape(1, -1),
        )

    @property
    def flattens(self) -> bool:
        return "flash" in str(self.causal.config._attn_implementation)

    def _autocast(self) -> Any:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.embedding_device.type, self.dtype)

    @property
    def embedding_device(self) -> torch.device:
        return next(self.parameters()).device

    # -- stages --------------------------------------------------------------------------------------------------------

    def stage(self, layers: Sequence[int], first: bool, last: bool, both: bool = False) -> nn.Module:
        """See fusedtp.train.stages.Staged."""
        return Stage(self, layers, first, last, both)

    def keep_(self, layers: Sequence[int], first: bool, last: bool) -> None:
        """See fusedtp.train.stages.Staged."""
        at = Anatomy(self.causal)
        every = getattr(at.base, at.layers)
        for i, layer in enumerate(every):
            if i not in layers:
                every[i] = Pass(layer)
        embedding = self.causal.get_input_embeddings()
        for name in at.before:
            module = getattr(at.base, name)
            if not (first or (last and self.is_tied and module is embedding)):
                setattr(at.base, name, Pass(module))
        if not last:
            for name in at.after:
                setattr(at.base, name, Pass(getattr(at.base, name)))
            setattr(self.causal, at.head, Pass(getattr(self.causal, at.head)))

    def edge(self, batch: int, length: int) -> tuple[int, int, torch.dtype]:
        """See fusedtp.train.stages.Staged. Parameters are fp32, and so is the residual stream."""
        sizes = self.split_of((batch, length))
        rows = batch * length if sizes is None else sizes.sizes[sizes.rank]
        return rows, self.config.hidden_size, torch.float32

    def split_of(self, lead: tuple[int, int]) -> Tokens | None:
        """How tokens are split over ranks between two layers; None: every rank has all tokens."""
        shared = getattr(self.hf, "_fusedtp", None)
        if shared is None or not self.sequence_parallel or lead[-1] < 2:
            return None
        comm = communicator(shared.group)
        return Tokens(comm.name, comm.rank, tuple(split(lead[0] * lead[1], comm.world_size)), shared.gathered)

    def costs(self, length: int) -> tuple[list[float], float]:
        """(multiply-adds per token of every layer, of the head), like fusedtp.train.stages.costs."""
        at, config = Anatomy(self.causal), self.config
        experts = next((n for name in EXPERTS if isinstance(n := getattr(config, name, None), int) and n > 0), 1)
        share = min(1.0, (getattr(config, "num_experts_per_tok", None) or experts) / experts)
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        found = [
            length * width + sum(p.numel() * (share if p.dim() > 2 else 1.0) for p in layer.parameters() if p.dim() > 1)
            for layer in getattr(at.base, at.layers)
        ]
        found[0] += config.hidden_size
        return found, float(config.hidden_size * config.vocab_size)

    # -- generation ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(self, tokens: Tensor, size: int, *, temperature: float, seed: int, max_context: int) -> Tensor:
        """tokens [1, P] and up to `size` more; stops at the end of a document. Collective; all ranks draw the same.

        The context is at most max_context tokens: when it is full, generation restarts from its later half.
        """
        drawn = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        with torch.random.fork_rng(devices=[] if tokens.device.type == "cpu" else None):
            torch.manual_seed(seed)
            left = size
            while left > 0:
                context = tokens[:, -min(tokens.shape[1], max(1, max_context // 2)) :]
                count = min(left, max(1, max_context - context.shape[1]))
                with self._autocast():
                    longer = self.hf.generate(
                        input_ids=context, attention_mask=torch.ones_like(context), max_new_tokens=count,
                        pad_token_id=self.config.pad_token_id or 0, **drawn,
                    )  # fmt: skip
                new = longer[:, context.shape[1] :]
                tokens, left = torch.cat([tokens, new], 1), left - count
                if new.shape[1] < count:
                    break
        return tokens


Model = CausalLM | TransformersModel  # the models that the trainer takes
ALIBI = {"mpt": "max_seq_len"}  # model type -> the field with the size of its ALiBi biases; other types have no size
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # names of the number of experts in configurations


def most_positions(model: TransformersModel) -> int | None:
    """The most tokens in a row for which a model has positions: the size of its table (learned, sinusoidal or ALiBi).

    None if there is no table, as with rotary positions.
    """
    if model.config.model_type in ALIBI:
        return int(getattr(model.config, ALIBI[model.config.model_type]))
    most = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(most, int):
        return None
    tables: list[tuple[int, int | None]] = []
    for module in model.causal.modules():
        if isinstance(module, nn.Embedding) and module.weight is not model.embedding:
            tables.append((module.num_embeddings, module.padding_idx))
        buffers = module.named_buffers(recurse=False)
        tables += [(len(buffer), None) for name, buffer in buffers if "pos" in name and buffer.dim() == 2]
    # OPT's table has two extra rows; RoBERTa's positions start after the row of the padding index.
    room = [most - (0 if padding is None else padding + 1) for rows, padding in tables if rows in (most, most + 2)]
    return min(room, default=None)


class Pass(nn.Module):
    """Replaces a module of another stage: returns its input, or `given` if set. Keeps the module's plain attributes."""

    KEPT: ClassVar = (int, float, str, bool)

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.__dict__ |= {
            name: value for name, value in vars(of).items() if isinstance(value, Pass.KEPT) and name not in vars(self)
        }
        self.given: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.given is not None:
            return self.given
        return args[0] if args else next(iter(kwargs.values()))


class Stage(Borrows):
    """Layers of a model as a module: input_ids [B, S] or hidden [T_r, H] -> hidden [T_r, H], or the loss [1]."""

    def __init__(self, model: TransformersModel, layers: Sequence[int], first: bool, last: bool, both: bool) -> None:
        super().__init__()
        self._model = [model]  # in a list, so that it is not a submodule: it has parameters of other stages
        self.first, self.last = first, last
        causal, at = model.causal, Anatomy(model.causal)
        every = getattr(at.base, at.layers)
        self.layers = nn.ModuleList(every[i] for i in layers)
        others = {i: Pass(layer) for i, layer in enumerate(every) if i not in layers}
        self._all = [nn.ModuleList(others.get(i, layer) for i, layer in enumerate(every))]
        self._before = [None if first else others[layers[0] - 1]]
        self.own = nn.ModuleDict()  # the modules besides layers that FSDP2 gathers with the stage
        borrows = both and model.is_tied  # the first stage has both embedding and head, which share a weight
        for name in at.before:
            tied = last and model.is_tied and getattr(at.base, name) is causal.get_input_embeddings()
            if first or (tied and not borrows):
                self.own[name] = getattr(at.base, name)
        if last:
            self.own.update({name: getattr(at.base, name) for name in at.after})
        if first if borrows else last:
            self.own["head"] = getattr(causal, at.head)
        elif last:
            self.lent = (getattr(causal, at.head),)
        self._at = [at]

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
        x, labels, positions = model._arranged(x, labels, positions)
        lead = (labels.shape[0], labels.shape[1])
        inputs: dict[str, Any] = {"input_ids": x}
        if not self.first:  # masks and rotary positions take shape, dtype and device from it; no layer reads it
            unread = torch.zeros((), dtype=x.dtype, device=x.device).expand(*lead, x.shape[-1])
            inputs = {"inputs_embeds": unread}
        with self._alone(None if self.first else self._received(x, lead)) as base, model._autocast():
            if self.last:
                loss = model._loss_of(labels, num_labels, position_ids=positions, **inputs)
                return torch.stack((loss,))  # not a view: FSDP2 warns about views
            hidden = base(position_ids=positions, use_cache=False, **inputs).last_hidden_state
        for siblings in model.hf._fusedtp.siblings if hasattr(model.hf, "_fusedtp") else ():
            siblings.ended()
        return self._sent(hidden, lead)

    @contextmanager
    def _alone(self, received: Any) -> Iterator[Any]:
        """The base model with only this stage's modules; the layer before them returns the received tensor."""
        (at,), (layers,), (before,) = self._at, self._all, self._before
        kept = {at.layers: getattr(at.base, at.layers)}
        if not self.last:
            kept |= {name: getattr(at.base, name) for name in at.after}
        try:
            at.base._modules[at.layers] = layers
            for name in kept.keys() - {at.layers}:
                at.base._modules[name] = Pass(kept[name])
            if before is not None:
                before.given = received
            yield at.base
        finally:
            at.base._modules |= kept
            if before is not None:
                before.given = None

    def _received(self, x: Tensor, lead: tuple[int, int]) -> Tensor:
        tokens = self._model[0].split_of(lead)
        return x.reshape(*lead, -1) if tokens is None else TokenShard.of(x, lead, tokens)

    def _sent(self, hidden: Tensor, lead: tuple[int, int]) -> Tensor:
        tokens = self._model[0].split_of(lead)
        if tokens is not None and not isinstance(hidden, TokenShard):
            hidden = shard(hidden, tokens.group, tokens.rank, len(tokens.sizes), tokens.gathered)
        own = hidden.local if isinstance(hidden, TokenShard) else hidden.reshape(-1, hidden.shape[-1])
        return own.to(torch.float32, copy=True)  # not a view: FSDP2 warns about views
