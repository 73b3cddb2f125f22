"""Saved memory of each module: its inputs and a few numbers per row, no fp32 copies."""

from collections.abc import Callable

import pytest
import torch

from fusedtp.nn import vocab_parallel_cross_entropy
from fusedtp.nn.mlp import gated
from fusedtp.nn.norm import rms_norm
from fusedtp.nn.rope import rotate

T, N = 64, 512
ROW_NUMBERS = 64 * T + 8 * N  # bytes for labels, statistics, a weight


def kept_bytes(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> int:
    """Bytes of storage that the graph keeps alive, counting each storage once."""
    storages = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function(*inputs)
    return sum(storages.values())


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16().requires_grad_()


labels = torch.randint(0, N, (T,))
tables = torch.randn(1, T, 1, N // 2), torch.randn(1, T, 1, N // 2)
CASES = {
    "loss": (lambda x: vocab_parallel_cross_entropy(x, labels), 1, [draw(T, N)]),
    "norm": (lambda x: rms_norm(x, torch.ones(N, requires_grad=True), 1e-5), 1, [draw(T, N)]),
    "gate": (lambda gate, up: gated(gate, up, "silu"), 2, [draw(T, N), draw(T, N)]),
    "rotation": (lambda x: rotate(x, *tables), 2, [draw(1, T, 1, N)]),  # the tables are shared by all layers
}


@pytest.mark.parametrize("case", CASES)
def test_only_inputs_are_kept(case: str) -> None:
    function, tensors, inputs = CASES[case]
    assert kept_bytes(function, *inputs) <= tensors * T * N * 2 + ROW_NUMBERS


def test_nothing_is_kept_without_gradients() -> None:
    for function, _, inputs in CASES.values():
        with torch.no_grad():
            assert kept_bytes(function, *inputs) == 0
