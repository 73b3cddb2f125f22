"""Models without a plan: inference finds a plan that splits most of them, and the result equals one device."""

import copy
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import fusedtp
from fusedtp.parallel.infer import Search, infer
from fusedtp.parallel.local_view import NarrowInput, names_in
from fusedtp.parallel.vocab_shard import VocabShard
from tests.harness import world
from tests.parallel import planless
from tests.parallel.hf.families import model_of
from tests.parallel.support import tp_mesh

transformers.logging.set_verbosity_error()

WIDTH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TOKENS = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def gpt2(**changes: Any) -> nn.Module:
    fields = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, **TOKENS, **changes}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**fields))


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**WIDTH, **TOKENS, max_position_embeddings=16))


def distilbert() -> nn.Module:
    fields = {
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 48,
        "max_position_embeddings": 16,
        **TOKENS,
    }
    return transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**fields))


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**WIDTH, image_size=16, patch_size=4))


def opt() -> nn.Module:
    fields = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 48,
        "dropout": 0.0,
    }
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(**fields, **TOKENS, max_position_embeddings=32, word_embed_proj_dim=32)
    )


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 2)


def nano() -> nn.Module:
    return planless.NanoGPT()


def nano_gated() -> nn.Module:
    return planless.NanoGPT(planless.ChunkedAttention, gated=True)


def normed() -> nn.Module:
    return planless.NanoGPT(planless.NormedAttention)


def side_by_side() -> nn.Module:
    return planless.Chain(planless.SideBySide)


def heads_beside() -> nn.Module:
    return planless.Chain(planless.HeadsBeside)


def biased() -> nn.Module:
    return planless.Chain(planless.BiasedBlock)


def multi_query() -> nn.Module:
    return planless.NanoGPT(planless.GroupedAttention)


def grouped_by_config() -> nn.Module:
    return planless.NanoGPT(planless.GroupedByConfig)


def group_by_group() -> nn.Module:
    return planless.NanoGPT(planless.GroupByGroup)


def interleaved() -> nn.Module:
    return planless.NanoGPT(planless.InterleavedAttention)


def ids() -> Tensor:
    return torch.randint(3, 50, (3, 5), generator=torch.Generator().manual_seed(1))


def image() -> Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def hidden() -> Tensor:
    return torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


# Model -> constructor, input, the smallest share of its parameters that must be split.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], float]] = {
    "gpt2": (gpt2, ids, 0.9),
    "bert": (bert, ids, 0.75),
    "distilbert": (distilbert, ids, 0.8),
    "vit": (vit, image, 0.8),
    "opt": (opt, ids, 0.9),
    "encoder": (encoder, hidden, 0.9),
    "timm": (planless.TimmViT, image, 0.8),
    "nano": (nano, ids, 0.9),
    "nano_gated": (nano_gated, ids, 0.9),
    "interleaved": (interleaved, ids, 0.4),
    "normed": (normed, ids, 0.9),
    "side_by_side": (side_by_side, ids, 0.9),
    "heads_beside": (heads_beside, ids, 0.9),
    "biased": (biased, ids, 0.9),
    "shared_bias": (planless.SharedBias, ids, 0.9),
    "alibi": (planless.Alibi, ids, 0.9),
    "multi_query": (multi_query, ids, 0.7),  # the packed projection is replicated
    "grouped_by_config": (grouped_by_config, ids, 0.6),
    "group_by_group": (group_by_group, ids, 0.9),
}
PLANS: dict[str, dict[str, str]] = {}


def made(name: str) -> nn.Module:
    """In fp64 with random weights; norms and biases are random too."""
    torch.manual_seed(0)
    model = MODELS[name][0]().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model


def plan_of(name: str) -> dict[str, str]:
    """Inferred for four ranks. Two ranks can use the same plan."""
    if name not in PLANS:
        PLANS[name] = infer(made(name), 4).plan
    return PLANS[name]


def outcome(model: nn.Module, x: Tensor) -> Tensor:
    """The output. Runs the backward of a weighted sum of it too."""
    out = next(y for y in tree_leaves(model(x)) if isinstance(y, Tensor))
    y = out.full_tensor() if isinstance(out, VocabShard) else out
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=y.dtype)
    (y * weights).sum().backward()
    return y.detach()


def difference(got: Tensor, want: Tensor, least: float = 1e-9) -> float:
    """Relative to the largest value. A replicated DTensor is checked on every rank."""
    whole = got.full_tensor() if isinstance(got, DTensor) else got
    own = [whole, got.to_local()] if isinstance(got, DTensor) and got.placements[0].is_replicate() else [whole]
    assert whole.shape == want.shape
    return max(float((each - want).abs().max() / want.abs().max().clamp(min=least)) for each in own)


