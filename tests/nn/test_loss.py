"""Cross-entropy with a sharded vocabulary equals the formula on full logits."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedtp.comm import VirtualWorld, place
from fusedtp.nn import loss as loss_module
from fusedtp.nn import vocab_parallel_cross_entropy
from fusedtp.nn.init import chunk_of
from fusedtp.nn.loss import combine_stats, local_gradient, local_stats
from tests.harness import world
from tests.nn import formulas
from tests.nn.support import assert_close, assert_same_function, assert_within, randn, roundings_of

IGNORED = -100

cases = st.tuples(st.integers(0, 6), st.integers(1, 9), st.integers(0, 1 << 30))


def draw(tokens: int, vocab: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels; a quarter of the labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.25] = IGNORED
    return randn(tokens, vocab, seed=seed) * 3, labels


@pytest.mark.slow
@given(cases)
def test_without_a_group_it_is_plain_cross_entropy(case: tuple[int, int, int]) -> None:
    logits, labels = draw(*case)
    assert_same_function(
        lambda x: vocab_parallel_cross_entropy(x, labels),
        lambda x: formulas.cross_entropy(x, labels),
        [logits],
        ["logits"],
    )


@given(cases, st.integers(1, 5))
def test_parts_of_the_vocabulary_combine_to_the_whole(case: tuple[int, int, int], world_size: int) -> None:
    logits, labels = draw(*case)
    parts = [chunk_of(logits, 1, rank, world_size) for rank in range(world_size)]
    starts = [sum(part.shape[1] for part in parts[:rank]) for rank in range(world_size)]
    stats = [local_stats(part, labels, start) for part, start in zip(parts, starts, strict=True)]
    lse, target = combine_stats(torch.stack(stats))
    assert_close("lse", lse, logits.logsumexp(1))
    count = labels != IGNORED
    assert_close("target", target[count], logits[count].gather(1, labels[count, None])[:, 0])

    scale = randn(len(labels), seed=case[2]) * count
    got = [
        local_gradient(part, labels, start, own[:, 0], lse, scale)
        for part, start, own in zip(parts, starts, stats, strict=True)
    ]
    onehot = F.one_hot(labels.clamp(min=0), logits.shape[1])
    assert_close("gradient", torch.cat(got, 1), (logits.softmax(1) - onehot) * scale[:, None])


@settings(max_examples=20)
@given(cases, st.integers(1, 4), st.booleans())
def test_ranks_agree_with_the_whole(case: tuple[int, int, int], world_size: int, say_vocab: bool) -> None:
    logits, labels = draw(*case)

    def rank_main(group: object) -> tuple[torch.Tensor, torch.Tensor]:
        part = chunk_of(logits, 1, group.rank(), world_size).clone().requires_grad_()  # type: ignore[attr-defined]
        size = logits.shape[1] if say_vocab else None
        loss = vocab_parallel_cross_entropy(part, labels, group, vocab_size=size)
        loss.backward()
        return loss.detach(), part.grad

    got = VirtualWorld(world_size).run(rank_main)
    want = logits.clone().requires_grad_()
    loss = formulas.cross_entropy(want, labels)
    loss.backward()
    for rank, (mine, _) in enumerate(got):
        assert_close(f"loss of rank {rank}", mine, loss)
    assert_close("dlogits", torch.cat([gradient for _, gradient in got], 1), want.grad)


@settings(max_examples=20)
@given(cases, st.integers(1, 4), st.sampled_from(["ignored nan", "masked part", "nothing odd"]))
def test_what_compiled_code_runs_agrees_with_the_whole(
    case: tuple[int, int, int], world_size: int, oddity: str
) -> None:
    logits, labels = draw(*case)
    columns = -(-logits.shape[1] // world_size)
    if oddity == "ignored nan":
        logits[labels == IGNORED] = torch.nan
    if oddity == "masked part" and columns < logits.shape[1]:  # of rank 0, where no label is
        logits[:, :columns] = -torch.inf
        labels = labels.where((labels == IGNORED) | (labels >= columns), columns)

    def rank_main(group: object) -> tuple[torch.Tensor, torch.Tensor]:
        at = place(group)  # type: ignore[arg-type]
        part = chunk_of(logits, 1, at.rank, world_size).clone().requires_grad_()
        start = min(at.rank * columns, logits.shape[1])
        losses = loss_module._traced_losses(part, labels, start, logits.shape[1], IGNORED, at)
        losses.backward(weights)
        assert part.grad is not None
        return losses.detach(), part.grad

    weights = randn(len(labels), seed=case[2])
    got = VirtualWorld(world_size).run(rank_main)
    want = logits.clone().requires_grad_()
    losses = F.cross_entropy(want, labels, ignore_index=IGNORED, reduction="none")
    losses.backward(weights)
    assert want.grad is not None
    for rank, (mine, _) in enumerate(got):
        assert_close(f"losses of rank {rank}", mine, losses)
    gradient = want.grad.masked_fill((labels == IGNORED)[:, None], 0.0)
    assert_close("dlogits", torch.cat([each for _, each in got], 1), gradient)


def test_rows_are_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = draw(23, 7, 1)
    whole = vocab_parallel_cross_entropy(logits, labels)
    monkeypatch.setattr(loss_module, "CPU_CHUNK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10)
    assert len(list(loss_module._row_chunks(logits))) == 23
    assert_same_function(
        lambda x: vocab_parallel_cross_entropy(x, labels),
        lambda x: F.cross_entropy(x, labels),
        [logits],
        ["logits"],
    )
    assert_close("loss", vocab_parallel_cross_entropy(logits, labels), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_logits_have_an_fp32_loss_and_a_gradient_rounded_once(dtype: torch.dtype) -> None:
    logits, labels = draw(50, 40, 2)
    mine = logits.to(dtype).requires_grad_()
    theirs = logits.to(dtype).double().requires_grad_()
    loss, want = vocab_parallel_cross_entropy(mine, labels), F.cross_entropy(theirs, labels)
    loss.backward()
    want.backward()
    assert loss.dtype == torch.float32
    assert_close("loss", loss, want, roundings=8)
    assert mine.grad is not None and mine.grad.dtype == dtype
    # In fp32: a log-sum-exp of 40 terms and a difference, whose absolute errors exp makes relative; then the
    # exponential, the one-hot and the scale. All but the first have one or two terms, about as large as |logit|.
    assert theirs.grad is not None
    largest = 1 + logits.abs().max().item()
    fp32 = (roundings_of(1, 40) + roundings_of(4, 2) * 2 * largest) * torch.finfo(torch.float32).eps
    scale = 1 / (labels != IGNORED).sum()
    assert_within("dlogits", mine.grad, theirs.grad, fp32 * scale * torch.ones_like(theirs.grad))


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]])
    assert vocab_parallel_cross_entropy(logits, torch.tensor([1])).item() == 2e4


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("world_size", [1, 2])
def test_odd_values_come_out_as_torch_gives_them(odd: float, world_size: int) -> None:
    logits, labels = randn(3, 4).float(), torch.tensor([0, 1, 2])
    logits[1, 2] = odd
    stats = [local_stats(part, labels, 2 * i) for i, part in enumerate(logits.chunk(world_size, 1))]
    lse, target = combine_stats(torch.stack(stats))
    wanted = F.cross_entropy(logits, labels, reduction="none")
    assert torch.equal((lse - target).isnan(), wanted.isnan())
    assert_close("losses", (lse - target).nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_an_ignored_label_count_for_nothing(odd: float, dtype: torch.dtype) -> None:
    logits = randn(3, 4).to(dtype)
    logits[1, 2] = odd
    logits.requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([0, IGNORED, 2]))
    loss.backward()
    assert loss.isfinite() and logits.grad is not None
    assert logits.grad.isfinite().all() and not logits.grad[1].any() and logits.grad[0].any()


def test_a_masked_vocabulary_part_counts_for_nothing() -> None:
    logits = randn(3, 4)
    logits[:, 2:] = -torch.inf
    labels = torch.tensor([0, 1, 0])
    stats = torch.stack([local_stats(part, labels, 2 * i) for i, part in enumerate(logits.chunk(2, 1))])
    lse, _ = combine_stats(stats)
    assert_close("lse", lse, logits[:, :2].logsumexp(1))
    assert not local_gradient(logits[:, 2:], labels, 2, stats[1, :, 0], lse, torch.ones(3).double()).any()


def test_no_labels_at_all_is_loss_zero() -> None:
    logits = randn(3, 4).requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, torch.full((3,), IGNORED))
    loss.backward()
    assert loss.item() == 0.0 and logits.grad is not None and not logits.grad.any()


def test_num_labels_weighs_microbatches_by_the_global_count() -> None:
    logits, labels = draw(12, 5, 3)
    count = int((labels != IGNORED).sum())
    parts = [
        vocab_parallel_cross_entropy(x, y, num_labels=count)
        for x, y in zip(logits.split(5), labels.split(5), strict=True)
    ]
    assert_close("loss", torch.stack(parts).sum(), F.cross_entropy(logits, labels))


@pytest.mark.parametrize("label", [4, -1, 1000])
def test_a_label_outside_the_vocabulary_raises(label: int) -> None:
    with pytest.raises(IndexError, match=f"label {label} is outside the vocabulary of 4"):
        vocab_parallel_cross_entropy(torch.randn(2, 4), torch.tensor([0, label]))


def test_shapes_that_do_not_fit_raise() -> None:
    with pytest.raises(ValueError, match=r"wanted logits \[T, V\]"):
        vocab_parallel_cross_entropy(torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"wanted logits \[T, V\]"):
        vocab_parallel_cross_entropy(torch.randn(2, 4), torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize("logits, labels", [(torch.float32, torch.float32), (torch.int64, torch.int64)])
def test_floats_are_no_labels_and_integers_no_logits(logits: torch.dtype, labels: torch.dtype) -> None:
    with pytest.raises(ValueError, match="wanted logits of floats and labels of integers, got"):
        vocab_parallel_cross_entropy(torch.ones(2, 4).to(logits), torch.ones(2).to(labels))


def with_a_fault_on_rank_0(group, fault: str) -> None:
    labels, logits = torch.zeros(2, dtype=torch.long), torch.randn(2, 3)
    if group.rank() == 0:
        labels, logits = {
            "shape": (labels[:1], logits),
            "label": (labels + 6, logits),
            "columns": (labels, logits[:, :2]),
        }[fault]
    vocab_parallel_cross_entropy(logits, labels, group, vocab_size=6)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["shape", "label", "columns"])
def test_a_rank_that_raises_tells_its_peers(fault: str) -> None:
    first, second = world(2).outcomes(with_a_fault_on_rank_0, fault, timeout=30)
    assert first.is_a("IndexError" if fault == "label" else "ValueError")
    assert second.is_a("PeerFailed") and "rank 0 raised" in second.message and second.seconds < 10


def test_wrong_columns_name_the_rank() -> None:
    def rank_main(group: object) -> None:
        vocab_parallel_cross_entropy(torch.randn(2, 3), torch.zeros(2, dtype=torch.long), group, vocab_size=7)

    with pytest.raises(Exception, match="rank 0 holds 3 columns of logits, wanted 4 of 7 over 2 ranks"):
        VirtualWorld(2).run(rank_main)


def test_double_backward_raises() -> None:
    logits = randn(3, 4).requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([0, 1, 2]))
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(loss, logits, create_graph=True)
