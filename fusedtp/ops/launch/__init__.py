"""Host side of the kernels: configurations, operands, launches; launchers of local kernels and of experts' rows.

The launchers of the fused matmuls stand in their operations' files. Outputs are ordinary tensors; nothing of the
workspace is handed out. Imports triton lazily.
"""

from . import cross_entropy, grouped, moe, moe_matmul, moe_matmul_combine, pointwise
from .config import Config, Machine
from .plain import matmul, scaled_matmul
from .run import DTYPES, Launch, require_triton

__all__ = [
    "DTYPES",
    "Config",
    "Launch",
    "Machine",
    "cross_entropy",
    "grouped",
    "matmul",
    "moe",
    "moe_matmul",
    "moe_matmul_combine",
    "pointwise",
    "require_triton",
    "scaled_matmul",
]
