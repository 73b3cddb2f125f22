"""What --verify accepts: rounding differences pass in every step; larger differences and non-finite values fail."""

import math

import pytest
import torch

import fusedtp.commands.verify as verify
from fusedtp.commands.verify import (
    LARGEST,
    ROUNDOFF,
    SHAKE,
    SPREAD,
    bounds,
    compare,
    reference_steps,
    rounding,
    shake_,
)
from fusedtp.train.config import parse
from fusedtp.train.data import build_tokens

CPU = torch.device("cpu")
STEPS = 20
TINY = "--width 32 --mlp-width 50 --layers 1 --length 32 --batch 8 --warmup 2"

# Three made-up steps. The shaken run differs only in step 1, by 1/1000 of the loss and 2/1000 of the norm.
REFERENCE = [
    {"loss": 5.0, "grad_norm": 2.0},
    {"loss": 4.0, "grad_norm": 1.0},
    {"loss": 3.0, "grad_norm": 4.0},
]
SPREADS = {"loss": (0.0, 1e-3, 1e-3), "grad_norm": (0.0, 2e-3, 2e-3)}


def differing(records: list[dict[str, float]], step: int, **factors: float) -> list[dict[str, float]]:
    """The records with the numbers of one step multiplied by factors."""
    return [
        {name: value * (factors.get(name, 1.0) if i == step else 1.0) for name, value in record.items()}
        for i, record in enumerate(records)
    ]


SHAKEN = differing(REFERENCE, 1, loss=1 + 1e-3, grad_norm=1 - 2e-3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, tuple]:
    """Precision -> config, reference run and shaken run of a tiny model over all steps, and other runs by name."""
    folder = tmp_path_factory.mktemp("verify")
    (folder / "book.txt").write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(3000)))
    tokens = build_tokens((folder / "book.txt",), folder / "tokens")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = {}
    for dtype in ("fp32", "bf16"):
        config = parse([*TINY.split(), "--dtype", dtype])
        runs = (reference_steps(config, tokens, STEPS, CPU, shaken) for shaken in (False, True))
        reference, shaken = runs
        draw = torch.Generator().manual_seed(7)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verify, "shake_", lambda model, relative, _: shake_(model, relative, draw))  # noqa: B023
            otherwise = reference_steps(config, tokens, STEPS, CPU, True)
        halves = parse([*TINY.split(), "--dtype", dtype, "--accumulate", "2"])
        others = {
            "shaken otherwise": otherwise,
            "in two microbatches": reference_steps(halves, tokens, STEPS, CPU),
        }
        found[dtype] = (config, reference, shaken, others)
    torch.set_num_threads(threads)
    return found


@pytest.mark.parametrize("skipped", [True, False])
def test_the_reference_moves_no_bias_in_a_step_that_the_run_skipped(tokens, monkeypatch, skipped):
    models: list[torch.nn.Module] = []
    build = verify.build

    def kept(*args):
        models.append(build(*args))
        return models[-1]

    monkeypatch.setattr(verify, "build", kept)
    config = parse(f"{TINY} --dtype fp16 --experts 4 --expert-width 8 --balance-bias 0.5".split())
    record = {"loss_scale": 1.0, "grad_norm": None if skipped else 1.0}
    (found,) = reference_steps(config, tokens, 1, CPU, follow=[record])
    biases = [buffer for name, buffer in models[0].named_buffers() if name.endswith("router.bias")]
    assert math.isinf(found["grad_norm"]) == skipped and len(biases) == 1
    assert bool(biases[0].any()) != skipped


