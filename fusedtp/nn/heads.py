"""Which numbers of ranks can share the heads of attention."""

from __future__ import annotations


def heads_split(world_size: int, heads: int, kv_heads: int) -> bool:
    """Whether every rank gets as many whole query heads, and has their kv heads.

    Ranks share the kv heads evenly too, or, where these are fewer, several ranks evenly share one.
    """
    if world_size < 1 or heads % world_size:
        return False
    return kv_heads % world_size == 0 or world_size % kv_heads == 0


def sizes_that_split(heads: int, kv_heads: int) -> str:
    """All world sizes that would do, in words: "1, 2, 4"."""
    return ", ".join(str(size) for size in range(1, heads + 1) if heads_split(size, heads, kv_heads))
