"""push_to_hub of a split model: one rank creates the repository and uploads the plain model, once."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load, load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import fusedtp
from tests.harness import world
from tests.parallel.support import dp_tp_mesh, tp_mesh

from .families import model_of
from .launch import as_torchrun
from .test_trainers import Rows, arguments


class Hub:
    """Replaces huggingface_hub's API and records this rank's calls. `fault` is the error that create_repo raises."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.calls: list[str] = []
        self.files: dict[str, bytes] = {}
        self.fault = fault

    def create_repo(self, repo_id: str, **_: Any) -> Any:
        self.calls.append("create_repo")
        if self.fault is not None:
            raise self.fault
        return SimpleNamespace(repo_id=repo_id)

    def create_commit(self, operations: Any, **_: Any) -> str:
        self.calls.append("create_commit")
        self.files = {each.path_in_repo: Path(each.path_or_fileobj).read_bytes() for each in operations}
        return "the commit"

    def upload_folder(self, folder_path: str, **_: Any) -> str:
        self.calls.append("upload_folder")
        self.files = {each.name: each.read_bytes() for each in Path(folder_path).iterdir() if each.is_file()}
        return "the commit"


@contextmanager
def without_network(hub: Hub) -> Iterator[None]:
    from huggingface_hub import ModelCard
    from huggingface_hub.errors import EntryNotFoundError

    with (
        patch("transformers.utils.hub.hf_api", lambda: hub),
        patch("transformers.modeling_utils.hf_api", lambda: hub),
        patch("transformers.trainer.hf_api", lambda: hub),
        patch.object(ModelCard, "load", side_effect=EntryNotFoundError("none yet")),
    ):
        yield


def split(group: Any, kind: str) -> tuple[nn.Module, Any]:
    """plain, parallel"""
    if kind == "peft":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
        adapted: Any = get_peft_model(model_of("llama"), config)
        return adapted, fusedtp.parallelize(copy.deepcopy(adapted), tp_mesh(group))
    plain = model_of("llama")
    if kind == "tp":
        return plain, fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group))
    mesh = dp_tp_mesh()
    return plain, fully_shard(fusedtp.parallelize(copy.deepcopy(plain), mesh["tp"]), mesh=mesh["dp"])


def assert_first_uploads(group: Any, hub: Hub, wanted: dict[str, torch.Tensor], upload: str, file: str) -> None:
    assert hub.calls == (["create_repo", upload] if group.rank() == 0 else [])
    if group.rank() == 0:
        got = load(hub.files[file])
        assert got.keys() == wanted.keys()
        for name in wanted:
            assert torch.equal(got[name], wanted[name]), name


def pushed(group: Any, kind: str, folder: str) -> None:
    plain, parallel = split(group, kind)
    file = "adapter_model.safetensors" if kind == "peft" else "model.safetensors"
    wanted = {}
    if group.rank() == 0:
        plain.save_pretrained(folder)  # type: ignore[operator]
        wanted = load_file(f"{folder}/{file}")
    hub = Hub()
    with without_network(hub):
        commit = parallel.push_to_hub("someone/model")
    assert commit == ("the commit" if group.rank() == 0 else None)
    assert_first_uploads(group, hub, wanted, "create_commit", file)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "world_size"), [("tp", 2), ("peft", 2), ("fsdp", 4)])
def test_the_first_rank_uploads(kind: str, world_size: int, tmp_path: Path):
    world(world_size).run(pushed, kind, str(tmp_path), timeout=60)


def saved_and_pushed(group: Any, folder: str) -> None:
    plain, parallel = split(group, "tp")
    hub = Hub()
    with without_network(hub):
        parallel.save_pretrained(folder, push_to_hub=True, repo_id="someone/model")
    assert_first_uploads(group, hub, dict(plain.named_parameters()), "create_commit", "model.safetensors")


@pytest.mark.slow
def test_save_pretrained_that_pushes(tmp_path: Path):
    world(2).run(saved_and_pushed, str(tmp_path), timeout=60)


def refused(group: Any) -> None:
    """An error from the hub is raised on every rank, and no rank hangs."""
    _, parallel = split(group, "tp")
    with without_network(Hub(PermissionError("no token"))), pytest.raises(PermissionError, match="no token"):
        parallel.push_to_hub("someone/model")
    with without_network(Hub()):
        parallel.push_to_hub("someone/model")


def test_a_refusal_is_raised_everywhere():
    world(2).run(refused, timeout=60)


def pushed_by_trainer(group: Any, folder: str) -> None:
    from fusedtp.train.hf import Trainer

    _, parallel = split(group, "tp")
    hub = Hub()
    with as_torchrun(group), without_network(hub):
        trainer = Trainer(model=parallel, args=arguments(folder, 2, max_steps=1), train_dataset=Rows())
        trainer.train()
        trainer.push_to_hub()
    wanted = {name: p.detach().full_tensor() for name, p in parallel.named_parameters()}
    assert_first_uploads(group, hub, wanted, "upload_folder", "model.safetensors")


@pytest.mark.slow
def test_a_trainer_pushes_once(tmp_path: Path):
    world(2).run(pushed_by_trainer, str(tmp_path), timeout=120)
