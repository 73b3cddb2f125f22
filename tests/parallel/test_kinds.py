"""Layers of one kind: a large model is tried with two of each, and the others get the same words."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fusedtp.parallel.infer import Search, infer
from fusedtp.parallel.kinds import Short, fingerprint, shortened
from tests.parallel import planless


class Deep(nn.Module):
    """Seven blocks in two stages, of which `unlike` have MLPs of another width."""

    def __init__(self, unlike: tuple[int, ...] = (), tied: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(50, planless.WIDTH)
        blocks = [planless.TimmBlock(planless.WIDTH, planless.HEADS) for _ in range(7)]
        for i in unlike:
            blocks[i].mlp = planless.TimmMlp(planless.WIDTH, 40)
        if tied:
            blocks[6].norm1.weight = blocks[0].norm1.weight
        self.stages = nn.ModuleList(nn.Sequential(*blocks[i : i + 4]) for i in (0, 4))
        self.head = nn.Linear(planless.WIDTH, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.wte(ids)
        for stage in self.stages:
            x = stage(x)
        return self.head(x)


def layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, planless.TimmBlock)]


@pytest.mark.parametrize(
    ("unlike", "kept"),
    [
        ((), ["0.0", "0.1", "1.0", "1.1"]),
        ((3,), ["0.0", "0.1", "0.3", "1.0", "1.1"]),
        ((0, 2, 3), ["0.0", "0.1", "0.2", "1.0", "1.1"]),
    ],
)
def test_two_layers_of_each_kind_are_kept_with_their_names(unlike: tuple[int, ...], kept: list[str]):
    model = Deep(unlike)
    short = shortened(model)
    assert short is not None and layers(short.model) == [f"stages.{name}" for name in kept]
    assert set(short.lacks) == set(layers(model)) - set(layers(short.model))
    named = dict(model.named_modules())
    for name, alike in short.lacks.items():
        assert {fingerprint(named[each]) for each in alike} == {fingerprint(named[name])}
    assert short.model.wte.weight.data_ptr() == model.wte.weight.data_ptr()
    assert shortened(Deep(tied=True)) is None and shortened(nn.Linear(2, 2)) is None


class Dropping(nn.Module):
    def __init__(self, rate: float, scale: float) -> None:
        super().__init__()
        self.drop_prob, self.scale, self.dropout = rate, scale, nn.Dropout(rate)


def test_rates_of_dropout_make_no_kinds():
    """Trials run without dropout."""
    assert fingerprint(Dropping(0.1, 1.0)) == fingerprint(Dropping(0.2, 1.0)) != fingerprint(Dropping(0.1, 2.0))
    assert fingerprint(Dropping(0.0, 1.0)) != fingerprint(Dropping(0.1, 1.0))


class Slots:
    __slots__ = "n"

    def __init__(self, n: int) -> None:
        self.n = n


class Holding(nn.Module):
    """With a buffer and an attribute."""

    held: Tensor

    def __init__(self, buffer: Tensor, attribute: Any = None) -> None:
        super().__init__()
        self.register_buffer("held", buffer)
        self.attribute = attribute


def test_what_tells_modules_apart():
    """Integers in tensors, and what objects hold, also such as lead back to themselves; not floats in tensors."""
    ones, twos = torch.ones(2, 2, dtype=torch.int64), torch.full((2, 2), 2)
    half = torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True)  # as a loss that the last forward stored
    loops = [SimpleNamespace(inner=SimpleNamespace(n=n)) for n in (1, 2, 1)]
    for each in loops:
        each.inner.outer = each
    same = [
        (Holding(ones), Holding(ones.clone())),
        (Holding(ones.float()), Holding(twos.float())),
        (Holding(ones.to_sparse()), Holding(ones.to_sparse())),
        (Holding(ones.to("meta")), Holding(twos.to("meta"))),
        (Holding(ones, loops[0]), Holding(ones, loops[2])),
        (Holding(ones, Slots(1)), Holding(ones, Slots(1))),
        (Holding(ones, half), Holding(ones, half.detach().clone())),
    ]
    other = [
        (Holding(ones), Holding(twos)),
        (Holding(ones, loops[0]), Holding(ones, loops[1])),
        (Holding(ones, [{"a": 1}]), Holding(ones, [{"a": 2}])),
        (Holding(ones, torch.float16), Holding(ones, torch.float32)),
        (Holding(ones, {"a", "b"}), Holding(ones, {"a"})),
        (Holding(ones, {1: 2}), Holding(ones, {3: 2})),
        (Holding(ones, Slots(1)), Holding(ones, Slots(2))),
        (Holding(ones, slice(1)), Holding(ones, slice(2))),
        (Holding(ones, threading.Lock()), Holding(ones, threading.Lock())),
        (Holding(ones, np.int64(1)), Holding(ones, np.int64(2))),
        (Holding(ones, torch.tensor(1.5)), Holding(ones, torch.tensor(2.5))),
        (Holding(ones, [1] * 2000), Holding(ones, [1] * 1999 + [2])),
    ]
    assert all(fingerprint(a) == fingerprint(b) for a, b in same)
    assert not any(fingerprint(a) == fingerprint(b) for a, b in other)


@pytest.mark.slow
@pytest.mark.parametrize("unlike", [(), (3,), (1,)])
def test_the_plan_is_that_of_the_whole_model(monkeypatch: pytest.MonkeyPatch, unlike: tuple[int, ...]):
    want = infer(Deep(unlike), 2)
    assert want.plan["wte"] == "embedding_rowwise" and want.whole == {}
    sizes: list[int] = []
    init = Search.__init__

    def counted(self: Search, model: nn.Module, **options: Any) -> None:
        sizes.append(len(layers(model)))
        init(self, model, **options)

    monkeypatch.setattr(Search, "__init__", counted)
    monkeypatch.setattr("fusedtp.parallel.infer.LARGEST_MODEL", 0)
    assert infer(Deep(unlike), 2) == want and sizes == [4 + len(unlike)]


class Sixth(Deep):
    """What it does with a layer depends on its number."""

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.wte(ids)
        for i, block in enumerate(block for stage in self.stages for block in stage):
            x = block(x) + (x.roll(1, -1) * len(block.mlp.fc1.weight) if i == 5 else 0.0)
        return self.head(x)


@pytest.mark.slow
def test_one_forward_of_all_layers_shows_what_two_do_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fusedtp.parallel.infer.LARGEST_MODEL", 0)
    found = infer(Sixth(), 2)
    assert found.plan["stages.*.*.attn.qkv"] == "packed_colwise_3"
    assert "the whole model differs" in found.whole["stages.*.*.mlp.fc1"]


class FourLinears(nn.Module):
    """Attention with its projections in a list, as in The Annotated Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(planless.WIDTH, planless.WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in list(self.linears)[:3])
        return self.linears[-1](nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_lists_of_linear_layers_stay_as_they_are():
    model = nn.Sequential(*(FourLinears() for _ in range(5)))
    short = shortened(model)
    assert short is not None and [len(each.linears) for each in short.model] == [4, 4]


class Numbered(nn.Module):
    """It names each of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(50, planless.WIDTH), nn.Linear(planless.WIDTH, 50)
        self.h = nn.ModuleList(planless.TimmBlock(planless.WIDTH, planless.HEADS) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.wte(ids)
        for i in range(4):
            x = self.h[i](x)
        return self.head(x)


@pytest.mark.slow
def test_a_model_that_needs_all_its_layers_is_tried_layer_by_layer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fusedtp.parallel.infer.LARGEST_MODEL", 0)
    found = infer(Numbered(), 2)
    assert found.plan["h.*.attn.qkv"] == "packed_colwise_3" and "wte" not in found.plan
    assert "proved alone" in found.whole[""]


def search_of(model: nn.Module, short: Short, words: dict[str, str]) -> Search:
    made = Search(short.model, model, 2, True, {}, 0)
    made.words = words
    return made


def test_layers_left_out_get_the_words_that_those_of_their_kind_agree_in():
    model = Deep(unlike=(3,))
    short = shortened(model)
    assert short is not None
    every = {f"{name}.mlp.fc1": "colwise" for name in layers(model)}
    kept = {name: word for name, word in every.items() if name.removesuffix(".mlp.fc1") in layers(short.model)}
    search = search_of(model, short, kept)
    assert search.lengthen(short) and search.words == every
    assert search.result(model).plan == {"stages.*.*.mlp.fc1": "colwise"}
    del kept["stages.0.1.mlp.fc1"]
    assert not search_of(model, short, kept).lengthen(short)
