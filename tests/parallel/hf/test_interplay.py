"""Split transformers models together with the tools that users put around them: each equals a single process."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface

import fusedtp
from fusedtp.parallel.twin import twin_of
from tests.harness import world
from tests.parallel.support import tp_mesh
from tests.sampling import SAMPLED

from .families import model_of
from .launch import as_torchrun
from .parity import LEAST, MARGIN, batch, errors, full, perturbed, results


def pair(group: Any, name: str = "llama", **options: Any) -> tuple[nn.Module, nn.Module]:
    plain = model_of(name)
    return plain, fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group), **options)


def assert_alike(parallel: nn.Module, plain: nn.Module, noise: nn.Module | None = None) -> None:
    """Results differ by no more than roundoff explains; see parity.py."""
    want = results(plain, batch())
    explained = errors(results(noise if noise is not None else perturbed(plain), batch()), want)
    for name, error in errors(results(parallel, batch()), want).items():
        assert error <= max(LEAST, MARGIN * explained.get(name, 0.0)), f"{name} is off by {error:.1e}"


def whole(model: nn.Module) -> None:
    model.compile(backend="aot_eager", fullgraph=True)


def each_layer(model: nn.Module) -> None:
    for layer in model.get_submodule("model.layers").children():
        layer.compile(backend="aot_eager", fullgraph=True)


def whole_with_checkpointing(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.compile(backend="aot_eager")


def compiled(group: Any, name: str, compile_: Callable[[nn.Module], None], graphs: int | None) -> None:
    """Every step gives the same results. The model, or all layers together, is one graph and nothing recompiles."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    plain, parallel = pair(group, name)
    for model in (plain, parallel):
        model.train()
    assert "tokens between layers" not in fusedtp.explain(parallel).whole
    compile_(parallel)
    explained = fusedtp.explain(parallel)
    assert "tokens between layers" in explained.whole
    assert not any("scatter" in layer.operation for layer in explained.layers)
    for _ in range(3):
        assert_alike(parallel, plain)
        for model in (plain, parallel):
            model.zero_grad()
    if graphs is not None:
        assert counters["stats"]["unique_graphs"] == graphs and not counters["graph_break"], counters
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "compile_", "graphs"),
    [
        ("llama", whole, 1),
        ("qwen3", each_layer, 1),
        *([] if SAMPLED else [("mixtral", whole, 1), ("llama", whole_with_checkpointing, None)]),
    ],
)
def test_compiled(name: str, compile_: Callable[[nn.Module], None], graphs: int | None):
    world(2).run(compiled, name, compile_, graphs, timeout=200)


def stack_without_its_model(plain: Any, parallel: Any, ids: Tensor) -> None:
    """Compiled layers, of which the model around their stack is not called."""
    from torch._dynamo.utils import counters

    each_layer(parallel)
    counters.clear()
    for _ in range(3):
        torch.testing.assert_close(parallel.model(ids, use_cache=False)[0], plain.model(ids)[0])
    assert counters["stats"]["unique_graphs"] == 1


def one_layer(plain: Any, parallel: Any, ids: Tensor) -> None:
    parallel.model.layers[0] = torch.compile(parallel.model.layers[0], backend="aot_eager")
    for model in (plain, parallel):
        model(ids, labels=ids).loss.backward()
    got, want = (model.get_input_embeddings().weight.grad for model in (parallel, plain))
    torch.testing.assert_close(got.full_tensor(), want, rtol=1e-4, atol=1e-6)


def wrapper(plain: Any, parallel: Any, ids: Tensor) -> None:
    """torch.compile(model) beside the model itself, which still runs as it is."""
    compiled = torch.compile(parallel, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids).logits, plain(ids).logits)
    assert "tokens between layers" in fusedtp.explain(compiled).whole
    before = parallel._fusedtp.calls.total()
    torch.testing.assert_close(parallel(ids).logits, plain(ids).logits)
    assert parallel._fusedtp.calls.total() > before


def compiled_in_part(group: Any, compare: Callable[[Any, Any, Tensor], None]) -> None:
    torch._dynamo.reset()
    compare(*pair(group), batch()["input_ids"])
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("compare", [stack_without_its_model, one_layer, wrapper])
def test_compiled_in_other_ways(compare: Callable[[Any, Any, Tensor], None]):
    world(2).run(compiled_in_part, compare, timeout=200)


