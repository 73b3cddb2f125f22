"""A parallel model generates the same text as the plain one, on every rank, for any placement of the logits."""

import pytest
import torch

from fusedtp.nn import CausalLM, generate
from tests.harness import world
from tests.parallel.support import batch, make, make_pair


def plan(head: str) -> dict[str, str]:
    """The model's own plan with another head: with "whole", every rank applies the full head to its own rows."""
    given = dict(make().tp_plan)
    if head == "whole":
        del given["lm_head"]
    else:
        given["lm_head"] = head
    return given


def continuations(group: object, head: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    plain, parallel = make_pair(group, options={"plan": plan(head)})
    ids, _ = batch(2, 3)

    def write(model: CausalLM, temperature: float) -> torch.Tensor:
        return generate(model, ids, 3, temperature=temperature, seed=5)

    return [(write(parallel, t), write(plain, t)) for t in (0.0, 1.0)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_dropout_is_off_while_generating_and_the_mode_comes_back(temperature: float, training: bool) -> None:
    """With two dropout states or none, the output is that of the same model without dropout."""
    ids, _ = batch(2, 3)
    want = generate(make(), ids, 4, temperature=temperature, seed=5)
    model = make(residual_dropout=0.5, embedding_dropout=0.5).train(training)
    for state in (None, (1, 2), (3, 4)):
        if state is not None:
            model.set_dropout(*state)
        assert torch.equal(generate(model, ids, 4, temperature=temperature, seed=5), want)
        assert all(module.training == training for module in model.modules())


def test_the_mode_comes_back_after_an_error() -> None:
    model = make()
    with pytest.raises(IndexError):
        generate(model, torch.full((1, 2), model.config.vocab_size), 1)
    assert all(module.training for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("head", ["colwise", "colwise_gather_output", "whole"])
def test_ranks_continue_as_the_plain_model(head: str) -> None:
    for pairs in world(2).run(continuations, head):
        for mine, want in pairs:
            assert torch.equal(mine, want)
