"""Queries packed with fewer keys and values in one projection: each rank uses the rows of its heads, beside one device.

In float64 with random values; each sum has at most 80 terms, so relative errors stay far below 1e-12.
"""

import copy
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import GPT2Config

import fusedtp
from fusedtp.comm import VirtualWorld
from fusedtp.parallel.local_view import view_of
from tests.harness import world
from tests.parallel.support import two_backwards
from tests.sampling import examples

OFF = 1e-12
HIDDEN = 10
GROUPS = [(4, 1), (8, 1), (4, 2), (8, 2), (8, 4), (4, 4), (12, 4)]


class Config:
    def __init__(self, heads: int, few: int) -> None:
        self.heads, self.few_heads = heads, few

    @property
    def scale(self) -> float:
        return float(self.heads) ** -0.5

    @property
    def twice(self) -> int:
        return 2 * self.heads

    @cached_property
    def shift(self) -> float:
        return 1.0 / self.heads


class Attention(nn.Module):
    """[queries of all heads | keys of few | values of few]

    more   "scaled": by a parameter of its own; "computed": by what its config computes from the number of heads
    """

    def __init__(self, heads: int, few: int, each: int, bias: bool, by_config: bool, more: str = "") -> None:
        super().__init__()
        self.each, self.config, self.more = each, Config(heads, few), more
        self.temperature = nn.Parameter(torch.ones(1)) if more == "scaled" else None
        if not by_config:
            self.heads, self.few_heads = heads, few
        self.qkv = nn.Linear(HIDDEN, (heads + 2 * few) * each, bias=bias)
        self.out = nn.Linear(heads * each, HIDDEN, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        numbers = self if hasattr(self, "heads") else self.config
        heads, few = numbers.heads, numbers.few_heads
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.each)).transpose(1, 2).split((heads, few, few), dim=1)
        q = q if self.temperature is None else q * self.temperature
        if self.more == "computed":
            q = q * self.config.scale + self.config.shift
            q = q.unflatten(1, (self.config.twice // 2 if heads is self.config.heads else heads, -1)).flatten(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        z: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return z


class Model(nn.Module):
    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(HIDDEN), Attention(*args)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.attn(self.norm(x))
        return y


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def made(*args: Any) -> Model:
    model = Model(*args).double()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=i))
    return model


def results(model: Any, x: Tensor, main_grad: bool) -> dict[str, Tensor]:
    """See two_backwards; main_grad: the linear layers' gradients are accumulated there."""
    return two_backwards(model, x, (model.attn.qkv, model.attn.out) if main_grad else ())


def plan_of(heads: int, few: int, by_config: bool) -> dict[str, str]:
    prefix = "config." * by_config
    numbers = [f"{prefix}heads", *([f"{prefix}few_heads"] if few > 1 else [])]
    return {
        "attn.qkv": f"colwise_of_heads({heads}, {few}, {few})",
        "attn.out": "rowwise",
        "attn": f"local_view({', '.join(numbers)})",
    }


def split(group: Any, model: nn.Module, plan: dict[str, str], tokens: bool) -> Any:
    return fusedtp.parallelize(copy.deepcopy(model), group, plan=plan, prove=False, sequence_parallel=tokens)


@pytest.mark.parametrize("more", ["", "scaled", "computed"])
@settings(max_examples=examples(100, 25))
@given(
    size=st.sampled_from([1, 2, 4]),
    group=st.sampled_from(GROUPS),
    each=st.integers(1, 5),
    bias=st.booleans(),
    by_config=st.booleans(),
    batch=st.integers(1, 3),
    length=st.integers(1, 5),
    tokens=st.booleans(),
    main_grad=st.booleans(),
)
def test_equals_one_device(
    size: int,
    group: tuple[int, int],
    each: int,
    bias: bool,
    by_config: bool,
    more: str,
    batch: int,
    length: int,
    tokens: bool,
    main_grad: bool,
) -> None:
    x, model, plan = (
        normal(batch, length, HIDDEN),
        made(*group, each, bias, by_config, more),
        plan_of(*group, by_config),
    )
    want = results(copy.deepcopy(model), x, False)
    if 1 < group[1] < size:
        with pytest.raises(ValueError, match=f"few_heads is {group[1]}, which {size} ranks cannot share evenly"):
            VirtualWorld(size).run(lambda g: split(g, model, plan, tokens))
        return

    def of_rank(group: Any) -> dict[str, float]:
        found = results(split(group, model, plan, tokens), x, main_grad)
        assert found.keys() == want.keys()
        off = {}
        for name, value in want.items():
            if value.shape != found[name].shape:  # a shard: columns of out
                value = value.chunk(size, 1)[group.rank()]
            off[name] = float((found[name] - value).abs().max()) / max(float(want[name].abs().max()), 1.0)
        return {name: error for name, error in off.items() if not error <= OFF}

    assert VirtualWorld(size).run(of_rank) == [{}] * size


