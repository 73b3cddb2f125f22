"""fusedtp.from_transformers and to_transformers: a CausalLM computes what the transformers model computes.

Note [What roundoff may change]
The two models compute the same sums in another order, in fp32. A value passes through at most 8 operations per layer
and 4 around the layers in the forward pass, and as many in backward. Each operation sums at most TERMS terms; see
Note [Roundings] in tests/nn.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

import fusedtp
from fusedtp.nn import CausalLM, ModelConfig, MoEConfig, RopeScaling, init_
from fusedtp.parallel import convert
from tests.harness import world
from tests.nn.support import assert_close, roundings_of
from tests.parallel.support import tp_mesh

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

MODELS = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
LAYERS, TERMS = 3, 96
ROUNDINGS = roundings_of(2 * (8 * LAYERS + 4), TERMS)
SMALL = dict(
    vocab_size=37, hidden_size=24, intermediate_size=22, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def model_of(name: str, seed: int = 0, **changes: Any) -> Any:
    """A small transformers model in fp32. Norms and biases are random too, because ones and zeros hide bugs."""
    more = EXPERTS if "num_local_experts" in convert.FAMILIES[name].reads else {}
    more = more | ({"moe_intermediate_size": 10} if name == "qwen3_moe" else {})
    config = AutoConfig.for_model(name, **{**SMALL, **more, **changes})
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")  # the others need widths of 4n
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in key else 0.3 * noise)
    return model.eval()


@st.composite
def cases(draw: Any) -> tuple[str, dict[str, Any]]:
    """A family and a configuration of it."""
    name = draw(st.sampled_from(MODELS))
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 1)]))
    heads = kv_heads * group
    changes: dict[str, Any] = dict(
        vocab_size=draw(st.integers(5, 41)),
        hidden_size=heads * draw(st.integers(3, 8)),
        intermediate_size=draw(st.integers(1, 24)),
        num_hidden_layers=draw(st.integers(1, LAYERS)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 8)),
        hidden_act=draw(st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh"])),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5, 0.1])),
        tie_word_embeddings=draw(st.booleans()),
    )
    default = dict(rope_type="default", rope_theta=draw(st.sampled_from([100.0, 1e4, 1e6])))
    linear = {**default, "rope_type": "linear", "factor": 2.0}
    mscale = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}
    factor = {**YARN, "attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0}
    changes["rope_parameters"] = dict(draw(st.sampled_from([default, linear, YARN, mscale, factor, LLAMA3])))
    reads = convert.FAMILIES[name].reads
    changes |= {field: draw(st.booleans()) for field in ("attention_bias", "mlp_bias") if field in reads}
    if "sliding_window" in reads:
        changes["sliding_window"] = draw(st.sampled_from([None, 1, 3, 50]))
    if "use_sliding_window" in reads:
        changes |= {"use_sliding_window": changes["sliding_window"] is not None, "max_window_layers": 0}
    if "num_local_experts" in reads:
        changes["num_experts"] = draw(st.integers(1, 5))
        changes["num_experts_per_tok"] = draw(st.integers(1, changes["num_experts"]))
    if name == "qwen3_moe":
        changes["moe_intermediate_size"] = draw(st.integers(1, 12))
        changes["norm_topk_prob"] = draw(st.booleans())
        changes["mlp_only_layers"] = list(range(draw(st.integers(0, changes["num_hidden_layers"]))))
    return name, changes


def batch(vocab: int, shape: tuple[int, int] = (2, 7)) -> tuple[Tensor, Tensor]:
    """Token ids, and labels shifted as a CausalLM expects them."""
    ids = torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(1))
    return ids, torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)


def gradients_of_transformers(model: CausalLM) -> dict[str, Tensor]:
    """Gradients of a CausalLM under transformers' names."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        theirs, half = convert.their_name(name)
        found[theirs] = torch.cat([found[theirs], parameter.grad], 1) if half == 1 else parameter.grad
    return found


