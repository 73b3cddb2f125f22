"""Logits that are split by columns over ranks equal plain ones: values, gradients, losses, and what is gathered."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusedtp.comm import VirtualWorld, communicator
from fusedtp.ops.rows import split
from fusedtp.parallel.vocab_shard import Columns, VocabShard

Program = Callable[[Tensor, Tensor, Tensor], Tensor]


def changed(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    assert change(x) is x
    return x


# Inputs: logits [B, S, V], one weight [V] and one scale [1]. Weight and scale require gradients.
LOCAL: dict[str, Program] = {
    "float": lambda x, w, s: x.float(),
    "scale": lambda x, w, s: x * 0.5,
    "cap": lambda x, w, s: torch.tanh(x / 30.0) * 30.0,
    "divide by a parameter": lambda x, w, s: x / (s + 3.0),
    "add a bias": lambda x, w, s: x + w,
    "flat": lambda x, w, s: x.view(-1, x.shape[-1]),
    "one row": lambda x, w, s: x[0],
    "a slice": lambda x, w, s: x[:, :-1].contiguous(),
    "the last": lambda x, w, s: x[:, -1],
    "unsqueeze": lambda x, w, s: x.unsqueeze(0),
    "masked": lambda x, w, s: x.masked_fill(w > 0, -5.0),
    "where": lambda x, w, s: torch.where(w > 0, x, torch.zeros_like(x)),
    "clamp": lambda x, w, s: x.clamp(-1.0, 1.0),
    "in place": lambda x, w, s: changed(x * 1.0, lambda y: torch.nn.functional.relu(y.add_(w), inplace=True)),
}
GATHERING: dict[str, Program] = {
    "softmax": lambda x, w, s: x.softmax(-1),
    "topk": lambda x, w, s: x.topk(1, -1).values,
    "some columns": lambda x, w, s: x[..., 1:],
    "matmul": lambda x, w, s: x @ w,
    "sum": lambda x, w, s: x.sum(),
    "transpose": lambda x, w, s: x.transpose(1, 2),
    "one number": lambda x, w, s: x[0, -1][1],
}


def tensors(batch: int, length: int, vocab: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, length, vocab), (vocab,), (1,))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def on_rank(group: Any, full: list[Tensor], program: Callable[..., Tensor]) -> tuple[Tensor, list[Any], Counter[str]]:
    """The whole result, gradients of all inputs (for logits, this rank's columns), and what was gathered."""
    world_size, rank = communicator(group).world_size, group.rank()
    sizes, gathered = split(full[0].shape[-1], world_size), Counter[str]()
    local = full[0].split(sizes, -1)[rank].clone().requires_grad_()
    others = [x.clone().requires_grad_() for x in full[1:]]
    columns = Columns(communicator(group).name, rank, world_size, full[0].shape[-1], gathered)
    y = program(VocabShard.of(local, columns), *others)
    counted = Counter(gathered)
    whole = y.full_tensor() if isinstance(y, VocabShard) else y
    (whole * weights_like(whole)).sum().backward()
    return whole.detach(), [local.grad, *(x.grad for x in others)], counted


def weights_like(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(x.dtype)


def compare(world_size: int, full: list[Tensor], program: Callable[..., Tensor], gathers: bool) -> None:
    alone = [x.clone().requires_grad_() for x in full]
    want = program(*alone)
    (want * weights_like(want)).sum().backward()
    sizes = split(full[0].shape[-1], world_size)
    for rank, (got, gradients, counted) in enumerate(
        VirtualWorld(world_size).run(lambda group: on_rank(group, full, program))
    ):
        torch.testing.assert_close(got, want.detach())
        assert got.dtype == want.dtype and bool(counted) == gathers, counted
        wanted = [alone[0].grad.split(sizes, -1)[rank], *(x.grad for x in alone[1:])]
        for mine, theirs in zip(gradients, wanted, strict=True):
            if theirs is None:
                assert mine is None or not mine.any()
            elif mine is None:
                assert not theirs.any()
            else:
                torch.testing.assert_close(mine, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOCAL)
@settings(max_examples=25)
@given(world_size=st.integers(1, 4), vocab=st.integers(1, 11), seed=st.integers(0, 99))
def test_what_treats_columns_alike_stays_local(name: str, world_size: int, vocab: int, seed: int):
    compare(world_size, tensors(2, 3, vocab, seed), LOCAL[name], gathers=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", GATHERING)
@settings(max_examples=25)
@given(world_size=st.integers(1, 4), vocab=st.integers(2, 11), seed=st.integers(0, 99))
def test_anything_else_gathers_and_is_counted(name: str, world_size: int, vocab: int, seed: int):
    compare(world_size, tensors(2, 3, vocab, seed), GATHERING[name], gathers=True)


@pytest.mark.slow
@given(
    world_size=st.integers(1, 4),
    vocab=st.integers(1, 11),
    seed=st.integers(0, 99),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    ignored=st.booleans(),
)
def test_cross_entropy(world_size: int, vocab: int, seed: int, reduction: str, ignored: bool):
    full = tensors(2, 3, vocab, seed)
    labels = torch.randint(0, vocab, (6,), generator=torch.Generator().manual_seed(seed))
    if ignored:
        labels[::2] = -100

    def program(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return F.cross_entropy((x + w).view(-1, vocab), labels, reduction=reduction)

    compare(world_size, full, program, gathers=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("between", [None, (2, 0), "scale"])
def test_the_loss_of_widened_logits_has_the_same_bits_and_makes_no_wide_ones(dtype: torch.dtype, between: Any):
    full = torch.randn(2, 3, 7).to(dtype)
    labels = torch.tensor([0, 6, -100, 3, 3, 1])

    def loss_of(group: Any, by_hand: bool) -> tuple[Tensor, Tensor, bool]:
        rank, world = group.rank(), communicator(group)
        own = full.split(split(7, 2), -1)[rank].clone().requires_grad_()
        columns = Columns(world.name, rank, 2, 7, Counter())
        if by_hand:
            wide = VocabShard.of(own.float(), columns)
        else:
            narrow = VocabShard.of(own, columns)
            wide = narrow.float() if rank else narrow.to(torch.float32)
        assert wide.dtype == torch.float32 and wide.shape == (2, 3, 7)
        if between == "scale":
            wide = wide * 3.0
        flat = wide.view(-1, 7) if between != (2, 0) else wide[:, :].reshape(6, 7)
        loss = F.cross_entropy(flat, labels)
        loss.backward()
        return loss.detach(), own.grad, flat.narrow_local is not None

    for rank in range(2):
        lazy, by_hand = (
            VirtualWorld(2).run(lambda group, eager=eager: loss_of(group, eager))[rank] for eager in (False, True)
        )
        assert torch.equal(lazy[0], by_hand[0]) and torch.equal(lazy[1], by_hand[1])
        assert lazy[2] == (between != "scale") and not by_hand[2]


def test_widened_logits_are_what_they_were_when_they_are_read():
    own = torch.randn(3, 4).bfloat16().requires_grad_()
    columns = Columns("", 0, 1, 4, Counter())
    wide = VocabShard.of(own, columns).float()
    with torch.no_grad():
        assert torch.equal(wide.local, own.float()) and wide.narrow_local is None
    (wide * 2.0).local.sum().backward()  # read first under no_grad: the graph is kept all the same
    assert torch.equal(own.grad, torch.full_like(own, 2.0))
    changed = own.detach().clone()
    late = VocabShard.of(changed, columns).float()
    changed.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place after float"):
        _ = late.local


def test_a_loss_with_smoothing_or_weights_gathers():
    labels = torch.tensor([0, 3, 2, 1, 4, 0])

    def smoothed(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return F.cross_entropy(x.view(-1, 5), labels, label_smoothing=0.1)

    def weighted(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return F.cross_entropy(x.view(-1, 5), labels, weight=w.detach().abs() + 1.0)

    for program in (smoothed, weighted):
        compare(3, tensors(2, 3, 5, 0), program, gathers=True)


@settings(max_examples=25)
@given(world_size=st.integers(1, 4), vocab=st.integers(1, 11), seed=st.integers(0, 99), keep=st.booleans())
def test_argmax_takes_the_first_of_equals(world_size: int, vocab: int, seed: int, keep: bool):
    full = tensors(2, 3, vocab, seed)
    full[0].round_()  # makes many values equal
    want = full[0].argmax(-1, keepdim=keep)

    def body(group: Any) -> Tensor:
        local = full[0].split(split(vocab, world_size), -1)[group.rank()]
        shard = VocabShard.of(local, Columns(communicator(group).name, group.rank(), world_size, vocab, Counter()))
        return shard.argmax(-1, keepdim=keep)

    for got in VirtualWorld(world_size).run(body):
        assert torch.equal(got, want)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * 2


def test_functions_of_others_get_gradients_too():
    compare(3, tensors(2, 3, 7, 0), lambda x, w, s: Doubled.apply(x * 1.0) + w, gathers=False)
    compare(3, tensors(2, 3, 7, 0), lambda x, w, s: Doubled.apply(x).sum(0) @ w, gathers=True)


def test_what_it_says_and_refuses():
    def body(group: Any) -> None:
        local = torch.ones(2, 3, len(range(group.rank(), 7, 2)))[..., : split(7, 2)[group.rank()]]
        shard = VocabShard.of(local, Columns(communicator(group).name, group.rank(), 2, 7, Counter()))
        assert shard.shape == (2, 3, 7) and shard.size(-1) == 7 and shard.dim() == 3 and len(shard) == 2
        assert repr(shard).startswith("VocabShard((2, 3, 7), columns ")
        with pytest.raises(TypeError, match="save its full_tensor"):
            torch.save(shard, "/dev/null")
        with pytest.raises(RuntimeError, match="changes logits in place"):
            shard[0] = 1.0
        with pytest.raises(RuntimeError, match="dropout changes logits in place"):
            torch.nn.functional.dropout(shard, inplace=True)

    VirtualWorld(2).run(body)


THROUGH_VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda x: x[..., 1:3].mul_(2.0),
    "column": lambda x: x.select(-1, 1).fill_(0.0),
    "transposed": lambda x: x.transpose(1, 2).mul_(2.0),
    "view of a view": lambda x: x.transpose(1, 2)[0].mul_(2.0),
    "assigned": lambda x: x[..., :2].__setitem__(slice(None), 5.0),
    "all": lambda x: x.flatten().add_(1.0),
}


def changed_through_views(group: Any) -> list[str]:
    shard = VocabShard.of(torch.ones(2, 3, 2), Columns(communicator(group).name, group.rank(), 2, 4, Counter()))
    said = []
    for change in THROUGH_VIEWS.values():
        with pytest.raises(RuntimeError, match=r"in place.*full_tensor\(\)") as error:
            change(shard)
        said.append(str(error.value))
    picked = shard[torch.arange(2)[:, None], torch.arange(3), 1]  # a copy, as on one device
    assert picked.mul_(2.0).sum() == 12 and shard.sum() == 24
    seen = shard[..., 1:3]
    assert copy.deepcopy(seen).mul_(3.0).sum() == 36 and type(seen.clone()) is Tensor
    assert seen.detach().numpy().sum() == 12
    return said


def test_a_change_through_a_view_is_refused_as_on_the_logits():
    """It would change gathered logits without changing the shards."""
    for said in VirtualWorld(2).run(changed_through_views):
        assert len(said) == len(THROUGH_VIEWS)


def asked_for_gradients(group: Any) -> list[Tensor]:
    """Gradients from a hook, retain_grad, torch.autograd.grad, and retain_grad with a hook that changes them."""
    columns = Columns(communicator(group).name, group.rank(), 2, 4, Counter())

    def logits() -> VocabShard:
        full = torch.arange(24.0).view(2, 3, 4) / 10
        leaf = full.split(2, -1)[group.rank()].clone().requires_grad_()
        return VocabShard.of(leaf * 1.0, columns)

    seen: list[Any] = []
    shard = logits()
    shard.register_hook(lambda grad: seen.append(grad))
    shard.retain_grad()
    shard.logsumexp(-1).sum().backward()
    doubled = logits()
    doubled.register_hook(lambda grad: grad * 2)
    doubled.retain_grad()
    doubled.logsumexp(-1).sum().backward()
    other = logits()
    (by_grad,) = torch.autograd.grad(other.logsumexp(-1).sum(), other)
    return [x.full_tensor() for x in (seen[0], shard.grad, by_grad, doubled.grad)]


def test_gradients_of_logits_are_of_all_columns():
    x = (torch.arange(24.0).view(2, 3, 4) / 10).requires_grad_()
    x.logsumexp(-1).sum().backward()
    for hooked, retained, by_grad, doubled in VirtualWorld(2).run(asked_for_gradients):
        for got, want in ((hooked, x.grad), (retained, x.grad), (by_grad, x.grad), (doubled, 2 * x.grad)):
            torch.testing.assert_close(got, want)
