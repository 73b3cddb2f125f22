"""Every factorization of four ranks gives the loss, the gradients and the norm of one process.

    --pp 2 --dp-replicate 1 --dp 1 --tp 2    and nine more, times tied embeddings, experts, schedules and kinds of --dp

CI tests each mesh and each schedule at least once. FUSEDTP_ALL_MESHES=1 (`make test-meshes`) tests all cases that
`faults` accepts. Dropout is on, so it must depend only on a token's position. No axis divides the vocabulary of 13, and
an axis of four does not divide the 10 features of the MLP.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fusedtp.commands.build import build_stages, shard_faults
from fusedtp.parallel import clip_grad_norm_
from fusedtp.train.config import TrainConfig, faults, parse
from fusedtp.train.data import Batches, build_tokens, tokenizer_of
from fusedtp.train.loop import ExpertLoad, backward
from fusedtp.train.mesh import World
from fusedtp.train.stages import SCHEDULES, stage_count
from tests.train.support import assert_gradients, meshes_of

SIZES = "--width 16 --heads 4 --kv-heads 2 --mlp-width 10 --length 8 --batch 8 --dropout 0.1 --documents separate"
EXPERTS = "--experts 4 --top-k 2 --expert-width 8 --shared-width 7 --dense-layers 1 --balance 0.1"
Axes = tuple[int, int, int, int]  # pp, dp-replicate, dp-shard, tp
AXES: list[Axes] = [axes for axes in product((1, 2, 4), repeat=4) if axes[0] * axes[1] * axes[2] * axes[3] == 4]
CASES = {
    "tp4 tied": "--tp 4 --tie-embeddings --accumulate 2",
    "dp2 tp2 zero2": "--dp 2 --tp 2 --tie-embeddings --accumulate 2 --data-parallel zero2",
    "experts over dp2 ep4": f"--dp 2 --tp 2 --ep 4 --accumulate 2 {EXPERTS}",
    "dp4 zero1": "--dp 4 --accumulate 2 --data-parallel zero1",
    "experts on hsdp": f"--dp 4 --dp-replicate 2 --tie-embeddings {EXPERTS}",
    "dp4 ddp": "--dp 4 --dp-replicate 4 --accumulate 2",
    "hsdp tp2": "--dp 2 --dp-replicate 2 --tp 2 --tie-embeddings",
    "pp4 dualpipev": "--pp 4 --accumulate 8 --tie-embeddings --schedule dualpipev",
    "pp4 zero bubble": "--pp 4 --accumulate 4 --schedule interleaved_zero_bubble --tie-embeddings --recompute full",
    "pp2 dp2 zbv": "--pp 2 --dp 2 --accumulate 4 --schedule zbv_zero_bubble --recompute selective",
    "pp2 ddp": "--pp 2 --dp 2 --dp-replicate 2 --accumulate 4 --tie-embeddings --schedule gpipe",
    "experts pp2 tp2": f"--pp 2 --tp 2 --accumulate 4 --tie-embeddings --schedule interleaved_1f1b {EXPERTS}",
    "pp2 tp2 no sp": "--pp 2 --tp 2 --accumulate 2 --schedule looped_bfs --no-sequence-parallel",
    "experts pp2 dp2": f"--pp 2 --dp 2 --accumulate 2 --schedule 1f1b {EXPERTS}",
    "pp2 dp2 zbv tied": "--pp 2 --dp 2 --accumulate 4 --tie-embeddings --schedule zbv_zero_bubble",
    "pp2 dp2 dualpipev tied": "--pp 2 --dp 2 --accumulate 5 --batch 20 --tie-embeddings --schedule dualpipev",
    "pp2 ddp zbv tied": "--pp 2 --dp 2 --accumulate 2 --tie-embeddings --schedule zbv_zero_bubble --data-parallel ddp",
    "experts pp2 dp2 zero bubble": f"--pp 2 --dp 2 --accumulate 2 --schedule interleaved_zero_bubble {EXPERTS}",
}


def axes_of(config: TrainConfig) -> Axes:
    parallel = config.parallel
    dp = parallel.dp or 1
    copies = parallel.copies(dp)
    return parallel.pp, copies, dp // copies, parallel.tp or 1


def every_case() -> Iterator[str]:
    """All cases that compute differently, as far as they can run."""
    for (pp, copies, shards, tp), tied, experts in product(AXES, (False, True), (False, True)):
        mesh = f"--pp {pp} --dp {copies * shards} --dp-replicate {copies} --tp {tp}"
        model = ("--tie-embeddings " if tied else "") + (EXPERTS if experts else "")
        if pp > 1:
            for schedule in SCHEDULES:
                pieces = 2 * pp if schedule == "dualpipev" else pp
                yield f"{mesh} --accumulate {pieces} --schedule {schedule} {model}"
        elif shards > 1:
            for kind, pieces in product(("zero1", "zero2", "zero3"), (1, 2)):
                yield f"{mesh} --accumulate {pieces} --data-parallel {kind} {model}"
        else:
            yield f"{mesh} --accumulate 2 {model}"


if os.environ.get("FUSEDTP_ALL_MESHES") == "1":
    CASES |= {options: options for options in every_case()}


def config_of(options: str, folder: Path) -> TrainConfig:
    """One layer more than stages, so stages are unequal, or three layers if there is no pipeline."""
    config = parse([*SIZES.split(), "--tp", "1", "--dp", "1", *options.split(), "--tokenizer", str(folder)])
    pp = config.parallel.pp
    layers = 1 + stage_count(config.parallel.schedule, pp) if pp > 1 else 3
    return replace(config, model=replace(config.model, layers=layers))


def all_faults(config: TrainConfig) -> list[str]:
    dp, tp = config.parallel.dp or 1, config.parallel.tp or 1
    return faults(config, dp, tp) or shard_faults(config, dp, tp)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer with 13 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = ["<end>", "<unknown>", ".", *(f"w{i}" for i in range(10))]
    own = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<unknown>"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("words")
    PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<end>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokens(words: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Most documents are shorter than a window, so microbatches have unequal numbers of labels."""
    folder = tmp_path_factory.mktemp("documents")
    for i in range(60):
        (folder / f"{i:02}.txt").write_text(" ".join(f"w{i * j % 10}" for j in range(2 + i % 9)) + " .")
    return build_tokens((folder,), tmp_path_factory.mktemp("tokens"), tokenizer_of(words))