def assert_computes(own: CausalLM, model: Any) -> None:
    """Logits, loss and all gradients equal those of the transformers model."""
    ids, labels = batch(model.config.vocab_size)
    want = model(input_ids=ids, labels=ids, use_cache=False)
    got = own(ids, labels, return_logits=True)
    assert_close("logits", got.logits, want.logits, ROUNDINGS)
    assert_close("loss", got.loss, want.loss, ROUNDINGS)
    for each, loss in ((own, got.loss), (model, want.loss)):
        each.zero_grad()
        loss.backward()
    gradients = gradients_of_transformers(own)
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert_close(f"gradient of {name}", gradients[name], gradient, ROUNDINGS)


def assert_same_model(got: nn.Module, want: nn.Module) -> None:
    """Bit for bit."""
    ours, theirs = dict(got.state_dict()), dict(want.state_dict())
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype and torch.equal(ours[name], value), name


def loaded(folder: Any) -> Any:
    """The model that transformers loads from this folder, if no key is missing or unexpected."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, experts_implementation="eager")
    assert not any(info.values()), info
    return model.eval()


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: x for path in sorted(folder.glob("*.safetensors")) for name, x in load_file(path).items()}


# --- the same function ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(case=cases())
@settings(max_examples=40)
def test_computes_the_same(case: tuple[str, dict[str, Any]]) -> None:
    """Any configuration of any family, converted in memory: logits, loss and gradients are equal."""
    model = model_of(case[0], **case[1])
    assert_computes(fusedtp.from_transformers(model), model)


@pytest.mark.slow
@given(case=cases())
@settings(max_examples=12)
def test_there_and_back_is_bitwise(case: tuple[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> None:
    """folder -> CausalLM -> folder: tensors, configuration and generation configuration are the same.

    A CausalLM that lost its original configuration finds one that computes the same.
    """
    folder = tmp_path_factory.mktemp("model")
    model = model_of(case[0], **case[1])
    model.generation_config.max_new_tokens = 77  # a setting that config.json does not hold
    model.save_pretrained(folder / "theirs")
    own = fusedtp.from_transformers(folder / "theirs")
    assert not own.training
    assert_same_model(own, fusedtp.from_transformers(model))
    fusedtp.to_transformers(own, folder / "again")
    want, got = tensors_of(folder / "theirs"), tensors_of(folder / "again")
    assert got.keys() == want.keys() and all(torch.equal(got[name], x) for name, x in want.items())
    for file in ("config.json", "generation_config.json"):
        read = [json.loads((folder / side / file).read_text()) for side in ("theirs", "again")]
        assert read[0] == read[1]
    assert_same_model(loaded(folder / "again"), model)

    own.pretrained = None
    fusedtp.to_transformers(own, folder / "other")
    ids, _ = batch(model.config.vocab_size)
    other = loaded(folder / "other")
    with torch.no_grad():
        assert_close("logits", other(ids).logits, model(ids).logits, ROUNDINGS)
    again = fusedtp.from_transformers(folder / "other")
    assert_same_model(again, own)
    assert convert._flat(again.config) == convert._flat(own.config)


OWN = {
    "llama": {},
    "llama with biases": dict(attention_bias=True, mlp_bias=True),
    "qwen2": dict(attention_bias=True, attention_output_bias=False),
    "mistral": dict(sliding_window=5),
    "qwen3": dict(qk_norm=True, tie_word_embeddings=True, rope_scaling=RopeScaling("linear", 2.0)),
    "mixtral": dict(moe=MoEConfig(hidden=10, balance_loss=0.0, score_after_topk=True)),
    "qwen3_moe": dict(qk_norm=True, moe=MoEConfig(hidden=10, balance_loss=0.0, normalize=False, first_dense=1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_a_model_made_here_goes_there_and_comes_back(name: str, tmp_path: Path) -> None:
    """The simplest family that computes it is chosen; parameters come back bit for bit, in bf16 too."""
    config = ModelConfig(**{**SMALL, "dtype": "bfloat16", "param_dtype": "bfloat16", **OWN[name]})
    model = init_(CausalLM(config), 0)
    fusedtp.to_transformers(model, tmp_path, eos_token_id=[3, 5])
    theirs = loaded(tmp_path)
    assert theirs.config.model_type == name.split()[0] and theirs.dtype == torch.bfloat16
    assert theirs.config.eos_token_id == [3, 5]
    again = fusedtp.from_transformers(tmp_path)
    assert_same_model(again, model)
    assert convert._flat(again.config) == convert._flat(config)
    wide = fusedtp.from_transformers(tmp_path, dtype="float32", param_dtype=torch.float32)
    assert wide.config.dtype == wide.config.param_dtype == "float32" and wide.norm.weight.dtype == torch.float32


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_one_by_one_and_packed(name: str, tmp_path: Path) -> None:
    """Both checkpoint layouts load, wherever the checkpoint is split into files."""
    model = model_of(name)
    for original in (True, False):
        folder = tmp_path / str(original)
        model.save_pretrained(folder, save_original_format=original, max_shard_size="8KB")
        assert any("experts.0." in key for key in tensors_of(folder)) == original
        assert_same_model(fusedtp.from_transformers(folder), fusedtp.from_transformers(model))


def test_balance_loss_of_one_layer_is_that_of_transformers() -> None:
    """In training mode, if the configuration asks for the loss."""
    model = model_of("mixtral", num_hidden_layers=1, output_router_logits=True, router_aux_loss_coef=0.5)
    plain = fusedtp.from_transformers(model, output_router_logits=False)
    own = fusedtp.from_transformers(model)
    ids, labels = batch(SMALL["vocab_size"])
    assert own.train()(ids, labels).loss > plain.train()(ids, labels).loss + 0.1
    assert_computes(own, model.train())


def test_options_are_those_that_no_checkpoint_says() -> None:
    options = {"residual_dropout": 0.1, "balance_loss": 0.02, "attention_dropout": 0.3}
    config = fusedtp.from_transformers(model_of("mixtral"), options=options).config
    assert config.moe is not None and config.moe.balance_loss == 0.02
    assert config.residual_dropout == 0.1 and config.attention_dropout == 0.3


def test_head_that_differs_from_the_embedding_is_read_though_the_configuration_ties_them(
    tmp_path: Path,
) -> None:
    """transformers does the same. If the two are equal, a file may hold either one."""
    model = model_of("qwen3")
    model.save_pretrained(tmp_path)
    own = fusedtp.from_transformers(tmp_path, tie_word_embeddings=True)
    assert not own.config.tie_word_embeddings
    assert_same_model(own, fusedtp.from_transformers(model))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    own = fusedtp.from_transformers(tmp_path, tie_word_embeddings=True)
    assert own.lm_head.weight is own.embed_tokens.weight
    assert torch.equal(own.embed_tokens.weight, model.lm_head.weight)


# --- faults are detected ----------------------------------------------------------------------------------------------


def swapped(a: str, b: str) -> Any:
    """their_name with two names swapped."""
    inner = convert.their_name

    def other(name: str) -> tuple[str, int | None]:
        taken = name.replace(a, "?").replace(b, a).replace("?", b)
        return inner(taken)

    return other


@pytest.mark.parametrize(
    "name, a, b",
    [
        ("llama", "q_proj", "k_proj"),
        ("qwen3", "k_proj", "v_proj"),
        ("qwen3", "q_norm", "k_norm"),
        ("llama", "mlp.gate_proj", "mlp.up_proj"),
        ("llama", "input_layernorm", "post_attention_layernorm"),
        ("mixtral", "experts.gate_proj", "experts.up_proj"),
    ],
)
def test_a_swap_is_seen(name: str, a: str, b: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of this file detects weights that were loaded under the wrong name."""
    model = model_of(name, num_key_value_heads=4)
    assert_computes(fusedtp.from_transformers(model), model)
    monkeypatch.setattr(convert, "their_name", swapped(a, b))
    own = fusedtp.from_transformers(model)
    monkeypatch.undo()
    with pytest.raises(AssertionError, match="logits"):
        assert_computes(own, model)


