"""Over several steps, optimizers, clipping, checkpointing, compilation and FSDP2 treat it as a normal DTensor model."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fusedtp.comm import communicator
from fusedtp.nn import MoEConfig, recompute_
from fusedtp.nn.init import init_
from fusedtp.nn.recompute import Recompute
from fusedtp.parallel import clip_grad_norm_, parallelize
from tests.harness import world
from tests.parallel.support import (
    assert_close,
    assert_same_gradients,
    batch,
    dp_tp_mesh,
    full,
    losses,
    make,
    make_pair,
)
from tests.sampling import SAMPLED

MIXED = {
    "num_key_value_heads": 1,
    "qk_norm": True,
    "attention_bias": True,
    "mlp_bias": True,
    "vocab_size": 31,
}


# An update is lr m / (sqrt(v) + eps), where m and sqrt(v) are means of gradients. With eps = 1 its slope is at most 2
# lr, so parameters differ by less than gradients do. (With a small eps, the sign of a near-zero gradient decides.)
ADAMW = {"lr": 0.01, "eps": 1.0}


def assert_same_parameters(parallel, plain) -> None:
    wanted = dict(plain.named_parameters())
    for name, parameter in parallel.named_parameters():
        assert_close(name, parameter, wanted[name])


def train(group, optimizer_options: dict, max_norm: float, changes: dict) -> None:
    plain, parallel = make_pair(group, **changes)
    optimizers = [torch.optim.AdamW(m.parameters(), **ADAMW, **optimizer_options) for m in (plain, parallel)]
    for step in range(3):
        want, got = losses((plain, parallel), *batch(2, 5, vocab=plain.config.vocab_size, seed=step))
        assert_close(f"loss of step {step}", got, want)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        clipped = clip_grad_norm_(parallel, max_norm)
        assert type(clipped) is torch.Tensor
        assert_close("norm", clipped, norm)
        assert_same_gradients(parallel, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(parallel, plain)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["foreach", "fused"])
@pytest.mark.parametrize("world_size, max_norm", [(2, 0.1), (4, 1e9)])
def test_adamw_steps_equal_the_plain_model(kind: str, world_size: int, max_norm: float):
    world(world_size).run(train, {kind: True}, max_norm, {**MIXED, "tie_word_embeddings": kind == "fused"})


def clip_other_norms(group) -> None:
    plain, parallel = make_pair(group, **MIXED, tie_word_embeddings=True)
    losses((plain, parallel), *batch(2, 5))
    for kind in (1.0, 3.0, float("inf")):
        want = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()], kind)
        assert_close(f"norm {kind}", clip_grad_norm_(parallel, 1e9, kind), want)
    assert clip_grad_norm_([], 1.0).item() == 0.0
    twice = [*parallel.parameters(), *parallel.parameters()]
    assert_close(
        "each once",
        clip_grad_norm_(twice, 1e9),
        torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]),
    )
    next(parallel.parameters()).grad.to_local().fill_(float("nan"))
    with pytest.raises(RuntimeError, match="norm of the gradients is nan"):
        clip_grad_norm_(parallel, 1.0, error_if_nonfinite=True)


def test_clipping_by_other_norms_and_of_what_is_not_finite():
    world(3).run(clip_other_norms)


def clip_two_meshes(group) -> None:
    mesh = dp_tp_mesh()
    full_value = torch.arange(1.0, 8.0, dtype=torch.float64)
    ways = ((mesh["tp"], Shard(0)), (mesh["dp"], Replicate()))
    shards = [nn.Parameter(distribute_tensor(full_value, m, [p], src_data_rank=None)) for m, p in ways]
    both = nn.Parameter(full_value.clone())
    for parameter in (*shards, both):
        parameter.grad = parameter.detach().clone()
    norm = clip_grad_norm_([*shards, both], 1.0)
    want = full_value.square().sum().mul(3).sqrt()
    assert_close("norm over two meshes and a plain tensor", norm, want)
    for parameter in (*shards, both):
        assert_close("clipped", full(parameter.grad), full_value / (want + 1e-6))


def test_clipping_counts_parameters_of_several_meshes_once():
    world(4).run(clip_two_meshes)


def checkpointed(group, changes: dict, sequence_parallel: bool, kind: Recompute) -> None:
    """Bitwise equal to the same model without recomputation. Only `full` communicates again."""
    _, parallel = make_pair(group, options={"sequence_parallel": sequence_parallel}, **changes)
    calls, found = [], []
    comm = communicator(parallel.token_group or group)
    for recompute in (False, True):
        if recompute:
            recompute_(parallel.layers, kind)
        before = sum(comm.engine_calls.values())
        parallel.zero_grad()
        losses([parallel], *batch(2, 5))
        calls.append(sum(comm.engine_calls.values()) - before)
        found.append([full(p.grad) for p in parallel.parameters()])
    assert all(map(torch.equal, *found))
    assert calls[0] < calls[1] if kind == "full" else calls[0] == calls[1]


EXPERTS = MoEConfig(num_experts=6, top_k=2, hidden=5, shared=4, balance_loss=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("changes", [MIXED, {"moe": EXPERTS}], ids=["dense", "experts"])
def test_activation_checkpointing(changes: dict, sequence_parallel: bool, kind: Recompute):
    world(3).run(checkpointed, changes, sequence_parallel, kind)


def compiled(group, sequence_parallel: bool) -> None:
    plain, parallel = make_pair(group, options={"sequence_parallel": sequence_parallel}, **MIXED)
    for layer in parallel.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    for _ in range(2):
        want, got = losses((plain, parallel), *batch(2, 5))
        assert_close("loss", got, want)
    assert_same_gradients(parallel, plain)
    assert torch._dynamo.utils.counters["stats"]["calls_captured"] > 0
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_compiled_blocks(sequence_parallel: bool):
    world(2).run(compiled, sequence_parallel, timeout=120)


def compiled_whole(group, changes: dict, options: dict) -> None:
    """One graph of layers, head and loss, over several steps and with other data."""
    plain, parallel = make_pair(group, options=options, **changes)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(parallel, fullgraph=True, backend="aot_eager")
    for step in range(2):
        ids, labels = batch(2, 5, vocab=plain.config.vocab_size, seed=step)
        labels[0, step] = -100
        for model in (plain, parallel):
            model.zero_grad()
        want, got = plain(ids, labels).loss, compiled(ids, labels).loss
        want.backward(), got.backward()
        assert_close("loss", got, want)
        assert_same_gradients(parallel, plain)
        logits, columns = plain(ids).logits, -(-plain.config.vocab_size // group.size())
        assert_close("logits", compiled(ids).logits, logits[..., columns * group.rank() :][..., :columns])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "one with labels, one without"
    with pytest.raises(RuntimeError, match=f"a label is outside the vocabulary of {plain.config.vocab_size}"):
        compiled(ids, torch.full_like(ids, plain.config.vocab_size))
    torch._dynamo.reset()


ONE = {"num_hidden_layers": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "changes", "options"),
    [
        pytest.param(2, {**MIXED, **ONE}, {}, id="sequence parallel"),
        *(
            []
            if SAMPLED
            else [
                pytest.param(3, {**MIXED, **ONE, "vocab_size": 2}, {}, id="a rank without columns"),
                pytest.param(2, {**MIXED, **ONE, "tie_word_embeddings": True}, {"sequence_parallel": False}, id="tied"),
                pytest.param(2, {"moe": EXPERTS, **ONE}, {}, id="experts"),
            ]
        ),
    ],
)
def test_compiled_whole(world_size: int, changes: dict, options: dict):
    world(world_size).run(compiled_whole, changes, options, timeout=200)


def fsdp(
    group, meta: bool, changes: dict, kind: Recompute | None, pieces: bool = False, own_head: bool = False
) -> None:
    mesh = dp_tp_mesh()
    plain = make(**changes)
    state = plain.state_dict()
    parallel = make(seed=3, **changes)
    if meta:
        with torch.device("meta"):
            parallel = type(plain)(plain.config)
    parallelize(parallel, mesh["tp"])
    if kind is not None:
        recompute_(parallel.layers, kind)
    for layer in parallel.layers:
        fully_shard(layer, mesh=mesh["dp"])
    if own_head:
        fully_shard(parallel.lm_head, mesh=mesh["dp"])
    fully_shard(parallel, mesh=mesh["dp"])
    if pieces:
        parallel.config = replace(parallel.config, max_logits_bytes=100)
    for module in parallel.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
    if meta:
        parallel.to_empty(device="cpu")
    parallel.load_state_dict(state)
    assert all(p.device_mesh.ndim == 2 for p in parallel.parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), **ADAMW) for m in (plain, parallel)]
    rank = mesh["dp"].get_local_rank()
    for step in range(2):
        ids, labels = batch(4, 5, seed=step)
        count = (labels != -100).sum()
        plain(ids, labels).loss.backward()
        mine = slice(2 * rank, 2 * rank + 2)
        # FSDP2 averages gradients over two dp ranks, so each rank's share of the mean loss is doubled.
        (parallel(ids[mine], labels[mine], num_labels=count).loss * 2).backward()
        assert_same_gradients(parallel, plain)
        want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert_close("norm", clip_grad_norm_(parallel, 0.5), want)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(parallel, plain)


@pytest.mark.slow
@pytest.mark.parametrize("meta, tied, kind", [(False, False, None), (False, True, "full"), (True, True, "selective")])
def test_fsdp2_over_two_by_two_ranks(meta: bool, tied: bool, kind: Recompute | None):
    world(4).run(fsdp, meta, {**MIXED, "tie_word_embeddings": tied}, kind, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("own_head", [False, True])
def test_a_loss_by_pieces_under_fsdp2(own_head: bool):
    """If FSDP2 wraps the head separately, the head is called as a module."""
    world(4).run(fsdp, False, MIXED, None, True, own_head, timeout=120)


def initialise_after_fsdp(group) -> None:
    mesh = dp_tp_mesh()
    plain = init_(make(**MIXED), 7)
    with torch.device("meta"):
        parallel = type(plain)(plain.config)
    fully_shard(parallelize(parallel, mesh["tp"]), mesh=mesh["dp"])
    init_(parallel.to_empty(device="cpu"), 7)
    for name, parameter in parallel.named_parameters():
        assert torch.equal(full(parameter), plain.get_parameter(name)), name


def test_the_initial_model_is_the_same_under_fsdp2():
    world(4).run(initialise_after_fsdp)


def accumulate(group) -> None:
    plain, parallel = make_pair(group, **MIXED)
    for step in range(3):
        losses((plain, parallel), *batch(1, 5, seed=step))
    assert_same_gradients(parallel, plain)
    parallel.zero_grad()
    for parameter in parallel.parameters():
        parameter.requires_grad_(False)
    parallel.norm.weight.requires_grad_(True)
    losses((parallel,), *batch(1, 5))
    assert [n for n, p in parallel.named_parameters() if p.grad is not None] == ["norm.weight"]
    with torch.no_grad():
        parallel(*batch(1, 5))
    assert isinstance(parallel.norm.weight, DTensor)


def test_gradients_accumulate_and_frozen_parameters_get_none():
    world(2).run(accumulate)


def main_grads(group) -> None:
    plain, parallel = make_pair(group)
    weights = {n: p for n, p in parallel.named_parameters() if n.endswith("_proj.weight")}
    for parameter in weights.values():
        parameter.main_grad = torch.zeros_like(parameter.to_local(), dtype=torch.float64)
    for step in range(2):
        losses((plain, parallel), *batch(2, 5, seed=step))
    for name, parameter in weights.items():
        assert parameter.grad is None
        shard = DTensor.from_local(
            parameter.main_grad, parameter.device_mesh, parameter.placements, shape=parameter.shape,
            stride=parameter.stride(),
        )  # fmt: skip
        assert_close(f"main_grad of {name}", shard, dict(plain.named_parameters())[name].grad)


def test_weight_gradients_accumulate_in_main_grad():
    world(2).run(main_grads)
