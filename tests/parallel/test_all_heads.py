"""Arguments with a dimension of all heads, of which a split attention gets its own, beside one device.

In float64 with random values; each sum has at most 32 terms, so relative errors stay far below 1e-12.
"""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fusedtp
from fusedtp.comm import VirtualWorld
from fusedtp.parallel.token_shard import TokenShard
from tests.parallel.planless import Biased
from tests.sampling import examples

OFF = 1e-12
HEADS, WIDTH = 4, 8
LAYERS = {"attn.q": "colwise", "attn.k": "colwise", "attn.v": "colwise", "attn.out": "rowwise"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Biased(WIDTH, HEADS)

    def forward(self, x: Tensor, bias: Tensor | None, by_name: bool) -> Tensor:
        y, _ = self.attn(x, bias=bias) if by_name else self.attn(x, bias)
        assert isinstance(y, Tensor)
        return y


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def made() -> Model:
    model = Model().double()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=i))
    return model


def results(model: nn.Module, x: Tensor, bias: Tensor | None, by_name: bool, learned: bool) -> dict[str, Tensor]:
    """The output and the gradients of input, bias and weights."""
    x = x.clone().requires_grad_()
    bias = bias if bias is None else bias.clone().requires_grad_(learned)
    y = model(x, bias, by_name)
    (y * normal(*y.shape, seed=9)).sum().backward()
    found = {"output": y, "gradient of x": x.grad, "gradient of bias": None if bias is None else bias.grad}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    return {name: value.detach() for name, value in found.items() if value is not None}


def shape_of(kind: str, batch: int, length: int) -> tuple[int, ...]:
    return {
        "heads": (1, HEADS, length, length),
        "samples, heads": (batch, HEADS, length, length),
        "samples x heads": (batch * HEADS, 1, length),
        "heads, one query": (batch, HEADS, 1, length),
        "one for all heads": (batch, 1, length, length),
        "heads alone": (HEADS, length, length),
        "keys": (length, length),
    }[kind]


KINDS = [
    "heads", "heads alone", "samples, heads", "samples x heads", "heads, one query", "one for all heads", "keys",
]  # fmt: skip


def split(group: Any, model: nn.Module, plan: dict[str, str], tokens: bool = True) -> Any:
    return fusedtp.parallelize(copy.deepcopy(model), group, plan=plan, prove=False, sequence_parallel=tokens)


@settings(max_examples=examples(100, 30))
@given(
    size=st.sampled_from([1, 2, 4]),
    kind=st.sampled_from([*KINDS, "none"]),
    batch=st.integers(1, 5),
    length=st.integers(1, 5),
    by_name=st.booleans(),
    learned=st.booleans(),
    tokens=st.booleans(),
)
def test_equals_one_device(
    size: int, kind: str, batch: int, length: int, by_name: bool, learned: bool, tokens: bool
) -> None:
    x = normal(batch, length, WIDTH)
    bias = None if kind == "none" else normal(*shape_of(kind, batch, length), seed=5)
    model = made()
    want = results(copy.deepcopy(model), x, bias, by_name, learned)
    where = {"samples x heads": "0 of 3 per sample", "heads alone": "0 of 3"}.get(kind, "1 of 4")
    plan = {**LAYERS, "attn": f"local_view(heads, bias[{where}])"}
    if size == HEADS and learned and kind == "one for all heads":
        with pytest.raises(ValueError, match="its one head may be common to all or this rank's"):
            VirtualWorld(size).run(lambda group: split(group, model, plan, tokens)(x, bias.requires_grad_(), by_name))
        return

    def of_rank(group: Any) -> dict[str, float]:
        found = results(split(group, model, plan, tokens), x, bias, by_name, learned)
        assert found.keys() == want.keys()
        rank, off = group.rank(), {}
        for name, value in want.items():
            if value.shape != found[name].shape:  # a shard: rows of q, k and v, columns of out
                value = value.chunk(size, 1 if name.endswith("out.weight") else 0)[rank]
            off[name] = float((found[name] - value).abs().max()) / max(float(want[name].abs().max()), 1.0)
        return {name: error for name, error in off.items() if not error <= OFF}

    assert VirtualWorld(size).run(of_rank) == [{}] * size


