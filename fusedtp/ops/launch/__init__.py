"""Host side of the fused kernels: choose a configuration, allocate outputs, launch. Imports triton lazily.

Called with a workspace's device view by the `triton` engine of each operation, between the workspace's begin and
end. Outputs are ordinary tensors; nothing of the workspace is handed out.
"""

from . import cross_entropy, grouped, moe, moe_matmul, moe_matmul_combine, pointwise
from .config import Config, Machine
from .gather import all_gather_bytes, all_gather_matmul, all_gather_wgrad, plan_matmul, plan_wgrad
from .plain import Epilogue, gated_matmul, matmul, scaled_gated_matmul, scaled_matmul
from .run import DTYPES, Launch, require_triton
from .scatter import (
    matmul_all_reduce,
    matmul_all_reduce_bytes,
    matmul_reduce_scatter,
    plan_one_shot,
    plan_reduce_scatter,
    plan_two_shot,
    reduce_scatter_bytes,
)

__all__ = [
    "DTYPES",
    "Config",
    "Epilogue",
    "Launch",
    "Machine",
    "all_gather_bytes",
    "all_gather_matmul",
    "all_gather_wgrad",
    "cross_entropy",
    "gated_matmul",
    "grouped",
    "matmul",
    "matmul_all_reduce",
    "matmul_all_reduce_bytes",
    "matmul_reduce_scatter",
    "moe",
    "moe_matmul",
    "moe_matmul_combine",
    "plan_matmul",
    "plan_one_shot",
    "plan_reduce_scatter",
    "plan_two_shot",
    "plan_wgrad",
    "pointwise",
    "reduce_scatter_bytes",
    "require_triton",
    "scaled_gated_matmul",
    "scaled_matmul",
]
