"""Head and loss fused, in pieces: the formula's value and gradients, without the logits of all tokens in memory."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusedtp.nn import linear_cross_entropy
from fusedtp.nn.init import chunk_of
from fusedtp.ops.matmul import widens
from tests.harness import world
from tests.nn.support import assert_close, assert_same_function, assert_within, randn, roundings_of

IGNORED = -100


def draw(tokens: int, vocab: int, width: int, seed: int) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.25] = IGNORED
    x, w, b = randn(tokens, width, seed=seed), randn(vocab, width, seed=seed + 1), randn(vocab, seed=seed + 2)
    return SimpleNamespace(x=x, w=w, b=b, labels=labels)


def formula(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
    """The loss by its formula; 0 without labels."""
    count = int((labels != IGNORED).sum())
    logits = x @ w.t() if b is None else x @ w.t() + b
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / max(count, 1)


@pytest.mark.slow
@given(
    st.integers(0, 9),
    st.integers(1, 9),
    st.integers(1, 5),
    st.booleans(),
    st.integers(1, 40),
    st.integers(0, 99),
)
def test_without_a_group_it_is_the_formula(tokens, vocab, width, bias, numbers, seed):
    at = draw(tokens, vocab, width, seed)
    inputs, names = [at.x, at.w, at.b][: 2 + bias], ["x", "weight", "bias"]
    assert_same_function(
        lambda x, w, b=None: linear_cross_entropy(x, w, at.labels, bias=b, max_logits_bytes=8 * numbers),
        lambda x, w, b=None: formula(x, w, b, at.labels),
        inputs, names[: 2 + bias],
    )  # fmt: skip


def of_ranks(group, sizes, vocab, width, numbers, seed, sharded, main_grad) -> tuple[torch.Tensor, ...]:
    """This rank's loss, dx (of its rows, or its part of the sum) and dw."""
    tokens, rank, ranks = sum(sizes), group.rank(), group.size()
    at = draw(tokens, vocab, width, seed)
    begin = sum(sizes[:rank])
    x = (at.x[begin : begin + sizes[rank]] if sharded else at.x).clone().requires_grad_()
    w = chunk_of(at.w, 0, rank, ranks).clone().requires_grad_()
    if main_grad:
        w.main_grad = torch.ones_like(w)
    loss = linear_cross_entropy(
        x, w, at.labels, group, sizes=sizes if sharded else None, vocab_size=vocab if seed % 2 else None,
        max_logits_bytes=8 * numbers,
    )  # fmt: skip
    (loss * 3).backward()
    assert (w.grad is None) == main_grad
    return loss.detach(), x.grad, w.main_grad - 1 if main_grad else w.grad


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 5), min_size=2, max_size=4), st.integers(1, 9), st.integers(1, 40), st.integers(0, 99),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_ranks_agree_with_the_formula(sizes, vocab, numbers, seed, sharded, main_grad):
    at = draw(sum(sizes), vocab, 3, seed)
    x, w = at.x.requires_grad_(), at.w.requires_grad_()
    want = formula(x, w, None, at.labels)
    (want * 3).backward()
    outcomes = world(len(sizes)).run(of_ranks, tuple(sizes), vocab, 3, numbers, seed, sharded, main_grad)
    for loss, _, _ in outcomes:
        assert torch.equal(loss, outcomes[0][0])
        assert_close("loss", loss, want.detach())
    parts = [dx for _, dx, _ in outcomes]
    assert_close("dx", torch.cat(parts) if sharded else sum(parts), x.grad)
    assert_close("dw", torch.cat([dw for _, _, dw in outcomes]), w.grad)


