"""The loop: a step that fails on the device updates no parameter; the validation loss covers all ranks' text.

A trainer of user-defined parts equals torch's plain loop in one process, and the examples in the documentation run.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from fusedtp.comm import SignalTimeout
from fusedtp.commands.build import build
from fusedtp.commands.run import trainer_of, validation_loss
from fusedtp.nn import CausalLM, FP8Linear, ModelConfig
from fusedtp.nn.init import init_
from fusedtp.parallel import parallelize
from fusedtp.train import loop
from fusedtp.train.config import parse
from fusedtp.train.data import Batches, FromLoader, Microbatch, build_tokens
from fusedtp.train.foreign import TransformersModel
from fusedtp.train.mesh import World
from fusedtp.train.shard import shard
from fusedtp.train.stages import Pipeline, cut, prune_
from fusedtp.train.watch import Guard
from tests.train.support import mesh_of, meshes_of
from tests.train.test_stages import model_of


@dataclass(frozen=True)
class FailingWorld(World):
    """A world with a failing kernel. `failed` lists the steps whose failure the host can see already."""

    failed: list[int] = field(default_factory=list)

    def check(self) -> None:
        if self.failed:
            raise SignalTimeout(f"step {self.failed[0]}")


class Late:
    """A norm on the device. The host sees the failure of its step only after waiting for it."""

    def __init__(self, failed: list[int], step: int) -> None:
        self.failed, self.step = failed, step

    def item(self) -> float:
        if self.step == 2:
            self.failed.append(self.step)
        return 1.0


def test_a_failed_step_reaches_no_parameter(tmp_path, monkeypatch):
    (tmp_path / "book.txt").write_text("once upon a time " * 200)
    tokens = build_tokens((tmp_path / "book.txt",), tmp_path / "tokens")
    sizes = "--width 16 --mlp-width 8 --layers 1 --length 16 --batch 2 --steps 5 --warmup 0"
    config = parse(sizes.split())
    world = FailingWorld()
    model = build(config, world)
    seen: list[list[torch.Tensor]] = []

    def norm_of(model: torch.nn.Module, max_norm: float, kind: float) -> Late:
        seen.append([p.detach().clone() for p in model.parameters()])
        return Late(world.failed, len(seen) - 1)

    monkeypatch.setattr(loop, "clip_grad_norm_", norm_of)
    with pytest.raises(SignalTimeout, match="step 2"):
        trainer_of(config, world, Batches(tokens, length=16, batch=2), model).train(5)
    assert len(seen) == 3 and not any(map(torch.equal, seen[0], seen[1]))
    assert all(map(torch.equal, seen[2], model.parameters()))


def small_model(dropout: float) -> CausalLM:
    config = ModelConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        residual_dropout=dropout, embedding_dropout=dropout,
    )  # fmt: skip
    return init_(CausalLM(config), 0, std=0.3)


def drawn_batches(rank: int) -> list[Microbatch]:
    generator = torch.Generator().manual_seed(rank)
    return [Microbatch(*torch.randint(0, 11, (2, 2, 5), generator=generator), 0, 10) for _ in range(3)]


def test_validation_drops_nothing_and_training_goes_on():
    with_dropout, without = small_model(0.5), small_model(0.0)
    with_dropout.set_dropout(0, 0)
    batches = drawn_batches(0)
    assert validation_loss(with_dropout, batches, World()) == validation_loss(without, batches, World())
    assert all(module.training for module in with_dropout.modules())


def validate(group) -> tuple[float, float]:
    """The validation loss over two data-parallel ranks, and over this rank's batches alone."""
    mesh, flat = meshes_of(2)
    world = World(2, rank=group.rank(), mesh=mesh, flat=flat)
    model, batches = small_model(0.0), drawn_batches(group.rank())
    return validation_loss(model, batches, world), validation_loss(model, batches, World())


def test_the_validation_loss_is_the_mean_over_the_data_parallel_ranks(worlds):
    (first, alone_0), (second, alone_1) = worlds(2).run(validate)
    assert alone_0 != alone_1
    rounded = torch.tensor([alone_0, alone_1]).sum().item() / 2  # summed in fp32, as the reduction does
    assert first == second == rounded


