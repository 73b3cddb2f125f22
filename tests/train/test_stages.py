"""Pipelines: every schedule gives the loss and the gradients of one process."""

from collections.abc import Sequence
from functools import cache
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fusedtp.comm import communicator
from fusedtp.nn import CausalLM, ModelConfig, MoEConfig, attention, init_, mask, recompute_
from fusedtp.nn.recompute import Recompute
from fusedtp.ops import engines
from fusedtp.ops.operation import Operation
from fusedtp.parallel import clip_grad_norm_, parallelize
from fusedtp.train import stages
from fusedtp.train.config import faults, parse
from fusedtp.train.data import Microbatch
from fusedtp.train.shard import blocks_of, shard
from fusedtp.train.stages import (
    SCHEDULES,
    TWO_PASSES,
    V_SHAPED,
    Pipeline,
    costs,
    cut,
    pipeline_faults,
    prune_,
    stage_costs,
    stage_count,
    stages_of,
    two_passes,
)
from tests.train.support import assert_gradients, mesh_of

MOE = MoEConfig(num_experts=4, top_k=2, hidden=6, shared=5, first_dense=1, balance_loss=0.1, z_loss=0.01)


def model_of(tied: bool, moe: MoEConfig | None = None) -> CausalLM:
    return CausalLM(
        ModelConfig(
            vocab_size=13, hidden_size=16, intermediate_size=10, num_hidden_layers=5, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=tied, residual_dropout=0.1, embedding_dropout=0.1,
            moe=moe, param_dtype="float32",
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


@cache
def alone(
    tied: bool, steps: tuple[tuple[int, int], ...], moe: MoEConfig | None = None
) -> list[tuple[float, dict[str, Tensor], float, float]]:
    """Loss, gradients, norm and held-out loss of each step in one process. steps: (microbatches, length) of each."""
    model = init_(model_of(tied, moe).to_empty(device="cpu"), 0, std=0.3)
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
    group: Any,
    schedule: str,
    pp: int,
    tp: int,
    tied: bool,
    steps: tuple[tuple[int, int], ...],
    moe: MoEConfig | None = None,
) -> tuple[list[tuple[float, dict[str, Tensor], float, float]], list[str]]:
    """Loss, gradients, norm and held-out loss of each step, and this rank's operations in order."""
    order: list[str] = []
    run = Operation._run

    def noted(operation: Operation, *given: Any) -> Any:
        order.append(operation.name)
        return run(operation, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Operation, "_run", noted)
        return steps_of_pipeline(schedule, pp, tp, tied, steps, moe), order


def steps_of_pipeline(
    schedule: str,
    pp: int,
    tp: int,
    tied: bool,
    steps: tuple[tuple[int, int], ...],
    moe: MoEConfig | None = None,
    recompute: Recompute | None = None,
) -> list[tuple[float, dict[str, Tensor], float, float]]:
    mesh = mesh_of(pp=pp, tp=tp)
    model = model_of(tied, moe)
    if tp > 1:
        parallelize(model, mesh["tp"])
    count = stage_count(schedule, pp)
    parts = cut([1.0] * 5, 0.5, count)
    here = stages_of(schedule, pp, mesh.get_local_rank("pp"))
    prune_(model, parts, here)
    if recompute is not None:
        recompute_(blocks_of(model), recompute, two_passes(schedule, pp))
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


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("pp", "tp", "tied"), [(2, 1, False), (2, 1, True), (2, 2, True)])
def test_every_schedule_gives_the_gradients_of_one_process(worlds, schedule: str, pp: int, tp: int, tied: bool):
    every_change = ((4, 8), (4, 5), (6, 5))  # the length changes, then the number of microbatches
    compare(worlds, schedule, pp, tp, tied, ((4, 8), (6, 5)) if tied else every_change)


def compare(
    worlds,
    schedule: str,
    pp: int,
    tp: int,
    tied: bool,
    steps: tuple[tuple[int, int], ...],
    moe: MoEConfig | None = None,
):
    """Compare losses, gradients and norms of a pipeline with those of one process."""
    every = worlds(pp * tp).run(pipelined, schedule, pp, tp, tied, steps, moe)
    for stage in range(pp):
        first, *others = (order for _, order in every[stage * tp : (stage + 1) * tp])
        assert (first or tp == 1) and all(order == first for order in others), "ranks of tp call alike"
    assert_same([found for found, _ in every], alone(tied, steps, moe))


def assert_same(
    every: Sequence[list[tuple[float, dict[str, Tensor], float, float]]],
    want: list[tuple[float, dict[str, Tensor], float, float]],
):
    """Compare each step on the ranks of a pipeline with one process."""
    names: set[str] = set()
    for found in every:
        for (loss, gradients, norm, evaluated), (wanted_loss, wanted, wanted_norm, wanted_evaluated) in zip(
            found, want, strict=True
        ):
            assert evaluated == pytest.approx(wanted_evaluated, rel=1e-5)
            assert loss == pytest.approx(wanted_loss, rel=1e-5)
            assert norm == pytest.approx(wanted_norm, rel=1e-5)
            assert_gradients(gradients, wanted, layers=5)
        names |= found[0][1].keys()
    assert names == want[0][1].keys()


