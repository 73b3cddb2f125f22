"""The operations: matmuls that communicate, with their siblings, their autograd and the choice between them."""

from .api import all_gather_matmul, all_gather_wgrad, local_linear, matmul_all_reduce, matmul_reduce_scatter

__all__ = [
    "all_gather_matmul",
    "all_gather_wgrad",
    "local_linear",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
]