def compared(group: Any, name: str, plan: dict[str, str] | None, sequence_parallel: bool) -> dict[str, Any]:
    plain = made(name)
    parallel: Any = copy.deepcopy(plain)
    fusedtp.parallelize(
        parallel,
        tp_mesh(group),
        plan=plan,
        sequence_parallel=sequence_parallel,
        prove=None if plan is None else False,
    )
    parallel = copy.deepcopy(parallel)  # the copy must keep its own attributes and forwards
    x = MODELS[name][1]()
    want = outcome(plain, x)
    errors = {"output": difference(outcome(parallel, x), want)}
    with torch.no_grad():
        out = next(y for y in tree_leaves(parallel(x)) if isinstance(y, Tensor))
        errors["output without autograd"] = difference(out, want)
    gradients = {key: p.grad for key, p in plain.named_parameters()}
    least = 1e-3 * max(float(g.abs().max()) for g in gradients.values() if g is not None)
    assert gradients.keys() == dict(parallel.named_parameters()).keys()
    for key, parameter in parallel.named_parameters():
        wanted = gradients[key]
        if wanted is not None:
            assert parameter.grad is not None, key
            errors[f"gradient of {key}"] = difference(parameter.grad, wanted, least)
    state = {key: full.shape for key, full in plain.state_dict().items()}
    assert {key: part.shape for key, part in parallel.state_dict().items()} == state
    every = list(parallel.parameters())
    split = sum(p.numel() for p in every if not p.placements[0].is_replicate())
    return {
        "errors": errors,
        "split": split / sum(p.numel() for p in every),
        "whole": dict(parallel._fusedtp.whole),
    }


def check(world_size: int, name: str, plan: dict[str, str] | None, sequence_parallel: bool) -> dict[str, Any]:
    for found in world(world_size).run(compared, name, plan, sequence_parallel):
        off = {key: error for key, error in found["errors"].items() if not error < 1e-9}
        assert not off, off
        assert found["split"] >= MODELS[name][2], f"only {found['split']:.0%} of the parameters are split"
    return dict(found)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_inferred_plan_is_exact(name: str, world_size: int, sequence_parallel: bool):
    check(world_size, name, plan_of(name), sequence_parallel)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "timm", "interleaved"])
def test_parallelize_infers(name: str):
    whole = check(2, name, None, True)["whole"]
    assert (name == "interleaved") == any("attn" in module for module in whole), whole


def explained(group: Any, make: Callable[[], nn.Module]) -> str:
    return str(fusedtp.explain(fusedtp.parallelize(make(), group)))


@pytest.mark.slow
def test_explain_says_what_code_sees_divided():
    def text(make: Callable[[], nn.Module]) -> str:
        return str(fusedtp.VirtualWorld(2).run(lambda group: explained(group, make))[0])

    assert "changed to local values in h.1.attn: n_head 4 -> 2, n_embd 32 -> 16, the width of its input" in text(nano)
    of_conv1d = text(gpt2)
    assert "changed to local values in transformer.h.0.attn: num_heads 4 -> 2" in of_conv1d
    assert re.search(r"transformer.h.0.mlp.c_proj +matmul_reduce_scatter", of_conv1d)


def test_attention_and_an_mlp_side_by_side_share_the_last_layer():
    plan = plan_of("side_by_side")
    assert plan["h.*.q"] == "colwise" and plan["h.*.gate"] == plan["h.*.up"] == "packed_colwise_3"
    assert plan["h.*.out"] == "packed_rowwise_4"
    uneven = {**plan, "h.*.out": "packed_rowwise_5"}
    with pytest.raises(ValueError, match="weight packs 5 matrices of 25 features, which 2 ranks cannot share"):
        fusedtp.VirtualWorld(2).run(lambda group: fusedtp.parallelize(side_by_side(), group, plan=uneven))


def head_by_function(group: Any) -> tuple[float, dict[str, str]]:
    torch.manual_seed(0)
    plain = planless.HeadByFunction().double()
    torch.manual_seed(0)
    split: Any = fusedtp.parallelize(planless.HeadByFunction().double(), tp_mesh(group))
    want = outcome(plain, ids())
    errors = [difference(outcome(split, ids()), want)]
    for own, theirs in zip(split.parameters(), plain.parameters(), strict=True):
        assert own.grad is not None and theirs.grad is not None
        errors.append(difference(own.grad, theirs.grad))
    return max(errors), {name: str(p.placements) for name, p in split.named_parameters()}