def with_flex_attention(
    group: Any, schedule: str, tp: int, recompute: Recompute | None, steps: tuple[tuple[int, int], ...]
) -> tuple[list[tuple[float, dict[str, Tensor], float, float]], int]:
    """The results of the steps, and the number of calls to flex attention."""
    from torch.nn.attention import flex_attention

    taken = 0

    def counted(*args: Any) -> Tensor:
        nonlocal taken
        taken += 1
        return mask.flex(*args)

    with pytest.MonkeyPatch.context() as patch:
        # torch can run this backward on a CPU, but refuses to by default.
        patch.setattr(flex_attention, "_validate_device", lambda *qkv: None)
        patch.setattr(attention, "attention_mask", lambda *given: mask.attention_mask(*given[:4], use_flex=True))
        patch.setattr(attention, "flex", counted)
        return steps_of_pipeline(schedule, 2, tp, False, steps, recompute=recompute), taken


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "tp", "recompute"),
    [
        ("1f1b", 1, "full"),
        ("interleaved_zero_bubble", 1, None),
        ("interleaved_zero_bubble", 1, "full"),
        ("interleaved_zero_bubble", 2, "selective"),
        ("zbv_zero_bubble", 1, "selective"),
        ("dualpipev", 1, "full"),
    ],
)
def test_block_masks_of_flex_attention_in_a_backward_of_two_passes(
    worlds, schedule: str, tp: int, recompute: Recompute | None
):
    """Its mask is not a tensor and reads the documents of the microbatch: torchtitan 3584."""
    steps = ((4, 8), (4, 5))
    every = worlds(2 * tp).run(with_flex_attention, schedule, tp, recompute, steps)
    assert_same([found for found, _ in every], alone(False, steps))
    training, evaluation = 4 * (1 + (recompute is not None)), 4  # microbatches per layer
    assert sum(taken for _, taken in every) == tp * len(steps) * 5 * (training + evaluation), "of 5 layers"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble", "dualpipev"])
@pytest.mark.parametrize("tp", [1, 2])
def test_losses_of_routers_reach_every_stage(worlds, schedule: str, tp: int):
    compare(worlds, schedule, 2, tp, False, ((4, 8), (4, 5)), MOE)


