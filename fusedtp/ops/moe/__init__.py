"""Mixture of experts: rows to their experts, through their matmuls, and back."""

from .api import MoEHandle, moe_combine, moe_dispatch
from .dispatch_matmul import moe_dispatch_gated, moe_dispatch_matmul
from .grouped import grouped_gated, grouped_matmul
from .matmul_combine import moe_matmul_combine
from .rounds import Room, moe_rounds
from .stages import moe_in_stages

__all__ = [
    "MoEHandle", "Room", "grouped_gated", "grouped_matmul", "moe_combine", "moe_dispatch", "moe_dispatch_gated",
    "moe_dispatch_matmul", "moe_in_stages", "moe_matmul_combine", "moe_rounds",
]  # fmt: skip
