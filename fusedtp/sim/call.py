"""One operation as a simulator's case makes it: sizes, options, and how its kernel is cut up."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusedtp.ops.launch import Config
from fusedtp.ops.rows import Rows

TILE = 16


@dataclass(frozen=True)
class Call:
    """One operation.

    sizes    rows of every rank, per batch entry (for an all-reduce only their sum counts)
    widths   N of each weight (the scattered operations take the first)
    k        columns of x; where they are this rank's own, rank r has k + r, or with tma k + 8 r
    chunk    rows (gather) or tiles (reduction) that one flag covers
    programs (senders, others)
    tile     rows and columns of one
    copied   ranks whose rows travel by copies beside the kernel, of a gather
    tma      what no peer writes goes by TMA where it can: of 16-bit operands whose rows are multiples of 8 long
    routing  of an exchange's tokens, one of exchange_cases.ROUTINGS
    """

    operation: str
    sizes: tuple[int, ...]
    widths: tuple[int, ...] = (17,)
    k: int = 16
    batch: int = 1
    bias: bool = True
    keep: bool = False
    dtype: torch.dtype = torch.float32
    chunk: int = 16
    programs: tuple[int, int] = (1, 2)
    tile: int = TILE
    copied: tuple[int, ...] = ()
    tma: bool = False
    routing: str = "any"

    def k_of(self, rank: int) -> int:
        """Columns of x of a rank that has its own."""
        return self.k + rank * (8 if self.tma else 1)

    @property
    def rows(self) -> Rows:
        return Rows(self.sizes, self.batch)

    @property
    def config(self) -> Config:
        senders, others = self.programs
        return Config(
            self.tile,
            self.tile,
            TILE,
            send_programs=senders,
            other_programs=others,
            chunk=self.chunk,
            tma=self.tma,
        )
