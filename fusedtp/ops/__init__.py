"""The operations: matmuls that communicate, one per file, and the classes that declare them."""

from .all_gather_matmul import all_gather_matmul
from .all_gather_wgrad import all_gather_wgrad
from .matmul_all_reduce import local_linear, matmul_all_reduce
from .matmul_reduce_scatter import matmul_reduce_scatter
from .moe import grouped_gated, grouped_matmul
from .scaled_all_gather_matmul import scaled_all_gather_matmul
from .scaled_matmul_all_reduce import scaled_matmul_all_reduce
from .scaled_matmul_reduce_scatter import scaled_matmul_reduce_scatter

__all__ = [
    "all_gather_matmul",
    "all_gather_wgrad",
    "grouped_gated",
    "grouped_matmul",
    "local_linear",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "scaled_all_gather_matmul",
    "scaled_matmul_all_reduce",
    "scaled_matmul_reduce_scatter",
]