def sharded_too(group: Any, few: int) -> dict[str, float]:
    """Errors of gradients with FSDP2 over two pairs of ranks, each of which sees other samples."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, samples = made(4, few, 4, True, False), normal(4, 3, HIDDEN).chunk(2)
    first, second = (results(copy.deepcopy(model), x, False) for x in samples)
    parallel = split(mesh["tp"], model, plan_of(4, few, False), True)
    for each in (parallel.attn, parallel):
        fully_shard(each, mesh=mesh["dp"])
    found = results(parallel, samples[mesh.get_local_rank("dp")], False)
    names = [f"gradient of {name}" for name, _ in model.named_parameters()]
    want = {name: (first[name] + second[name]) / 2 for name in names}
    off = {name: float((found[name] - x).abs().max() / x.abs().max().clamp(min=1.0)) for name, x in want.items()}
    return {name: error for name, error in off.items() if not error <= OFF}


@pytest.mark.slow
@pytest.mark.parametrize("few", [1, 2])
def test_with_parameters_sharded_over_other_ranks(few: int) -> None:
    assert world(4).run(sharded_too, few) == [{}] * 4


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("colwise_of_heads(4, 2, 1)", "8 output features|32 output features are not matrices of 4, 2, 1 heads"),
        ("colwise_of_heads(5, 2, 1)", "5 heads cannot be divided evenly among 2 ranks"),
        ("colwise_of_heads(1, 1)", "1 heads cannot be divided among 2 ranks"),
        ("colwise_of_heads(8, 0, 0)", "are not matrices of 8, 0, 0 heads"),
    ],
)
def test_what_does_not_fit_is_refused(word: str, said: str) -> None:
    model = made(4, 2, 4, True, False)
    with pytest.raises(ValueError, match=said):
        VirtualWorld(2).run(lambda group: split(group, model, {"attn.qkv": word, "attn.out": "rowwise"}, True))


@pytest.mark.parametrize(("numbers", "wrong"), [((8, 4, 4), 8), ((4, 1, 3), 3)])
def test_numbers_that_the_module_around_does_not_count_are_refused(numbers: tuple[int, ...], wrong: int) -> None:
    """They make as many features as (4, 2, 2) does, in another order."""
    plan = {**plan_of(4, 2, False), "attn.qkv": f"colwise_of_heads{numbers}"}
    said = rf"attn\.qkv: its plan says {wrong} heads, the module around it heads 4, few_heads 2"
    with pytest.raises(ValueError, match=said):
        VirtualWorld(2).run(lambda group: split(group, made(4, 2, 4, True, False), plan, True))


class Tied(Model):
    """Another linear layer has the weight too, and uses all of it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.all = nn.Linear(HIDDEN, self.attn.qkv.out_features)
        self.all.weight = self.attn.qkv.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) * self.all(x).mean(-1, keepdim=True)
        return y


@pytest.mark.parametrize("tokens", [False, True])
def test_a_weight_that_a_whole_layer_has_too(tokens: bool) -> None:
    model, x = Tied(4, 2, 4, True, False).double(), normal(2, 3, HIDDEN)
    want = results(copy.deepcopy(model), x, False)
    for found in VirtualWorld(2).run(lambda g: results(split(g, model, plan_of(4, 2, False), tokens), x, False)):
        for name in ("output", "gradient of x", "gradient of attn.qkv.weight", "gradient of all.bias"):
            assert float((found[name] - want[name]).abs().max()) <= OFF * max(float(want[name].abs().max()), 1.0), name


class Slots:
    __slots__ = ("few_heads", "heads")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (Slots(), r"it has no integer attribute config\.heads"),
        (SimpleNamespace(heads=4, few_heads=2), "its config, a SimpleNamespace, cannot be shown with local values"),
    ],
)
def test_a_config_that_cannot_be_viewed_is_refused_before_anything_changes(config: Any, said: str) -> None:
    def of_rank(group: Any) -> None:
        model = made(4, 2, 4, True, True)
        model.attn.config = config
        with pytest.raises(ValueError, match=said):
            fusedtp.parallelize(model, group, plan=plan_of(4, 2, True), prove=False)
        assert not any(
            isinstance(p, DTensor) or hasattr(m, "parallel") for m in model.modules() for p in m.parameters()
        )

    VirtualWorld(2).run(of_rank)


def test_a_view_knows_by_which_name_a_config_of_transformers_stores_a_number() -> None:
    whole = GPT2Config(n_head=8)
    view = view_of(whole, {"num_attention_heads": 4})
    assert (view.num_attention_heads, view.n_head, whole.num_attention_heads, view.n_embd) == (4, 4, 8, whole.n_embd)


def test_the_view_of_a_config_is_the_config_but_for_the_numbers() -> None:
    """What others change later is seen in both; the model's config and other modules' keep all heads."""

    def of_rank(group: Any) -> None:
        model = made(4, 2, 4, True, True)
        model.config = model.attn.config  # type: ignore[assignment]
        parallel = split(group, model, plan_of(4, 2, True), True)
        view, whole = parallel.attn.config, parallel.config
        assert (view.heads, view.few_heads, whole.heads, whole.few_heads) == (2, 1, 4, 2)
        assert isinstance(view, Config)
        whole.implementation = "eager"
        assert view.implementation == "eager"
        view.later = 3
        assert whole.later == 3
        copied = copy.deepcopy(parallel)
        assert (copied.attn.config.heads, copied.config.heads) == (2, 4)
        copied.config.implementation = "sdpa"
        assert copied.attn.config.implementation == "sdpa" and view.implementation == "eager"

    VirtualWorld(2).run(of_rank)
