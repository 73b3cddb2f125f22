"""Mixture of experts: send rows to their experts, run the experts' matmuls, and bring the outputs back."""

from .combine import moe_combine, moe_matmul_combine
from .dispatch import moe_dispatch, moe_dispatch_gated, moe_dispatch_matmul
from .grouped import grouped_gated, grouped_matmul
from .plan import MoEHandle, usual_room
from .rounds import Mlp, RecvUsage, moe_rounds
from .stages import moe_in_stages

__all__ = [
    "Mlp", "MoEHandle", "RecvUsage", "grouped_gated", "grouped_matmul", "moe_combine", "moe_dispatch",
    "moe_dispatch_gated", "moe_dispatch_matmul", "moe_in_stages", "moe_matmul_combine", "moe_rounds", "usual_room",
]  # fmt: skip
