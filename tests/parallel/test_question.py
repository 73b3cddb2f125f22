"""Different parts are never mistaken for equal tensors, and gradients are right even before the answer is known."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedtp
from fusedtp.comm import VirtualWorld, communicator
from fusedtp.parallel.question import BITS, SURE, Question, precision
from tests.harness import world
from tests.parallel.support import full, tp_mesh


def answers(group: Any, calls: list[list[list[Tensor]]]) -> list[tuple[bool | None, bool]]:
    """Each call lists every rank's tensors. Returns, after each call, the answer so far and what to do in this call."""
    question, comm, found = Question(), communicator(group), []
    for call in calls:
        xs = call[comm.rank]
        taken = question.ask(xs, [precision(x) for x in xs], comm.name, comm.world_size)
        found.append((question.differ, taken))
    return found


def asked(*calls: list[list[Tensor]]) -> list[tuple[bool | None, bool]]:
    first, other = VirtualWorld(2).run(lambda group: answers(group, list(calls)))
    assert first == other
    return first


def both(*xs: Tensor) -> list[list[Tensor]]:
    return [list(xs), [x.clone().requires_grad_(x.requires_grad) for x in xs]]


VALUES = torch.randn(300, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("size", [24, 300])
def test_what_roundoff_tells_apart_is_the_same(dtype: torch.dtype, size: int):
    x = VALUES[:size].to(dtype)
    assert asked(both(x)) == [(False, False)]
    assert asked([[x], [x * (1 + torch.finfo(dtype).eps)]]) == [(False, False)]


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("size", [1, 12, 300])
def test_parts_that_resemble_each_other_differ(dtype: torch.dtype, size: int):
    x = VALUES[:size].to(dtype)
    assert asked([[x], [x * 0.96]]) == [(True, True)]
    assert asked([[x], [torch.zeros_like(x)]]) == [(True, True)]


@pytest.mark.parametrize(
    "x", [torch.zeros(5), torch.zeros(0, 5), torch.tensor([torch.inf, 1]), torch.full((3,), torch.nan)]
)
def test_zeros_and_what_is_not_finite_say_nothing(x: Tensor):
    taken = not bool(x.isfinite().all())
    assert asked(both(x), both(x), [[VALUES], [VALUES.flip(0)]]) == [(None, taken), (None, taken), (True, True)]
    assert asked(both(x), both(VALUES)) == [(None, taken), (False, False)]


def test_one_rank_has_no_values():
    assert asked([[torch.zeros(0)], [VALUES]]) == [(True, True)]


@pytest.mark.parametrize("size", [1, 3, 300])
def test_few_numbers_must_agree_more_than_once(size: int):
    """So must constants, which can come from weights that start at zero."""
    calls = [both(torch.full((size,), 1 + i / 7)) for i in range(5)]
    enough = math.ceil(SURE / BITS[torch.float32])
    assert asked(*calls) == [(None, False)] * (enough - 1) + [(False, False)] * (len(calls) - enough + 1)
    assert asked(*[calls[0]] * 9) == [(None, False)] * 9, "the same number again says nothing"


def test_masks_do_not_keep_it_from_an_answer():
    mask, hidden = torch.zeros(4, 4), VALUES.clone().requires_grad_()
    assert asked(both(mask, hidden)) == [(False, False)]
    assert asked(both(mask, torch.zeros(3, requires_grad=True))) == [(None, False)]
    assert asked([[mask, hidden], [mask + 1, hidden]]) == [(True, True)]


def test_autocast_leaves_fewer_bits():
    assert precision(VALUES) == BITS[torch.float32]
    with torch.autocast("cpu", torch.bfloat16):
        assert precision(VALUES) == BITS[torch.bfloat16]


class Attention(nn.Module):
    """Has norms over heads, which the plan does not name. Queries may start at zero."""

    def __init__(self, norm: Any, zero: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.q_norm, self.proj = norm(4), nn.Linear(16, 16)
        for parameter in self.q_norm.parameters():
            nn.init.normal_(parameter, 1.0)
        if zero:
            nn.init.zeros_(self.q.weight)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.proj(F.scaled_dot_product_attention(self.q_norm(q), k, v).transpose(1, 2).flatten(2))


class Gains(nn.Module):
    """Three parameters of a module with split children."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gain = nn.Linear(16, 32), nn.Linear(32, 16), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.up(x))
        return self.down(self.gain[0] * h + self.gain[1] * h.sigmoid() + self.gain[2] * h.square())


class Net(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.emb, self.norm, self.inner = nn.Linear(8, 16, bias=False), nn.RMSNorm(16), inner

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        return x + self.inner(self.norm(x))


ATTENTION = {"inner.q": "colwise", "inner.k": "colwise", "inner.v": "colwise", "inner.proj": "rowwise"}
GAINS = {"inner.up": "colwise", "inner.down": "rowwise"}
STARTS: dict[str, Any] = {
    "zero_queries": (lambda: Attention(nn.RMSNorm, True), ATTENTION, 1.0, 1.0),
    "zero_queries_biased_norm": (lambda: Attention(nn.LayerNorm, True), ATTENTION, 1.0, 1.0),
    "zero_inputs": (lambda: Attention(nn.RMSNorm, False), ATTENTION, 0.0, 1.0),
    "zero_gradients": (Gains, GAINS, 1.0, 0.0),
    "infinite_gradients": (Gains, GAINS, 1.0, torch.inf),
}


def off(got: Tensor, want: Tensor) -> float:
    return float((full(got) - want).abs().max() / want.abs().max().clamp(min=1.0))


def gradients(group: Any, start: str, sequence_parallel: bool) -> tuple[list[dict[str, float]], list[int]]:
    """Errors of gradients in three steps, the first set up by `start`, and how often ranks compared values in each."""
    torch.manual_seed(0)
    make, plan, of_inputs, of_gradients = STARTS[start]
    plain = Net(make()).double()
    model = fusedtp.parallelize(
        copy.deepcopy(plain), tp_mesh(group), plan=plan, sequence_parallel=sequence_parallel, prove=False
    )
    generator, errors, counts = torch.Generator().manual_seed(1), [], []
    asks, count = Question.ask, 0

    def counted(*args: Any) -> bool:
        nonlocal count
        count += 1
        return asks(*args)

    Question.ask = counted  # type: ignore[method-assign]
    try:
        for step in range(4):
            x = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64) * (1.0 if step else of_inputs)
            count = 0
            for each in (plain, model):
                each.zero_grad()
                (each(x).square().sum() * (1.0 if step else of_gradients)).backward()
            counts.append(count)
            pairs = list(zip(plain.named_parameters(), model.parameters(), strict=True))
            if step or math.isfinite(of_gradients):
                errors.append({name: off(q.grad, p.grad) for (name, p), q in pairs})
            else:
                assert not model.inner.gain.grad.to_local().isfinite().all(), "every rank skips this step"
                continue
            for (_, p), q in pairs:
                p.data -= 0.01 * p.grad
                q.data -= 0.01 * q.grad
    finally:
        Question.ask = asks  # type: ignore[method-assign]
    return errors, counts


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("start", STARTS)
def test_gradients_are_right_before_it_is_known_and_afterwards(start: str, sequence_parallel: bool):
    for errors, counts in world(2).run(gradients, start, sequence_parallel):
        wrong = [
            (step, name, error) for step, found in enumerate(errors) for name, error in found.items() if error > 1e-9
        ]
        assert not wrong, wrong
        assert counts[0] and not counts[-1], f"asked {counts} times"