def changing_what_siblings_share(group: Any) -> None:
    """Each projection sees x as it is when called. A change between them that the compiler cannot see is refused."""
    from transformers.models.llama import modeling_llama as llama

    class MLP(llama.LlamaMLP):
        between = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            up = self.up_proj(x)
            y = self.down_proj(up * self.gate_proj(x.mul_(2) if self.between else x).sigmoid())
            return y + self.down_proj(self.up_proj(x.mul_(2)) * self.gate_proj(x))

    true, llama.LlamaMLP = llama.LlamaMLP, MLP
    try:
        plain = model_of("llama", num_hidden_layers=1)
    finally:
        llama.LlamaMLP = true
    ids = batch()["input_ids"]
    for between in (False, True):
        MLP.between = between
        parallel = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group))
        with torch.no_grad():  # with gradients, autograd refuses it
            torch.testing.assert_close(parallel(ids).logits, plain(ids).logits)
            parallel.compile(backend="aot_eager")
            if not between:  # both projections ran before the change
                torch.testing.assert_close(parallel(ids).logits, plain(ids).logits)
                continue
            with pytest.raises(RuntimeError, match="changed in place between"):
                parallel(ids)
    torch._dynamo.reset()


@pytest.mark.slow
def test_what_siblings_share_is_not_changed_between_them_in_compiled_code():
    world(2).run(changing_what_siblings_share, timeout=200)


def low_precision(group: Any, autocast: bool) -> None:
    """The error against the fp32 model is as small as that of the plain model in bf16."""
    exact = model_of("qwen3")
    plain = copy.deepcopy(exact)
    if not autocast:
        plain.bfloat16()
    parallel = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group))
    want = results(exact, batch())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = [results(model, batch()) for model in (plain, parallel)]
    ours, theirs = (errors(each, want) for each in (found[1], found[0]))
    assert found[1]["logits"].dtype == found[0]["logits"].dtype
    for name, error in ours.items():
        assert error <= 3 * max(theirs[name], 2**-8), (name, error, theirs[name])


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [True, False])
def test_bf16(autocast: bool):
    world(2).run(low_precision, autocast)


def without_names() -> nn.Module:
    """User-defined attention and MLP classes have parameters of their own that apply to split heads and features."""
    from transformers.models.llama import modeling_llama as llama

    class Attention(llama.LlamaAttention):
        def __init__(self, config: Any, layer_idx: int) -> None:
            super().__init__(config, layer_idx)
            self.scale = nn.Parameter(torch.randn(self.head_dim))

        def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
            parts = (self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states))
            q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in parts)
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            y = nn.functional.scaled_dot_product_attention(q * self.scale, k, v, is_causal=True)
            return self.o_proj(y.transpose(1, 2).flatten(2)), None

    class MLP(llama.LlamaMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.scale = nn.Parameter(torch.randn(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.up_proj(x) * self.gate_proj(x).sigmoid() * self.scale)

    true = llama.LlamaAttention, llama.LlamaMLP
    llama.LlamaAttention, llama.LlamaMLP = Attention, MLP
    try:
        return model_of("llama")
    finally:
        llama.LlamaAttention, llama.LlamaMLP = true


def with_parameters_that_no_plan_names(group: Any) -> None:
    plain = without_names()
    for sequence_parallel in (True, False):
        model = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group), sequence_parallel=sequence_parallel)
        for _ in range(2):  # the second backward uses what the first one learned
            for each in (plain, model):
                each.zero_grad()
            assert_alike(model, plain)


@pytest.mark.slow
def test_parameters_that_meet_parts_of_heads_though_no_plan_names_them():
    world(2).run(with_parameters_that_no_plan_names)


def compiled_with_parameters_that_no_plan_names(group: Any, compile_: Callable[[nn.Module], None]) -> None:
    plain = without_names()
    torch._dynamo.reset()
    model = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group))
    compile_(model)
    with pytest.raises(RuntimeError, match="is not in the plan, so one uncompiled forward and backward"):
        results(model, batch())
    torch._dynamo.reset()
    model = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group))
    results(model, batch())
    compile_(model)
    for _ in range(2):
        for each in (plain, model):
            each.zero_grad()
        assert_alike(model, plain)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("compile_", [whole, each_layer])
