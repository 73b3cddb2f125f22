"""A causal language model of transformers as the trainer takes models: called, cut into stages, asked to write.

    TransformersModel(hf).forward(input_ids, labels, ...) -> loss    labels are shifted already, their number is given
    .stage(layers, first, last, both)    the model's own forward, where other stages' modules pass on what they get
    .generate(tokens, size)        transformers' generate

Note [Stages of others' models]
Code of a model makes masks and rotary positions before its layers, and scales and caps logits after them. So a stage
runs that code, not a copy of it: layers of other stages are replaced by modules that return their input, the last one
before the stage's own returns what was received. A plan for pipelines (base_model_pp_plan of transformers) says which
modules come before the layers and which after. What goes from stage to stage is this rank's rows of the flattened
tokens, a plain tensor [T_r, H], where tensor parallelism splits tokens, else [T, H].

Note [Documents in transformers]
transformers keeps documents apart where positions do not follow each other. Its masks do so for every row of a batch
(eager, sdpa, flex_attention); flash attention only in a batch of one row (5.23). So rows are put one behind the other
there. Whether a model's layers keep to it, commands/build.py tries on a small copy.

Dropout stays off: the model is never put into training mode, so that any mesh computes what one process does.
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
    """Why a model cannot be a pipeline."""


class Output(NamedTuple):
    """loss: the sum of the tokens' losses by the number of labels. routings: none, as fusedtp.nn's have them."""

    loss: Tensor
    routings: tuple[Routing, ...] = ()


class Anatomy:
    """Where the parts of a causal model lie, by its plan for pipelines.

    base     the model without its head, whose children are the layers and all else
    layers   the name of its list of layers
    before, after   names of its modules that come before and after those
    head     the name of the causal model's head
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
            raise NotCut(f"{kind} has a plan for pipelines without one list of layers and one head")
        self.layers, self.head = lists[0], heads[0]
        at = names.index(self.layers)
        self.before, self.after = names[:at], names[at + 1 :]
        known = [getattr(self.base, name) for name in names] + [getattr(causal, self.head)]
        covered = {id(p) for module in known for p in module.parameters()}
        if others := [name for name, p in causal.named_parameters() if id(p) not in covered]:
            raise NotCut(f"{kind} has parameters that its plan for pipelines does not place: {', '.join(others[:3])}")