# -- a trainer of user-defined parts -----------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "train.md"
FIRST, *BLOCKS = re.findall(
    r"```python\n(.*?)```", PAGE.read_text().split("## In Python")[1].split("\n## ")[0], flags=re.S
)


def run_page(group: Any, folder: str) -> tuple[int, int, list[int]]:
    """Run all blocks in order. Returns the steps of the first and the last trainer, and the checkpoints."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with chdir(folder):
        exec(compile(FIRST, PAGE.name, "exec"), names)
        first = names["trainer"].step
        for block in BLOCKS:
            exec(compile(block, PAGE.name, "exec"), names)
        found = names["checkpoints"].steps()
    return first, names["trainer"].step, found


@pytest.mark.slow
def test_the_page_runs(worlds, tmp_path: Path):
    assert len(BLOCKS) == 3
    assert worlds(2).run(run_page, str(tmp_path)) == [(5, 20, [16, 20])] * 2


def own_batches(count: int) -> list[dict[str, torch.Tensor]]:
    """Batches of two rows with unequal numbers of labels."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(0, 13, (2, count, 2, 8), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.4] = -100
    return [{"input_ids": ids[i], "labels": labels[i]} for i in range(count)]


def own_model() -> CausalLM:
    return model_of(tied=False)


@cache
def plain_loop(steps: int, batches_a_step: int) -> list[tuple[float, float]]:
    """Losses and norms of torch's plain loop over all batches of a step at once."""
    model = init_(own_model().to_empty(device="cpu"), 0, std=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    every, found = own_batches(steps * batches_a_step), []
    for step in range(steps):
        part = every[step * batches_a_step : (step + 1) * batches_a_step]
        ids, labels = (torch.cat([batch[name] for batch in part]) for name in ("input_ids", "labels"))
        model.set_dropout(3, step)
        model(ids, labels).loss.backward()
        with torch.no_grad():
            loss = model(ids, labels).loss
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step(), optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


def own_trainer(group: Any, axis: str, accumulate: int, steps: int) -> list[tuple[float, float]]:
    mesh = mesh_of(**{axis: 2})
    model, pipeline, every = own_model(), None, own_batches(4 * steps)
    if axis == "tp":
        parallelize(model, mesh)
    elif axis == "dp":
        shard(model, mesh)
        every = every[group.rank() :: 2]
    else:
        parts, here = cut([1.0] * 5, 0.5, 2), [group.rank()]
        prune_(model, parts, here)
        pipeline = Pipeline(model, mesh, "1f1b", parts, here)
    init_(model.to_empty(device="cpu"), 0, std=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = loop.Trainer(
        model, iter(every), optimizer, mesh, pipeline=pipeline, accumulate=accumulate, clip=0.3, seed=3
    )
    assert trainer.train(steps)
    return [(record["loss"], record["grad_norm"]) for record in trainer.metrics.steps]


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "accumulate"), [("tp", 4), ("dp", 2), ("pp", 4)])
def test_own_parts_train_like_the_plain_loop(worlds, axis: str, accumulate: int):
    """Means are over all labels of a step, on any rank and microbatch; dropout depends on the token's position."""
    want = plain_loop(3, 4)
    for found in worlds(2).run(own_trainer, axis, accumulate, 3):
        assert [pytest.approx(pair, rel=2e-5) for pair in want] == found


