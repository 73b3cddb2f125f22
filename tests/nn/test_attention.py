"""Attention equals softmax written out token by token, with every kind of mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.nn import Attention, ModelConfig, TokenLayout, init_
from fusedtp.nn.attention import attend
from fusedtp.nn.mask import attention_mask
from tests.nn import formulas
from tests.nn.support import ROUNDINGS, assert_close, assert_same_function, randn

CPU = torch.device("cpu")

shapes = st.fixed_dictionaries(
    {
        "batch": st.integers(0, 2),
        "length": st.integers(0, 6),
        "kv_heads": st.integers(1, 2),
        "group": st.integers(1, 3),
        "half_dim": st.integers(1, 3),
        "causal": st.booleans(),
        "window": st.none() | st.integers(1, 7),
        "with_documents": st.booleans(),
        "seed": st.integers(0, 1 << 30),
    }
)


def documents_of(case: dict) -> torch.Tensor | None:
    """Random document ids; a document need not be contiguous."""
    if not case["with_documents"]:
        return None
    generator = torch.Generator().manual_seed(case["seed"])
    return torch.randint(0, 3, (case["batch"], case["length"]), generator=generator)


def draw(case: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, TokenLayout]:
    batch, length, kv, dim = case["batch"], case["length"], case["kv_heads"], 2 * case["half_dim"]
    q = randn(batch, length, kv * case["group"], dim, seed=case["seed"])
    k, v = (randn(batch, length, kv, dim, seed=case["seed"] + i) for i in (1, 2))
    return q, k, v, TokenLayout(batch, length, document_ids=documents_of(case))


def steepened(q: torch.Tensor, k: torch.Tensor) -> float:
    """Roundings, scaled by 1 + the largest score: exp turns a score's absolute error into its weight's relative error.

    A score is at most |q| |k| / sqrt(D), for any query and key [..., D].
    """
    if not q.numel():
        return ROUNDINGS
    largest = q.norm(dim=-1).max() * k.norm(dim=-1).max() / q.shape[-1] ** 0.5
    return ROUNDINGS * (1 + largest.item())


@settings(max_examples=60)
@given(shapes)
def test_attend_is_softmax_over_the_keys_a_query_sees(case: dict) -> None:
    q, k, v, layout = draw(case)
    mask = attention_mask(layout, case["causal"], case["window"], CPU)
    assert_same_function(
        lambda q, k, v: attend(q, k, v, mask),
        lambda q, k, v: formulas.attention(q, k, v, case["causal"], case["window"], layout.document_ids),
        (q, k, v),
        "qkv",
        steepened(q, k),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_flex_attention_sees_the_same_keys(causal: bool, window: int | None) -> None:
    q, k, v = randn(2, 7, 4, 8, seed=1), randn(2, 7, 2, 8, seed=2), randn(2, 7, 2, 8, seed=3)
    layout = TokenLayout(2, 7, document_ids=torch.tensor([[0, 0, 0, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1, 0]]))
    blocks = attention_mask(layout, causal, window, CPU, use_flex=True)
    assert blocks.blocks is not None
    want = formulas.attention(q, k, v, causal, window, layout.document_ids)
    assert_close("y", attend(q, k, v, blocks), want)


def test_no_mask_is_built_where_none_is_needed() -> None:
    plain = attention_mask(TokenLayout(2, 5), True, None, CPU)
    assert plain.is_causal and plain.dense is None and plain.blocks is None
    wide = attention_mask(TokenLayout(2, 5), True, 5, CPU)
    assert wide.is_causal and wide.dense is None


@pytest.mark.parametrize("use_flex", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_windows_at_both_ends_of_their_range_show_the_keys_of_the_definition(
    length: int, causal: bool, use_flex: bool
) -> None:
    """Windows of 1, S - 1, S and S + 1 keys; the two largest hide nothing, so they need no mask."""
    places = torch.arange(length)
    for window in sorted({1, max(1, length - 1), length, length + 1}):
        mask = attention_mask(TokenLayout(1, length), causal, window, CPU, use_flex=use_flex)
        assert (mask.dense is None and mask.blocks is None) == (window >= length), window
        if mask.dense is not None:
            got = mask.dense[0, 0]
        elif mask.blocks is not None:
            zero = torch.zeros((), dtype=torch.int64)
            got = mask.blocks.mask_mod(zero, zero, places[:, None], places[None, :])
        else:
            got = torch.ones(length, length, dtype=torch.bool)
            got = got.tril() if mask.is_causal else got
        want = [[formulas.seen(i, j, causal, window, None) for j in range(length)] for i in range(length)]
        assert got.tolist() == want, window


def module(case: dict, **changes: object) -> Attention:
    config = ModelConfig(
        hidden_size=5,
        num_attention_heads=case["kv_heads"] * case["group"],
        num_key_value_heads=case["kv_heads"],
        head_dim=2 * case["half_dim"],
        is_causal=case["causal"],
        sliding_window=case["window"],
        dtype="float64",
        param_dtype="float64",
        **changes,  # type: ignore[arg-type]
    )
    attention = Attention(config)
    with torch.no_grad():
        for i, parameter in enumerate(attention.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=case["seed"] + i))
    return attention


def written_out(attention: Attention, case: dict, layout: TokenLayout, x: torch.Tensor) -> torch.Tensor:
    """The whole module, computed by its definition."""
    dim, theta = attention.head_dim, attention.config.rope_theta
    frequencies = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    shape = (layout.batch, layout.length, -1, dim)

    def heads(linear: torch.nn.Module) -> torch.Tensor:
        y = x @ linear.weight.T + (0.0 if linear.bias is None else linear.bias)
        return y.reshape(*shape[:2], y.shape[-1] // dim, dim)

    def turned(y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(y)
        for b, s, h in torch.cartesian_prod(*map(torch.arange, y.shape[:3])).tolist():
            place = s if layout.positions is None else int(layout.positions[b, s])
            out[b, s, h] = formulas.rotation(y[b, s, h], place, frequencies)
        return out

    q, k, v = heads(attention.q_proj), heads(attention.k_proj), heads(attention.v_proj)
    if attention.q_norm is not None:
        q = formulas.rms_norm(q, attention.q_norm.weight, attention.config.rms_norm_eps)
        k = formulas.rms_norm(k, attention.k_norm.weight, attention.config.rms_norm_eps)
    y = formulas.attention(turned(q), turned(k), v, case["causal"], case["window"], layout.document_ids)
    y = y.reshape(layout.tokens, attention.q_proj.out_features) @ attention.o_proj.weight.T
    return y if attention.o_proj.bias is None else y + attention.o_proj.bias


@settings(max_examples=40)
@given(shapes, st.booleans(), st.booleans(), st.booleans())
def test_module_is_its_definition(case: dict, qk_norm: bool, bias: bool, own_positions: bool) -> None:
    attention = module(case, qk_norm=qk_norm, attention_bias=bias)
    layout = TokenLayout(case["batch"], case["length"], document_ids=documents_of(case))
    if own_positions:
        layout = layout.with_(positions=torch.randint(0, 50, (layout.batch, layout.length)))
    x = randn(layout.tokens, 5, seed=case["seed"])
    names, weights = zip(*attention.named_parameters(), strict=True)

    def run(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(attention, dict(zip(names, weights, strict=True)), (x, layout))

    def want(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        copy = module(case, qk_norm=qk_norm, attention_bias=bias)
        for name, weight in zip(names, weights, strict=True):
            owner, _, leaf = name.rpartition(".")
            del copy.get_submodule(owner)._parameters[leaf]
            setattr(copy.get_submodule(owner), leaf, weight)
        return written_out(copy, case, layout, x)

    q, k = (
        norm(linear(x).unflatten(-1, (-1, attention.head_dim)))
        for linear, norm in (
            (attention.q_proj, attention.q_norm or torch.nn.Identity()),
            (attention.k_proj, attention.k_norm or torch.nn.Identity()),
        )
    )
    assert_same_function(run, want, (x, *weights), ("x", *names), steepened(q, k))


def test_without_layout_it_is_one_sequence() -> None:
    attention = init_(Attention(ModelConfig(hidden_size=8, num_attention_heads=2)), 0)
    x = torch.randn(7, 8)
    assert torch.equal(attention(x), attention(x, TokenLayout(1, 7)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_is_as_good_as_its_rounding(dtype: torch.dtype) -> None:
    q, k, v = (randn(2, 33, 4, 8, seed=i).to(dtype) for i in range(3))
    got = attend(q, k, v, attention_mask(TokenLayout(2, 33), True, None, CPU))
    want = attend(q.double(), k.double(), v.double(), attention_mask(TokenLayout(2, 33), True, None, CPU))
    assert got.dtype == dtype
    assert_close("y", got, want, roundings=1)


def test_grouped_heads_may_be_column_slices_of_one_matmul() -> None:
    """Projections may return views of a wider buffer."""
    wide = torch.randn(6, 40, requires_grad=True)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.view(2, 3, t.shape[-1] // 4, 4) for t in (q, k, v))
        return attend(q, k, v, attention_mask(TokenLayout(2, 3), True, None, CPU))

    cut = wide.split([24, 8, 8], dim=1)
    assert torch.equal(run(*cut), run(*(t.contiguous() for t in cut)))