class TransformersModel(nn.Module):
    """A causal model of transformers, or adapters (PEFT) around it. `hf` is that, split or not.

    dtype               of matmuls; parameters stay fp32
    sequence_parallel   as given to parallelize
    """

    # what the trainer asks of models of fusedtp.nn
    token_split: tuple[int, int] = (0, 1)

    def __init__(self, hf: Any, dtype: torch.dtype = torch.float32, sequence_parallel: bool = True) -> None:
        super().__init__()
        self.hf, self.dtype, self.sequence_parallel = hf, dtype, sequence_parallel
        self.causal.loss_function = self._loss
        self._num_labels: float | None = None
        self._own: Any = None  # what _loss returned
        self.is_tied = self.causal.get_output_embeddings() is not None and (
            self.causal.get_output_embeddings().weight is self.causal.get_input_embeddings().weight
        )
        self.tied = self.is_tied and self.embedding.requires_grad
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
        """Rates that the configuration has by name, which are left out in training; see above."""
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
        """What FSDP2 gathers at a time: layers, as their model names their class."""
        kinds = set(getattr(self.causal, "_no_split_modules", None) or ())
        named = [(name, each) for name, each in self.causal.named_modules() if type(each).__name__ in kinds]
        return [each for name, each in named if not any(name.startswith(f"{other}.") for other, _ in named)]

    def train(self, mode: bool = True) -> TransformersModel:
        """Nothing: see above."""
        return super().train(False)

    def set_dropout(self, seed: int, step: int, first_token: int) -> None:
        """Nothing: see above."""

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
        """input_ids, labels [B, S]; positions begin anew where a document does, which keeps documents apart."""
        x, labels, positions = self._arranged(input_ids, labels, positions)
        with self._autocast():
            return Output(self._loss_of(labels, num_labels, input_ids=x, position_ids=positions))

    def _loss_of(self, labels: Tensor, num_labels: float, **inputs: Any) -> Tensor:
        self._num_labels = num_labels
        loss: Tensor = self.hf(labels=labels, use_cache=False, **inputs).loss
        kind = type(self.causal).__name__
        if self._num_labels is not None:
            raise ValueError(f"{kind} has a loss of its own, which does not take shifted labels")
        (own, version, value), self._own = self._own, None
        touched = loss is not own or loss._version != version  # values are compared only then: a GPU waits for that
        if touched and torch.is_grad_enabled() and not torch.equal(loss, value):
            raise ValueError(
                f"{kind} adds to the loss of its labels, anew in every microbatch and on every data-parallel rank: "
                "set config.output_router_logits = False, or train without what else it adds"
            )
        return loss

    def _loss(self, logits: Tensor, labels: Tensor, *_: Any, **__: Any) -> Tensor:
        """In the place of transformers' loss_function, which would shift labels and divide by their own number."""
        assert self._num_labels is not None
        num_labels, self._num_labels = self._num_labels, None
        logits = logits.float()
        total = F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1), reduction="sum")
        loss: Tensor = total / num_labels
        self._own = loss, loss._version, loss.detach().clone()
        return loss

    def _arranged(self, x: Tensor, labels: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """All rows of a batch in one, where attention is blind to documents else.."""
        if positions is None or not self.flattens:
            return x, labels, positions
        return (
            (x.reshape(1, -1) if x.dtype == torch.int64 else x),
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
        """See fusedtp.train.stages.Staged. Parameters are fp32, and so is what layers add to."""
        sizes = self.split_of((batch, length))
        rows = batch * length if sizes is None else sizes.sizes[sizes.rank]
        return rows, self.config.hidden_size, torch.float32

    def split_of(self, lead: tuple[int, int]) -> Tokens | None:
        """How ranks share the tokens between two layers; None: all have all."""
        shared = getattr(self.hf, "_fusedtp", None)
        if shared is None or not self.sequence_parallel or lead[-1] < 2:
            return None
        comm = communicator(shared.group)
        return Tokens(comm.name, comm.rank, tuple(split(lead[0] * lead[1], comm.world_size)), shared.gathered)

    def costs(self, length: int) -> tuple[list[float], float]:
        """Multiply-adds a token of every layer, and of the head, as fusedtp.train.stages.costs has them."""
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

    # -- writing -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(self, tokens: Tensor, size: int, *, temperature: float, seed: int, max_context: int) -> Tensor:
        """tokens [1, P] and up to `size` more, which end with a document's end. Collective; all ranks draw alike.

        At most max_context tokens are seen: when they are full, their later half is read anew.
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


Model = CausalLM | TransformersModel  # what the trainer takes
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # what configurations call their number


class Pass(nn.Module):
    """In the place of a module of another stage: returns what it gets, or what is `given`. Plain attributes stay."""

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
        self._model = [model]  # no submodule: its parameters are other stages' too
        self.first, self.last = first, last
        causal, at = model.causal, Anatomy(model.causal)
        every = getattr(at.base, at.layers)
        self.layers = nn.ModuleList(every[i] for i in layers)
        others = {i: Pass(layer) for i, layer in enumerate(every) if i not in layers}
        self._all = [nn.ModuleList(others.get(i, layer) for i, layer in enumerate(every))]
        self._before = [None if first else others[layers[0] - 1]]
        self.own = nn.ModuleDict()  # what is gathered beside layers, where FSDP2 shards the stage
        borrows = both and model.is_tied  # the first stage has embedding and head, whose weight is one
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
        if not self.first:  # its shape, dtype and device tell masks and rotary positions theirs; no layer reads it
            unread = torch.zeros((), dtype=x.dtype, device=x.device).expand(*lead, x.shape[-1])
            inputs = {"inputs_embeds": unread}
        with self._alone(None if self.first else self._received(x, lead)) as base, model._autocast():
            if self.last:
                loss = model._loss_of(labels, num_labels, position_ids=positions, **inputs)
                return torch.stack((loss,))  # no view, which FSDP2 warns of
            hidden = base(position_ids=positions, use_cache=False, **inputs).last_hidden_state
        for siblings in model.hf._fusedtp.siblings if hasattr(model.hf, "_fusedtp") else ():
            siblings.forget()
        return self._sent(hidden, lead)

    @contextmanager
    def _alone(self, received: Any) -> Iterator[Any]:
        """The base model with this stage's modules only; those before its layers return what was received."""
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
        return own.to(torch.float32, copy=True)  # no view, which FSDP2 warns of
