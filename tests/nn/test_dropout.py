"""The dropout mask is a function of (seed, step, layer, site, global token, feature) and looks random."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedtp.nn import HiddenDropout, TokenLayout
from fusedtp.nn.dropout import dropout_mask, dropout_state

WORD = (1 << 32) - 1


def by_hand(seed: int, step: int, site: int, token: int, feature: int, rate: float) -> bool:
    """The definition, in Python's unbounded integers."""

    def mix64(x: int) -> int:
        x &= (1 << 64) - 1
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & (1 << 64) - 1
        return x ^ (x >> 31)

    def mix32(x: int) -> int:
        x &= WORD
        x = (x ^ (x >> 16)) * 0x7FEB352D & WORD
        x = (x ^ (x >> 15)) * 0x846CA68B & WORD
        return x ^ (x >> 16)

    row = mix64(mix64(mix64(mix64(seed) ^ step) ^ site) ^ mix64(token))
    bits = mix32(mix32((mix64(feature + 1) & WORD) ^ (row & WORD)) + (row >> 32))
    signed = bits - (1 << 32) if bits >> 31 else bits
    return signed < int(rate * 2.0**32) - 2**31


@given(
    st.integers(0, 1 << 62), st.integers(0, 1 << 40), st.integers(0, 400), st.integers(0, 1 << 40),
    st.floats(0.0, 0.99),
)  # fmt: skip
def test_mask_is_its_definition(seed: int, step: int, site: int, first: int, rate: float) -> None:
    got = dropout_mask(dropout_state(seed, step, first), rate, site, 3, 2, 5)
    want = [[by_hand(seed, step, site, first + 3 + t, f, rate) for f in range(5)] for t in range(2)]
    assert got.tolist() == want


@given(st.lists(st.integers(0, 7), min_size=1, max_size=5), st.integers(0, 100), st.integers(1, 9))
def test_any_split_of_tokens_meets_the_same_mask(sizes: list[int], step: int, features: int) -> None:
    state, total = dropout_state(5, step, 11), sum(sizes)
    dropout = HiddenDropout(0.4, layer=2, site=1)
    x = torch.randn(total, features)
    whole = dropout(x, TokenLayout(1, total, dropout=state))
    parts = [
        dropout(part, TokenLayout(1, total, tuple(sizes), rank, dropout=state))
        for rank, part in enumerate(x.split(sizes))
    ]
    assert torch.equal(torch.cat(parts), whole)
    later = dropout_state(5, step, 11 + sizes[0])  # another microbatch or data-parallel rank
    rest = dropout(x[sizes[0] :], TokenLayout(1, total - sizes[0], dropout=later))
    assert torch.equal(rest, whole[sizes[0] :])


def test_every_layer_and_site_has_a_mask_of_its_own() -> None:
    x, layout = torch.ones(8, 32), TokenLayout(1, 8, dropout=dropout_state(3, 4))
    masks = [HiddenDropout(0.5, layer, site)(x, layout) for layer in range(6) for site in range(3)]
    for i, mask in enumerate(masks):
        assert not any(torch.equal(mask, other) for other in masks[:i])


def test_values_are_kept_and_scaled_or_zero() -> None:
    x = torch.rand(64, 64, dtype=torch.float64) + 1.0
    x.requires_grad_()
    y = HiddenDropout(0.25, 0, 1)(x, TokenLayout(1, 64, dropout=dropout_state(0, 0)))
    y.backward(torch.ones_like(y))
    kept = y != 0
    torch.testing.assert_close(y[kept], (x / 0.75)[kept])
    torch.testing.assert_close(x.grad, kept.double() / 0.75)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_masks_look_independent(rate: float) -> None:
    """Rates, and agreement between masks that differ in one argument, are within 5 standard deviations."""
    rows, features = 512, 256
    masks = {
        "base": dropout_mask(dropout_state(1, 1), rate, 4, 0, rows, features),
        "seed": dropout_mask(dropout_state(2, 1), rate, 4, 0, rows, features),
        "step": dropout_mask(dropout_state(1, 2), rate, 4, 0, rows, features),
        "site": dropout_mask(dropout_state(1, 1), rate, 5, 0, rows, features),
        "token": dropout_mask(dropout_state(1, 1), rate, 4, 1, rows, features),
    }
    count = rows * features

    def near(name: str, got: float, p: float, count: int) -> None:
        assert abs(got - p) < 5 * (p * (1 - p) / count) ** 0.5, f"{name}: {got}, wanted {p}"

    agree = rate**2 + (1 - rate) ** 2
    base = masks["base"]
    for name, mask in masks.items():
        near(f"rate of {name}", mask.double().mean().item(), rate, count)
        if name != "base":
            near(f"agreement with {name}", (mask == base).double().mean().item(), agree, count)
    near("agreement of features", (base[:, 1:] == base[:, :-1]).double().mean().item(), agree, count - rows)
    for name, sums, n in (("row", base.sum(1), features), ("column", base.sum(0), rows)):
        spread = sums.double().var().item() / (n * rate * (1 - rate))
        assert 0.7 < spread < 1.3, f"variance of {name} sums is {spread} of the binomial one"


def test_nothing_happens_in_evaluation_or_at_rate_zero() -> None:
    x = torch.randn(3, 4)
    assert HiddenDropout(0.5, 0, 1).eval()(x) is x
    assert HiddenDropout(0.0, 0, 1)(x) is x


def test_training_without_a_state_raises() -> None:
    with pytest.raises(ValueError, match="set_dropout"):
        HiddenDropout(0.5, 0, 1)(torch.randn(3, 4), TokenLayout(1, 3))
