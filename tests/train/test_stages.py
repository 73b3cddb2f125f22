"""Pipelines: every schedule gives the loss and the gradients of one process."""

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fusedtp.nn import CausalLM, ModelConfig, init_
from fusedtp.parallel import clip_grad_norm_, parallelize
from fusedtp.train.config import faults, parse
from fusedtp.train.data import Microbatch
from fusedtp.train.stages import SCHEDULES, Pipeline, cut, prune_, stage_count, stages_of


def model_of(tied: bool, dtype: str = "float32") -> CausalLM:
    return CausalLM(
        ModelConfig(
            vocab_size=13, hidden_size=16, intermediate_size=10, num_hidden_layers=5, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=tied, residual_dropout=0.1, embedding_dropout=0.1,
            dtype=dtype, param_dtype="float32",
        ),
        device="meta",
    )  # fmt: skip


def batches_of(count: int, length: int, seed: int) -> list[Microbatch]:
    """Microbatches with unequal numbers of labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 13, (count, 2, length), generator=generator)
    labels = torch.randint(0, 13, (count, 2, length), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    positions = torch.arange(length).expand(2, -1) % 4
    documents = torch.arange(length).expand(2, -1) // 4
    total = int((labels != -100).sum())
    return [Microbatch(ids[i], labels[i], 2 * length * i, total, positions, documents) for i in range(count)]


def alone(tied: bool, steps: list[tuple[int, int]]) -> list[tuple[float, dict[str, Tensor], float, float]]:
    model = init_(model_of(tied).to_empty(device="cpu"), 0, std=0.3)
    found = []
    for step, (count, length) in enumerate(steps):
        total = torch.zeros(())
        for batch in batches_of(count, length, step):
            model.set_dropout(7, step, batch.first_token)
            loss = model(**batch.arguments()).loss
            loss.backward()
            total += loss.detach()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        model.eval()
        with torch.no_grad():
            every = [model(**batch.arguments()).loss.item() for batch in batches_of(count, length, step + 50)]
        model.train()
        found.append((total.item(), gradients, norm.item(), sum(every)))
        for p in model.parameters():
            p.grad = None
    return found


def pipelined(
    group: Any, schedule: str, pp: int, tp: int, tied: bool, steps: list[tuple[int, int]]
) -> list[tuple[float, dict[str, Tensor], float, float]]:
    mesh = init_device_mesh("cpu", (pp, tp), mesh_dim_names=("pp", "tp"))
    model = model_of(tied)
    if tp > 1:
        parallelize(model, mesh["tp"])
    count = stage_count(schedule, pp)
    parts = cut([1.0] * 5, 0.5, count)
    here = stages_of(schedule, pp, mesh.get_local_rank("pp"))
    prune_(model, parts, here)
    init_(model.to_empty(device="cpu"), 0, std=0.3)
    pipeline = Pipeline(model, mesh["pp"], schedule, parts, here)
    found = []
    for step, (count, length) in enumerate(steps):
        model.eval()
        evaluated = pipeline.evaluate(batches_of(count, length, step + 50)).item()
        model.train()
        loss = pipeline.step(batches_of(count, length, step), 7, step)
        gradients = {
            name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
            for name, p in model.named_parameters()
        }
        norm = clip_grad_norm_(model, 1e9, others=pipeline.group, uncounted=pipeline.uncounted)
        found.append((loss.item(), gradients, norm.item(), evaluated))
        for p in model.parameters():
            p.grad = None
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("pp", "tp", "tied"), [(2, 1, False), (2, 1, True), (2, 2, True)])
def test_every_schedule_gives_the_gradients_of_one_process(
    worlds, schedule: str, pp: int, tp: int, tied: bool
):
    steps = [(4, 8), (4, 5), (6, 8)]
    want = alone(tied, steps)
    names: set[str] = set()
    for found in worlds(pp * tp).run(pipelined, schedule, pp, tp, tied, steps):
        for (loss, gradients, norm, evaluated), (wanted_loss, wanted, wanted_norm, wanted_evaluated) in zip(
            found, want, strict=True
        ):
            assert evaluated == pytest.approx(wanted_evaluated, rel=1e-5)
            assert loss == pytest.approx(wanted_loss, rel=1e-5)
            assert norm == pytest.approx(wanted_norm, rel=1e-5)
            torch.testing.assert_close(
                gradients, {name: wanted[name] for name in gradients}, rtol=1e-4, atol=1e-6
            )
        names |= found[0][1].keys()
    assert names == want[0][1].keys()


@given(
    layers=st.lists(st.integers(1, 9).map(float), min_size=1, max_size=7),
    head=st.integers(0, 20),
    data=st.data(),
)
def test_the_dearest_stage_is_as_cheap_as_can_be(layers: list[float], head: int, data: st.DataObject):
    stages = data.draw(st.integers(1, len(layers)))
    parts = cut(layers, head, stages)
    assert [i for part in parts for i in part] == list(range(len(layers))) and all(map(len, parts))

    def dearest(ends: Sequence[int]) -> float:
        sums = [sum(layers[begin:end]) for begin, end in pairwise((0, *ends, len(layers)))]
        return max(*sums[:-1], sums[-1] + head) if len(sums) > 1 else sums[0] + head

    every = combinations(range(1, len(layers)), stages - 1)
    assert dearest([part.stop for part in parts[:-1]]) == min(map(dearest, every))


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="3 pipeline stages of 2 layers"):
        cut([1.0, 1.0], 0.0, 3)


def test_what_a_pipeline_cannot_do_is_said_together():
    options = "--pp 4 --layers 3 --accumulate 2 --batch 4 --experts 4 --schedule dualpipev --tie-embeddings"
    assert [fault.split(":")[0] for fault in faults(parse(options.split()), 2, 1)] == [
        "--schedule dualpipev with --pp 4 has 8 stages, more than --layers 3",
        "--schedule dualpipev with --pp 4 needs at least 8 --accumulate microbatches, not 2",
        "--experts with --pp",
        "--schedule dualpipev with --dp 2",
        "--schedule dualpipev with --dp 2 and --tie-embeddings",
    ]
    fine = "--pp 2 --layers 4 --accumulate 4 --batch 8 --schedule interleaved_1f1b"
    assert faults(parse(fine.split()), 2, 2) == []
    odd = parse([*fine.split(), "--accumulate", "3", "--batch", "6"])
    assert faults(odd, 2, 1) == [
        "--schedule interleaved_1f1b needs an --accumulate that --pp 2 divides, not 3"
    ]
