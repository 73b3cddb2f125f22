"""The same layers on any number of ranks: bitwise equal on exact inputs, within the fp32 bound on random ones."""

import pytest
import torch
from torch import Tensor

import fusedtp
from fusedtp.ops.rows import split
from tests.engines import ENGINES
from tests.harness import world

T, K, N = 13, 11, 17  # not divisible by any world size


def tensors(dtype: torch.dtype, exact: bool) -> list[Tensor]:
    """x [T, K], up [N, K], b [N], down [K, N], c [K], g [T, K].

    Exact inputs have entries 0, 1 and -1, so |h| <= 12 and |y| <= 17 * 12 + 1 < 2**8, and bf16 holds every sum of
    forward and backward: |dh| <= 11, |ddown| <= 13 * 12, |dx| <= 17 * 11, |dup| <= 13 * 11.
    """
    generator = torch.Generator().manual_seed(3)
    shapes = (T, K), (N, K), (N,), (K, N), (K,), (T, K)
    if exact:
        return [torch.randint(-1, 2, s, generator=generator).to(dtype) for s in shapes]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def two_layers(group, engine: str, dtype: torch.dtype, exact: bool) -> list[Tensor]:
    """This rank's y, dx, dup, db, ddown, dc of y = (x @ up.T + b) @ down.T + c, column- then row-parallel."""
    x, up, b, down, c, g = tensors(dtype, exact)
    w, r = group.size(), group.rank()
    sizes, widths = split(T, w), split(N, w)
    parts = x.split(sizes)[r], up.split(widths)[r], b.split(widths)[r], down.split(widths, 1)[r], c
    x, up, b, down, c = (t.detach().requires_grad_() for t in parts)
    (h,) = fusedtp.all_gather_matmul(x, [up], group, biases=[b], sizes=sizes, engine=engine)
    y = fusedtp.matmul_reduce_scatter(h, down, group, bias=c, sizes=sizes, engine=engine)
    y.backward(g.split(sizes)[r])
    return [y.detach(), x.grad, up.grad, b.grad, down.grad, c.grad]


def whole(shards: list[list[Tensor]]) -> dict[str, Tensor]:
    """The shards of all ranks concatenated."""
    y, dx, dup, db, ddown, dc = (list(column) for column in zip(*shards, strict=True))
    return {
        "y": torch.cat(y), "dx": torch.cat(dx), "dup": torch.cat(dup), "db": torch.cat(db),
        "ddown": torch.cat(ddown, 1), "dc": torch.stack(dc).sum(0),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_world_sizes_agree_bit_for_bit_on_exact_inputs(engine, dtype):
    one = whole(world(1).run(two_layers, engine, dtype, True))
    x, up, b, down, c, _ = (t.double() for t in tensors(dtype, True))
    assert torch.equal(one["y"].double(), (x @ up.T + b) @ down.T + c)
    for size in (2, 3, 4):
        for name, t in whole(world(size).run(two_layers, engine, dtype, True)).items():
            assert torch.equal(t, one[name]), f"{name} on {size} ranks"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_world_sizes_agree_within_the_bound_on_random_inputs(engine):
    one = whole(world(1).run(two_layers, engine, torch.float32, False))
    x, up, b, down, c, g = (t.double().abs() for t in tensors(torch.float32, False))
    h, dh = x @ up.T + b, g @ down
    magnitude = {
        "y": h @ down.T + c, "dx": dh @ up, "dup": dh.T @ x, "db": dh.sum(0), "ddown": g.T @ h, "dc": g.sum(0)
    }  # fmt: skip
    for size in (2, 3, 4):
        for name, t in whole(world(size).run(two_layers, engine, torch.float32, False)).items():
            # both runs err by at most (terms of both layers + W + 2) unit roundoffs of the sum of absolute values
            bound = 2 * (T + K + N + size + 2) * 2.0**-24 * magnitude[name]
            assert ((t.double() - one[name].double()).abs() <= bound).all(), f"{name} on {size} ranks"
