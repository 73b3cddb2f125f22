"""Memory of head and loss in pieces: what Note [Memory of the loss] in fusedtp/nn/linear_loss.py says, no more."""

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fusedtp.nn import linear_cross_entropy
from fusedtp.nn import loss as loss_module
from fusedtp.ops.matmul import widens

V, K, ROWS = 1000, 64, 32  # vocabulary, width, rows per piece
STEPS = 1024  # columns of a piece, padded with zeros, see Note [Steps of K on CPU] in ops/matmul.py
FEW = 256 * ROWS + 16 * V  # some numbers per row of the piece; a chunk of one row, widened, and its temporaries


def peak_bytes(function: Callable[[], object]) -> tuple[int, int]:
    """The peak of bytes that torch's allocator handed out while `function` ran, and the bytes still allocated after it.

    Memory allocated before does not count; an operation's temporaries do.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, now


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CPU_CHUNK", 256)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


@pytest.mark.slow
@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("tokens", [64, 160])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_piece_of_logits_and_the_gradients_are_all_there_is(dtype, tokens, main_grad):
    x, w = (torch.randn(n, K).to(dtype).requires_grad_() for n in (tokens, V))
    if main_grad:
        w.main_grad = torch.zeros(V, K)
    labels = torch.randint(0, V, (tokens,))
    size, piece = x.element_size(), ROWS * V * x.element_size()
    losses = []
    most, left = peak_bytes(lambda: losses.append(linear_cross_entropy(x, w, labels, max_logits_bytes=piece)))
    kept = tokens * K * size + V * K * 4
    widened = V * K * 4 + ROWS * V * 4 if widens(x) else 0
    operand = 512 * (ROWS + K) * 4 if size == 2 else 0  # a block of dweight's product, see ops/matmul.py
    operand += ROWS * STEPS * 2 if size == 2 and not widens(x) else 0  # and of dx's, padded with zeros
    assert kept <= left <= kept + FEW
    assert piece + kept <= most <= piece + kept + widened + operand + FEW

    most, _ = peak_bytes(losses.pop().backward)
    product = 0 if main_grad else V * K * size + (V * K * 4 if size == 2 else 0)
    assert most <= tokens * K * size + product + FEW


def test_without_gradients_a_piece_is_all_there_is():
    x, w = (torch.randn(n, K).requires_grad_() for n in (160, V))
    labels = torch.randint(0, V, (160,))
    with torch.no_grad():
        most, left = peak_bytes(lambda: linear_cross_entropy(x, w, labels, max_logits_bytes=ROWS * V * 4))
    assert left == 0 and most <= ROWS * V * 4 + FEW