Step = tuple[float, dict[str, Tensor], float, float]  # loss, gradients, their norm, their largest entry


def stepped(group: Any, options: str, words: Path, tokens: Path) -> Step:
    """Forward and backward of the trainer's first step on a mesh."""
    torch.set_num_threads(1)
    config = config_of(options, words)
    pp, copies, shards, tp = axes_of(config)
    dp, ep = copies * shards, config.parallel.ep or tp
    mesh, flat = meshes_of(dp, tp, ep, pp, copies)
    here = World(dp, tp, ep, group.rank(), torch.device("cpu"), mesh, flat, pp=pp, dp_replicate=copies)
    return step_of(config, here, tokens)


def step_of(config: TrainConfig, here: World, tokens: Path) -> Step:
    data = config.data
    batches = Batches(
        tokens, length=data.length, batch=data.batch, accumulate=data.accumulate, dp=here.dp, dp_rank=here.dp_rank,
        documents=data.documents,
    )  # fmt: skip
    model, pipeline = build_stages(config, here)
    load = ExpertLoad(model, here, 0.0)
    loss = backward(model, batches, 0, load, 0, pipeline, config.parallel.kind)
    own = {} if pipeline is None else {"others": pipeline.group, "uncounted": pipeline.uncounted}
    norm, largest = (clip_grad_norm_(model, 1e9, kind, **own).item() for kind in (2.0, math.inf))
    gradients = {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return here.mean(loss), gradients, norm, largest


@cache
def alone(config: TrainConfig, tokens: Path) -> Step:
    """The same step in one process, without a mesh."""
    return step_of(config, World(), tokens)


def model_and_data(config: TrainConfig) -> TrainConfig:
    """Only the options on which the loss and its gradients depend."""
    return TrainConfig(config.model, config.data, run=config.run)


@pytest.mark.slow
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_mesh_gives_the_gradients_of_one_process(worlds, words: Path, tokens: Path, options: str):
    config = config_of(options, words)
    assert all_faults(config) == []
    loss, gradients, norm, largest = alone(model_and_data(config), tokens)
    names: set[str] = set()
    for found in worlds(4).run(stepped, options, words, tokens):
        assert found[0] == pytest.approx(loss, rel=1e-5)
        assert found[2] == pytest.approx(norm, rel=1e-5) and found[3] == pytest.approx(largest, rel=1e-4)
        assert_gradients(found[1], gradients, config.model.layers)
        names |= found[1].keys()
    assert names == gradients.keys() and len(names) > 9 * config.model.layers


@pytest.mark.slow
def test_ci_has_every_mesh_and_schedule(words: Path):
    configs = [config_of(options, words) for options in [*CASES.values()][:15]]
    assert [fault for config in configs for fault in all_faults(config)] == []
    assert {axes_of(config) for config in configs} == set(AXES) and len(AXES) == 10
    assert {config.parallel.schedule for config in configs if config.parallel.pp > 1} == set(SCHEDULES)
    assert tokenizer_of(words).vocab_size == 13