def test_trials_run_functions_that_a_model_holds_on_their_copy():
    """Else a trial multiplies by the table of the model itself, and a split of the embedding seems right."""
    for error, placements in world(2).run(head_by_function):
        assert error < 1e-9
        assert "Shard" in placements["up.weight"] and "Replicate" in placements["wte.weight"]


@pytest.mark.slow
def test_what_inner_modules_and_parameters_know_of_heads_is_divided():
    plan = plan_of("heads_beside")
    assert plan["h.*.by_heads"] == "local_view(h)" and plan["h.*.core"] == "local_view(num_attention_heads)"
    assert plan["h.*.temperature"] == "grouped_gemm" and plan["h.*.table"] == "rowwise"
    said = str(fusedtp.VirtualWorld(2).run(lambda group: explained(group, heads_beside))[0])
    assert "changed to local values in h.0.by_heads: h 4 -> 2" in said


@pytest.mark.slow
def test_what_a_trial_does_not_use_is_not_divided():
    plan = infer(planless.Chain(planless.Idle), 2).plan
    assert plan["h.*.by_heads"] == "local_view(h)" and plan["h.*.temperature"] == "grouped_gemm"
    assert "h.*.level" not in plan and "h.*.grid" not in plan


ALL_HEADS = {"0": "norm_of_all_heads"}


@pytest.mark.slow
def test_a_norm_over_the_features_of_all_heads_is_split_as_they_are():
    plan = infer(planless.NanoGPT(planless.NormedAttention), 2).plan
    assert plan["h.*.attn.q_norm"] == plan["h.*.attn.k_norm"] == "norm_of_all_heads"
    assert plan["h.*.attn.q"] == "colwise" and plan["h.*.attn.out"] == "rowwise"
    two = fusedtp.VirtualWorld(2)
    with pytest.raises(ValueError, match=r"LayerNorm is not an nn\.RMSNorm over the last dimension"):
        two.run(lambda group: fusedtp.parallelize(nn.Sequential(nn.LayerNorm(4)), group, plan=ALL_HEADS))
    with pytest.raises(ValueError, match="x has all 4 features"):
        two.run(
            lambda group: fusedtp.parallelize(nn.Sequential(nn.RMSNorm(4)), group, plan=ALL_HEADS)(torch.ones(3, 4))
        )


@pytest.mark.slow
def test_an_interleaved_projection_stays_whole():
    found = infer(planless.NanoGPT(planless.InterleavedAttention), 2)
    assert not any("attn" in name for name in found.plan)
    assert "ranks" in found.whole["h.*.attn.c_attn"]


@pytest.mark.slow
def test_heads_that_ranks_cannot_share_stay_whole():
    found = infer(gpt2(n_embd=24, n_head=3), 2)
    assert "transformer.h.*.attn.c_attn" not in found.plan and "transformer.h.*.mlp.c_fc" in found.plan
    assert "num_heads is 3, which 2 ranks cannot share" in found.whole["transformer.h.*.attn.c_attn"]


@pytest.mark.slow
def test_layers_that_differ_are_named_one_by_one():
    model: Any = planless.NanoGPT()
    model.h[1]["attn"] = planless.InterleavedAttention(planless.WIDTH, planless.HEADS)
    plan, whole = infer(model, 2)
    assert plan["h.0.attn.c_attn"] == "packed_colwise_3"
    assert not any(name.startswith(("h.1.attn", "h.*.attn")) for name in plan)
    assert plan["h.*.mlp.0"] == "colwise" and "h.1.attn.c_attn" in whole


def test_a_pattern_names_no_parameter_that_stays_whole():
    model = planless.TimmViT()
    search = Search(model, model, 2, True, {}, 0)
    search.words = {"blocks.0.gamma": "rowwise", "blocks.0.mlp.fc1": "colwise", "blocks.1.mlp.fc1": "colwise"}
    assert search.result(model).plan == {"blocks.0.gamma": "rowwise", "blocks.*.mlp.fc1": "colwise"}


