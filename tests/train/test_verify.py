"""What --verify calls equal: rounding passes, anything larger or not finite does not."""

import math

import pytest

from fusedtp.train.config import parse
from fusedtp.train.verify import bound, compare

REFERENCE = [
    {"loss": 5.0, "grad_norm": 2.0},
    {"loss": 4.0, "grad_norm": 1.0},
    {"loss": 3.0, "grad_norm": 4.0},
]


def differing(step: int, **factors: float) -> list[dict[str, float]]:
    """The reference with one step's numbers multiplied."""
    return [
        {name: value * (factors.get(name, 1.0) if i == step else 1.0) for name, value in record.items()}
        for i, record in enumerate(REFERENCE)
    ]


def test_the_bound_follows_the_derivation():
    config = parse(["--layers", "2", "--width", "64", "--mlp-width", "128", "--batch", "4", "--length", "64"])
    error = math.sqrt(40) * (2**-24 + math.sqrt(256) * 2**-24)
    assert bound(config, 0) == pytest.approx(error)
    assert bound(config, 5) == pytest.approx(32 * error)
    assert bound(config, 19) == 0.1
    half = parse(["--layers", "2", "--batch", "4", "--length", "64", "--dtype", "bf16"])
    assert bound(half, 0) == pytest.approx(math.sqrt(40) * 2**-9, rel=1e-2)


def test_the_same_numbers_are_equal():
    result = compare(parse([]), REFERENCE, REFERENCE)
    assert result.passed
    assert result.max_loss_difference == result.max_grad_norm_difference == result.share_of_bound == 0


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("name", ["loss", "grad_norm"])
@pytest.mark.parametrize("sign", [1, -1])
def test_each_step_has_its_bound(step, name, sign):
    config = parse([])
    inside, outside = (
        compare(config, differing(step, **{name: 1 + sign * share * bound(config, step)}), REFERENCE)
        for share in (0.9, 1.1)
    )
    assert inside.passed and not outside.passed
    assert inside.share_of_bound == pytest.approx(0.9, rel=1e-6)
    wanted = 0.9 * bound(config, step) * (REFERENCE[step]["loss"] if name == "loss" else 1)
    got = inside.max_loss_difference if name == "loss" else inside.max_grad_norm_difference
    assert got == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_finite_is_not_equal(wrong):
    for name in ("loss", "grad_norm"):
        result = compare(parse([]), differing(1, **{name: wrong}), REFERENCE)
        assert not result.passed
    assert not compare(parse([]), REFERENCE, differing(1, loss=wrong, grad_norm=wrong)).passed
