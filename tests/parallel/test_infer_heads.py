"""What an inferred plan does with arguments of all heads, and what it must not take for such."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedtp
from fusedtp.parallel.infer import infer
from tests.parallel import planless
from tests.parallel.test_example import too_large
from tests.parallel.test_infer import explained, ids, plan_of


def test_a_bias_of_all_heads_is_divided_where_it_comes_from_and_where_it_is_passed():
    plan = plan_of("shared_bias")
    assert plan["h.*"] == "local_view(heads, bias[1 of 4])" and plan["h.*.table.weight"] == "rowwise"
    plan = plan_of("alibi")
    assert plan["h.*"] == "local_view(heads, bias[0 of 3 per sample])"
    plan = plan_of("biased")
    assert plan["h.*.attn"] == "local_view(heads)" and plan["h.*.attn.relative.rows"] == "rowwise"
    assert plan["h.*.attn.common"] == "replicated_with_grad_allreduce"
    said = str(fusedtp.VirtualWorld(2).run(lambda group: explained(group, planless.Alibi))[0])
    assert "changed to local values in h.0: heads 4 -> 2, its heads of bias" in said


@pytest.mark.parametrize(
    ("samples", "word"),
    [
        (1, "local_view(heads, bias[0 of 3])"),  # whether more samples come before heads or after is not known
        (3, "local_view(heads, bias[0 of 3 per sample])"),
        (planless.HEADS, "local_view(heads, bias[0 of 3 per sample])"),
    ],
)
def test_an_example_says_whether_a_dimension_is_of_samples_too(samples: int, word: str):
    example = {"ids": ids().repeat(2, 1)[:samples]}
    assert infer(planless.Alibi(), 2, True, example).plan["h.*"] == word


class Repeated(planless.GroupedAttention):
    """Keys and values are repeated by a number that an attribute holds, as in transformers' eager attention."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__(n_embd, n_head)
        self.num_key_value_groups = n_head

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in self.parts(x))
        k, v = (y.repeat_interleave(self.num_key_value_groups, 1) for y in (k, v))
        y = (q @ k.transpose(-2, -1) * self.head_dim**-0.5).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).flatten(2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "ranks", "packed", "divided"),
    [
        (planless.GroupedAttention, 2, "colwise_of_heads(4, 1, 1)", "num_heads, embed_dim"),
        (planless.GroupedPairs, 4, "colwise_of_heads(8, 4, 4)", "num_heads, num_key_value_heads, embed_dim"),
        (planless.GroupedByConfig, 2, "colwise_of_heads(8, 4, 4)", "config.n_head, config.n_query_groups"),
        (planless.GroupedByProperty, 2, "colwise_of_heads(8, 4, 4)", "config.n_head, config.n_query_groups"),
        (planless.GroupByGroup, 2, "colwise", "num_heads, num_key_value_heads"),
        (Repeated, 4, "colwise_of_heads(4, 1, 1)", "num_heads, embed_dim, num_key_value_groups"),
    ],
)
def test_queries_packed_with_fewer_keys_are_cut_by_heads(attention: Any, ranks: int, packed: str, divided: str):
    found = infer(planless.NanoGPT(attention), ranks)
    assert not found.whole
    assert found.plan["h.*.attn.attn"] == packed and found.plan["h.*.attn"] == f"local_view({divided})"