@pytest.mark.parametrize(
    "name, theirs, read",
    [
        ("qwen3_moe", dict(norm_topk_prob=True), dict(norm_topk_prob=False)),
        ("qwen3_moe", dict(num_experts_per_tok=2), dict(num_experts_per_tok=3)),
        ("mistral", dict(sliding_window=3), dict(sliding_window=4)),
        ("llama", dict(rope_parameters=YARN), dict(rope_parameters=LLAMA3)),
        ("llama", dict(rms_norm_eps=1e-6), dict(rms_norm_eps=1e-2)),
        ("llama", dict(hidden_act="silu"), dict(hidden_act="gelu")),
    ],
)
def test_another_configuration_is_seen(name: str, theirs: dict, read: dict) -> None:
    model = model_of(name, **theirs)
    with pytest.raises(AssertionError, match="logits"):
        assert_computes(fusedtp.from_transformers(model, **read), model)


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "padding": ("llama", dict(pad_token_id=0), "pad_token_id is 0"),
    "activation": ("llama", dict(hidden_act="relu"), "hidden_act is 'relu'"),
    "dynamic rope": (
        "llama",
        dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)),
        "rope_type is 'dynamic'",
    ),
    "partial rotary": (
        "llama",
        dict(rope_parameters={**LLAMA3, "partial_rotary_factor": 0.5}),
        "does not read partial_rotary_factor",
    ),
    "yarn's ramp": ("qwen3", dict(rope_parameters={**YARN, "truncate": False}), "does not read truncate"),
    "some windows": (
        "qwen2",
        dict(use_sliding_window=True, sliding_window=4, max_window_layers=1),
        "layer_types has full_attention, sliding_attention;",
    ),
    "unknown field": ("llama", dict(logit_scale=2.0), "logit_scale is 2.0, which CausalLM does not read"),
    "field of another family": (
        "mistral",
        dict(attention_bias=True),
        "attention_bias is True, which CausalLM does not read",
    ),
    "known field": ("llama", dict(chunk_size_feed_forward=2), "chunk_size_feed_forward is 2"),
    "jitter": ("mixtral", dict(router_jitter_noise=0.1), "router_jitter_noise is 0.1"),
    "balance over layers": ("mixtral", dict(output_router_logits=True), "one balance loss over all layers"),
    "experts between": ("qwen3_moe", dict(mlp_only_layers=[1]), r"layers \[1\] are dense"),
    "sparse steps": (
        "qwen3_moe",
        dict(decoder_sparse_step=3, num_hidden_layers=3, mlp_only_layers=[2]),
        None,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_causal_lm_does_not_compute_is_refused_by_name(case: str) -> None:
    name, changes, message = REFUSED[case]
    if message is None:  # all layers are dense, so nothing is refused
        model = model_of(name, **changes)
        assert_computes(fusedtp.from_transformers(model), model)
        return
    with pytest.raises(ValueError, match=message):
        fusedtp.from_transformers(model_of(name, **changes))


def test_all_faults_of_a_configuration_come_in_one_error(tmp_path: Path) -> None:
    """In memory and on disk. `ignore` and configuration changes resolve them."""
    model = model_of("mixtral", router_jitter_noise=0.1, output_router_logits=True, pad_token_id=1, answer=42)
    model.save_pretrained(tmp_path)
    for source in (model, tmp_path):
        with pytest.raises(ValueError) as error:
            fusedtp.from_transformers(source, options={"vocab_size": 3}, dtype="int8")
        for word in (
            "router_jitter_noise",
            "output_router_logits",
            "pad_token_id",
            "answer is 42",
            "vocab_size",
            "int8",
        ):
            assert word in str(error.value)
        own = fusedtp.from_transformers(
            source, ignore=["answer"], router_jitter_noise=0.0, output_router_logits=False, pad_token_id=None
        )
        fusedtp.to_transformers(own, tmp_path / "again", pad_token_id=1)
        assert loaded(tmp_path / "again").config.pad_token_id == 1


def test_other_models_are_refused(tmp_path: Path) -> None:
    gemma = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma", **SMALL))
    gemma.save_pretrained(tmp_path)
    for source in (gemma, tmp_path):
        with pytest.raises(ValueError, match="CausalLM does not support GemmaForCausalLM, only LlamaForCausalLM"):
            fusedtp.from_transformers(source)

    class Other(transformers.LlamaForCausalLM):
        pass

    with pytest.raises(ValueError, match="does not support Other"):
        fusedtp.from_transformers(Other(AutoConfig.for_model("llama", **SMALL)))


class Adapted(nn.Linear):
    """Stands for an adapter or a quantized layer."""


def broken(how: str) -> Any:
    model = model_of("llama")
    attention = model.model.layers[1].self_attn
    if how == "adapter":
        attention.q_proj = Adapted(24, 32, bias=False)
    elif how == "shape":
        attention.q_proj.weight = nn.Parameter(torch.zeros(5, 24))
    elif how == "unexpected":
        attention.q_proj.bias = nn.Parameter(torch.zeros(32))
    elif how == "missing":
        del attention.q_proj.weight
    elif how == "meta":
        model.to("meta")
    elif how == "dtypes":
        model.model.norm.bfloat16()
    return model


@pytest.mark.parametrize(
    "how, message",
    [
        ("adapter", "layers.1.self_attn.q_proj is a Adapted"),
        ("shape", r"layers.1.self_attn.q_proj.weight has shape \(5, 24\), but \(32, 24\) in CausalLM"),
        ("unexpected", "layers.1.self_attn.q_proj.bias is unexpected"),
        ("missing", "layers.1.self_attn.q_proj.weight is missing"),
        ("meta", "model.norm.weight is on the meta device"),
        ("dtypes", "several dtypes: torch.bfloat16, torch.float32"),
    ],
)
def test_weights_that_do_not_fit_are_named(how: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fusedtp.from_transformers(broken(how))


def test_weights_of_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model_of("mixtral").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gate = next(name for name in tensors if name.endswith("gate.weight"))
    tensors[gate] = tensors[gate][:3].clone()
    tensors["model.extra"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError) as error:
        fusedtp.from_transformers(tmp_path)
    for fault in (
        "gate.weight has shape (3, 24)",
        "model.norm.weight is missing",
        "model.extra is unexpected",
    ):
        assert fault in str(error.value)


@pytest.mark.parametrize("wrong", [dict(nonsense=1), dict(tie_word_embeddings=True), dict(mesh="cpu")])
def test_bad_arguments_are_named(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)) if "mesh" not in wrong else "1-D DeviceMesh"):
        fusedtp.from_transformers(model_of("llama"), **wrong)