class Gated(nn.Module):
    """A number for each token and head, computed from hidden states that ranks share, weighs the heads."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads, self.v, self.out = HEADS, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            y = self.v(x).unflatten(-1, (self.heads, -1)) * gate[..., None]
            z: Tensor = self.out(y.flatten(2))
            return z

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.attn = nn.Linear(WIDTH, HEADS), Gated.Heads()

    def forward(self, x: Tensor, bias: Tensor | None, by_name: bool) -> Tensor:
        x = self.attn(x, torch.ones(*x.shape[:2], HEADS, dtype=x.dtype)) + x
        z: Tensor = self.attn(x, self.gate(x))
        return z.full_tensor() if isinstance(z, TokenShard) else z


def test_an_argument_computed_from_split_tokens() -> None:
    model, x = Gated().double(), normal(3, 5, WIDTH)
    want = results(copy.deepcopy(model), x, None, False, False)
    plan = {"attn.v": "colwise", "attn.out": "rowwise", "attn": "local_view(heads, gate[2 of 3])"}

    def of_rank(group: Any) -> float:
        own = split(group, model, plan)
        found = results(own, x, None, False, False)
        assert own._fusedtp.gathered["gate"] == 1
        names = ["output", "gradient of x", "gradient of gate.weight", "gradient of gate.bias"]
        return max(float((found[name] - want[name]).abs().max()) for name in names)

    assert max(VirtualWorld(2).run(of_rank)) <= OFF


TABLE = "gradient of first.table.weight"


class Tabled(nn.Module):
    """The first layer passes the bias of its table on to the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Biased(WIDTH, HEADS, table=True), Biased(WIDTH, HEADS)

    def forward(self, x: Tensor, bias: Tensor | None, by_name: bool) -> Tensor:
        y, bias = self.first(x, bias)
        z, _ = self.second(x + y, bias)
        assert isinstance(z, Tensor)
        return z


def test_heads_that_are_this_rank_s_already() -> None:
    model = Tabled().double()
    x = normal(3, 5, WIDTH)
    want = results(copy.deepcopy(model), x, None, False, False)
    view = "local_view(heads, bias[1 of 4])"
    plan = {f"{at}.{name.removeprefix('attn.')}": word for at in ("first", "second") for name, word in LAYERS.items()}
    plan |= {"first": view, "second": view, "first.table.weight": "rowwise"}

    def of_rank(group: Any) -> float:
        part = want[TABLE].chunk(2, 1)[group.rank()]
        return float((results(split(group, model, plan), x, None, False, False)[TABLE] - part).abs().max())

    assert max(VirtualWorld(2).run(of_rank)) <= OFF

    def with_as_many_ranks_as_heads(group: Any) -> None:
        own = split(group, model, plan)
        with torch.no_grad():
            assert (own(x, None, False) - want["output"]).abs().max() <= OFF
        own(x, None, False)

    with pytest.raises(ValueError, match="with as many ranks as heads, its one head may be common to all or this"):
        VirtualWorld(4).run(with_as_many_ranks_as_heads)


class Gain(nn.Module):
    """The attention has a parameter of its own, before its projections, and keyword-only arguments."""

    class Attention(Biased):
        def __init__(self) -> None:
            super().__init__(WIDTH, HEADS)
            self.gain = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor, *more: Tensor, bias: Tensor | None = None) -> Tensor:  # type: ignore[override]
            return super().forward(x * self.gain, bias)[0]

    def __init__(self) -> None:
        super().__init__()
        self.attn = Gain.Attention()

    def forward(self, x: Tensor, bias: Tensor | None, by_name: bool) -> Tensor:
        return self.attn(x, bias=bias) if by_name else self.attn(x, torch.ones(3, 3, 5, 5))


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("by_name", [True, False])
def test_parameters_of_the_attention_itself_keep_their_gradients(tokens: bool, by_name: bool) -> None:
    """Ranks get different heads of the bias, but the same input."""
    model, x, bias = Gain().double(), normal(3, 5, WIDTH), normal(3, HEADS, 5, 5)
    names = ["output", "gradient of x", "gradient of attn.gain"]
    want = results(copy.deepcopy(model), x, bias, by_name, True)

    def of_rank(group: Any) -> float:
        own = split(group, model, {**LAYERS, "attn": "local_view(heads, bias[1 of 4])"}, tokens)
        found = results(own, x, bias, by_name, True)
        return max(float((found[name] - want[name]).abs().max()) for name in names)

    assert max(VirtualWorld(2).run(of_rank)) <= OFF