class OfTwoKinds(nn.Module):
    """Two attentions of equal shapes, whose configs count heads differently; too large to be tried as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(1_400_000, 16)
        self.h = nn.ModuleList([planless.GroupedByConfig(16, 4) for _ in range(2)])
        for attention, numbers in zip(self.h, ((4, 1, 4), (8, 2, 2)), strict=True):
            heads, few, size = numbers
            attention.attn = nn.Linear(16, (heads + 2 * few) * size)
            attention.config, attention.head_dim = planless.GroupedConfig(*numbers), 0  # type: ignore[assignment]

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.wte(ids)
        for attention in self.h:
            x = x + attention(x)
        return x


@pytest.mark.slow
def test_layers_whose_configs_count_other_heads_are_tried_apart():
    plan = infer(OfTwoKinds(), 2, example={"ids": ids()}).plan
    assert [plan[f"h.{i}.attn"] for i in range(2)] == ["colwise_of_heads(4, 1, 1)", "colwise_of_heads(8, 2, 2)"]


class InOrder(planless.TimmAttention):
    """Queries, keys and values are packed in the order that its config names; the model uses its attention weights."""

    def __init__(self, order: str, weights: bool) -> None:
        super().__init__(planless.WIDTH, planless.HEADS)
        self.config, self.weights = SimpleNamespace(inner=SimpleNamespace(order=order)), weights

    def forward(self, x: Tensor) -> Any:
        shape = {"three heads": (3, self.num_heads, -1), "heads three": (self.num_heads, 3, -1)}
        order = self.config.inner.order
        q, k, v = self.qkv(x).unflatten(-1, shape[order]).movedim(2 + order.split().index("three"), 0).transpose(2, 3)
        weights = (q @ k.mT * self.head_dim**-0.5).softmax(-1)
        y = self.proj((weights @ v).transpose(1, 2).flatten(2))
        return (y, weights) if self.weights else y


class InOrders(nn.Module):
    def __init__(self, weights: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(50, planless.WIDTH)
        self.h = nn.ModuleList(InOrder(order, weights) for order in ("three heads", "heads three", "three heads"))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.wte(ids)
        for attention in self.h:
            y, weights = attention(x) if attention.weights else (attention(x), torch.ones(()))
            x = x + y * weights.std(1, correction=0).mean() if attention.weights else x + y
        return x


@pytest.mark.slow
@pytest.mark.parametrize("large", [False, True])
def test_layers_whose_configs_differ_are_tried_apart(monkeypatch: pytest.MonkeyPatch, large: bool):
    if large:
        too_large(monkeypatch)
    plan = infer(InOrders(), 2, example={"ids": ids()}).plan
    words = ["packed_colwise_3", "colwise", "packed_colwise_3"]
    assert [plan[f"h.{i}.qkv"] for i in range(3)] == words


@pytest.mark.slow
@pytest.mark.parametrize("large", [False, True])
def test_attention_stays_whole_if_the_model_may_use_its_weights(monkeypatch: pytest.MonkeyPatch, large: bool):
    """A model gathers weights that it returns, but not those that it uses."""
    if large:
        too_large(monkeypatch)
    assert infer(InOrders(weights=True), 2, example={"ids": ids()}).plan == {}


class BiasedByConfig(nn.Module):
    """An attention that gets a bias of all heads, whose number its config knows; too large to be tried as a whole."""

    class Attention(planless.Biased):
        def __init__(self) -> None:
            super().__init__(planless.WIDTH, planless.HEADS)
            self.config = planless.GroupedConfig(self.heads, 1, 8)
            del self.heads

        def forward(self, x: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
            q, k, v = (
                each(x).unflatten(-1, (self.config.n_head, -1)).transpose(1, 2) for each in (self.q, self.k, self.v)
            )
            y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))
            return y

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(700_000, planless.WIDTH)
        self.h = nn.ModuleList(BiasedByConfig.Attention() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.wte(ids)
        for attention in self.h:
            x = x + attention(x, planless.distances(x)[None, None] * torch.arange(1.0, 5)[:, None, None])
        return x


@pytest.mark.slow
def test_arguments_are_cut_by_a_number_of_a_config_too():
    plan = infer(BiasedByConfig(), 2, example={"ids": ids()}).plan
    assert plan["h.*"] == "local_view(config.n_head, bias[1 of 4])"


class HeadsFirst(planless.Alibi):
    """Its bias is of heads x samples."""

    class Layer(planless.Biased):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
            y, _ = super().forward(x, bias.view(self.heads, -1, *bias.shape[1:]).transpose(0, 1))
            assert isinstance(y, Tensor)
            return y

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(HeadsFirst.Layer(32, 4) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        slopes = torch.arange(1.0, 5)[:, None, None] * torch.arange(x.shape[1])
        for block in self.h:
            x = x + block(x, slopes.repeat_interleave(len(x), 0))
        return self.lm_head(x)


def test_a_bias_of_heads_x_samples_is_not_taken_for_one_of_samples_x_heads():
    plan, whole = infer(HeadsFirst(), 2)
    assert not plan and "h.*.q" in whole

    def of_rank(group: Any) -> None:
        split: Any = fusedtp.parallelize(HeadsFirst(), group, example={"ids": ids()[:1]})
        split(ids()[:1])
        split(ids())

    with pytest.raises(ValueError, match=r"bias has shape .*; dimension 0 should be 1 or 4, for 4 heads"):
        fusedtp.VirtualWorld(2).run(of_rank)


class Masked(planless.SharedBias):
    """Every layer gets a mask [B, 1, S, S] too, and by a name that is not in its signature, all heads' of it."""

    class Layer(planless.Biased):
        def forward(self, x: Tensor, mask: Tensor, bias: Tensor | None = None, **more: Any) -> Any:  # type: ignore[override]
            every = self.table(planless.distances(x)).permute(2, 0, 1)[None] if bias is None and self.table else bias
            y, _ = super().forward(x, mask + every)
            return y, every

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Masked.Layer(32, 4, table=i == 0) for i in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x, bias = self.wte(ids), None
        mask = torch.zeros(len(ids), 1, 5, 5, dtype=x.dtype).masked_fill(ids[:, None, None] == 3, -1e4)
        for block in self.h:
            y, bias = block(x, mask, bias=bias, unused=mask.expand(-1, 4, -1, -1))
            x = x + y
        return self.lm_head(x)