def test_the_bound_follows_the_derivation():
    config = parse(["--layers", "2", "--width", "64", "--mlp-width", "128", "--batch", "4", "--length", "64"])
    one_step = 2**-24 + math.sqrt(40 * 256) * 2**-24
    assert rounding(config) == pytest.approx(one_step)
    half = parse(["--layers", "2", "--batch", "4", "--length", "64", "--dtype", "bf16"])
    assert rounding(half) == pytest.approx(2**-8 + math.sqrt(40 * 704) * 2**-24)
    wanted = [[one_step + SPREAD * SPREADS[name][step] for name in SPREADS] for step in range(3)]
    torch.testing.assert_close(
        bounds(config, REFERENCE, SHAKEN), torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_unit_roundoff_is_the_largest_relative_error_of_a_rounding(name, dtype):
    """1 + u lies halfway between 1 and the next number, and rounds to the even one, 1; a little more rounds up."""
    unit = ROUNDOFF[name]
    halfway = torch.tensor([1 + unit, 1 + unit * (1 + 2**-10)], dtype=torch.float64)
    assert halfway.to(dtype).tolist() == [1, 1 + 2 * unit]


def test_the_same_numbers_are_equal():
    result = compare(parse([]), REFERENCE, REFERENCE, SHAKEN)
    assert result.passed and result.steps == result.of == 3
    assert result.max_loss_difference == result.max_grad_norm_difference == result.share_of_bound == 0


@pytest.mark.parametrize(
    ("options", "unit"),
    [("", "nats/byte"), ("--tokenizer folder", "nats/token"), ("--vocab-size 9 --data ids.npy", "nats/token")],
)
def test_a_difference_of_losses_is_per_byte_only_if_tokens_are_bytes(options, unit):
    off = differing(REFERENCE, 1, loss=1.01)
    said = compare(parse(options.split()), off, REFERENCE, SHAKEN).in_words()
    assert said.startswith(f"NOT EQUAL: loss differs by at most 4.0e-02 {unit}, gradient norm by 0.0e+00 (relative), ")


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("name", ["loss", "grad_norm"])
@pytest.mark.parametrize("sign", [1, -1])
def test_each_step_has_its_bound(step, name, sign):
    config = parse([])
    bound = rounding(config) + SPREAD * SPREADS[name][step]
    inside, outside = (
        compare(config, differing(REFERENCE, step, **{name: 1 + sign * share * bound}), REFERENCE, SHAKEN)
        for share in (0.9, 1.1)
    )
    assert inside.passed and not outside.passed
    assert inside.share_of_bound == pytest.approx(0.9, rel=1e-6)
    wanted = 0.9 * bound * (REFERENCE[step]["loss"] if name == "loss" else 1)
    got = inside.max_loss_difference if name == "loss" else inside.max_grad_norm_difference
    assert got == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_finite_is_not_equal(wrong):
    for name in ("loss", "grad_norm"):
        assert not compare(parse([]), differing(REFERENCE, 1, **{name: wrong}), REFERENCE, SHAKEN).passed
    every = [dict.fromkeys(record, wrong) for record in REFERENCE]
    assert not compare(parse([]), REFERENCE, every, every).passed


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "off"), [("fp32", 1e-5), ("bf16", 0.02)])
@pytest.mark.parametrize("step", [0, 12, STEPS - 1])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_loss_that_is_slightly_off_fails_in_every_step(trained, dtype, off, step, sign):
    """About twice the bound of the last step: 5e-6 in fp32 and 1% in bf16, where roundoff alone is 0.4%."""
    config, reference, shaken, _others = trained[dtype]
    factor = 1 + sign * off
    assert len(bounds(config, reference, shaken)) == STEPS
    assert not compare(config, differing(reference, step, loss=factor), reference, shaken).passed
    if dtype == "fp32":
        assert not compare(config, differing(reference, step, grad_norm=factor), reference, shaken).passed


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("run", ["shaken otherwise", "in two microbatches"])
def test_another_run_with_other_roundings_passes(trained, dtype, run):
    """The bound comes from one draw of shaking. Neither of these runs contributed to it."""
    config, reference, shaken, others = trained[dtype]
    assert others[run] not in (reference, shaken)
    result = compare(config, others[run], reference, shaken)
    assert result.passed and result.steps == STEPS, result


def test_where_rounding_may_cause_anything_nothing_is_compared():
    config = parse([])
    wild = differing(SHAKEN, 2, loss=1 + 1.01 * LARGEST / SPREAD)
    result = compare(config, differing(REFERENCE, 2, loss=2.0), REFERENCE, wild)
    assert result.passed and (result.steps, result.of) == (2, 3)
    assert "equal in 2 of 3 steps" in result.in_words()
    assert not compare(config, differing(REFERENCE, 1, loss=1.01), REFERENCE, wild).passed
    nothing = compare(config, REFERENCE, REFERENCE, differing(REFERENCE, 0, grad_norm=1.1))
    assert nothing.steps == 0 and not nothing.passed and "NOT COMPARED" in nothing.in_words()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_shaking_moves_every_parameter_by_what_a_rounding_may_change(name, dtype):
    """By at least u, up to the fp32 rounding of the product, and by at most two fp32 units if one is 2 u."""
    model = torch.nn.Linear(40, 50)
    before = [p.clone() for p in model.parameters()]
    unit = torch.finfo(dtype).eps / 2
    shake_(model, SHAKE[name], torch.Generator().manual_seed(0))
    for old, new in zip(before, model.parameters(), strict=True):
        change = ((new.double() - old.double()) / old.double()).detach()
        assert change.abs().min() >= unit * (1 - 2**-15) and change.abs().max() <= 4 * unit
    assert change.sign().unique().tolist() == [-1.0, 1.0]