def test_inputs_without_tensors_and_by_name() -> None:
    """The samples are those of the first tensor of the signature, not of the call."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Biased(WIDTH, HEADS)

        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            y = self.attn(bias=bias, x=x)[0]
            assert isinstance(y, Tensor)
            return y

    model, x, bias = Named().double(), normal(3, 5, WIDTH), normal(3 * HEADS, 1, 5)

    def of_rank(group: Any) -> float:
        own = split(group, model, {**LAYERS, "attn": "local_view(heads, bias[0 of 3 per sample])"})
        with pytest.raises(AttributeError):
            own.attn([1, 2])
        return float((own(x, bias) - model(x, bias)).detach().abs().max())

    assert max(VirtualWorld(2).run(of_rank)) <= OFF


@pytest.mark.parametrize("tokens", [True, False])
def test_parameters_of_an_attention_that_gets_this_rank_s_heads(tokens: bool) -> None:
    class Model(Tabled):
        def __init__(self) -> None:
            super().__init__()
            self.second = Gain.Attention()

        def forward(self, x: Tensor, bias: Tensor | None, by_name: bool) -> Tensor:
            y, bias = self.first(x, bias)
            return self.second(x + y, bias=bias)

    model, x = Model().double(), normal(3, 5, WIDTH)
    want = results(copy.deepcopy(model), x, None, False, False)
    view = "local_view(heads, bias[1 of 4])"
    plan = {f"{at}.{name.removeprefix('attn.')}": word for at in ("first", "second") for name, word in LAYERS.items()}
    plan |= {"first": view, "second": view, "first.table.weight": "rowwise"}

    def of_rank(group: Any) -> float:
        found = results(split(group, model, plan, tokens), x, None, False, False)
        return float((found["gradient of second.gain"] - want["gradient of second.gain"]).abs().max())

    assert max(VirtualWorld(2).run(of_rank)) <= OFF


def refused(word: str, bias: Tensor | None = None) -> None:
    def of_rank(group: Any) -> None:
        split(group, made(), {**LAYERS, "attn": word})(normal(3, 5, WIDTH), bias, True)

    VirtualWorld(2).run(of_rank)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("local_view(heads, mask[1 of 4])", "attn: its forward has no argument mask"),
        ("local_view(bias[1 of 4])", "attn: bias is cut by heads, but no attribute says how many there are"),
        (
            "local_view(heads, bias[1])",
            r"attn: it has no integer attribute bias\[1\], or argument with a dimension, as",
        ),
        ("local_view(heads, bias[4 of 4])", "attn: bias has no dimension 4 of 4"),
        ("local_view(heads, bias[1 of 4], bias[0 of 3])", "attn: bias is listed twice"),
    ],
)
def test_words_that_do_not_fit_the_module(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refused(word)


@pytest.mark.parametrize(
    ("how", "shape", "expected"),
    [
        ("1 of 4", (3, 3, 5, 5), "1 or 4, for 4 heads"),
        ("0 of 3", (12, 1, 5), "1 or 4, for 4 heads"),
        ("0 of 3 per sample", (4, 1, 5), "1 or 12, for 3 samples x 4 heads"),
        ("0 of 3 per sample", (2, 1, 5), "1 or 12, for 3 samples x 4 heads"),
        ("0 of 3 per sample", (0, 1, 5), "1 or 12, for 3 samples x 4 heads"),
    ],
)
def test_a_bias_of_another_number_of_heads(how: str, shape: tuple[int, ...], expected: str) -> None:
    with pytest.raises(ValueError, match=rf"bias has shape .*; dimension {how[0]} should be {expected}"):
        refused(f"local_view(heads, bias[{how}])", torch.zeros(shape, dtype=torch.float64))
