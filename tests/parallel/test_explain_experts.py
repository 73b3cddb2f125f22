"""What `explain` says about experts matches what runs, whether the dtype is given or detected."""

import pytest
import torch

from fusedtp.comm import communicator
from fusedtp.nn import MoE, MoEConfig
from fusedtp.ops.engines import layer_calls
from fusedtp.parallel import explain, parallelize
from tests.engines import ENGINES
from tests.harness import world
from tests.parallel.support import batch, make_pair, tp_mesh

MIXTURE = MoEConfig(num_experts=4, top_k=2, hidden=6, shared=5, first_dense=1)


def said_and_ran(group, engine: str, dtype: torch.dtype | None) -> tuple[str, str, str, set[str]]:
    """(name, engine and reason of the only layer of experts, engines that its forward and backward ran)."""
    _, model = make_pair(group, options={"engine": engine}, moe=MIXTURE, dtype="float32", param_dtype="float32")
    layers = {layer.operation: layer for layer in explain(model, 10, dtype).layers}
    layer = layers["moe_dispatch, moe_combine"]
    communicator(group).layer_calls.clear()
    model(*batch(2, 5)).loss.backward()
    return layer.name, layer.engine, layer.reason, set(layer_calls(communicator(group))["mlp.experts"])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["auto", *ENGINES])
def test_the_engine_of_experts_is_the_one_that_runs(engine: str):
    for name, chosen, reason, ran in world(2).run(said_and_ran, engine, None):
        assert name == "layers.1.mlp.experts" and ran == {chosen}
        assert chosen == ("chunked" if engine == "auto" else engine)
        assert reason == ("CPU ranks read their peers' tokens in place" if engine == "auto" else "asked for")


def of_a_layer(group, dtype: torch.dtype | None, sequence_parallel: bool) -> str:
    """A single layer has no config with a compute dtype, so the dtype of its weights is used."""
    moe = MoE(6, 5, 2 * group.size(), 2, dtype=torch.float64)
    parallelize(moe, tp_mesh(group), sequence_parallel=sequence_parallel)
    return str(explain(moe, dtype=dtype))


@pytest.mark.parametrize("world_size, engine", [(1, "local"), (2, "chunked")])
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_a_layer_without_a_config_is_explained(world_size: int, engine: str, dtype: torch.dtype | None):
    for text in world(world_size).run(of_a_layer, dtype, True):
        assert f"experts  moe_dispatch, moe_combine  {engine}" in text


def test_experts_whose_tokens_are_whole_on_every_rank_are_explained():
    for text in world(2).run(of_a_layer, None, False):
        assert "experts  moe_dispatch, moe_combine, all_gather  chunked" in text


def fp64_by_kernels(group) -> None:
    explain(parallelize(MoE(6, 5, 4, 2, dtype=torch.float64), tp_mesh(group), engine="triton"))


def test_an_engine_that_cannot_run_raises_as_it_would_when_called():
    for outcome in world(2).outcomes(fp64_by_kernels):
        assert outcome.is_a("ValueError") and "takes fp32, fp16 and bf16, not torch.float64" in outcome.message
