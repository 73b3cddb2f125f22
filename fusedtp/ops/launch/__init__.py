"""Host side of the kernels: configurations, operands, launches; launchers of local kernels.

The launchers of fused and grouped matmuls are in their operations' files. Outputs are ordinary tensors, never views of
the workspace. Imports triton lazily.
"""

from fusedtp.comm.launching import Launch

from . import cross_entropy, pointwise, quantize
from .config import Config, Machine
from .plain import matmul, scaled_matmul
from .run import DTYPES, require_triton

__all__ = [
    "DTYPES",
    "Config",
    "Launch",
    "Machine",
    "cross_entropy",
    "matmul",
    "pointwise",
    "quantize",
    "require_triton",
    "scaled_matmul",
]