def trainer_on_axes_of_one(group: Any, steps: int) -> list[tuple[float, float]]:
    mesh, model = mesh_of(pp=1, dp=1, tp=1), own_model()
    parallelize(model, mesh["tp"])
    prune_(model, [range(5)], [0])
    pipeline = Pipeline(model, mesh["pp"], "1f1b", [range(5)], [0])
    shard(model, mesh["dp"], stages=list(pipeline.stages.values()), kind="zero1")
    init_(model.to_empty(device="cpu"), 0, std=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = own_batches(4 * steps)
    trainer = loop.Trainer(
        model, batches, optimizer, mesh, pipeline=pipeline, accumulate=4, clip=0.3, kind="zero1", seed=3
    )
    assert trainer.train(steps)
    return [(record["loss"], record["grad_norm"]) for record in trainer.metrics.steps]


@pytest.mark.slow
def test_axes_of_one_train_like_the_plain_loop(worlds):
    """Pipeline, data and tensor axes of size one use the same code as larger ones."""
    (found,) = worlds(1).run(trainer_on_axes_of_one, 3)
    assert [pytest.approx(pair, rel=2e-5) for pair in plain_loop(3, 4)] == found


class Stateful:
    """Like torchdata's loaders: it continues from its state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self.at < 3:
            self.at += 1
            yield own_batches(3)[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("make", [Stateful, lambda: own_batches(3)], ids=["stateful", "list"])
def test_data_goes_on_where_it_was(make):
    """Includes the end of the iterable, after which it restarts."""
    loader = FromLoader(make(), World(), accumulate=2)
    seen = []
    for _ in range(4):
        state = loader.state_dict()
        seen.append([batch.input_ids for batch in loader.step()])
        again = FromLoader(make(), World(), accumulate=2)
        again.load_state_dict(state)
        assert all(map(torch.equal, seen[-1], [batch.input_ids for batch in again.step()]))
    assert torch.equal(seen[0][0], seen[1][1]) and not torch.equal(seen[0][0], seen[0][1])


@pytest.mark.parametrize("make", [Stateful, lambda: own_batches(3)], ids=["stateful", "list"])
@pytest.mark.parametrize("accumulate", [2, 3, 4, 7])
def test_a_step_that_takes_a_batch_twice_is_told_once(make, accumulate: int):
    """Not so a step that begins in the middle of three batches, also after a resume there."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loader = FromLoader(make(), World(), accumulate)
        for _ in range(3):
            seen = [tuple(batch.input_ids.flatten().tolist()) for batch in loader.step()]
        first = FromLoader(make(), World(), 2)
        list(first.step())
        again = FromLoader(make(), World(), 2)
        again.load_state_dict(first.state_dict())
        list(again.step())
    said = f"the data ends after 3 of the {accumulate} batches of a step (accumulate), so each step takes some of them"
    assert [str(each.message) for each in told] == [f"{said} more than once"] * (len(set(seen)) < accumulate)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchdatas_loader_goes_on_where_it_was(num_workers: int):
    """Each epoch is reshuffled, and workers read ahead."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    rows = [{"input_ids": torch.full((4,), i)} for i in range(10)]

    def made(seed: int) -> FromLoader:
        torch.manual_seed(seed)
        loader = StatefulDataLoader(rows, batch_size=2, shuffle=True, num_workers=num_workers)
        return FromLoader(loader, World(), accumulate=2)

    loader, states, seen = made(0), [], []
    for _ in range(5):  # two epochs of five batches
        states.append(loader.state_dict())
        seen.append([batch.input_ids[:, 0].tolist() for batch in loader.step()])
    for at, state in enumerate(states[1:], 1):
        again = made(at)
        again.load_state_dict(state)
        for want in seen[at:]:
            assert [batch.input_ids[:, 0].tolist() for batch in again.step()] == want
    taken = [row for step in seen for batch in step for row in batch]
    assert sorted(taken[:10]) == sorted(taken[10:]) == list(range(10)) and taken[:10] != taken[10:]


def test_labels_default_to_the_next_token():
    ids = torch.arange(8).view(2, 4)
    (batch,) = FromLoader([{"input_ids": ids}], World()).step(scale=2.0)
    assert batch.labels.tolist() == [[1, 2, 3, -100], [5, 6, 7, -100]] and batch.num_labels == 3.0


def test_labels_default_to_the_next_token_of_the_document():
    ids = torch.arange(10).view(2, 5)
    documents = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 2, 2, 2]])
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 0, 1, 2]])
    want = [[1, 2, -100, 4, -100], [-100, -100, 8, 9, -100]]
    for more in (
        {"document_ids": documents},
        {"positions": positions},
        {"document_ids": documents, "positions": positions},
    ):
        (batch,) = FromLoader([{"input_ids": ids} | more], World()).step()
        assert batch.labels.tolist() == want and batch.num_labels == 5.0
    (batch,) = FromLoader([{"input_ids": ids, "labels": ids + 1, "document_ids": documents}], World()).step()
    assert torch.equal(batch.labels, ids + 1), "labels that are given stay"


def counted(group: Any, lengths: list[int], labels: list[int]) -> tuple[int, float]:
    """The number of tokens of a step and the loss divisor, for ranks with these row lengths and numbers of labels."""
    mesh, flat = meshes_of(2)
    rank = group.rank()
    ids = torch.ones(2, lengths[rank], dtype=torch.int64)
    given = torch.full_like(ids, -100)
    given.view(-1)[: labels[rank]] = 3
    batch = {"input_ids": ids, "labels": given}
    loader = FromLoader([batch], World(2, rank=rank, mesh=mesh, flat=flat))
    (made,) = loader.step()
    return loader.tokens, made.num_labels


@pytest.mark.parametrize(
    ("lengths", "labels", "want"),
    [([8, 4], [3, 2], (24, 2.5)), ([4, 8], [1, 0], (24, 0.5)), ([4, 4], [0, 0], (16, 0.5))],
)
def test_tokens_and_labels_are_those_of_all_ranks(worlds, lengths: list[int], labels: list[int], want):
    """Also a single label on two ranks: its loss divided by 0.5 and averaged over the ranks is its loss."""
    assert worlds(2).run(counted, lengths, labels) == [want] * 2


@pytest.mark.parametrize(("val_every", "steps"), [(0, [2]), (2, [1, 2])])
def test_validation_comes_last_or_every_so_many_steps(val_every: int, steps: list[int]):
    model = small_model(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [{"input_ids": torch.arange(10).view(2, 5)}]
    trainer = loop.Trainer(model, batches, optimizer, validate=lambda: 1.5, val_every=val_every)
    assert trainer.train(3)
    assert trainer.metrics.validations == [{"step": step, "val_loss": 1.5} for step in steps]


def test_scales_of_fp8_follow_the_steps_that_were_taken():
    """With a history, scales come from earlier steps. Step 1 of three is skipped, for its gradients are infinite."""
    model = small_model(0.0)
    mlp: Any = model.layers[0].mlp
    weight = mlp.down_proj.weight
    mlp.down_proj = FP8Linear(*reversed(weight.shape), scales="tensor", history=4, min_rows=0)
    mlp.down_proj.load_state_dict({"weight": weight})
    batches = [{"input_ids": torch.arange(10).view(2, 5)}]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = loop.Trainer(model, batches, optimizer, guard=Guard(World(), "skip"))
    largest: list[float] = []

    def record(module: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        largest.append(args[0].abs().max().item())
        if trainer.step == 1:
            output.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))

    mlp.down_proj.register_forward_hook(record)
    for _ in range(3):
        trainer.train_step()
    assert torch.isinf(torch.tensor([record["grad_norm"] for record in trainer.metrics.steps])).tolist() == [0, 1, 0]
    assert all(mlp.down_proj.operations.scaling.seen)
    history = mlp.down_proj.amax_history
    assert history[:2, 0].tolist() == [max(largest[1:]), largest[0]]
    assert history.isfinite().all() and not history[2:].any() and not mlp.down_proj.amax.any()


@pytest.mark.parametrize("make", [lambda: small_model(0.0), lambda: small_foreign()], ids=["own", "transformers"])
def test_documents_are_apart_by_positions_or_by_their_numbers(make):
    """Positions alone and document ids alone work like both: no document sees another."""
    ids = torch.randint(0, 11, (2, 9), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1], [7, 3, 3, 3, 3, 3, 4, 4, 4]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 0, 1, 2]])

    def loss(**more: torch.Tensor) -> float:
        (batch,) = FromLoader([{"input_ids": ids} | more], World()).step()
        return make()(**batch.arguments()).loss.item()

    want, labels = 0.0, 0
    for row, of_row in zip(ids, documents, strict=True):
        for document in of_row.unique():
            own = row[of_row == document][None]
            if own.shape[1] > 1:
                (batch,) = FromLoader([{"input_ids": own}], World()).step()
                want += make()(**batch.arguments()).loss.item() * (own.shape[1] - 1)
                labels += own.shape[1] - 1
    for more in (
        {"document_ids": documents, "positions": positions},
        {"document_ids": documents},
        {"positions": positions},
    ):
        assert loss(**more) == pytest.approx(want / labels, rel=1e-5), more.keys()


def small_foreign() -> TransformersModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=11, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
    return TransformersModel(LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_rows_that_are_concatenated_for_flash_attention_have_the_same_loss(monkeypatch, dtype: torch.dtype):
    model, shapes = small_foreign(), []
    ids, labels = torch.randint(0, 11, (2, 2, 9), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 0, 1, 2]])
    want = model(ids, labels, positions, num_labels=18.0).loss
    monkeypatch.setattr(TransformersModel, "flattens", True)
    model.causal.get_input_embeddings().register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape))
    torch.testing.assert_close(model(ids.to(dtype), labels, positions, num_labels=18.0).loss, want)
    assert shapes == [(1, 18)]


IDS = torch.tensor([[5, 6, 7, 8], [9, 9, 4, 3]])


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ({"labels": IDS}, "labels equal input_ids"),
        ({"labels": IDS.masked_fill(IDS > 6, -100)}, "labels equal input_ids"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])}, r"attention_mask has zeros.*labels of.* -100"),
        ({"labels": IDS[:, 1:]}, r"labels has shape \(2, 3\), but input_ids has \(2, 4\)"),
        ({"positions": IDS[0]}, r"positions has shape \(4,\), but input_ids has \(2, 4\)"),
        ({"position_ids": IDS, "idx": IDS}, r"a batch has 'position_ids', 'idx'; the trainer reads input_ids, labels"),
    ],
)
def test_batches_that_would_train_something_else_are_refused(batch: dict[str, torch.Tensor], why: str):
    with pytest.raises(ValueError, match=why):
        next(FromLoader([{"input_ids": IDS} | batch], World()).step())


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ([IDS], "a batch is a list; the trainer takes mappings with input_ids"),
        (IDS, "a batch is a Tensor; the trainer takes mappings with input_ids"),
        ({"labels": IDS}, "a batch has no input_ids"),
        ({"input_ids": IDS[0]}, r"input_ids has shape \(4,\); the trainer takes rows of tokens, \[B, S\]"),
        ({"input_ids": IDS.tolist()}, "input_ids is a list; the trainer takes tensors"),
        ({"input_ids": IDS.float()}, r"input_ids is torch\.float32; the trainer takes integers"),
        ({"input_ids": IDS, "labels": IDS > 5}, r"labels is torch\.bool; the trainer takes integers"),
    ],
)
def test_what_is_no_batch_is_refused(batch: Any, why: str):
    """A TensorDataset yields lists, and a tokenizer yields lists of lists."""
    with pytest.raises(ValueError, match=why):
        next(FromLoader([batch], World()).step())


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: small_model(0.0), lambda: small_foreign()], ids=["own", "transformers"])
@pytest.mark.parametrize("given", [("input_ids",), ("input_ids", "labels", "positions", "document_ids")], ids=len)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.uint16, torch.uint32])
def test_ids_of_another_integer_dtype_train_as_int64(make, given: tuple[str, ...], dtype: torch.dtype):
    """uint8 and uint16 cannot hold the label -100 of a row's last token."""
    every = {
        "input_ids": torch.randint(0, 11, (2, 9), generator=torch.Generator().manual_seed(0)),
        "labels": torch.randint(0, 11, (2, 9), generator=torch.Generator().manual_seed(1)),
        "positions": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2),
        "document_ids": torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]] * 2),
    }
    found = []
    for wanted in (torch.int64, dtype):
        batch = {name: every[name].to(wanted) for name in given}
        (made,) = FromLoader([batch], World()).step()
        assert made.input_ids.dtype == made.labels.dtype == torch.int64
        model = make()
        model(**made.arguments()).loss.backward()
        found.append([made.labels, *(p.grad for p in model.parameters())])
    for want, got in zip(*found, strict=True):
        assert torch.equal(want, got)


