"""A parallel model's state has the original names, global shapes and values, at any world size and from meta too."""

import copy
import pickle

import pytest
import torch
from torch.distributed.tensor import DTensor

from fusedtp.nn import CausalLM
from fusedtp.nn.init import init_
from fusedtp.parallel import parallelize
from tests.harness import world
from tests.parallel.support import assert_close, batch, full, losses, make, make_pair, tp_mesh

CHANGES = {
    "num_key_value_heads": 1,
    "qk_norm": True,
    "attention_bias": True,
    "mlp_bias": True,
    "vocab_size": 31,
}


def full_state(group, tied: bool) -> dict:
    """Full state of another model, as saved from these ranks."""
    _, parallel = make_pair(group, seed=5, tie_word_embeddings=tied, **CHANGES)
    return {name: full(value) for name, value in parallel.state_dict().items()}


def load(group, state: dict, tied: bool, assign: bool) -> None:
    plain, parallel = make_pair(group, tie_word_embeddings=tied, **CHANGES)
    assert plain.state_dict().keys() == state.keys() == parallel.state_dict().keys()
    assert all(isinstance(value, DTensor) for value in parallel.state_dict().values())
    plain.load_state_dict(state)
    parallel.load_state_dict(copy.deepcopy(state), assign=assign)
    for name, value in parallel.state_dict().items():
        assert torch.equal(full(value), state[name]), name
    want, got = losses((plain, parallel), *batch(2, 5, vocab=31))
    assert_close("loss", got, want)
    wrong = {**state, "norm.weight": torch.zeros(3)}
    with pytest.raises(RuntimeError, match=r"size mismatch for norm.weight.*\[3\].*\[24\]"):
        parallel.load_state_dict(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_the_state_of_two_ranks_loads_on_one_and_on_four(tied: bool):
    states = world(2).run(full_state, tied)
    for state in (states[1], make(5, tie_word_embeddings=tied, **CHANGES).state_dict()):
        assert state.keys() == states[0].keys()
        assert all(torch.equal(value, states[0][name]) for name, value in state.items())
    world(1).run(load, states[0], tied, False)
    world(4).run(load, states[0], tied, tied)


def initialise(group, tied: bool) -> dict:
    config = make(tie_word_embeddings=tied, **CHANGES).config
    with torch.device("meta"):
        model = CausalLM(config)
    parallelize(model, tp_mesh(group))
    assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
    init_(model.to_empty(device="cpu"), 7, std=0.3)
    assert (model.lm_head.weight is model.embed_tokens.weight) == tied
    plain = init_(CausalLM(config), 7, std=0.3)
    want, got = losses((plain, model), *batch(2, 5, vocab=31))
    assert_close("loss", got, want)
    return {name: full(value) for name, value in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_made_on_meta_is_the_same_at_any_world_size(tied: bool):
    first, *others = [world(size).run(initialise, tied)[0] for size in (1, 2, 3, 4)]
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in first.items())


def copies(group) -> None:
    plain, parallel = make_pair(group, **CHANGES)
    twin = copy.deepcopy(parallel)
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.zero_()
    want, got = losses((plain, twin), *batch(2, 5, vocab=31))
    assert_close("loss of the copy", got, want)
    parallels = [m.parallel for m in parallel.modules() if getattr(m, "parallel", None) is not None]
    assert parallels == [m.parallel for m in twin.modules() if getattr(m, "parallel", None) is not None]
    assert pickle.loads(pickle.dumps(parallels)) == parallels


def test_models_can_be_copied():
    world(2).run(copies)


def tie_through_styles(group) -> None:
    from torch import nn
    from torch.distributed.tensor.parallel import parallelize_module

    from fusedtp.parallel import FusedColwise, FusedEmbedding, FusedRowwise

    def tied() -> nn.ModuleDict:
        model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "head": nn.Linear(4, 7, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    model = parallelize_module(tied(), tp_mesh(group), {"embed": FusedEmbedding(), "head": FusedColwise()})
    assert model["head"].weight is model["embed"].weight
    with pytest.raises(ValueError, match="tied parameters cannot be placed both as"):
        parallelize_module(tied(), tp_mesh(group), {"embed": FusedEmbedding(), "head": FusedRowwise()})


def test_tied_parameters_stay_one():
    world(2).run(tie_through_styles)
