"""A parallel model computes the same loss and gradients as the same class on one device."""

import copy
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial
from torch.nn.utils.parametrize import register_parametrization

import fusedtp
from fusedtp.comm import communicator
from fusedtp.nn import (
    CausalLM,
    Linear,
    ModelConfig,
    RopeScaling,
    TransformerBlock,
    document_ids_from_lengths,
    recompute_,
)
from fusedtp.parallel.foreign import sum_apart
from tests.harness import world
from tests.parallel.support import (
    assert_close,
    assert_same_gradients,
    batch,
    losses,
    make,
    make_pair,
    tp_mesh,
)

CASES: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "one kv head": {"num_key_value_heads": 1, "qk_norm": True},
    "grouped kv heads": {"attention_bias": True, "mlp_bias": True},
    "indivisible vocabulary and width": {"vocab_size": 31, "intermediate_size": 37},
    "an empty share of the vocabulary": {"vocab_size": 5, "tie_word_embeddings": True},
    "a sliding window": {"sliding_window": 3, "num_key_value_heads": 1},
    "linear RoPE scaling": {"rope_scaling": RopeScaling("linear", 2.5), "rope_theta": 20.0},
    "llama3 RoPE scaling": {"rope_scaling": RopeScaling("llama3", 8.0, 16), "rope_theta": 20.0},
    "yarn RoPE scaling": {"rope_scaling": RopeScaling("yarn", 4.0, 64), "rope_theta": 20.0},
}
GROUPED = {1: 4, 2: 6, 3: 6, 4: 2}  # world size -> kv heads: divisible by it, except two heads for four ranks


def compare(group, batch_size: int, length: int, options: dict, changes: dict) -> None:
    plain, parallel = make_pair(group, options=options, **changes)
    ids, labels = batch(batch_size, length, vocab=plain.config.vocab_size)
    want, got = losses((plain, parallel), ids, labels)
    assert_close("loss", got, want)
    assert_same_gradients(parallel, plain)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_loss_and_gradients_equal_the_plain_model(world_size: int, case: str):
    changes = dict(CASES[case])
    if case == "grouped kv heads":
        changes["num_key_value_heads"] = GROUPED[world_size]
    world(world_size).run(compare, 2, 6, {}, changes)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size, length", [(1, 7), (3, 5), (1, 2), (1, 1), (1, 5), (0, 5), (2, 0)])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_tokens_need_not_divide_and_may_be_fewer_than_ranks(batch_size: int, length: int, sequence_parallel: bool):
    changes = {"num_key_value_heads": 1, "qk_norm": True, "attention_bias": True, "mlp_bias": True}
    world(3).run(compare, batch_size, length, {"sequence_parallel": sequence_parallel}, changes)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tied", "one kv head", "grouped kv heads"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_without_sequence_parallelism(world_size: int, case: str):
    changes = {**CASES[case], "num_key_value_heads": GROUPED[world_size], "qk_norm": True}
    world(world_size).run(compare, 2, 3, {"sequence_parallel": False}, changes)


@pytest.mark.parametrize("engine", ["collective", "chunked"])
def test_every_engine(engine: str):
    world(2).run(compare, 2, 5, {"engine": engine}, {"tie_word_embeddings": True})


def compare_documents(group, window: int | None) -> None:
    """Documents end inside and between the ranks' tokens. Positions are unordered, since RoPE only sees distances."""
    document_ids = document_ids_from_lengths([[2, 3, 2], [4, 1, 2]])
    positions = torch.tensor([[0, 5, 1, 9, 2, 30, 4], [7, 0, 0, 11, 3, 2, 1]])
    plain, parallel = make_pair(group, sliding_window=window)
    ids, labels = batch(2, 7)
    out = [model(ids, labels, positions, document_ids).loss for model in (plain, parallel)]
    for loss in out:
        loss.backward()
    assert_close("loss", out[1], out[0])
    assert_same_gradients(parallel, plain)
    for other in (plain(ids, labels, positions).loss, plain(ids, labels, None, document_ids).loss):
        assert other.item() != out[0].item(), "neither may be without effect"


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_documents_and_positions(world_size: int, window: int | None):
    world(world_size).run(compare_documents, window)


def compare_logits(group, plan: dict) -> None:
    plain, parallel = make_pair(group, options={"plan": plan})
    ids, labels = batch(2, 5)
    want = plain(ids, labels, return_logits=True)
    got = parallel(ids, labels, return_logits=True)
    assert_close("logits", got.logits, want.logits)
    assert_close("loss", got.loss, want.loss)
    (want.loss + want.logits.square().mean()).backward()
    (got.loss + got.logits.square().mean()).backward()
    assert_same_gradients(parallel, plain)


def test_a_head_that_gathers_its_logits():
    plan = {
        "embed_tokens": "embedding_rowwise",
        "lm_head": "colwise_gather_output",
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
    }
    world(3).run(compare_logits, plan)


class Doubled(Linear):
    def forward(self, x, layout=None):
        return 2 * super().forward(x, layout)


def with_one_doubled(group, name: str, by: str, sequence_parallel: bool) -> None:
    """Double a layer by a hook or its own forward. The layer shares its input, and so its gather, with others."""
    plain = make(0)
    layer, parent = (plain.layers[0].get_submodule(each) for each in (name, name.partition(".")[0]))
    if by == "hook":
        layer.register_forward_hook(lambda module, given, y: 2 * y)
    else:
        setattr(parent, name.partition(".")[2], other := Doubled(layer.in_features, layer.out_features))
        other.load_state_dict(layer.state_dict())
    parallel = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group), sequence_parallel=sequence_parallel)
    ids, labels = batch(2, 5, vocab=plain.config.vocab_size)
    want, got = losses((plain, parallel), ids, labels)
    assert_close("loss", got, want)
    assert_same_gradients(parallel, plain)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("by", ["hook", "forward"])
