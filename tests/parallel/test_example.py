"""Plans inferred from an example of the model's inputs: exact, and refused where the example shows too little."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedtp
from fusedtp.parallel import siblings
from fusedtp.parallel.infer import infer
from fusedtp.parallel.observe import recorded
from fusedtp.parallel.plan import generic
from fusedtp.parallel.trial import Inputs
from fusedtp.parallel.twin import NoTwin
from tests.harness import world
from tests.parallel import planless
from tests.parallel.support import tp_mesh
from tests.parallel.test_infer import difference, gpt2, ids

ATTENTION = {f"attn.{name}": "colwise" for name in ("to_q", "to_k", "to_v", "add_q", "add_k", "add_v")}


def on_an_example(group: Any, given: bool) -> tuple[dict[str, float], float, dict[str, str]]:
    """Largest differences from one device, the share of split parameters, and what stays whole."""
    torch.manual_seed(0)
    plain, example = planless.Diffusion().double(), planless.Diffusion.example(torch.float64)
    split: Any = copy.deepcopy(plain)
    fusedtp.parallelize(split, tp_mesh(group), example=example if given else None)
    weights = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    want, got = plain(**example), split(**example)
    for y in (want, got):
        (y * weights).sum().backward()
    errors = {"output": difference(got, want)}
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    least = 1e-3 * max(float(g.abs().max()) for g in wanted.values())
    own = dict(split.named_parameters())
    errors |= {name: difference(own[name].grad, want, least) for name, want in wanted.items()}
    parts = sum(p.numel() for p in own.values() if not p.placements[0].is_replicate())
    return errors, parts / sum(p.numel() for p in own.values()), dict(split._fusedtp.whole)


@pytest.mark.slow
@pytest.mark.parametrize(("given", "least"), [(True, 0.9), (False, 0.15)])
def test_a_model_whose_inputs_cannot_be_guessed(given: bool, least: float):
    """Without an example only its MLPs are split: attention would get inputs that no trial gave it."""
    for errors, share, whole in world(2).run(on_an_example, given):
        assert max(errors.values()) < 1e-9, errors
        assert share > least
        assert ("blocks.*.attn.to_q" in whole) == (not given)
        if not given:
            assert share < 0.4
            assert "parallelize takes an example" in whole[""]
            assert whole["blocks.*.attn.to_q"] == "add_q beside it did not run in the trial"


def too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are run module by module, however small they are."""
    for name in ("LARGEST_MODEL", "LARGEST_SHORT"):
        monkeypatch.setattr(f"fusedtp.parallel.infer.{name}", 0)


@pytest.mark.slow
@pytest.mark.parametrize("large", [False, True])
def test_an_example_shows_joint_attention_and_adaptive_norms(monkeypatch: pytest.MonkeyPatch, large: bool):
    """A large model is not copied: its modules are tried one by one, on what they got when the model ran."""
    if large:
        too_large(monkeypatch)
    model = planless.Diffusion().bfloat16()
    found = infer(model, 2, example=planless.Diffusion.example(torch.bfloat16))
    for i in range(3):
        own = {name: word for name, word in found.plan.items() if name.startswith(("blocks.*", f"blocks.{i}."))}
        own = {name.split(".", 2)[2]: word for name, word in own.items()}
        rows = {"attn.to_out.0"} | ({"attn.to_add_out"} if i < 2 else set())
        assert {name for name, word in own.items() if word == "rowwise"} == {*rows, "ff.2"} | {"attn.to_add_out"}
        assert ATTENTION.items() <= own.items()
        assert own["norm.linear"] == own["norm_text.linear"] == "colwise_gather_output"
    assert found.whole.get("", "").endswith("a copy of the whole model cannot be run") == large
    assert all(p.grad is None for p in model.parameters())