def test_a_batch_of_transformers_collator_is_refused():
    from transformers import default_data_collator

    rows = [{"input_ids": row, "labels": row, "attention_mask": [1] * 4} for row in IDS.tolist()]
    with pytest.raises(ValueError, match="labels equal input_ids"):
        next(FromLoader([default_data_collator(rows)], World()).step())


@pytest.mark.parametrize(
    ("ids", "labels"),
    [
        ([[7, 7, 7, 7]], [[7, 7, 7, 7]]),  # the same token repeated
        ([[7, 7, 7, 7], [8, 8, 8, 8]], [[7, 7, 7, 7], [8, 8, 8, -100]]),
        ([[7, 7, 7, 8, 8]], [[7, 7, -100, 8, 8]]),  # two documents
        ([[1, 2, 3, 4]], [[-100, -100, -100, 4]]),  # one answer token, which follows the row
        ([[1, 2, 3, 4]], [[-100, 2, -100, -100]]),
        ([[1, 2, 3, 4]], [[2, 3, 4, 4]]),
        ([[1, 2, 3, 4]], [[-100] * 4]),
    ],
)
def test_labels_that_only_look_unshifted_are_taken(ids: list[list[int]], labels: list[list[int]]):
    given = {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}
    (batch,) = FromLoader([given | {"attention_mask": torch.ones_like(given["input_ids"])}], World()).step()
    assert batch.labels.tolist() == labels