UNWRITTEN = {
    "is_causal": dict(is_causal=False),
    "qk_norm": dict(qk_norm=True, mlp_bias=True),
    "mlp_bias": dict(sliding_window=3, mlp_bias=True),
    "attention_bias": dict(sliding_window=3, attention_bias=True),
    "shared": dict(moe=MoEConfig(shared=8)),
    "capacity": dict(moe=MoEConfig(capacity=1.5)),
    "score": dict(moe=MoEConfig(score="sigmoid")),
    "scale": dict(moe=MoEConfig(scale=2.0)),
    "normalize": dict(moe=MoEConfig(normalize=False)),
    "first_dense": dict(moe=MoEConfig(first_dense=1)),
    "bias": dict(moe=MoEConfig(bias=True)),
    "num_groups": dict(moe=MoEConfig(num_groups=2)),
}


@pytest.mark.parametrize("name", UNWRITTEN)
def test_what_transformers_does_not_compute_is_not_written(name: str, tmp_path: Path) -> None:
    model = CausalLM(ModelConfig(**{**SMALL, **UNWRITTEN[name]}), device="meta")
    message = "mlp_bias" if name == "qk_norm" else name
    with pytest.raises(ValueError, match=f"cannot represent this CausalLM.*\n(.*\n)*  - {message} is "):
        fusedtp.to_transformers(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_options_without_a_place_are_not_lost_silently(tmp_path: Path) -> None:
    config = ModelConfig(**SMALL, residual_dropout=0.1, attention_dropout=0.2, moe=MoEConfig(hidden=8, z_loss=0.1))
    with pytest.warns(UserWarning, match=r"not saved.*balance_loss=0.01, residual_dropout=0.1, z_loss=0.1"):
        fusedtp.to_transformers(init_(CausalLM(config), 0), tmp_path)
    assert loaded(tmp_path).config.attention_dropout == 0.2


def test_a_model_without_values_or_of_changed_shape_is_not_written(tmp_path: Path) -> None:
    model = CausalLM(ModelConfig(**SMALL), device="meta")
    with pytest.raises(ValueError, match=r"still on the meta device.*norm.weight"):
        fusedtp.to_transformers(model, tmp_path)
    model = init_(CausalLM(ModelConfig(**SMALL)), 0)
    model.norm.weight = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(24,\), but \(3,\) in CausalLM"):
        fusedtp.to_transformers(model, tmp_path)
    with pytest.raises(ValueError, match="LlamaConfig has no such field:\n  - eos_tokken"):
        fusedtp.to_transformers(init_(CausalLM(ModelConfig(**SMALL)), 0), tmp_path, eos_tokken=1)


# --- ranks ------------------------------------------------------------------------------------------------------------


def load_and_save(group: Any, name: str, folder: str) -> None:
    """Both sources give the plain model's parts. A rank reads only its own parts and saves the plain model's folder."""
    from fusedtp.parallel.pretrained import Lazy

    mesh = tp_mesh(group)
    plain = fusedtp.from_transformers(folder)
    inner, read = Lazy.full, []

    def count(self: Any) -> Tensor:
        values = inner(self)
        assert values.untyped_storage().nbytes() == values.nbytes, "a view keeps the file in memory"
        read.append(values.nbytes)
        return values

    Lazy.full = count  # type: ignore[method-assign]
    try:
        own = fusedtp.from_transformers(folder, mesh)
    finally:
        Lazy.full = inner  # type: ignore[method-assign]
    parts = [p.to_local().nbytes for p in own.parameters()]
    assert sum(read) == sum(parts) and max(read) <= max(parts)
    assert not own.training and own.config == plain.config
    same = fusedtp.from_transformers(loaded(folder), mesh)
    wanted = dict(plain.named_parameters())
    for model in (own, same):
        for key, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor) and torch.equal(parameter.full_tensor(), wanted[key]), key
    ids, labels = batch(plain.config.vocab_size)
    assert_close("loss", own(ids, labels).loss, plain(ids, labels).loss, ROUNDINGS)
    fusedtp.to_transformers(own, f"{folder}/again")
    if group.rank() == 0:
        want, got = tensors_of(Path(folder)), tensors_of(Path(folder, "again"))
        assert got.keys() == want.keys() and all(torch.equal(got[key], x) for key, x in want.items())
    torch.distributed.barrier(group)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, changes",
    [("llama", {}), ("qwen3", dict(tie_word_embeddings=True)), ("mixtral", {}), ("qwen3_moe", {})],
)
def test_each_rank_reads_its_part_and_one_writes(name: str, changes: dict, tmp_path: Path) -> None:
    model_of(name, **changes).save_pretrained(tmp_path, max_shard_size="20KB")
    world(2).run(load_and_save, name, str(tmp_path))