@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"])
def test_what_others_did_to_a_layer_that_shares_its_input_is_kept(name, by, sequence_parallel):
    world(2).run(with_one_doubled, name, by, sequence_parallel)


def parametrized(group, name: str) -> str:
    model = CausalLM(ModelConfig(vocab_size=16, hidden_size=16, num_hidden_layers=1))
    register_parametrization(model.get_submodule(name), "weight", torch.nn.Identity())
    with pytest.raises(ValueError, match="its weight is computed from other parameters") as raised:
        fusedtp.parallelize(model, tp_mesh(group))
    return str(raised.value)


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head", "layers.0.mlp.up_proj", "layers.0.self_attn.o_proj"])
def test_a_weight_that_is_computed_is_refused(name):
    last = name.rpartition(".")[2]
    assert all(last in said for said in world(2).run(parametrized, name))


def sums_of_gradients(group, changes: dict, how: str) -> int:
    """The number of calls that sum gradients of replicated parameters. All gradients must equal the plain model's."""
    mesh = init_device_mesh("cpu", (1, group.size()), mesh_dim_names=("dp", "tp"))
    plain = make(**changes)
    parallel = fusedtp.parallelize(copy.deepcopy(plain), mesh["tp"])
    for layer in parallel.layers if how == "sharded" else ():
        fully_shard(layer, mesh=mesh["dp"])
    if how == "recomputed":
        for model in (plain, parallel):
            recompute_(model.layers)
    if how == "apart":
        sum_apart(parallel)
    if how == "main_grad":
        for layer in parallel.layers:
            weight = layer.input_layernorm.weight
            weight.main_grad = torch.zeros_like(weight)
    ids, labels = batch(2, 6)
    want, got = (model(ids, labels).loss for model in (plain, parallel))
    want.backward()
    calls = communicator(mesh["tp"]).engine_calls
    calls.clear()
    got.backward()
    count = sum(n for (name, _), n in calls.items() if name == "all_reduce_rows")
    if how == "main_grad":
        for layer in parallel.layers:
            weight = layer.input_layernorm.weight
            assert weight.grad is None
            weight.grad, weight.main_grad = weight.main_grad, None
    assert_same_gradients(parallel, plain)
    return count


BIASED = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, changes, wanted",
    [
        ("", {}, 1),  # two layers with two norms each
        ("", {"qk_norm": True, **BIASED}, 1),
        ("", {"num_hidden_layers": 1}, 1),
        ("recomputed", {}, 1),
        ("sharded", {}, 2),  # with FSDP2 a layer has its parameters only while it runs
        ("apart", {}, 4),
        ("main_grad", {}, 1 + 2),
    ],
    ids=str,
)
def test_gradients_of_what_ranks_hold_alike_are_summed_in_one_call(how: str, changes: dict, wanted: int):
    """The final norm comes after the layers, so its gradient is summed separately."""
    assert world(2).run(sums_of_gradients, changes, how) == [wanted + 1] * 2


class Scaled(TransformerBlock):
    """Has a parameter of its own, which every rank holds whole."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.gamma = torch.nn.Parameter(torch.full((24,), 1.5, dtype=torch.float64))

    def forward(self, x, layout=None):
        return super().forward(x, layout) * self.gamma


class OwnNorm(torch.nn.Module):
    """Written by a user who knows that the weight is a DTensor."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight.to_local(grad_placements=[Partial()]), 1e-5)


def looked_at(module, *_: Any) -> None:
    """Like a logging hook that only one rank has."""
    assert all(parameter.shape and parameter.dtype == torch.float64 for parameter in module.parameters())


def changed_by_a_user(group, what: str, sequence_parallel: bool) -> None:
    plain = make(0)
    if what == "a subclass":
        scaled = Scaled(plain.config)
        scaled.load_state_dict(plain.layers[1].state_dict(), strict=False)
        plain.layers[1] = scaled
    parallel = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group), sequence_parallel=sequence_parallel)
    layers = parallel.layers
    if what == "a norm replaced":
        layers[0].input_layernorm = OwnNorm(layers[0].input_layernorm.weight)
    if what == "hooks" and group.rank() == 1:
        for module in (layers[0], layers[1].input_layernorm, layers[1].self_attn.o_proj):
            module.register_forward_hook(looked_at)
            module.register_forward_pre_hook(looked_at)
    ids, labels = batch(2, 5)
    if what == "some layers":
        layers[1].input_layernorm.weight.register_hook(lambda gradient: 2 * gradient)  # never called
        for model in (plain, parallel):
            layout = model.layout(ids)
            hidden = model.through(model.layers[:1], model.embed(ids, layout), layout)
            model.loss_of(model.norm(hidden), labels, layout).backward()
            assert all(parameter.grad is None for parameter in model.layers[1].parameters())
            del model.layers[1]
    else:
        want, got = losses((plain, parallel), ids, labels)
        assert_close("loss", got, want)
    if what == "a norm replaced":
        weight = layers[0].input_layernorm.weight
        assert weight.grad.placements == (Partial(),)
        weight.grad = weight.grad.redistribute(placements=weight.placements)
    assert_same_gradients(parallel, plain)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("what", ["a subclass", "a norm replaced", "hooks", "some layers"])
def test_what_a_user_changes_in_a_stack_is_kept(what: str, sequence_parallel: bool):
    if sequence_parallel or what != "a norm replaced":
        world(2).run(changed_by_a_user, what, sequence_parallel)
