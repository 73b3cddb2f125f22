"""Ranks must have the same plan, weights and inputs; if they differ, every rank reports the difference."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import _deregister_pytree_node, register_pytree_node

import fusedtp
from fusedtp.comm import communicator
from fusedtp.nn import CausalLM, ModelConfig
from fusedtp.parallel.agree import check_same_weights, named_leaves
from tests.harness import PerRank, world
from tests.parallel.support import tp_mesh


class Mlp(nn.Module):
    """Can be split on rank 0. `fault` changes the code on the other rank: raise, or mix features between the layers."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "raise":
            raise RuntimeError("no such kernel here")
        h = torch.relu(self.up(x))
        return self.down(h * h.mean(-1, keepdim=True) if self.fault == "mix" else h)


class Pair(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.first, self.second = Mlp(""), Mlp(fault)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def split(group: Any, kind: type[nn.Module], fault: str, message: str) -> None:
    torch.manual_seed(0)
    model = kind(fault if group.rank() else "")
    with pytest.raises(ValueError, match=message):
        fusedtp.parallelize(model, tp_mesh(group))
    assert not any(hasattr(module, "parallel") for module in model.modules())


DIFFERENT = r"ranks found different plans: second\.up \(rank 0: 'colwise', rank 1: 'whole'\); second\.down"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fault", "messages"),
    [
        (Pair, "mix", [DIFFERENT] * 2),
        (
            Mlp,
            "raise",
            ["rank 1 found no plan: ValueError: Mlp cannot be", "^Mlp cannot be parallelized over 2"],
        ),
    ],
)
def test_ranks_that_find_different_plans(kind: type[nn.Module], fault: str, messages: list[str]):
    world(2).run(split, kind, fault, PerRank(messages), timeout=30)


def registered_otherwise(group: Any, other: float) -> str:
    """Two buffers that each rank registers in another order. On rank 1 one of them has the value `other`."""
    model, values = nn.Module(), {"full": 1.0, "sliding": 2.0}
    if group.rank():
        values = {"sliding": other, "full": 1.0}
    for name, value in values.items():
        model.register_buffer(name, torch.full((3,), value))
    try:
        check_same_weights(model, communicator(group))
    except ValueError as error:
        return str(error)
    return ""


def test_buffers_are_compared_by_name_whatever_their_order():
    assert world(2).run(registered_otherwise, 2.0) == [""] * 2
    for said in world(2).run(registered_otherwise, 3.0):
        assert said.startswith("ranks hold different values of sliding;")


def of_our_own(group: Any, what: str, sequence_parallel: bool) -> str:
    """Run a CausalLM with fewer kv heads than ranks twice. Rank 1 differs in `what`, already in the first forward."""
    other = group.rank() == 1
    config = ModelConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = CausalLM(config)
    fusedtp.parallelize(model, tp_mesh(group), sequence_parallel=sequence_parallel)
    fusedtp.nn.init_(model, seed=other if what == "weights" else 0)  # after parallelize, where weights are often loaded
    given: dict[str, Any] = {name: torch.arange(6).view(1, 6) % 3 for name in ("labels", "document_ids")}
    given["num_labels"] = 6
    if what in given:
        given[what] = given[what] + other
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        model(torch.zeros(1, 6, dtype=torch.long), label=None)  # does not count as the first forward
    try:
        for _ in range(2):
            model(torch.arange(6).view(1, 6) + (other and what == "input_ids"), **given)
    except ValueError as error:
        return str(error)
    assert not model._forward_pre_hooks, "later forwards compare no more"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        pytest.param("", "", id="alike"),
        pytest.param(
            "weights",
            "ranks hold different values of layers.0.self_attn.k_proj.weight, layers.0.self_attn.v_proj.weight;",
            id="weights",
        ),
        *(
            pytest.param(name, f"ranks of one tensor-parallel group got different inputs: {name};", id=name)
            for name in ("input_ids", "labels", "document_ids", "num_labels")
        ),
    ],
)
def test_a_first_forward_of_our_own_model_compares_what_ranks_share(what: str, message: str, sequence_parallel: bool):
    for said in world(2).run(of_our_own, what, sequence_parallel, timeout=30):
        assert said.startswith(message) and bool(said) == bool(what)


class Nameless:
    """A kind of node whose parts have no names."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


def test_inputs_have_an_order_that_their_dictionaries_do_not_say():
    one, two = (
        {"mask": dict(pairs), "ids": 0} for pairs in ([("full", 1), ("sliding", 2)], [("sliding", 2), ("full", 1)])
    )
    assert named_leaves(((5,), one)) == named_leaves(((5,), two))
    assert [x for _, x in named_leaves(((5,), one))] == [5, 0, 1, 2]


def test_inputs_without_names_are_counted():
    register_pytree_node(Nameless, lambda node: (list(node.parts), None), lambda parts, _: Nameless(*parts))
    try:
        assert named_leaves(((Nameless(7, 8),), {})) == [("0", 7), ("1", 8)]
    finally:
        _deregister_pytree_node(Nameless)