def save_sharded_again(group: Any, folder: str) -> None:
    """With FSDP2 on top, the parameters' mesh has two dimensions, and only the first rank of both writes."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    own = fusedtp.from_transformers(folder, mesh["tp"])
    for module in (*own.layers, own):
        fully_shard(module, mesh=mesh["dp"])
    own = own.train()
    ids, labels = batch(own.config.vocab_size)
    own(ids, labels).loss.backward()
    fusedtp.to_transformers(own, f"{folder}/again")
    want, got = tensors_of(Path(folder)), tensors_of(Path(folder, "again"))
    assert got.keys() == want.keys() and all(torch.equal(got[key], x) for key, x in want.items())


def test_parameters_that_fsdp2_shards_again_are_written(tmp_path: Path) -> None:
    model_of("mixtral").save_pretrained(tmp_path)
    world(2).run(save_sharded_again, str(tmp_path))


def fail_together(group: Any, folder: str) -> None:
    """An error on one rank is raised on both: bad files, another folder, other weights."""
    mesh, rank = tp_mesh(group), group.rank()
    with pytest.raises(ValueError, match="neither model"):
        fusedtp.from_transformers(folder if rank else f"{folder}/empty", mesh)
    with pytest.raises(ValueError, match="ranks hold different values of"):
        fusedtp.from_transformers(model_of("llama", seed=rank), mesh)
    own = fusedtp.from_transformers(folder, mesh)
    with pytest.raises(OSError):
        fusedtp.to_transformers(own, "/dev/null/folder")
    split = fusedtp.parallelize(loaded(folder), mesh)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is a DTensor"):
        fusedtp.from_transformers(split)


@pytest.mark.slow
def test_a_fault_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text((tmp_path / "config.json").read_text())
    world(2).run(fail_together, str(tmp_path))
