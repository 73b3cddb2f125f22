"""Trainers around models that are split over tensor-parallel and data-parallel ranks; each equals a single process."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import fusedtp
from tests.harness import world
from tests.parallel.support import dp_tp_mesh, tp_mesh

from .families import model_of
from .launch import as_torchrun
from .parity import batch, full

TOLERANCE = 1e-3


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sixteen rows. The first has fewer labels, so ranks average over different numbers of tokens."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value[index] for name, value in batch((16, 5), padding=3).items()}


def arguments(folder: str, batch_size: int, **more: Any) -> Any:
    from transformers import TrainingArguments

    options: dict[str, Any] = {
        "per_device_train_batch_size": batch_size,
        "max_steps": 3,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    return TrainingArguments(output_dir=folder, **{**options, **more})


def logged(trainer: Any) -> dict[str, list[float]]:
    steps = [log for log in trainer.state.log_history if "loss" in log]
    return {name: [log[name] for log in steps] for name in ("loss", "grad_norm")}


def assert_same_logs(got: dict[str, list[float]], want: dict[str, list[float]], steps: int = 3) -> None:
    for name in want:
        assert len(want[name]) == steps and got[name] == pytest.approx(want[name], rel=TOLERANCE), name


def assert_same_weights(parallel: nn.Module, plain: nn.Module) -> None:
    """AdamW moves weights by about its learning rate, however small the gradients are. The bound is a tenth of that."""
    wanted = dict(plain.named_parameters())
    for name, parameter in parallel.named_parameters():
        torch.testing.assert_close(
            full(parameter.detach()),
            wanted[name].detach(),
            rtol=0,
            atol=1e-3,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def two_dimensional(model: Any, mesh: DeviceMesh) -> Any:
    fusedtp.parallelize(model, mesh["tp"])
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def with_trainer(group: Any, folder: str) -> None:
    """Two microbatches per step. Save at step 2 and resume from there."""
    import transformers

    from fusedtp.train.hf import Trainer

    plain = model_of("qwen3")
    options = arguments(f"{folder}/{group.rank()}", 4, gradient_accumulation_steps=2)
    alone = transformers.Trainer(model=plain, args=options, train_dataset=Rows())
    alone.train()
    mesh = dp_tp_mesh()
    models = []
    for resume in (None, f"{folder}/split/checkpoint-2"):
        model = two_dimensional(model_of("qwen3"), mesh)
        with as_torchrun(group):
            options = arguments(f"{folder}/split", 2, gradient_accumulation_steps=2)
            trainer = Trainer(model=model, args=options, train_dataset=Rows())
            trainer.train(resume_from_checkpoint=resume)
        assert_same_logs(logged(trainer), logged(alone))
        models.append(model)
    assert_same_weights(models[0], plain)
    for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(first.to_local(), second.to_local())
    if group.rank() == 0:
        want, got = (load_file(f"{folder}/{kind}/checkpoint-2/model.safetensors") for kind in ("0", "split"))
        assert got.keys() == want.keys()
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=0, atol=1e-3, msg=name)


@pytest.mark.slow
def test_trainer_on_two_dimensions(tmp_path: Path):
    world(4).run(with_trainer, str(tmp_path), timeout=200)


def evaluated(group: Any, folder: str, count: int) -> None:
    """Rows have equal length. Two ranks get an odd number of rows in batches of three; four ranks get equal numbers."""
    from fusedtp.train.hf import Trainer

    rows = torch.utils.data.Subset(Rows(), range(1, 1 + count))
    plain = model_of("qwen3").eval()
    with torch.no_grad():
        alone = [plain(**{name: value[None] for name, value in row.items()}) for row in rows]
    loss = sum(each.loss.item() for each in alone) / count
    seen: list[tuple[int, ...]] = []

    def metrics(made: Any) -> dict[str, float]:
        seen.append((*made.predictions.shape[:2], *made.label_ids.shape))
        return {"sum": float(made.label_ids.sum())}

    with as_torchrun(group, many_devices=False):
        model: Any = model_of("qwen3")
        if group.size() == 2:
            fusedtp.parallelize(model, DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",)))
        else:
            two_dimensional(model, dp_tp_mesh())
        options = arguments(folder, 2, per_device_eval_batch_size=3 if group.size() == 2 else 2)
        with pytest.raises(ValueError, match="eval_use_gather_object would count each row once per rank"):
            Trainer(model=model, args=arguments(folder, 2, eval_use_gather_object=True))
        split = Trainer(model=model, args=options, eval_dataset=rows, compute_metrics=metrics)
        got, found = split.evaluate(), split.predict(rows)
    assert set(seen) == {(count, 5, count, 5)}
    assert got["eval_loss"] == pytest.approx(loss, rel=1e-5)
    assert got["eval_sum"] == sum(float(row["labels"].sum()) for row in rows)
    wanted = torch.cat([each.logits for each in alone])
    torch.testing.assert_close(torch.tensor(found.predictions), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "count"), [(2, 7), (4, 8)])
def test_an_evaluation_counts_each_row_once(tmp_path: Path, ranks: int, count: int):
    world(ranks).run(evaluated, str(tmp_path), count, timeout=120)


def apart(group: Any, folder: str) -> None:
    """Without fully_shard, each data-parallel rank would train its own model."""
    from fusedtp.train.hf import Trainer

    model = fusedtp.parallelize(model_of("llama"), dp_tp_mesh()["tp"])
    with (
        as_torchrun(group),
        pytest.raises(ValueError, match=r"nothing averages the gradients of .*fully_shard"),
    ):
        Trainer(model=model, args=arguments(folder, 2), train_dataset=Rows())


def test_trainer_refuses_data_parallel_ranks_that_train_apart(tmp_path: Path):
    world(4).run(apart, str(tmp_path), timeout=120)


def adafactor(group: Any, folder: str) -> None:
    from fusedtp.train.hf import Trainer

    model = model_of("llama")
    with as_torchrun(group):
        Trainer(model=model, args=arguments(folder, 2, optim="adafactor"), train_dataset=Rows())
        fusedtp.parallelize(model, tp_mesh(group))
        with pytest.raises(ValueError, match=r"'adafactor' cannot train a split model"):
            Trainer(model=model, args=arguments(folder, 2, optim="adafactor"), train_dataset=Rows())


def test_trainer_refuses_an_optimizer_that_would_fail(tmp_path: Path):
    world(2).run(adafactor, str(tmp_path), timeout=120)


def accelerator(**more: Any) -> Any:
    from accelerate import ParallelismConfig

    from fusedtp.train.hf import Accelerator

    return Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2, dp_shard_size=2), **more)


def plugin(**more: Any) -> Any:
    from accelerate.utils import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **more)


def with_accelerate(group: Any, folder: str) -> None:
    """The FSDP2 plugin wraps the layers; then three clipped steps and save_pretrained."""
    plain = model_of("qwen3")
    with as_torchrun(group):
        made = accelerator(fsdp_plugin=plugin())
        mesh = made.torch_device_mesh
        parallel = fusedtp.parallelize(copy.deepcopy(plain), mesh["tp"])
        model, optimizer = made.prepare(parallel, torch.optim.AdamW(parallel.parameters(), 1e-2))
        assert {p.device_mesh.ndim for p in model.parameters()} == {2}
        alone = torch.optim.AdamW(plain.parameters(), 1e-2)
        inputs, rank = batch((4, 5), padding=3), mesh["dp_shard"].get_local_rank()
        mine = {name: value[2 * rank : 2 * rank + 2] for name, value in inputs.items()}
        labels, all_labels = ((each["labels"][:, 1:] != -100).sum() for each in (mine, inputs))
        for _ in range(3):
            want = plain(**inputs).loss
            want.backward()
            want_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            alone.step()
            alone.zero_grad()
            loss = model(**mine).loss * (2 * labels / all_labels)
            made.backward(loss)
            norm = made.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            got = made.reduce(loss.detach(), "mean")
            assert got.item() == pytest.approx(want.item(), rel=TOLERANCE)
            assert full(norm).item() == pytest.approx(want_norm.item(), rel=TOLERANCE)
        assert_same_weights(model, plain)
        model.save_pretrained(folder)
    if group.rank() == 0:
        saved = load_file(f"{folder}/model.safetensors")
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(saved[name], parameter.detach(), rtol=0, atol=1e-3, msg=name)


@pytest.mark.slow
def test_accelerate_on_two_dimensions(tmp_path: Path):
    world(4).run(with_accelerate, str(tmp_path), timeout=120)


def refused_by_accelerate(group: Any) -> None:
    wrong: list[tuple[Any, str]] = [
        (lambda: None, r"nothing averages the gradients of .*fully_shard"),
        (lambda: plugin(cpu_ram_efficient_loading=True), "cpu_ram_efficient_loading sends whole weights"),
    ]
    for make, message in wrong:
        with as_torchrun(group):
            made = accelerator(fsdp_plugin=make())
            model = fusedtp.parallelize(model_of("llama"), made.torch_device_mesh["tp"])
            with pytest.raises(ValueError, match=message):
                made.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))


@pytest.mark.slow
def test_accelerate_refuses_what_would_be_wrong():
    world(4).run(refused_by_accelerate, timeout=120)