class Largest(nn.Module):
    """Keep the largest half of each token's features."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x >= x.median(dim=-1, keepdim=True).values)


def test_what_was_changed_after_construction_is_what_is_tried():
    model: Any = gpt2()
    for block in model.transformer.h:
        block.mlp.act = Largest()
    plan, whole = infer(model, 2)
    assert not any("mlp" in name for name in plan) and "transformer.h.*.mlp.c_fc" in whole
    assert plan["transformer.h.*.attn.c_attn"] == "packed_colwise_3"


class Rounding(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, (self.weight * 8).round() / 8, self.bias)


def test_linears_that_do_more_are_named():
    plan, whole = infer(nn.Sequential(Rounding(32, 64), nn.ReLU(), Rounding(64, 32)), 2)
    assert not plan
    assert whole == dict.fromkeys("02", "Rounding has its own forward")


@pytest.mark.slow
def test_linears_with_a_forward_of_their_own_that_computes_the_same_are_split():
    """Falcon adds the bias in a second step."""
    plan, whole = infer(model_of("falcon"), 2)
    assert not whole
    assert plan["transformer.h.*.mlp.dense_h_to_4h"] == "colwise"
    assert plan["transformer.h.*.mlp.dense_4h_to_h"] == "rowwise"
    assert plan["transformer.h.*.self_attention.query_key_value"] == "colwise_of_heads(4, 1, 1)"


class Beside(nn.Module):
    """As in CodeGen: attention, of which ranks cannot share the packed features, and an MLP have the same input."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(dim), planless.InterleavedAttention(dim, heads)
        self.mlp = nn.Sequential(OrderedDict(up=nn.Linear(dim, 4 * dim), act=nn.GELU(), down=nn.Linear(4 * dim, dim)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.attn(h) + self.mlp(h)


@pytest.mark.slow
def test_an_mlp_is_split_beside_an_attention_that_shares_its_input_and_cannot_be():
    plan, whole = infer(planless.Chain(Beside), 2)
    assert plan["h.*.mlp.up"] == "colwise" and plan["h.*.mlp.down"] == "rowwise"
    assert {name for name in whole if "attn" in name} == {"h.*.attn.c_attn", "h.*.attn.c_proj"}


@pytest.mark.slow
def test_roundoff_where_a_softmax_saturates_hinders_nothing():
    """With large inputs a query's gradient is so small that roundoff changes it by a twentieth."""
    plan, _ = infer(model_of("bert-generation"), 2)
    assert plan["bert.encoder.layer.*.attention.self.query"] == "colwise"


class ReturningAttention(nn.Module):
    """Also returns more(keys, values, weights)."""

    def __init__(self, more: Callable[..., Any]) -> None:
        super().__init__()
        self.more, self.n_head = more, 4
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Any:
        q, k, v = (y.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        weights = (q @ k.mT).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2)), self.more(k, v, weights)


class Returning(nn.Module):
    """Attention and an MLP, either as modules of their own or in the model itself."""

    def __init__(self, more: Callable[..., Any], nested: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)
        if nested:
            self.attention = ReturningAttention(more)
        else:
            self.more, self.n_head = more, 4
            self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, ids: Tensor) -> Any:
        x = self.table(ids)
        y, more = self.attention(x) if hasattr(self, "attention") else ReturningAttention.forward(self, x)  # type: ignore[arg-type]
        x = x + y
        return self.head(x + self.down(self.up(x).sin())), more


@pytest.mark.slow
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("more", [lambda k, v, weights: (k, v), lambda k, v, weights: torch.stack([weights, weights])])
def test_outputs_of_which_ranks_have_a_part_are_not_split(more: Callable[..., Any], nested: bool):
    plan, whole = infer(Returning(more, nested), 2)
    where = "attention." if nested else ""
    assert not {f"{where}qkv", f"{where}proj"} & plan.keys()
    assert re.search("output 1 is .* instead of", whole[f"{where}qkv"])
    assert not nested or {"up", "down"} <= plan.keys(), "what does not show in these outputs is split nevertheless"


