"""Transformer blocks whose tensor-parallel communication is fused into the matmul."""

from fusedtp import nn
from fusedtp.comm import (
    PeerDied,
    PeerFailed,
    SignalTimeout,
    SignatureMismatch,
    TooManyRows,
    VirtualWorld,
    check,
    reserve,
    set_timeout,
)
from fusedtp.ops import (
    all_gather_matmul,
    all_gather_wgrad,
    grouped_gated,
    grouped_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    scaled_all_gather_matmul,
    scaled_matmul_all_reduce,
    scaled_matmul_reduce_scatter,
)
from fusedtp.ops.all_gather_gated_matmul import all_gather_gated_matmul
from fusedtp.ops.moe import moe_combine, moe_dispatch, moe_in_stages, moe_rounds
from fusedtp.parallel import (
    ExpertSplit,
    FusedColwise,
    FusedEmbedding,
    FusedExperts,
    FusedRowwise,
    Replicated,
    clip_grad_norm_,
    explain,
    from_pretrained,
    from_transformers,
    parallelize,
    prove,
    to_transformers,
)

__version__ = "0.1.0"

__all__ = [
    "ExpertSplit",
    "FusedColwise",
    "FusedEmbedding",
    "FusedExperts",
    "FusedRowwise",
    "PeerDied",
    "PeerFailed",
    "Replicated",
    "SignalTimeout",
    "SignatureMismatch",
    "TooManyRows",
    "VirtualWorld",
    "all_gather_gated_matmul",
    "all_gather_matmul",
    "all_gather_wgrad",
    "check",
    "clip_grad_norm_",
    "explain",
    "from_pretrained",
    "from_transformers",
    "grouped_gated",
    "grouped_matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "moe_combine",
    "moe_dispatch",
    "moe_in_stages",
    "moe_rounds",
    "nn",
    "parallelize",
    "prove",
    "reserve",
    "scaled_all_gather_matmul",
    "scaled_matmul_all_reduce",
    "scaled_matmul_reduce_scatter",
    "set_timeout",
    "to_transformers",
]
