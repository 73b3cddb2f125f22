"""This library's layers are registered in transformers' own registries."""

import os
from pathlib import Path
from typing import Any

import pytest

import fusedtp
from fusedtp.comm import communicator
from fusedtp.parallel.registry import register_with_transformers
from tests.harness import world
from tests.parallel.support import tp_mesh

from .families import model_of
from .launch import as_torchrun
from .parity import LEAST, MARGIN, batch, errors, perturbed, results

STYLES = {
    "model.layers.*.self_attn.q_proj": "fusedtp_colwise",
    "model.layers.*.self_attn.o_proj": "fusedtp_rowwise",
    "model.layers.*.mlp.gate_proj": "fusedtp_colwise",
    "model.layers.*.mlp.up_proj": "fusedtp_colwise",
    "model.layers.*.mlp.down_proj": "fusedtp_rowwise",
    "lm_head": "fusedtp_colwise_gather_output",
}


def loaded(group: Any, name: str, folder: str, options: dict[str, Any], operation: str) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig  # type: ignore[attr-defined]

    register_with_transformers()
    rank, size = str(group.rank()), str(group.size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    plain = model_of(name)
    split = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**options)).eval()
    want = results(plain, batch())
    explained = errors(results(perturbed(plain), batch()), want)
    for key, error in errors(results(split, batch()), want).items():
        assert error <= max(LEAST, MARGIN * explained.get(key, 0.0)), f"{key} is off by {error:.1e}"
    mesh = split._device_mesh
    assert any(made == operation for made, _ in communicator(mesh if mesh.ndim == 1 else mesh["tp"]).engine_calls)


def test_styles_in_a_tp_plan(tmp_path: Path):
    model_of("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    options = {"tp_size": 2, "tp_plan": STYLES}
    world(2).run(loaded, "llama", str(tmp_path), options, "matmul_all_reduce", timeout=120)


@pytest.mark.slow
def test_the_exchange_as_an_expert_implementation(tmp_path: Path):
    model_of("qwen3_moe").save_pretrained(tmp_path)  # type: ignore[operator]
    options = {"tp_size": 2, "ep_size": 2, "ep_implementation": "fusedtp"}
    world(2).run(loaded, "qwen3_moe", str(tmp_path), options, "moe_dispatch", timeout=120)


def split_by_transformers(group: Any, folder: str, options: dict[str, Any]) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    with as_torchrun(group):
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=options)
    models = [model, get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))]
    for each in models:
        with pytest.raises(ValueError, match=r"transformers has split .* already; load it without tp_plan"):
            fusedtp.parallelize(each, tp_mesh(group))


@pytest.mark.parametrize("options", [{"tp_size": 2, "tp_plan": "auto"}, {"fsdp_size": 2}], ids=["tp", "fsdp"])
def test_a_model_that_transformers_has_split_is_refused(options: dict[str, Any], tmp_path: Path):
    model_of("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    world(2).run(split_by_transformers, str(tmp_path), options, timeout=120)