class Stages(nn.Module):
    """Two MLPs of several widths under one name, on an image."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(planless.TimmMlp(width, 3 * width) for width in (16, 32))
        self.wider = nn.Linear(16, 32)

    def forward(self, image: Tensor, scale: Tensor) -> Tensor:
        x = self.stages[0](image.flatten(2).transpose(1, 2) * scale)
        return self.stages[1](self.wider(x))


def test_layers_of_one_name_and_several_widths_have_inputs_of_their_own(monkeypatch: pytest.MonkeyPatch):
    too_large(monkeypatch)
    monkeypatch.setattr("fusedtp.parallel.infer.guesses", lambda module: [])
    found = infer(Stages(), 2, example={"image": torch.randn(2, 16, 2, 3), "scale": torch.ones(())})
    assert found.plan == {"stages.*.fc1": "colwise", "stages.*.fc2": "rowwise"}


def test_what_is_kept_of_a_run_on_an_example():
    """Inputs are kept of the first module of a kind, in fp32 on the CPU; only activations require gradients."""
    example = planless.Diffusion.example(torch.bfloat16)
    found = recorded(planless.Diffusion().bfloat16(), Inputs((), example), lambda name, module: generic(name))
    x, vector = found["blocks.*.norm"].args
    assert x.dtype == vector.dtype == torch.float32 and x.requires_grad and vector.requires_grad
    assert {name for name, x in found[generic("")].kwargs.items() if x.requires_grad} == {"latent", "caption"}
    assert {name for name in found if name.startswith("blocks")} == {
        generic(name) for name, module in planless.Diffusion().named_modules() if name.startswith("blocks.")
    } - {"blocks.*.attn.to_out"}


def products(group: Any) -> list[tuple[int, ...]]:
    """Numbers of layers of joint attention that are multiplied in one call, in two forwards; and what explain says."""
    model, example = planless.Diffusion(), planless.Diffusion.example()
    plan = {f"blocks.*.attn.{name}": "colwise" for name in ("to_q", "to_k", "to_v", "add_q", "add_k", "add_v")}
    plan |= {"blocks.*.attn.to_out.0": "rowwise", "blocks.*.attn": "local_view(num_heads)"}
    split: Any = fusedtp.parallelize(model, tp_mesh(group), plan={**plan, "blocks.*.attn.to_add_out": "rowwise"})
    found = []
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            counts: list[int] = []
            patch.setattr(
                "fusedtp.parallel.siblings.project_all",
                lambda x, linears, all=siblings.project_all, counts=counts: (
                    counts.append(len(linears)) or all(x, linears)
                ),
            )
            split(**example)
        found.append(tuple(counts))
    said = str(fusedtp.explain(split))
    return [*found, (said.count("one call with attn.to_q"), said.count("one call with attn.add_q"))]


def test_layers_that_had_inputs_of_their_own_are_set_apart():
    """The layers of each kind of tokens share their input; that all six do was a guess."""
    for found in world(2).run(products):
        assert sum(found[0]) > 18 and found[1:] == [(3,) * 6, (6, 6)]


class NormedByFeatures(nn.Module):
    """Attention, of x to a context, that depends on the norm of queries and keys over all features."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = planless.HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(planless.WIDTH, planless.WIDTH) for _ in range(4))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        given = x if context is None else context
        q, k = (6 * F.normalize(y, dim=-1) for y in (self.q(x), self.k(given)))
        heads = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in (q, k, self.v(given)))
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    [
        {"x": torch.randn(2, 8, 32)},
        {"x": torch.randn(2, 1, 32)},
        {"x": torch.zeros(2, 8, 32)},
        {"x": torch.ones(2, 8, 32)},
        {"x": torch.randn(2, 8, 32), "context": torch.randn(2, 1, 32)},
        {"x": torch.randn(2, 8, 32), "context": torch.zeros(2, 3, 32)},
    ],
    ids=["tokens", "one token", "zeros", "equal tokens", "one token of context", "a context of zeros"],
)
def test_an_example_that_hides_a_wrong_split_proves_nothing(example: dict[str, Tensor]):
    """A softmax over one token, or over equal ones, is constant."""
    assert not infer(NormedByFeatures(), 2, example=example).plan


@pytest.mark.slow
def test_gradients_of_the_example_are_compared():
    plan = infer(planless.GradientByHeads(of_input=True), 2, example={"x": torch.randn(2, 8, 32)}).plan
    assert plan == {"fc1": "colwise", "fc2": "rowwise"}, "with a local number of heads its gradient is wrong"


