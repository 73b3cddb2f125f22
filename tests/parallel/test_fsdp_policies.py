"""FSDP2's MixedPrecisionPolicy and prefetching on a model with fused layers, on 2 x 2 ranks."""

import copy

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fusedtp.parallel import parallelize
from tests.harness import world
from tests.parallel.support import batch, dp_tp_mesh, full, make

CHANGES = {"num_key_value_heads": 1, "qk_norm": True, "attention_bias": True, "vocab_size": 31}


def gradients(model, ids, labels, count) -> dict[str, torch.Tensor]:
    """Full gradients of the sum of token losses over `count`."""
    model(ids, labels, num_labels=count).loss.backward()
    return {name: full(parameter.grad) for name, parameter in model.named_parameters()}


def sharded(model, mesh, prefetch: bool = False, **options):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"], **options)
    fully_shard(model, mesh=mesh["dp"], **options)
    for module in (model, *model.layers):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no average
    if prefetch:
        for before, after in zip(model.layers, model.layers[1:], strict=False):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
        model.set_modules_to_forward_prefetch([model.layers[0]])
    return model


def mixed_precision(group, reduce_dtype: torch.dtype, cast_inputs: bool) -> None:
    """Compare with a bf16 model that is only tensor parallel and sees one half of the batch at a time."""
    mesh = dp_tp_mesh()
    plain = make(dtype="bfloat16", param_dtype="float32", tie_word_embeddings=True, **CHANGES)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, cast_forward_inputs=cast_inputs
    )
    model = sharded(parallelize(copy.deepcopy(plain), mesh["tp"]), mesh, mp_policy=policy)
    in_bf16 = parallelize(copy.deepcopy(plain).to(torch.bfloat16), mesh["tp"])
    ids, labels = batch(4, 5)
    count = (labels != -100).sum()
    halves, parts = [slice(0, 2), slice(2, 4)], []
    for half in halves:
        parts.append(gradients(in_bf16, ids[half], labels[half], count))
        in_bf16.zero_grad()
    mine = halves[mesh["dp"].get_local_rank()]
    found = gradients(model, ids[mine], labels[mine], count)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name
        one, other = (part[name].to(reduce_dtype) for part in parts)
        want = ((one + other) / 2).float()  # FSDP2 averages
        if cast_inputs:
            assert (found[name] - want).norm() <= 0.05 * want.norm(), name
        else:
            assert torch.equal(found[name], want), name


@pytest.mark.slow
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
def test_parameters_in_bf16_and_gradients_reduced_as_the_policy_says(reduce_dtype):
    """A fused layer uses the weights that FSDP2 gathers. With fp32 reduction, no sum is rounded to bf16."""
    world(4).run(mixed_precision, reduce_dtype, False, timeout=120)


@pytest.mark.slow
def test_a_policy_that_casts_inputs_of_blocks_rounds_the_rotary_table_too():
    world(4).run(mixed_precision, torch.float32, True, timeout=120)


def prefetching(group) -> None:
    mesh = dp_tp_mesh()
    plain = make(num_hidden_layers=3, **CHANGES)
    models = [sharded(parallelize(copy.deepcopy(plain), mesh["tp"]), mesh, prefetch) for prefetch in (False, True)]
    for seed in range(2):
        ids, labels = batch(4, 5, seed=seed)
        mine = slice(2 * mesh["dp"].get_local_rank(), 2 * mesh["dp"].get_local_rank() + 2)
        one, other = (gradients(model, ids[mine], labels[mine], 10) for model in models)
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.slow
def test_prefetching_changes_no_gradient():
    world(4).run(prefetching, timeout=120)
