"""Rotary positions equal complex rotation, and the scalings equal their papers' formulas."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.nn import RopeScaling, TokenLayout
from fusedtp.nn.rope import inverse_frequencies, rotary_tables, rotate
from tests.nn import formulas
from tests.nn.support import assert_close, assert_same_function, randn


def turned_by(position: int, theta: float, size: float) -> float:
    """The error, in eps, of a number of this size rotated by position * theta^-e, an angle of up to `position`.

    See power_units: the angle is off by position times the frequency's error, plus two roundings; so is its cosine.
    """
    return size * position * (power_units(theta) + 2) / 2


def power_units(theta: float) -> float:
    """Relative error of theta^-e, 0 <= e < 1, in units of u: e's error times ln(theta), then pow and 1 / x round."""
    return math.log(theta) + 4


@settings(max_examples=40)
@given(st.integers(0, 2), st.integers(0, 5), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_rotation_is_complex_multiplication(batch: int, length: int, heads: int, half: int, own: bool) -> None:
    positions = torch.randint(0, 100, (batch, length)) if own else None
    layout = TokenLayout(batch, length, positions=positions)
    cos, sin = rotary_tables(layout, 2 * half, dtype=torch.float64)
    frequencies = [10000.0 ** (-i / half) for i in range(half)]

    def want(x: torch.Tensor) -> torch.Tensor:
        rows = [
            formulas.rotation(x[b, s, h], s if positions is None else int(positions[b, s]), frequencies)
            for b in range(batch)
            for s in range(length)
            for h in range(heads)
        ]
        return torch.stack(rows).view_as(x) if rows else x * 1.0

    x = randn(batch, length, heads, 2 * half)
    assert_same_function(lambda x: rotate(x, cos, sin), want, [x], "x", roundings=4 + turned_by(100, 10000.0, 5.0))


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_scores_depend_on_distance_only(a: int, b: int, shift: int) -> None:
    q, k = randn(1, 1, 1, 16, seed=1), randn(1, 1, 1, 16, seed=2)

    def score(i: int, j: int) -> torch.Tensor:
        tables = [
            rotary_tables(TokenLayout(1, 1, positions=torch.tensor([[n]])), 16, dtype=torch.float64) for n in (i, j)
        ]
        return (rotate(q, *tables[0]) * rotate(k, *tables[1])).sum()

    # Both vectors of both scores are rotated by up to 1000, and 16 products are summed.
    size = (q.norm() * k.norm()).item()
    assert_close("score", score(a + shift, b + shift), score(a, b), roundings=4 * turned_by(1000, 10000.0, size) + 18)


def test_compiled_formula_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    cos, sin = rotary_tables(TokenLayout(2, 5), 8, dtype=torch.float64)
    x = randn(2, 5, 3, 8)
    eager = rotate(x, cos, sin)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert_close("y", rotate(x, cos, sin), eager, roundings=4)


def test_16_bit_is_rotated_in_fp32_and_rounded_once() -> None:
    cos, sin = rotary_tables(TokenLayout(2, 50), 8)
    x = torch.randn(2, 50, 3, 8, dtype=torch.bfloat16)
    assert torch.equal(rotate(x, cos, sin), rotate(x.float(), cos, sin).bfloat16())


@given(st.integers(1, 64), st.floats(1.0, 64.0), st.floats(100.0, 1e6))
def test_linear_scaling_divides_positions(half: int, factor: float, theta: float) -> None:
    plain, _ = inverse_frequencies(2 * half, theta, None)
    scaled, attention = inverse_frequencies(2 * half, theta, RopeScaling("linear", factor))
    assert attention == 1.0
    assert_close("frequencies", scaled, plain / factor, roundings=4)


@given(
    st.integers(1, 64),
    st.floats(1.0, 64.0),
    st.integers(64, 100000),
    st.floats(1.0, 4.0),
    st.floats(4.5, 32.0),
)
def test_llama3_scaling_is_its_formula(half: int, factor: float, context: int, low: float, high: float) -> None:
    scaling = RopeScaling("llama3", factor, context, low_freq_factor=low, high_freq_factor=high)
    got, attention = inverse_frequencies(2 * half, 500000.0, scaling)
    want = []
    for i in range(half):
        frequency = 500000.0 ** (-i / half)
        wavelength = 2 * math.pi / frequency
        if wavelength > context / low:
            frequency /= factor
        elif wavelength >= context / high:
            smooth = (context / wavelength - low) / (high - low)
            frequency = (1 - smooth) * frequency / factor + smooth * frequency
        want.append(frequency)
    assert attention == 1.0
    # On the ramp, keep = (turns - low) / (high - low) is off by the error of turns <= high; the kept part is added to
    # the scaled one, which is at least plain / factor.
    units = power_units(500000.0) + 6
    bound = (units + factor * high / (high - low) * units) * 2.0**-24
    assert ((got.double() / torch.tensor(want, dtype=torch.float64)) - 1).abs().max() < bound


@given(st.integers(4, 64), st.floats(1.0, 64.0), st.integers(256, 100000))
def test_yarn_scaling_is_its_formula(half: int, factor: float, context: int) -> None:
    got, attention = inverse_frequencies(2 * half, 10000.0, RopeScaling("yarn", factor, context))

    def bound(turns: float) -> float:
        return 2 * half * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(10000.0))

    low, high = max(math.floor(bound(32)), 0), min(math.ceil(bound(1)), 2 * half - 1)
    units = power_units(10000.0) + 4 * factor  # the ramp rounds 4 times, relative to at least plain / factor
    for i in range(half):
        plain = 10000.0 ** (-i / half)
        extrapolate = 1 - min(max((i - low) / (high - low if high > low else 1e-3), 0.0), 1.0)
        want = plain / factor * (1 - extrapolate) + plain * extrapolate
        assert math.isclose(got[i].item(), want, rel_tol=units * 2.0**-24)
    assert math.isclose(attention, 0.1 * math.log(factor) + 1)
    cos, _ = rotary_tables(TokenLayout(1, 1), 2 * half, 10000.0, RopeScaling("yarn", factor, context))
    assert_close("cos at 0", cos, torch.full_like(cos, attention))


def test_faults_are_reported_together() -> None:
    scaling = RopeScaling("ntk", 0.5, 0)  # type: ignore[arg-type]
    assert len(scaling.faults()) == 3
    assert RopeScaling("llama3", 8.0, low_freq_factor=4.0, high_freq_factor=1.0).faults()
    assert RopeScaling("yarn", 8.0, beta_fast=1.0, beta_slow=2.0).faults()
    assert not RopeScaling("yarn", 8.0).faults()
