"""The source of a forward shows whether a norm works on each token alone. Code that might not is refused."""

import ast
import copy
import functools
import importlib.util
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fusedtp
from fusedtp.comm import communicator
from fusedtp.ops.rows import split
from fusedtp.parallel.by_token import _read, by_token
from fusedtp.parallel.token_shard import Tokens, TokenShard
from tests.harness import world

from .support import tp_mesh

FIXED = torch.ones(4, 3)


class Norm(nn.Module):
    """The norm of most transformers models."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))
        self.table, self.eps, self.shape = nn.Parameter(torch.ones(3, width)), 1e-5, (width,)

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(dtype)


class OfGemma(Norm):
    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        """The stored weight is one less than the factor."""
        output = self._norm(x.float())
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)


class OfT5(Norm):
    def forward(self, x):
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(self.weight.dtype)


class Centred(Norm):
    def forward(self, x):
        mean = x.mean(dim=-1, keepdim=True)
        variance = torch.var(x, -1, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(variance + self.eps) * self.weight + self.bias


class ByFunction(Norm):
    def forward(self, x):
        return F.layer_norm(x, self.shape, self.weight, self.bias, eps=self.eps)


class Cubic(Norm):
    def forward(self, x):
        return -(x.abs() ** 3)


ALIKE = [Norm, OfGemma, OfT5, Centred, ByFunction, Cubic]


class OverTokens(Norm):
    def forward(self, x):
        return x - x.mean(1, keepdim=True)


class OverTokensFromTheEnd(Norm):
    def forward(self, x):
        return x - x.mean(-2, keepdim=True)


class OverBoth(Norm):
    def forward(self, x):
        return x - x.mean((-1, -2), keepdim=True)


class OverAll(Norm):
    def forward(self, x):
        return x - x.mean()


class WithoutItsDimension(Norm):
    def forward(self, x):
        return x - x.mean(-1)


class BiasedVariance(Norm):
    def forward(self, x):
        return x - x.var(-1, True)


class Deviation(Norm):
    def forward(self, x):
        return x - torch.var(x, -1, False)


class TwiceADimension(Norm):
    def forward(self, x):
        return x - x.mean(1, dim=-1, keepdim=True)


class Branching(Norm):
    def forward(self, x):
        if self.eps > 1:
            x = x - x.mean(1, keepdim=True)
        return x


class BranchingInside(Norm):
    def forward(self, x):
        return x if self.eps < 1 else x.flip(1)


class Looping(Norm):
    def forward(self, x):
        for _ in range(2):
            x = x * self.weight
        return x


class BySize(Norm):
    def forward(self, x):
        return x / x.shape[1]


class Drawing(Norm):
    def forward(self, x):
        return x + torch.randn(4)


class Dropping(Norm):
    def forward(self, x):
        return F.dropout(x, 0.5)


class Indexed(Norm):
    def forward(self, x):
        return x * x[:, :1]


class Flipped(Norm):
    def forward(self, x):
        return x.flip(1)


class OfATable(Norm):
    def forward(self, x):
        return x * self.table


class OfSomethingGlobal(Norm):
    def forward(self, x):
        return x @ FIXED


class OfTwo(Norm):
    def forward(self, x, gate=None):
        return x * gate


class Changing(Norm):
    def forward(self, x):
        self.eps = self.eps * 2
        return x * self.eps


class InPlace(Norm):
    def forward(self, x):
        x *= self.weight
        return x


class Calling(Norm):
    def more(self, x):
        return x.cumsum(1)

    def forward(self, x):
        return self.more(x)


class CallingItself(Norm):
    def forward(self, x):
        return self.forward(x)


class OfAnotherTorch(Norm):
    def forward(self, x):
        return not_torch.rsqrt(x)  # noqa: F821


@torch.no_grad()
def decorated(self: Any, x: Tensor) -> Tensor:
    return x * self.weight


class Decorated(Norm):
    forward = decorated


def centred(self: Any, x: Tensor) -> Tensor:
    return Norm.forward(self, x - x.mean(1, keepdim=True))


class Wrapped(Norm):
    """inspect returns the source of the wrapped function."""

    forward = functools.wraps(Norm.forward)(centred)


def of_another_torch() -> type:
    torch = SimpleNamespace(rsqrt=lambda x: x.flip(1))

    class Shadowed(Norm):
        def forward(self, x):
            return torch.rsqrt(x)

    return Shadowed


def of_something_outside() -> type:
    inner = torch.ones(3, 1)

    class Closed(Norm):
        def forward(self, x):
            return x * inner

    return Closed


APART = [
    OverTokens, OverTokensFromTheEnd, OverBoth, OverAll, WithoutItsDimension, Branching, BranchingInside, Looping,
    BySize, Drawing, Dropping, Indexed, Flipped, OfATable, OfSomethingGlobal, OfTwo, Changing, InPlace, Calling,
    CallingItself, OfAnotherTorch, Decorated, of_something_outside(), nn.BatchNorm1d, nn.Softmax2d,
    BiasedVariance, Deviation, TwiceADimension, Wrapped, of_another_torch(),
]  # fmt: skip


@pytest.mark.slow
@given(data=st.data())
@pytest.mark.parametrize("cls", ALIKE)
def test_what_treats_tokens_alike_gives_its_rows(cls, data):
    module = cls()
    forward = by_token(module)
    assert forward is cls.forward
    b, s = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    x = torch.randn(b, s, 4, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    begin = data.draw(st.integers(0, b * s))
    rows = x.flatten(0, 1)[begin : data.draw(st.integers(begin, b * s))]
    assert torch.equal(forward(module, rows), module(x).flatten(0, 1)[begin : begin + len(rows)])


@pytest.mark.parametrize("module", [nn.LayerNorm(4), nn.RMSNorm(4), nn.Identity()], ids=str)
def test_norms_of_torch_treat_tokens_alike(module):
    assert by_token(module) is type(module).forward


def test_norms_of_transformers_treat_tokens_alike():
    transformers = pytest.importorskip("transformers")
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.gpt_neox_japanese.modeling_gpt_neox_japanese import GPTNeoXJapaneseMLP
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    for cls in (LlamaRMSNorm, GemmaRMSNorm):
        assert by_token(cls(4)) is cls.forward
    assert by_token(T5LayerNorm(4)) is None  # it branches on its weight's dtype
    assert by_token(GPTNeoXJapaneseMLP(transformers.GPTNeoXJapaneseConfig(hidden_size=8))) is None


@pytest.mark.slow
@pytest.mark.parametrize("cls", APART)
def test_what_may_tell_tokens_apart_is_refused(cls):
    assert by_token(cls(4) if issubclass(cls, (Norm, nn.BatchNorm1d)) else cls()) is None


def test_ranks_that_are_threads_parse_one_after_another(monkeypatch):
    parse, parsing, together = ast.parse, [], []

    def slow(text: str, *how: Any, **more: Any) -> ast.AST:
        parsing.append(text)
        time.sleep(0.05)
        together.append(len(parsing))
        parsing.pop()
        return parse(text, *how, **more)

    monkeypatch.setattr(ast, "parse", slow)
    _read.cache_clear()
    modules = [Norm(), OfGemma(), OfT5(), Centred()]
    with ThreadPoolExecutor(len(modules)) as pool:
        assert all(pool.map(by_token, modules))
    assert len(together) >= len(modules) and set(together) == {1}


def test_what_the_instance_has_of_its_own_is_refused():
    module = Norm()
    module.forward = lambda x: x.flip(1)
    assert by_token(module) is None
    module = OfGemma()
    module._norm = lambda x: x.flip(1)
    assert by_token(module) is None
    module = Norm()
    module.eps = torch.ones(3, 1)
    assert by_token(module) is None
    module = Norm()
    module.eps = torch.ones(4, requires_grad=True)  # its gradient would not be summed
    assert by_token(module) is None
    module = Norm()
    module.child = nn.Linear(4, 4)
    assert by_token(module) is None
    assert by_token(nn.LayerNorm((3, 4))) is None


TEXT = """
import torch
from torch import nn