class Normalizing(nn.Module):
    """Two MLPs that each need all hidden features."""

    def __init__(self) -> None:
        super().__init__()
        self.up1, self.down1, self.up2, self.down2 = (nn.Linear(a, b) for a, b in [(24, 40), (40, 24)] * 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down1(nn.functional.normalize(self.up1(x), dim=-1))
        return self.down2(nn.functional.normalize(self.up2(x), dim=-1))


def test_the_reason_is_not_that_of_a_later_attempt_which_could_not_work():
    assert "output 0 is off by" in infer(Normalizing(), 2).whole["up1"]


@pytest.mark.slow
def test_numbers_that_happen_to_equal_a_width_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    kind = transformers.models.gpt2.modeling_gpt2.GPT2Attention
    begin = kind.__init__

    def with_more(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.grain, self.block_size = 64, self.embed_dim  # the small copy with 8 heads has width 64

    monkeypatch.setattr(kind, "__init__", with_more)
    view = infer(gpt2(n_embd=32, n_head=8), 2).plan["transformer.h.*.attn"]
    assert names_in(view) == ("num_heads", "embed_dim", "split_size")


@pytest.mark.slow
def test_weights_that_start_at_zero_hide_nothing():
    model = planless.NanoGPT(planless.InterleavedAttention)
    for module in model.modules():
        if isinstance(module, planless.NanoAttention):
            for parameter in module.parameters():
                nn.init.zeros_(parameter)
    assert not any("attn" in name for name in infer(model, 2).plan)


@pytest.mark.parametrize("of_input", [True, False])
def test_a_fault_that_only_gradients_show(of_input: bool):
    assert infer(planless.GradientByHeads(of_input), 2).plan == {"fc1": "colwise", "fc2": "rowwise"}


@pytest.mark.slow
def test_the_model_is_not_changed():
    model = made("nano")
    before = {key: x.clone() for key, x in model.state_dict().items()}
    infer(model, 2)
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    assert not any(hasattr(m, "parallel") or m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_a_model_with_nothing_to_split():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    with pytest.raises(ValueError, match="none could be inferred; pass one, such as plan=") as caught:
        fusedtp.VirtualWorld(2).run(lambda group: fusedtp.parallelize(copy.deepcopy(model), group))
    assert "  - 0: split over 2 ranks, " in str(caught.value)


def test_a_narrow_input_is_refused_outside_linear_layers():
    x = NarrowInput.of(torch.zeros(2, 5, 8), 2)
    assert x.shape == (2, 5, 4) and x.size(-1) == 4
    with pytest.raises(RuntimeError, match="only linear layers"):
        x + 1


class Layer(nn.Module):
    def __init__(self, layer_idx: int, act: Any) -> None:
        super().__init__()
        self.layer_idx, self.act, self.up, self.down = layer_idx, act, nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Alternating(Layer):
    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.up(x))
        return self.down(nn.functional.normalize(h, dim=-1) if self.layer_idx % 2 else h)


class OfTwoInputs(nn.Module):
    """inference tries its layers one by one."""

    def __init__(self, *layers: nn.Module, act: nn.Module | None = None) -> None:
        super().__init__()
        self.layers, self.act = nn.ModuleList(layers), act

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x + y if self.act is None else self.act(x + y)


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def normalized(x: Tensor) -> Tensor:
    return nn.functional.normalize(x, dim=-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layers",
    [
        lambda: [Alternating(i, torch.sin) for i in range(2)],
        lambda: [Layer(i, act) for i, act in enumerate([torch.sin, normalized])],
        lambda: [Layer(i, partial(torch.mul, other=2.0) if i == 0 else partial(normalized)) for i in range(2)],
        lambda: [Layer(i, (lambda x, f=f: f(x))) for i, f in enumerate([doubled, normalized])],
    ],
)
def test_layers_that_differ_in_a_function_or_by_their_number_are_tried_each(layers: Callable[[], list[nn.Module]]):
    plan, whole = infer(OfTwoInputs(*layers()), 2)
    assert plan == {"layers.0.up": "colwise", "layers.0.down": "rowwise"} and "off by" in whole["layers.1.up"]


def test_layers_of_one_kind_are_tried_once(monkeypatch: pytest.MonkeyPatch):
    tried: list[str] = []
    once = Search._try
    monkeypatch.setattr(Search, "_try", lambda self, *args: tried.append(args[2]) or once(self, *args))
    assert infer(OfTwoInputs(*(Layer(i, doubled) for i in range(3))), 2).plan.keys() == {"layers.*.up", "layers.*.down"}
    assert len(tried) == 1


def test_a_parameter_of_split_layers_and_of_what_is_whole():
    """Its gradient would be summed although it is complete already."""
    act = nn.PReLU()
    found = infer(OfTwoInputs(Layer(0, act), Layer(1, doubled), act=act), 2)
    assert found.plan == {"layers.1.up": "colwise", "layers.1.down": "rowwise"}
    assert "layers.0.act.weight is also used outside layers.0" in found.whole["layers.0.up"]


def vector(group: Any) -> None:
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 24)).double()
    parallel = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group))
    x = torch.randn(24, dtype=torch.float64)
    want = outcome(plain, x)
    assert want.dim() == 1 and difference(outcome(parallel, x), want) < 1e-9
    for p, q in zip(plain.parameters(), parallel.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and difference(q.grad, p.grad) < 1e-9


def test_an_input_without_tokens():
    world(2).run(vector)


def padded(group: Any) -> None:
    plain = made("encoder")
    parallel = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group))
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
    with torch.no_grad():
        want, got = (model(hidden(), src_key_padding_mask=padding) for model in (plain, parallel))
    assert difference(got[~padding], want[~padding]) < 1e-9


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_an_encoder_of_torch_takes_padding_without_gradients():
    world(2).run(padded)
