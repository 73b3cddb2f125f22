"""The single-device formula that each operation declares as its reference, with torch's own autograd.

The weights of all ranks form one full weight and the shards of x one full x, so forward and each gradient are one plain
matmul. Results are dicts of named tensors for one rank: y0, y1, ..., dx, dw0, dw1, ..., db0, ...
"""

import torch
from torch import Tensor

from fusedtp.ops.operation import OPERATIONS
from tests.properties.cases import Case, Tensors

Named = dict[str, Tensor]


def expected(case: Case, data: Tensors, rank: int, dtype: torch.dtype = torch.float64) -> Named:
    """The results of rank `rank` after forward and backward, computed in `dtype`."""
    return _gather(case, data, rank, dtype) if case.gathers else _reduction(case, data, rank, dtype)


def _forward_backward(
    operation: str, x: Tensor, w: Tensor, b: Tensor, g: Tensor, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """x [..., K], w [N, K], b [N], g [..., N] -> y, dx, dw, db."""
    reference, dy = OPERATIONS[operation].reference, g.flatten(0, -2).to(dtype)
    leaves = [t.to(dtype).detach().requires_grad_() for t in (x.flatten(0, -2), w, b)]
    if operation == "all_gather_wgrad":  # the weight gradient alone; the others are not needed
        (dw,) = reference(leaves[0].detach(), [dy])
        return torch.zeros_like(g), torch.zeros_like(x), dw, torch.zeros_like(b)
    with torch.enable_grad():
        if operation == "all_gather_matmul":
            (y,) = reference(leaves[0], [leaves[1]], [leaves[2]])
        else:
            y = reference(*leaves)
    dx, dw, db = torch.autograd.grad(y, leaves, dy)
    return y.detach().reshape(g.shape), dx.reshape(x.shape), dw, db


def _gather(case: Case, data: Tensors, rank: int, dtype: torch.dtype) -> Named:
    dim = 0 if case.batch is None else 1
    widths = [n for of_rank in case.local for n in of_rank]
    weights = [w for of_rank in data.weights for w in of_rank]
    biases = [b for of_rank in data.biases for b in of_rank]
    biases = [w.new_zeros(n) if b is None else b for b, w, n in zip(biases, weights, widths, strict=True)]
    gradients = [
        torch.zeros_like(g) if i in case.unused else g for of_rank in data.gradients for i, g in enumerate(of_rank)
    ]
    y, dx, dw, db = _forward_backward(
        case.operation,
        torch.cat(data.xs, dim),
        torch.cat(weights),
        torch.cat(biases),
        torch.cat(gradients, -1),
        dtype,
    )
    count = len(case.local[0])
    mine = slice(rank * count, (rank + 1) * count)
    named = {f"y{i}": t for i, t in enumerate(y.split(widths, -1)[mine])}
    named["dx"] = dx.split(case.sizes, dim)[rank]
    named |= {f"dw{i}": t for i, t in enumerate(dw.split(widths)[mine])}
    named |= {f"db{i}": t for i, t in enumerate(db.split(widths)[mine]) if data.biases[rank][i] is not None}
    return named


def _reduction(case: Case, data: Tensors, rank: int, dtype: torch.dtype) -> Named:
    dim = 0 if case.batch is None else 1
    everywhere = case.operation == "matmul_all_reduce"
    widths = [k for (k,) in case.local]
    weights = [w for (w,) in data.weights]
    bias = data.biases[rank][0]
    gradients = [g for (g,) in data.gradients]
    y, dx, dw, db = _forward_backward(
        case.operation,
        torch.cat(data.xs, -1),
        torch.cat(weights, -1),
        weights[0].new_zeros(case.features) if bias is None else bias,
        gradients[0] if everywhere else torch.cat(gradients, dim),
        dtype,
    )
    named = {"y0": y if everywhere else y.split(case.sizes, dim)[rank]}
    named["dx"], named["dw0"] = dx.split(widths, -1)[rank], dw.split(widths, -1)[rank]
    if bias is not None:  # with sharded rows, each rank's bias gradient comes from its own rows
        named["db0"] = db if everywhere else gradients[rank].flatten(0, -2).to(dtype).sum(0)
    return named