class Norm(nn.Module):
    def forward(self, x):
        return x * {what}
"""


def test_a_text_that_is_not_what_runs_proves_nothing(tmp_path: Path):
    path = tmp_path / "norms_of_a_user.py"
    path.write_text(TEXT.format(what="x.mean(1, keepdim=True)"))
    spec = importlib.util.spec_from_file_location("norms_of_a_user", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path.write_text(TEXT.format(what="x.mean(-1, keepdim=True)"))
    assert by_token(module.Norm()) is None


def split_llama(group) -> tuple[Any, Any, Tensor]:
    from .hf.families import model_of

    plain = model_of("llama")
    parallel = fusedtp.parallelize(copy.deepcopy(plain), tp_mesh(group))
    return plain, parallel, torch.arange(1, 11).view(2, 5)


def seen_in_a_norm(group) -> set[type]:
    _, parallel, ids = split_llama(group)
    seen: set[type] = set()
    cls = type(parallel.model.norm)
    true = torch.rsqrt

    def rsqrt(x: Tensor) -> Tensor:
        seen.add(type(x))
        return true(x)

    assert parallel.model.norm.parallel.alike is cls.forward
    torch.rsqrt = rsqrt
    try:
        parallel(input_ids=ids, labels=ids).loss.backward()
    finally:
        torch.rsqrt = true
    return seen


def test_a_norm_of_a_split_model_sees_plain_rows():
    assert world(2).run(seen_in_a_norm) == [{Tensor}] * 2


def patched_after_the_split(group) -> None:
    plain, parallel, ids = split_llama(group)
    cls = type(parallel.model.norm)
    true, seen = cls.forward, set()

    def centred(self: Any, x: Tensor) -> Tensor:
        seen.add(type(x))
        return true(self, x - x.mean(1, keepdim=True))

    cls.forward = centred
    try:
        want, got = (model(input_ids=ids, labels=ids).loss for model in (plain, parallel))
    finally:
        cls.forward = true
    assert TokenShard in seen
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_forward_that_was_replaced_since_is_the_one_that_runs():
    world(2).run(patched_after_the_split)


def of_scores(group) -> None:
    """A norm over [B, S]: its features are the tokens."""
    _, parallel, _ = split_llama(group)
    norm = parallel.model.norm
    x = torch.randn(3, norm.weight.shape[0], generator=torch.Generator().manual_seed(1))
    place = communicator(group)
    shard = TokenShard.of(
        x.flatten().split(split(x.numel(), place.world_size))[place.rank],
        x.shape,
        Tokens(place.name, place.rank, split(x.numel(), place.world_size), Counter()),
    )
    got = norm(shard)
    got = got.full_tensor() if isinstance(got, TokenShard) else got
    torch.testing.assert_close(got, norm(x))


def test_a_norm_whose_last_dimension_counts_tokens_gathers_them():
    world(2).run(of_scores)
