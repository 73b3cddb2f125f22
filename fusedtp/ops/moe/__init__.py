"""Mixture of experts: rows to their experts, through their matmuls, and back."""

from .api import MoEHandle, moe_combine, moe_dispatch
from .grouped import grouped_gated, grouped_matmul

__all__ = ["MoEHandle", "grouped_gated", "grouped_matmul", "moe_combine", "moe_dispatch"]
