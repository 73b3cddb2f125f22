"""The same initial model at any world size, placement and order of modules."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fusedtp.nn import CausalLM, ModelConfig, init_
from fusedtp.nn.init import chunk_of, draw, local_slice, original_name
from tests.harness import world
from tests.nn.support import assert_close, roundings_of

SMALL = {
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 7,
}


def small(**changes: object) -> ModelConfig:
    return ModelConfig(**{**SMALL, **changes})  # type: ignore[arg-type]


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@given(st.lists(st.integers(0, 6), min_size=1, max_size=3), st.integers(1, 7), st.data())
def test_chunk_of_is_torch_chunk(shape: list[int], world_size: int, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    x = torch.rand(shape)
    chunks = x.chunk(world_size, dim)
    for rank in range(world_size):
        want = chunks[rank] if rank < len(chunks) else x.narrow(dim, 0, 0)
        assert torch.equal(chunk_of(x, dim, rank, world_size), want)


def sharded(group: object, seed: int) -> dict[str, bool]:
    """Which parameters of a sharded model equal what init_ gives the plain model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = CausalLM(small(tie_word_embeddings=True), device="meta")
    plans = {"embed": Shard(0), "q_proj": Shard(0), "up_proj": Shard(0), "down_proj": Shard(1)}
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        place = next((place for key, place in plans.items() if key in name), Replicate())
        local = chunk_of(parameter, place.dim, mesh["tp"].get_local_rank(), 2) if place.is_shard() else parameter
        cut = DTensor.from_local(
            local.contiguous(),
            mesh["tp"],
            [place],
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        setattr(model.get_submodule(owner), leaf, nn.Parameter(cut))
    model.tie_weights()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    init_(model.to_empty(device="cpu"), seed)
    assert model.lm_head.weight is model.embed_tokens.weight
    want = parameters(init_(CausalLM(small(tie_word_embeddings=True)), seed))
    got = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    assert got.keys() == want.keys()
    return {name: torch.equal(got[name], want[name]) for name in want}


@pytest.mark.slow
def test_any_slicing_holds_the_same_model() -> None:
    """Two ranks of tensor parallelism times two of FSDP2, tied weights, a vocabulary of 7, built on the meta device."""
    for equal in world(4).run(sharded, 3):
        assert equal and all(equal.values()), equal


def test_meta_then_to_empty_is_the_same_as_direct() -> None:
    for tied in (False, True):
        config = small(tie_word_embeddings=tied, attention_bias=True, qk_norm=True)
        direct = init_(CausalLM(config), 5)
        late = init_(CausalLM(config, device="meta").to_empty(device="cpu"), 5)
        assert (late.lm_head.weight is late.embed_tokens.weight) == tied
        want = parameters(direct)
        assert parameters(late).keys() == want.keys()
        for name, got in parameters(late).items():
            assert torch.equal(got, want[name]), name


def test_a_parameter_does_not_depend_on_the_others() -> None:
    deep = parameters(init_(CausalLM(small(num_hidden_layers=2, mlp_bias=True)), 1))
    shallow = parameters(init_(CausalLM(small(num_hidden_layers=1)), 1))
    for name, got in shallow.items():
        if "o_proj" in name or "down_proj" in name:
            assert_close(name, got, deep[name] * 2**0.5)
        else:
            assert torch.equal(got, deep[name]), name


def test_seeds_and_names_differ() -> None:
    draws = [
        draw("a.weight", (4, 4), 0, 1.0, 0),
        draw("b.weight", (4, 4), 0, 1.0, 0),
        draw("a.weight", (4, 4), 1, 1.0, 0),
    ]
    assert not any(torch.equal(x, y) for i, x in enumerate(draws) for y in draws[:i])


def test_spread_of_each_kind() -> None:
    config = ModelConfig(num_hidden_layers=8, attention_bias=True, qk_norm=True)
    for name, parameter in init_(CausalLM(config), 0).named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            std = 0.02 / (4 if "o_proj" in name or "down_proj" in name else 1)
            assert abs(parameter.std().item() / std - 1) < 0.05, name
            assert abs(parameter.mean().item()) < std * 0.05, name


def test_wrappers_do_not_change_a_name() -> None:
    assert original_name("_orig_mod.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight") == (
        "layers.0.mlp.up_proj.weight"
    )


def test_draws_are_fixed_for_all_time() -> None:
    """Reproducing an old run needs the same draws: they must not change by accident."""
    got = draw("layers.0.mlp.up_proj.weight", (3, 4), 0, 1.0, 0).flatten()[:4]
    want = torch.tensor([-0.1783023, 1.0523522, -0.0931831, -0.2482509])
    # Box and Muller's formula has 6 operations and an angle of up to 2 pi; half of the last decimal is half an eps.
    assert_close("draw", got, want, roundings=roundings_of(6, 1) + 2 * math.pi + 0.5)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_parameter_dtypes_hold_the_rounded_draw(dtype: str) -> None:
    fp32 = parameters(init_(CausalLM(small()), 2))
    for name, got in parameters(init_(CausalLM(small(param_dtype=dtype)), 2)).items():
        assert torch.equal(got, fp32[name].to(got.dtype)) and got.dtype == getattr(torch, dtype), name


def test_a_plain_parameter_is_not_sliced() -> None:
    x = torch.rand(3)
    assert local_slice(x, nn.Parameter(x)) is x
