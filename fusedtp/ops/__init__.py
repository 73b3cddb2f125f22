"""The operations: matmuls that communicate, with their siblings, their autograd and the choice between them."""

from .api import all_gather_matmul, all_gather_wgrad, local_linear, matmul_all_reduce, matmul_reduce_scatter
from .moe.grouped import grouped_gated, grouped_matmul

__all__ = [
    "all_gather_matmul",
    "all_gather_wgrad",
    "grouped_gated",
    "grouped_matmul",
    "local_linear",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
]
