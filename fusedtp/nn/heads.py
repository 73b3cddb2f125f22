"""World sizes that can share attention heads."""

from __future__ import annotations


def heads_split(world_size: int, heads: int, kv_heads: int) -> bool:
    """Whether every rank gets equally many whole query heads, along with their kv heads.

    Ranks divide the kv heads evenly too; if there are fewer kv heads than ranks, equally many ranks share each.
    """
    if world_size < 1 or heads % world_size:
        return False
    return kv_heads % world_size == 0 or world_size % kv_heads == 0


def sizes_that_split(heads: int, kv_heads: int) -> str:
    """All possible world sizes as text: "1, 2, 4"."""
    return ", ".join(str(size) for size in range(1, heads + 1) if heads_split(size, heads, kv_heads))