class Flat(nn.Module):
    """An MLP on tokens of all samples in one dimension, beside a layer that is called by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.ModuleList([nn.Linear(32, 64)]), nn.Linear(64, 32)
        self.gate, self.before = nn.Linear(32, 1), nn.Linear(32, 32)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        x = self.before(x)
        flat = x.view(-1, 32) * F.linear(x.view(-1, 32), self.gate.weight)
        return x + scale * self.down(self.up[0](flat).relu()).view_as(x)


def test_an_mlp_on_flattened_tokens_beside_a_layer_called_by_a_function():
    plan = infer(Flat(), 2, example={"x": torch.randn(2, 8, 32), "scale": 0.5}).plan
    assert plan == {"up.*": "colwise", "down": "rowwise"}


class Stored(nn.Module):
    """Keeps an activation and takes a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        self.last = self.fc1(torch.stack([edges @ each for each in x]))
        return self.fc2(self.last.relu())


def test_a_model_that_stores_activations_takes_an_example():
    model, example = Stored(), {"x": torch.randn(2, 5, 32), "edges": torch.eye(5).to_sparse()}
    model(**example)
    assert infer(model, 2, example=example).plan == {"fc1": "colwise", "fc2": "rowwise"}


@pytest.mark.slow
def test_an_example_leaves_the_cache_of_transformers_out():
    assert infer(gpt2(), 2, example={"input_ids": ids()}).plan.keys() >= infer(gpt2(), 2).plan.keys()


class OfFeatures(nn.Module):
    """A norm of these features of x."""

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__()
        self.norm, self.features = norm, slice(None)

    def forward(self, x: Tensor) -> Any:
        return self.norm(x[:, self.features])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"eps": 0.1}, {"elementwise_affine": False}])
def test_a_norm_over_all_heads_is_torchs_norm(options: dict[str, Any], dtype: torch.dtype):
    """Also of rows whose mean square is smaller than eps."""
    plain = OfFeatures(nn.RMSNorm(8, **options).to(dtype))
    rows = torch.randn(5, 8) * torch.logspace(-4, 1, 5)[:, None]

    def outcome_of(model: Any) -> tuple[Tensor, Tensor]:
        x = rows.to(dtype).requires_grad_()
        y = model(x)
        (y.float() * torch.arange(40.0).view(5, 8)[:, model.features]).sum().backward()
        assert x.grad is not None
        return y.detach().float(), x.grad.float()

    def of_rank(group: Any) -> tuple[Tensor, Tensor]:
        split = fusedtp.parallelize(copy.deepcopy(plain), group, plan={"norm": "norm_of_all_heads"})
        split.features = slice(4 * group.rank(), 4 * group.rank() + 4)
        return outcome_of(split)

    first, second = fusedtp.VirtualWorld(2).run(of_rank)
    got = torch.cat([first[0], second[0]], dim=1), first[1] + second[1]
    for mine, theirs in zip(got, outcome_of(plain), strict=True):
        assert ((mine - theirs).abs().amax(1) <= 4 * torch.finfo(dtype).eps * theirs.abs().amax(1)).all()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"example": {"latent": torch.ones(2, 8, 5)}}, r"Diffusion cannot run on the example: TypeError: .*'caption'"),
        ({"example": {}, "meta": True}, "an example needs a model with weights, and patches.weight is"),
        ({"example": {}, "plan": {"out": "colwise_gather_output"}}, "Diffusion has one already"),
    ],
)
def test_an_example_that_does_not_help_is_refused(options: dict[str, Any], why: str):
    (said,) = {str(each) for each in fusedtp.VirtualWorld(2).run(lambda group: refusal(group, options))}
    assert re.search(why, said), said


def test_a_model_without_a_plan_has_nothing_to_prove():
    model, example = planless.Diffusion(), planless.Diffusion.example()
    with pytest.raises(NoTwin, match="Diffusion has no plan to prove; parallelize proves the one that it infers"):
        fusedtp.VirtualWorld(2).run(lambda group: fusedtp.prove(model, group, example))
    plan = {"blocks.*.ff.0": "colwise", "blocks.*.ff.2": "rowwise"}
    (proof, _) = fusedtp.VirtualWorld(2).run(lambda group: fusedtp.prove(model, group, example, plan=plan))
    assert proof.exact


def refusal(group: Any, options: dict[str, Any]) -> str:
    with torch.device("meta" if options.get("meta") else "cpu"):
        model = planless.Diffusion()
    with pytest.raises(ValueError) as error:
        fusedtp.parallelize(model, group, **{key: x for key, x in options.items() if key != "meta"})
    return str(error.value)