def test_compiled_code_is_refused_what_only_a_step_that_is_not_shows(compile_: Callable[[nn.Module], None]):
    world(2).run(compiled_with_parameters_that_no_plan_names, compile_, timeout=200)


def adapted(group: Any, targets: list[str], frozen: bool) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    torch.manual_seed(1)
    plain: Any = get_peft_model(model_of("llama"), config)
    if not frozen:
        plain.requires_grad_(True)
    parallel = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group))
    assert_alike(parallel, plain)
    assert not parallel._fusedtp.whole  # type: ignore[union-attr]
    trained = [name for name, p in parallel.named_parameters() if p.grad is not None]
    assert bool(trained) and (not frozen or all("lora_" in name for name in trained))
    merged = [model.merge_and_unload() for model in (plain, parallel)]
    with torch.no_grad():
        inputs = {key: value for key, value in batch().items() if key != "labels"}
        want, got = (model(**inputs, use_cache=False).logits for model in merged)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["o_proj", "down_proj"], ["lm_head", "gate_proj"]])
def test_lora(targets: list[str]):
    world(2).run(adapted, targets, True)


@pytest.mark.slow
@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"]])
def test_lora_where_ranks_share_kv_heads(targets: list[str]):
    world(4).run(adapted, targets, len(targets) > 1)


def test_lora_beside_trained_weights():
    world(2).run(adapted, ["q_proj", "o_proj"], False)


def with_modules_that_are_trained_whole(group: Any, saved: list[str]) -> None:
    """PEFT does this when tokens were added."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=saved, init_lora_weights=False)
    plain: Any = get_peft_model(model_of("llama"), config)
    parallel = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group))
    assert_alike(parallel, plain)
    trained = {name for name, p in parallel.named_parameters() if p.grad is not None and "lora_" not in name}
    assert len(trained) == len(saved) and all("modules_to_save" in name for name in trained)


@pytest.mark.parametrize("saved", [["lm_head", "embed_tokens"], ["lm_head"]])
def test_lora_beside_modules_that_are_trained_whole(saved: list[str]):
    world(2).run(with_modules_that_are_trained_whole, saved)


def adapted_with_a_wrong_plan(group: Any) -> None:
    """A module of the inner model that the plan would break stays whole."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["gate_proj"], init_lora_weights=False)
    plain: Any = get_peft_model(model_of("doge"), config)
    parallel: Any = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group))
    assert list(parallel._fusedtp.whole) == ["base_model.model.model.layers.*.self_attn"]
    assert_alike(parallel, plain)


def test_lora_in_a_model_with_a_wrong_plan():
    world(2).run(adapted_with_a_wrong_plan)


def adapted_late(group: Any) -> None:
    from peft import LoraConfig, get_peft_model

    _, parallel = pair(group)
    late = get_peft_model(parallel, LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"q_proj\.lora_A\.default.*: added to the model after parallelize"):
        late(**batch())


def test_an_adapter_that_comes_too_late_is_named():
    world(2).run(adapted_late)