def messages_of(
    group: Any, schedule: str, recompute: Recompute | None = None, engine: str = "auto"
) -> dict[str, dict[str, int]]:
    """Communication calls per layer in one step, on two stages of two tensor-parallel ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    model = model_of(False)
    parallelize(model, mesh["tp"], engine=engine)
    parts = cut([1.0] * 5, 0.5, stage_count(schedule, 2))
    here = stages_of(schedule, 2, mesh.get_local_rank("pp"))
    prune_(model, parts, here)
    if recompute is not None:
        recompute_(blocks_of(model), recompute, two_passes(schedule, 2))
    init_(model.to_empty(device="cpu"), 0, std=0.3)
    Pipeline(model, mesh["pp"], schedule, parts, here).step(batches_of(4, 8, 0), 7, 0)
    return engines.layer_calls(communicator(mesh["tp"]))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["auto", "collective"])
@pytest.mark.parametrize("recompute", [None, "selective", "full"])
def test_weight_gradients_that_come_later_repeat_no_communication(worlds, recompute: Recompute | None, engine: str):
    whole, later = (
        worlds(4).run(messages_of, schedule, recompute, engine)
        for schedule in ("interleaved_1f1b", "interleaved_zero_bubble")
    )
    if (
        engine == "auto"
    ):  # on CPU ranks both gradients of a column-parallel layer share a call, where one pass wants them
        for of_whole, of_later in zip(whole, later, strict=True):
            for layer in [layer for layer in of_whole if "+" in layer or layer == "lm_head"]:
                n, m = (sum(of.pop(layer).values()) for of in (of_whole, of_later))
                assert n <= m <= n + n // 2, layer
    for of_whole, of_later in zip(whole, later, strict=True):  # norm gradients: one call per stack, or one each
        stack, each = (sum(of.pop("all_reduce_rows").values()) for of in (of_whole, of_later))
        assert 4 <= stack < each <= 4 * (3 * 2 + 1), "4 microbatches of 3 layers, or of 2 and what is behind them"
    assert later == whole
    assert all("mlp.down_proj" in rank for rank in whole)
    calls = sum(whole[0]["mlp.down_proj"].values())
    passes = 3 if recompute == "full" else 2  # forward, backward; full communicates again in backward, once
    assert calls == 4 * 3 * passes, "4 microbatches of 3 layers"


def sharded(group: Any, schedule: str, tied: bool) -> list[tuple[float, dict[str, Tensor], float]]:
    mesh = mesh_of(pp=2, dp=2)
    model = model_of(tied)
    count = stage_count(schedule, 2)
    parts, here = cut([1.0] * 5, 0.5, count), stages_of(schedule, 2, mesh.get_local_rank("pp"))
    prune_(model, parts, here)
    pipeline = Pipeline(model, mesh["pp"], schedule, parts, here)
    shard(model, mesh["dp"], stages=list(pipeline.stages.values()), kind="zero1")
    init_(model.to_empty(device="cpu"), 0, std=0.3)
    found = []
    for step in range(2):
        dp = mesh.get_local_rank("dp")
        every = [half_of(batch, dp) for batch in batches_of(4, 8, step)]
        loss = pipeline.step(every, 7, step)
        dist.all_reduce(loss, group=mesh["dp"].get_group())
        gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        norm = clip_grad_norm_(model, 1e9, others=pipeline.group, uncounted=pipeline.uncounted)
        found.append((loss.item() / 2, gradients, norm.item()))
        for p in model.parameters():
            p.grad = None
    return found


def half_of(batch: Microbatch, dp: int) -> Microbatch:
    row = slice(dp, dp + 1)
    ids, labels, place = (
        batch.input_ids[row],
        batch.labels[row],
        batch.first_token + dp * batch.input_ids.shape[1],
    )
    return Microbatch(ids, labels, place, batch.num_labels / 2, batch.positions[row], batch.document_ids[row])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "tied"),
    [(schedule, schedule not in V_SHAPED) for schedule in SCHEDULES] + [("interleaved_zero_bubble", False)],
)
def test_every_schedule_trains_sharded_parameters(worlds, schedule: str, tied: bool):
    want = alone(tied, ((4, 8), (4, 8)))
    for found in worlds(4).run(sharded, schedule, tied):
        for (loss, gradients, norm), (wanted_loss, wanted, wanted_norm, _) in zip(found, want, strict=True):
            assert loss == pytest.approx(wanted_loss, rel=1e-5)
            assert norm == pytest.approx(wanted_norm, rel=1e-5)
            assert_gradients(gradients, wanted, layers=5)


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


def test_the_first_layer_has_the_embedding_and_the_last_stage_the_head():
    config = ModelConfig(vocab_size=50, hidden_size=8, intermediate_size=6, num_hidden_layers=3, num_attention_heads=2)
    layers, head = costs(config, 4)
    assert (layers[0] - layers[1], layers[1] - layers[2], head) == (8, 0, 50 * 8)
    assert stage_costs(layers, head, [range(1), range(1, 3)]) == [layers[0], 2 * layers[1] + head]


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="3 pipeline stages of 2 layers"):
        cut([1.0, 1.0], 0.0, 3)


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 8), st.integers(1, 20))
def test_fewer_microbatches_than_pipeline_ranks_are_refused(schedule: str, pp: int, microbatches: int):
    found = pipeline_faults(schedule, pp, 2, 99, microbatches)
    least = 2 * pp if schedule == "dualpipev" else pp
    few = f"--schedule {schedule} with --pp {pp} needs at least {least} --accumulate microbatches"
    assert (microbatches < least) == any(fault.startswith(few) for fault in found)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_two_passes_before_torch_can_make_them_are_refused(schedule: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stages, "SPLITS_BACKWARD", False)
    found = pipeline_faults(schedule, 2, 2, 99, 4)
    assert found == [
        f"--schedule {schedule} needs torch 2.13: its split backward fails in older versions"
        for _ in range(schedule in TWO_PASSES)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", TWO_PASSES)
def test_zero_bubble_with_torch_compile_is_refused_by_name(schedule: str):
    options = f"--pp 2 --layers 4 --accumulate 4 --batch 8 --schedule {schedule} --recompute full"
    assert faults(parse(options.split()), 1, 2) == []
    (found,) = faults(parse([*options.split(), "--compile"]), 1, 2)
    assert found.startswith(f"--schedule {schedule} with --compile") and "161904" in found


@pytest.mark.slow
def test_what_a_pipeline_cannot_do_is_said_together():
    options = "--pp 4 --layers 3 --accumulate 2 --batch 4 --experts 4 --schedule dualpipev"
    assert [fault.split(":")[0] for fault in faults(parse(options.split()), 2, 1)] == [
        "--schedule dualpipev with --pp 4 has 8 stages, more than --layers 3",
        "--schedule dualpipev with --pp 4 needs at least 8 --accumulate microbatches, not 2",
    ]
    fine = "--pp 2 --layers 4 --accumulate 4 --batch 8 --schedule interleaved_1f1b"
    assert faults(parse(fine.split()), 2, 2) == []
    odd = parse([*fine.split(), "--accumulate", "3", "--batch", "6"])
    assert faults(odd, 2, 1) == ["--schedule interleaved_1f1b needs --pp 2 to divide --accumulate 3"]