def test_what_a_trainer_cannot_train_is_refused():
    with pytest.raises(ValueError, match="the data has no batch"):
        list(FromLoader([], World()).step())
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"Linear is not a fusedtp\.nn\.CausalLM"):
        loop.Trainer(model, [], torch.optim.SGD(model.parameters()))


def test_an_optimizer_of_other_parameters_is_refused(worlds):
    """For example one created before parallelize or shard replaced the parameters: it would train nothing."""
    found = worlds(2).run(early_optimizer)
    assert all("created before" in each and each.startswith("the optimizer has parameters") for each in found)
    model, other = small_model(0.0), small_model(0.0)
    with pytest.raises(ValueError, match="parameters that are not the model's"):
        loop.Trainer(model, [], torch.optim.SGD(other.parameters()))
    loop.Trainer(model, [], torch.optim.SGD([model.norm.weight]))  # the other parameters stay frozen


def early_optimizer(group: Any) -> str:
    mesh, model = mesh_of(tp=2), small_model(0.0)
    optimizer = torch.optim.AdamW(model.parameters())
    parallelize(model, mesh)
    try:
        loop.Trainer(model, [], optimizer, mesh)
    except ValueError as error:
        return str(error)
    return ""


def test_an_iterator_that_ends_says_so():
    loader = FromLoader(iter(own_batches(3)), World())
    for _ in range(3):
        list(loader.step())
    with pytest.raises(ValueError, match="the data ended after 3 batches and does not restart: a list_iterator"):
        list(loader.step())


def refusal(group: Any, shape: tuple[int, ...], axes: tuple[str, ...]) -> str:
    try:
        World.of(init_device_mesh("cpu", shape, mesh_dim_names=axes), torch.device("cpu"))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("axes", "why"),
    [(("tp", "dp"), "in this order"), (("dp", "model"), "must be some of"), (("dp", "tp"), "")],
)
def test_a_mesh_with_other_axes_is_refused(worlds, axes: tuple[str, ...], why: str):
    found = worlds(2).run(refusal, (2, 1), axes)
    assert all(why in each and bool(why) == bool(each) for each in found)