class Largest(nn.Module):
    """Keep the largest half of each token's features."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x >= x.median(dim=-1, keepdim=True).values)


def normalized_mlp(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(F.normalize(self.act_fn(self.gate_proj(x)) * self.up_proj(x), dim=-1))


def with_other_activations(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = Largest()


def with_another_forward(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.forward = MethodType(normalized_mlp, mlp)


def with_a_hook(model: Any) -> None:
    model.model.layers[1].mlp.act_fn.register_forward_hook(lambda module, args, y: F.normalize(y, dim=-1))


def with_another_method(model: Any) -> None:
    norm = model.model.layers[1].input_layernorm
    norm.extra_repr = lambda: "another"


def with_a_hook_on_an_adapted_layer(model: Any) -> None:
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=2, target_modules=["up_proj"]))
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, args, y: F.normalize(y, dim=-1))


CHANGES = {
    "model.layers.1.mlp.act_fn .*: Largest instead of SiLU": with_other_activations,
    "model.layers.1.mlp .*: its own forward": with_another_forward,
    "model.layers.1.mlp.act_fn .*: a hook": with_a_hook,
    "model.layers.1.mlp.up_proj .*: a hook": with_a_hook_on_an_adapted_layer,
    "model.layers.1.input_layernorm .*: a different extra_repr": with_another_method,
}


@pytest.mark.slow
@pytest.mark.parametrize("why", CHANGES)
def test_a_model_that_was_changed_is_not_proved_by_a_copy_of_its_class(why: str):
    model = model_of("llama")
    CHANGES[why](model)
    with pytest.raises(ValueError, match=f"cannot be proved: {why}"):
        fusedtp.VirtualWorld(2).run(lambda group: fusedtp.parallelize(copy.deepcopy(model), group, prove=True))


def test_a_model_that_was_changed_is_split_with_a_warning():
    model = model_of("llama")
    model.model.layers[1].mlp.act_fn = nn.Tanh()
    with pytest.warns(UserWarning, match="layers.1.mlp.act_fn differs from a small copy"):
        fusedtp.VirtualWorld(2).run(lambda group: fusedtp.parallelize(copy.deepcopy(model), group) and None)


def with_accelerate_hooks(model: Any) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    add_hook_to_module(model.model.layers[1].mlp, AlignDevicesHook(execution_device="cpu"))


def with_lora(model: Any) -> None:
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))


def with_what_trainers_switch_on(model: Any) -> None:
    model.train().requires_grad_(False)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.model.layers[1].compile(backend="eager")


def with_hooks_where_tokens_are_whole(model: Any) -> None:
    model.register_forward_hook(lambda module, args, out: None)
    model.model.layers[1].register_forward_hook(lambda module, args, out: out + 1)


@pytest.mark.parametrize(
    "change",
    [with_accelerate_hooks, with_lora, with_what_trainers_switch_on, with_hooks_where_tokens_are_whole],
)
def test_what_libraries_add_to_a_model_does_not_hinder_its_proof(change: Callable[[nn.Module], None]):
    model = model_of("llama")
    change(model)
    twin_of(model, 2)


def heads_that_talk(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """As in arXiv:2003.02436: each head's attention depends on the other heads."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    hidden = torch.ones(query.shape[2], key.shape[2]).triu(1).bool()
    weights = (query @ key.mT * scaling).masked_fill(hidden, -1e9).softmax(-1)
    return ((weights + weights.mean(1, keepdim=True)) @ value).transpose(1, 2).contiguous(), None


def with_registered_attention(group: Any) -> None:
    AttentionInterface.register("talking", heads_that_talk)
    plain: Any = model_of("llama", attention="talking")
    parallel: Any = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group))
    assert list(parallel._fusedtp.whole) == ["model.layers.*.self_attn"]
    assert_alike(parallel, plain)


def test_attention_that_a_user_registered_is_what_is_proved():
    world(2).run(with_registered_attention)


def adapted_otherwise(group: Any) -> list[str]:
    from peft import AdaLoraConfig, LoraConfig, get_peft_model

    said = []
    for config in (AdaLoraConfig(target_modules=["q_proj"], total_step=10), LoraConfig(use_dora=True)):
        with pytest.raises(ValueError) as caught:
            fusedtp.parallelize(get_peft_model(model_of("llama"), config), tp_mesh(group))
        said.append(str(caught.value))
    return said


def test_adapters_that_cannot_be_split_are_named():
    for adalora, dora in world(2).run(adapted_otherwise):
        assert "SVDLinear with lora_E (AdaLoRA) cannot be split" in adalora
        assert "Linear with lora_magnitude_vector (DoRA) cannot be split" in dora


def resized(group: Any) -> None:
    _, parallel = pair(group)
    rows = parallel.get_input_embeddings().num_embeddings
    assert parallel.resize_token_embeddings(rows) is parallel.resize_token_embeddings()
    for model in (parallel, copy.deepcopy(parallel)):
        with pytest.raises(ValueError, match="call resize_token_embeddings before parallelize"):
            model.resize_token_embeddings(rows + 1)


def test_a_vocabulary_grows_before_the_split():
    world(2).run(resized)


