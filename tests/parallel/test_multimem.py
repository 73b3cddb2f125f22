"""A model with switch all-reduces (multimem): `explain` matches what runs, and the result equals one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fusedtp
from fusedtp.comm import communicator
from fusedtp.ops.engines import calls
from tests.harness import world
from tests.parallel.support import batch, tp_mesh

pytest.importorskip("triton")


def trained(group: Any, sequence_parallel: bool) -> tuple[dict[str, set[str]], dict[str, set[str]], float, float]:
    """Engines per operation as `explain` gives them and as they ran; the split model's loss and the one-device loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=29, hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    whole = LlamaForCausalLM(config)
    model = fusedtp.parallelize(
        copy.deepcopy(whole), tp_mesh(group), engine="multimem", sequence_parallel=sequence_parallel, prove=False
    )
    told: dict[str, set[str]] = {}
    for layer in fusedtp.explain(model, 10).layers:
        for operation in layer.operation.split(", "):
            told.setdefault(operation, set()).add(layer.engine)
    comm = communicator(group)
    comm.engine_calls.clear()
    ids, labels = batch(2, 5)
    loss = model(ids, labels=labels).loss
    loss.backward()
    ran = {operation: set(by) for operation, by in calls(comm).items()}
    return told, ran, loss.item(), whole(ids, labels=labels).loss.item()


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_model_runs_as_it_is_told_and_gives_its_loss(sequence_parallel: bool):
    for told, ran, loss, want in world(2).run(trained, sequence_parallel):
        assert ("matmul_all_reduce" in ran) == (not sequence_parallel)
        for operation in told.keys() & ran.keys():
            assert ran[operation] == told[operation] - {"local", "joined"}, (operation, told, ran)
        of_rows = ("matmul_reduce_scatter", "triton") if sequence_parallel else ("matmul_all_reduce", "multimem")
        assert told[of_rows[0]] == ran[of_rows[0]] == {of_rows[1]}
        assert loss == pytest.approx(want, rel=1e-5)