@pytest.mark.parametrize("samples", [2, 4])
def test_other_arguments_stay_whole(samples: int):
    """Also if there are as many samples as heads."""
    example = {"ids": ids().repeat(2, 1)[:samples]}
    plan = infer(Masked(), 2, True, example).plan
    assert plan["h.*"] == "local_view(heads, bias[1 of 4])"


class Reshaped(planless.Biased):
    """The width is the length of a reshape in the layer with a table; in others its root is a scale."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.width = self.q.out_features

    def forward(self, x: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> Any:
        if self.table is None:
            return super().forward(x, bias, self.width**-0.5)
        y = self.q(x)
        assert y.reshape(*x.shape[:2], self.width).shape == y.shape
        return super().forward(x, bias)


class Different(planless.SharedBias):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Reshaped(32, 4, table=i == 0) for i in range(2))


def test_layers_that_divide_different_attributes_keep_their_own_words():
    plan = infer(Different(), 2, True, {"ids": ids()}).plan
    assert plan["h.0"] == "local_view(heads, width)" and plan["h.1"] == "local_view(heads, bias[1 of 4])"


class Flat(nn.Module):
    """Attention and an MLP in one module, each of which needs attributes of it divided."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.hidden = heads, 48
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, self.hidden), nn.Linear(self.hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).sin().reshape(*x.shape[:2], self.hidden))


def test_a_module_with_two_units_has_the_attributes_of_both_divided():
    assert infer(planless.Chain(Flat), 2).plan["h.*"] == "local_view(heads, hidden)"


class Masking(planless.SharedBias):
    """Some of its outputs are not finite."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).masked_fill(torch.arange(50) == 7, self.value)


def test_heads_are_not_handed_on_without_a_trial_of_the_whole_model():
    """Values that are no numbers cannot be compared; infinities can."""
    plan, whole = infer(Masking(torch.nan), 2)
    assert plan == {} and "split over 2 ranks" in whole["h.*.q"]
    assert infer(Masking(torch.nan), 2, True, {"ids": ids()}).plan == {}
    assert "h.*.q" in infer(Masking(-torch.inf), 2).plan


def test_a_bias_that_layers_pass_on_is_not_divided_among_as_many_ranks_as_heads():
    """One head may be common to all ranks or this rank's: its gradient would have to be guessed."""
    assert infer(planless.SharedBias(4), 4).plan == {}
    assert "h.*.q" in infer(planless.SharedBias(4), 2).plan