def sharded(group: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = model_of("qwen3")
    parallel: Any = fusedtp.parallelize(copy.deepcopy(plain), mesh["tp"])
    for layer in parallel.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(parallel, mesh=mesh["dp"])
    inputs, rank = batch((4, 5)), mesh["dp"].get_local_rank()
    own = {name: value[2 * rank : 2 * rank + 2] for name, value in inputs.items()}
    mine, everyone = ((each["labels"][:, 1:] != -100).sum() for each in (own, inputs))
    want, noise = results(plain, inputs), results(perturbed(plain), inputs)
    got = results(parallel, own, scale=float(2 * mine / everyone))
    assert parallel._fusedtp.gathered.keys() <= {"logits: full_tensor"}  # FSDP2's checks gather no tokens
    of_weights = [{k: v for k, v in each.items() if k.startswith("gradient")} for each in (got, want, noise)]
    explained = errors(of_weights[2], of_weights[1])
    for name, error in errors(of_weights[0], of_weights[1]).items():
        assert error <= max(LEAST, MARGIN * explained[name]), f"{name} is off by {error:.1e}"


@pytest.mark.slow
def test_fsdp2_on_top():
    world(4).run(sharded, timeout=120)


def trained(group: Any) -> None:
    losses: list[list[float]] = []
    norms: list[list[float]] = []
    for model in pair(group, "qwen3_moe"):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        losses.append([])
        norms.append([])
        for _ in range(5):
            loss = model(**batch()).loss
            loss.backward()
            norm: Any = fusedtp.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
            norms[-1].append(norm.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


@pytest.mark.slow
def test_five_steps_with_clipping():
    world(2).run(trained)


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Eight rows from one batch."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: value[index] for name, value in batch((8, 5)).items()}


def with_trainer(group: Any, folder: str) -> None:
    from transformers import Trainer, TrainingArguments

    def logs_of(model: nn.Module, kind: str) -> list[dict[str, float]]:
        options = TrainingArguments(
            output_dir=f"{folder}/{kind}",
            per_device_train_batch_size=2,
            max_steps=5,
            save_steps=3,
            save_only_model=True,
            logging_steps=1,
            learning_rate=1e-2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=options, train_dataset=Rows())
        trainer.train()
        return [log for log in trainer.state.log_history if "loss" in log]

    plain, parallel = pair(group)
    alone = logs_of(plain, str(group.rank()))
    with as_torchrun(group):
        split = logs_of(parallel, "split")
    for name in ("loss", "grad_norm"):
        want, got = ([log[name] for log in each] for each in (alone, split))
        assert len(want) == 5 and got == pytest.approx(want, rel=1e-3), name
    if group.rank() == 0:
        from safetensors.torch import load_file

        want, got = (load_file(f"{folder}/{kind}/checkpoint-3/model.safetensors") for kind in ("0", "split"))
        assert got.keys() == want.keys()
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-2, atol=1e-3, msg=name)


@pytest.mark.slow
def test_trainer(tmp_path: Path):
    world(2).run(with_trainer, str(tmp_path), timeout=120)


def resumed(group: Any, folder: str) -> None:
    """After a resume at step 3, steps 4 and 5 equal those of the uninterrupted run bit for bit."""
    from transformers import TrainingArguments

    from fusedtp.train.hf import Trainer

    logs, weights = [], []
    for resume in (None, f"{folder}/checkpoint-3"):
        model = fusedtp.parallelize(model_of("qwen3"), tp_mesh(group))
        with as_torchrun(group):
            options = TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=2,
                max_steps=5,
                save_steps=3,
                logging_steps=1,
                learning_rate=1e-2,
                use_cpu=True,
                report_to=[],
                disable_tqdm=True,
            )
            trainer = Trainer(model=model, args=options, train_dataset=Rows())
            trainer.train(resume_from_checkpoint=resume)
        logs.append([log["loss"] for log in trainer.state.log_history if "loss" in log and log["step"] > 3])
        weights.append([p.detach().to_local() for p in model.parameters()])  # type: ignore[attr-defined]
    assert len(logs[0]) == 2 and logs[0] == logs[1]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.slow
def test_trainer_resumes(tmp_path: Path):
    world(2).run(resumed, str(tmp_path), timeout=200)


def with_accelerate(group: Any) -> None:
    from accelerate import Accelerator, ParallelismConfig

    plain, parallel = pair(group)
    config = ParallelismConfig(tp_size=group.size())
    with as_torchrun(group):
        accelerator = Accelerator(cpu=True, parallelism_config=config)
        model, optimizer = accelerator.prepare(parallel, torch.optim.AdamW(parallel.parameters(), 1e-2))
        compare(accelerator, plain, model, optimizer)