class Largest(TorchDispatchMode):
    """The size of the largest tensor allocated in this context; views do not count."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **kwargs or {})
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_of_all_tokens_never_exist(dtype):
    tokens, vocab, width = 300, 500, 8
    at = draw(tokens, vocab, width, 0)
    x, w = at.x.to(dtype).requires_grad_(), at.w.to(dtype).requires_grad_()
    limit = 10 * vocab  # elements of a piece: ten rows
    behind = 12 if dtype == torch.bfloat16 and not widens(x) else 0  # zeros: Note [Steps of K on CPU] in ops/matmul.py
    with Largest() as largest:
        linear_cross_entropy(x, w, at.labels, max_logits_bytes=limit * x.element_size()).backward()
    assert largest.elements == max(10 * (vocab + behind), vocab * width)
    with Largest() as largest:
        linear_cross_entropy(x, w, at.labels).backward()
    assert largest.elements == tokens * (vocab + behind), "this is how a piece of all rows would show"


def test_a_16_bit_weight_s_gradient_is_summed_over_pieces_in_fp32():
    """One row per piece or all rows: integers give the same logits, and only the order of an fp32 sum differs."""
    at = draw(256, 5, 4, 3)
    x, w = (t.round().clamp(-2, 2).to(torch.bfloat16).requires_grad_() for t in (at.x, at.w))
    sums = []
    for limit in (1, 1 << 20):
        w.main_grad = torch.zeros(5, 4)
        linear_cross_entropy(x, w, at.labels, max_logits_bytes=limit).backward()
        sums.append(w.main_grad)
    count = int((at.labels != IGNORED).sum())
    absolute = x.detach().double().abs().sum(0).expand(5, 4) / count  # a softmax minus one-hot is at most 1
    assert_within("dw", sums[0], sums[1].double(), roundings_of(2, 256) * torch.finfo(torch.float32).eps * absolute)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [7, 1031, 5000], ids=lambda rows: f"{rows} rows a piece")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_bias_s_gradient_is_rounded_once_after_all_rows(dtype, rows):
    """Equal logits in four columns: entries of dlogits are 1/4 or -3/4, exact in every dtype.

    Sums of rows are therefore exact in fp32, and the only allowed error in 16 bits is one rounding of the whole sum.
    Rows are sorted by label: sums of pieces are large, have more digits than 16 bits hold, and cancel.
    """
    vocab = 4
    labels = torch.arange(vocab).repeat_interleave(1031)
    labels[::100] = IGNORED
    tokens = len(labels)
    x, weight = torch.zeros(tokens, 2, dtype=dtype), torch.zeros(vocab, 2, dtype=dtype)
    bias = torch.zeros(vocab, dtype=dtype, requires_grad=True)
    limit = rows * vocab * x.element_size()
    linear_cross_entropy(x, weight, labels, bias=bias, num_labels=1, max_logits_bytes=limit).backward()
    counted = labels[labels != IGNORED]
    exact = (0.25 - F.one_hot(counted, vocab).double()).sum(0)
    assert torch.equal(bias.grad, exact.to(dtype)), f"{bias.grad.tolist()}, wanted {exact.tolist()}"


def test_without_gradients_none_is_made():
    at = draw(6, 5, 4, 1)
    with torch.no_grad(), Largest() as largest:
        linear_cross_entropy(at.x, at.w, at.labels, max_logits_bytes=8)
    assert largest.elements <= 6  # a piece is one row of 5 logits; there are losses of 6 tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda at: {"labels": at.labels[:3]}, r"labels \[6\], got"),
        (lambda at: {"weight": at.w[:, :2]}, "wanted x"),
        (lambda at: {"weight": at.w.float()}, "one dtype, not torch.float64, torch.float32"),
        (lambda at: {"sizes": (3, 3)}, "need a group"),
        (lambda at: {"x": at.x[0, 0]}, "wanted x"),
        (lambda at: {"bias": at.w[:1, 0]}, r"bias has shape \(1,\), wanted \[V\] for weight \(5, 4\)"),
        (lambda at: {"bias": at.x[:, :1]}, r"bias has shape \(6, 1\)"),
        (lambda at: {"labels": at.labels.double()}, "labels of integers, got torch.float64, torch.float64"),
        (lambda at: {"x": at.x.long(), "weight": at.w.long()}, "logits of floats"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    at = draw(6, 5, 4, 1)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{"x": at.x, "weight": at.w, "labels": at.labels} | change(at))


def test_a_label_outside_the_vocabulary_is_named():
    at = draw(6, 5, 4, 1)
    with pytest.raises(IndexError, match="label 5 is outside the vocabulary of 5"):
        linear_cross_entropy(at.x, at.w, at.labels.clamp(min=5))


def test_double_backward_raises():
    at = draw(6, 5, 4, 1)
    loss = linear_cross_entropy(at.x.requires_grad_(), at.w, at.labels)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(loss, at.x, create_graph=True)


def with_rows_of_its_own(group) -> None:
    at = draw(6, 10, 4, 1)
    linear_cross_entropy(at.x[:3], at.w[:5], at.labels, group, sizes=(4, 2) if group.rank() == 0 else (3, 3))


def test_a_rank_whose_rows_do_not_fit_is_named_and_no_peer_waits():
    first, second = world(2).outcomes(with_rows_of_its_own)
    assert first.is_a("ValueError") and "rank 0 has 3 rows; sizes is [4, 2]" in first.message
    assert second.is_a("PeerFailed") and "rank 0 raised" in second.message and second.seconds < 10
