"""Which rows of a gathered tensor belong to which rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedtp.comm import Place


def split(n: int, world_size: int) -> tuple[int, ...]:
    """Split n rows over ranks like torch.chunk (and DTensor's Shard): ceil(n / W) each, the last fewer or none."""
    if not torch.compiler.is_compiling() and n % world_size == 0:  # while tracing, this would add a guard
        return (n // world_size,) * world_size
    each = -(-n // world_size)
    return tuple([max(0, min(each, n - r * each)) for r in range(world_size)])


@dataclass(frozen=True)
class Rows:
    """The row map of a sharded token dimension.

    dim=0   local [T_r, K],     global [T, K]      batch 1
    dim=1   local [B, S_r, K],  global [B, S, K]   batch B

    With S = sum(sizes) and off_p = sum(sizes[:p]), rank p's local row i (batch-major) is global row
    (i // S_p) * S + off_p + i % S_p.
    """

    sizes: tuple[int, ...]
    batch: int = 1

    @property
    def length(self) -> int:
        """S: rows of all ranks, per batch entry."""
        return sum(self.sizes)

    @property
    def total(self) -> int:
        return self.batch * self.length

    @property
    def longest(self) -> int:
        """Rows of the rank that holds the most."""
        return self.batch * max(self.sizes)

    def offset(self, p: int) -> int:
        return sum(self.sizes[:p])

    def local(self, p: int) -> int:
        """Rows that rank p holds."""
        return self.batch * self.sizes[p]

    def parts(self, full: Tensor) -> list[Sequence[Tensor]]:
        """Every rank's rows of a global [total, N] as views of contiguous rows, one per batch entry."""
        views, w = full.split_with_sizes(self.sizes * self.batch), len(self.sizes)
        return [views[p::w] for p in range(w)]

    def blocks(self, full: Tensor, p: int) -> Sequence[Tensor]:
        """The same for one rank."""
        return self.parts(full)[p]

    def runs(self, local: Tensor, p: int) -> Sequence[Tensor]:
        """The same rows in rank p's own [local(p), N]."""
        return (local,) if self.batch == 1 else local.split_with_sizes((self.sizes[p],) * self.batch)

    def pairs(self, full: Tensor, local: Tensor, p: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(view of the global rows, view of the local rows) of rank p, one pair per batch entry."""
        return zip(self.blocks(full, p), self.runs(local, p), strict=True)

    def put(self, full: Tensor, local: Tensor, p: int) -> None:
        """Copy rank p's local rows to their places in the global rows."""
        for block, run in self.pairs(full, local, p):
            block.copy_(run)

    def gather(self, parts: Sequence[Tensor]) -> Tensor:
        """Every rank's local [local(p), N] -> global [total, N]."""
        if self.batch == 1:
            return torch.cat(list(parts))
        n = parts[0].shape[-1]
        shaped = [t.reshape(self.batch, s, n) for t, s in zip(parts, self.sizes, strict=True)]
        return torch.cat(shaped, dim=1).reshape(self.total, n)

    def ordered_by_rank(self, full: Tensor) -> Tensor:
        """Global [total, N] -> the ranks' local rows one after another, [total, N]; `full` itself if batch is 1."""
        if self.batch == 1:
            return full
        shaped = full.reshape(self.batch, self.length, full.shape[-1])
        parts = [t.flatten(0, 1) for t in shaped.split(list(self.sizes), dim=1)]
        return torch.cat(parts)


def rows_of_shard(x: Tensor, at: Place, sizes: Sequence[int] | None, dim: int) -> Rows:
    """The row map when `x` is this rank's shard. Without `sizes` all ranks hold as many rows as this one."""
    if dim not in (0, 1):
        raise ValueError(f"rank {at.rank}: dim is {dim}; it must be 0 for [T, K] or 1 for [B, S, K]")
    if x.dim() != 2 + dim:
        raise ValueError(
            f"rank {at.rank}: x has shape {tuple(x.shape)}; with dim={dim} it must have {2 + dim} dimensions"
        )
    batch = x.shape[0] if dim == 1 else 1
    if sizes is None:
        return Rows((x.shape[dim],) * at.world_size, batch)
    rows = Rows(tuple(int(n) for n in sizes), batch)
    _check_sizes(rows.sizes, at)
    if rows.sizes[at.rank] != x.shape[dim]:
        raise ValueError(
            f"rank {at.rank}: sizes[{at.rank}] is {rows.sizes[at.rank]}, but this rank's shard has {x.shape[dim]} rows "
            f"(shape {tuple(x.shape)}, dim {dim})"
        )
    return rows


def rows_of_full(x: Tensor, at: Place, sizes: Sequence[int] | None, dim: int) -> Rows:
    """The row map when `x` holds all rows. Without `sizes` they are split like torch.chunk."""
    shape = x.shape
    if dim not in (0, 1) or len(shape) != 2 + dim:
        raise ValueError(
            f"rank {at.rank}: dim is {dim} and x has shape {tuple(shape)}; wanted dim 0 and [T, K], or dim 1 and "
            "[B, S, K]"
        )
    batch = shape[0] if dim == 1 else 1
    if sizes is None:
        return Rows(split(shape[dim], at.world_size), batch)
    rows = Rows(tuple(int(n) for n in sizes), batch)
    _check_sizes(rows.sizes, at)
    if rows.length != shape[dim]:
        raise ValueError(
            f"rank {at.rank}: sizes {list(rows.sizes)} sum to {rows.length}, but dim {dim} of x {tuple(shape)} is "
            f"{shape[dim]}"
        )
    return rows


def rows_of_all(x: Tensor, at: Place, _sizes: object = None, _dim: int = 0) -> Rows:
    """The row map of rows [..., K] that every rank has and keeps: each rank sums its share as torch.chunk splits it."""
    return Rows(split(math.prod(x.shape[:-1]), at.world_size))


def _check_sizes(sizes: tuple[int, ...], at: Place) -> None:
    if len(sizes) != at.world_size or min(sizes) < 0:
        raise ValueError(f"rank {at.rank}: sizes must be {at.world_size} row counts, one per rank, not {list(sizes)}")