def compare(accelerator: Any, plain: nn.Module, model: nn.Module, optimizer: Any) -> None:
    """Three steps with gradient clipping."""
    alone = torch.optim.AdamW(plain.parameters(), 1e-2)
    for _ in range(3):
        want = plain(**batch()).loss
        want.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        alone.step()
        alone.zero_grad()
        got = model(**batch()).loss
        accelerator.backward(got)
        ours: Any = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
        assert got.item() == pytest.approx(want.item(), rel=1e-4)
        assert float(ours) == pytest.approx(float(norm), rel=1e-3)


@pytest.mark.slow
def test_accelerate():
    world(2).run(with_accelerate, timeout=120)


def around(group: Any) -> None:
    """Hooks see full shapes; copies, eval and inference_mode work; a second call to parallelize is refused."""
    plain, parallel = pair(group)
    seen: list[torch.Size] = []
    parallel.model.layers[0].register_forward_hook(lambda m, a, out: seen.append(out.shape))  # type: ignore[union-attr]
    assert_alike(copy.deepcopy(parallel), plain)
    parallel(**batch())
    assert seen[-1] == (3, 5, 32)
    with torch.inference_mode():
        inputs = {key: value for key, value in batch().items() if key != "labels"}
        out = parallel(**inputs, output_hidden_states=True, use_cache=False)
        want = plain(**inputs, output_hidden_states=True, use_cache=False)
    for ours, theirs in zip(out.hidden_states, want.hidden_states, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    kept = parallel(**inputs, logits_to_keep=2, use_cache=False).logits
    torch.testing.assert_close(kept.full_tensor(), want.logits[:, -2:], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="it is parallel already"):
        fusedtp.parallelize(parallel, tp_mesh(group))


@pytest.mark.slow
def test_hooks_copies_and_inference():
    world(2).run(around)


def differing(group: Any) -> None:
    model: Any = model_of("llama")
    with torch.no_grad():
        model.model.norm.weight[3] += group.rank()
    with pytest.raises(ValueError, match=r"ranks hold different values of model\.norm\.weight"):
        fusedtp.parallelize(model, tp_mesh(group))
    _, parallel = pair(group)
    inputs = batch()
    inputs["input_ids"] = inputs["input_ids"].roll(group.rank(), 0)
    with pytest.raises(ValueError, match="got different inputs: input_ids"):
        parallel(**inputs)


def test_ranks_that_differ_are_told():
    world(2).run(differing)


def with_a_penalty(group: Any) -> None:
    """Penalize all parameters in the loss; copy the model while gradients exist, as weight averaging does."""
    plain, parallel = pair(group)
    for model in (plain, parallel):
        penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
        (model(**batch()).loss + 1e-3 * penalty).backward()
    wanted = dict(plain.named_parameters())
    for copied in (parallel, copy.deepcopy(parallel)):
        for name, parameter in copied.named_parameters():
            torch.testing.assert_close(full(parameter.grad), wanted[name].grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_a_penalty_on_parameters_and_a_copy_after_the_backward():
    world(2).run(with_a_penalty)


def with_heads_in_a_list(group: Any) -> None:
    from transformers import SwinConfig, SwinForImageClassification

    sizes: dict[str, Any] = dict(image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4])
    torch.manual_seed(1)
    plain: Any = SwinForImageClassification(SwinConfig(**sizes, window_size=4)).eval()
    parallel = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group))
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(full(parallel(images).logits), plain(images).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_model_whose_layers_have_different_numbers_of_heads():
    world(2).run(with_heads_in_a_list)


def with_narrow_experts(group: Any) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = dict(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_local_experts=4)
    heads = dict(num_attention_heads=4, num_key_value_heads=4)
    for width, fits in ((24, False), (32, True)):  # in fp32 on four ranks: parts of 24 and of 32 bytes
        model: Any = MixtralForCausalLM(MixtralConfig(**sizes, **heads, intermediate_size=width))
        refused = nullcontext() if fits else pytest.raises(ValueError, match=r"down_proj: .*ExpertSplit\(\)")
        with refused:
            fusedtp.parallelize(model, tp_mesh(group))
        model(input_ids=torch.arange(8)[None])


@pytest.mark.slow
def test_experts_too_narrow_for_grouped_products_are_refused():
    world(4).run(with_narrow_experts)
