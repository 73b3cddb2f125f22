"""Models without a plan: the inferred one splits most of them, and computes what one device computes."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import fusedtp
from fusedtp.parallel.infer import infer
from fusedtp.parallel.local_view import NarrowInput, names_in
from fusedtp.parallel.vocab_shard import VocabShard
from tests.harness import world
from tests.parallel import planless
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


def interleaved() -> nn.Module:
    return planless.NanoGPT(planless.InterleavedAttention)


def ids() -> Tensor:
    return torch.randint(3, 50, (3, 5), generator=torch.Generator().manual_seed(1))


def image() -> Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def hidden() -> Tensor:
    return torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


# Model -> how to make it, its input, the least share of its parameters that must be split.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], float]] = {
    "gpt2": (gpt2, ids, 0.9),
    "bert": (bert, ids, 0.75),
    "distilbert": (distilbert, ids, 0.8),
    "vit": (vit, image, 0.8),
    "opt": (opt, ids, 0.9),
    "encoder": (encoder, hidden, 0.4),
    "timm": (planless.TimmViT, image, 0.8),
    "nano": (nano, ids, 0.9),
    "nano_gated": (nano_gated, ids, 0.9),
    "interleaved": (interleaved, ids, 0.4),
}
PLANS: dict[str, dict[str, str]] = {}


def made(name: str) -> nn.Module:
    """In fp64, with random weights, also of norms and biases."""
    torch.manual_seed(0)
    model = MODELS[name][0]().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model


def plan_of(name: str) -> dict[str, str]:
    """Inferred for four ranks; two share what four share."""
    if name not in PLANS:
        PLANS[name] = infer(made(name), 4).plan
    return PLANS[name]


def outcome(model: nn.Module, x: Tensor) -> Tensor:
    """The output, after the backward of a weighted sum."""
    out = next(y for y in tree_leaves(model(x)) if isinstance(y, Tensor))
    y = out.full_tensor() if isinstance(out, VocabShard) else out
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=y.dtype)
    (y * weights).sum().backward()
    return y.detach()


def difference(got: Tensor, want: Tensor, least: float = 1e-9) -> float:
    """Relative to the largest value; of a replicated DTensor, on every rank."""
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
    parallel = copy.deepcopy(parallel)  # attributes and forwards of its own go along
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


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_inferred_plan_is_exact(name: str, world_size: int, sequence_parallel: bool):
    check(world_size, name, plan_of(name), sequence_parallel)


@pytest.mark.parametrize("name", ["gpt2", "timm", "interleaved"])
def test_parallelize_infers(name: str):
    whole = check(2, name, None, True)["whole"]
    assert (name == "interleaved") == any("attn" in module for module in whole), whole


def explained(group: Any, make: Callable[[], nn.Module]) -> str:
    return str(fusedtp.explain(fusedtp.parallelize(make(), group)))


def test_explain_says_what_code_sees_divided():
    def text(make: Callable[[], nn.Module]) -> str:
        return str(fusedtp.VirtualWorld(2).run(lambda group: explained(group, make))[0])

    assert "local to its rank in h.1.attn: n_head 4 -> 2, n_embd 32 -> 16, the width of its input" in text(nano)
    of_conv1d = text(gpt2)
    assert "local to its rank in transformer.h.0.attn: num_heads 4 -> 2" in of_conv1d
    assert re.search(r"transformer.h.0.mlp.c_proj +matmul_reduce_scatter", of_conv1d)


def test_an_interleaved_projection_stays_whole():
    found = infer(planless.NanoGPT(planless.InterleavedAttention), 2)
    assert not any("attn" in name for name in found.plan)
    assert "ranks" in found.whole["h.*.attn.c_attn"]


def test_heads_that_ranks_cannot_share_stay_whole():
    found = infer(gpt2(n_embd=24, n_head=3), 2)
    assert "transformer.h.*.attn.c_attn" not in found.plan and "transformer.h.*.mlp.c_fc" in found.plan
    assert "num_heads is 3, which 2 ranks cannot share" in found.whole["transformer.h.*.attn.c_attn"]


def test_layers_that_differ_are_named_one_by_one():
    model: Any = planless.NanoGPT()
    model.h[1]["attn"] = planless.InterleavedAttention(planless.WIDTH, planless.HEADS)
    plan, whole = infer(model, 2)
    assert plan["h.0.attn.c_attn"] == "packed_colwise_3"
    assert not any(name.startswith(("h.1.attn", "h.*.attn")) for name in plan)
    assert plan["h.*.mlp.0"] == "colwise" and "h.1.attn.c_attn" in whole


def test_numbers_that_happen_to_equal_a_width_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    kind = transformers.models.gpt2.modeling_gpt2.GPT2Attention
    begin = kind.__init__

    def with_more(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.grain, self.block_size = 64, self.embed_dim  # a small copy with 8 heads is 64 wide

    monkeypatch.setattr(kind, "__init__", with_more)
    view = infer(gpt2(n_embd=32, n_head=8), 2).plan["transformer.h.*.attn"]
    assert names_in(view) == ("num_heads", "embed_dim", "split_size")


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


def test_the_model_is_not_changed():
    model = made("nano")
    before = {key: x.clone() for key, x in model.state_dict().items()}
    infer(model, 2)
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    assert not any(hasattr(m, "parallel") or m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_a_model_with_nothing_to_split():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    with pytest.raises(ValueError, match="none could be inferred; give one, as plan=") as caught:
        fusedtp.VirtualWorld(2).run(lambda group: fusedtp.parallelize(copy.deepcopy(model), group))
    assert "  - 0: split over 2 ranks, " in str(caught.value)


def test_a_narrow_input_is_refused_outside_linear_layers():
    x = NarrowInput.of(torch.zeros(2, 5, 8), 2)
    assert x.shape == (2, 5, 4) and x.size(-1) == 4
    with pytest.raises(RuntimeError, match="only the shape"):
        x + 1


class Deciding(nn.Module):
    """decide(x, h) -> whether the hidden h, which ranks may have a part of, goes one way or another."""

    def __init__(self, decide) -> None:
        super().__init__()
        self.up, self.down, self.decide = nn.Linear(24, 40), nn.Linear(40, 24), decide

    def forward(self, x):
        h = self.up(x)
        return self.down(h.relu() if self.decide(x, h) else h.sin())


@pytest.mark.parametrize(
    "decide",
    [
        lambda x, h: h.mean() > 0.05,
        lambda x, h: (h > 9).any(),
        lambda x, h: float(h.abs().max()) > 9,
        lambda x, h: torch.isnan(h[..., 0]).any() or h.std().item() > 9,
        lambda x, h: h.detach().mean() > 0.05,
        lambda x, h: h.argmax().item() % 2,
        lambda x, h: torch.no_grad()(torch.mean)(h) > 0.05,
    ],
)
def test_code_that_decides_by_a_part_of_an_activation_stays_whole(decide):
    """Whichever way it goes in the trial: other inputs may lead ranks other ways."""
    model = Deciding(decide)
    with pytest.raises(ValueError, match="decides by the values of an activation that each rank has a part of"):
        fusedtp.VirtualWorld(2).run(lambda group: fusedtp.parallelize(copy.deepcopy(model), group))


@pytest.mark.parametrize(
    "decide",
    [
        lambda x, h: x.mean() > 0.05,
        lambda x, h: torch.isnan(x).any(),
        lambda x, h: x.detach().std().item() > 1,
        lambda x, h: h.shape[0] > 1 and h.dtype == torch.float32,
    ],
)
def test_code_that_decides_by_what_all_ranks_have_is_split(decide):
    model = Deciding(decide)
    fusedtp.VirtualWorld(2).run(lambda group: fusedtp.parallelize(copy.deepcopy(model), group))


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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_an_encoder_of_torch_takes_padding_without_gradients():
    world(2).run(padded)
