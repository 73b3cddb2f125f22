"""Send a shard's rows to the peers by copies instead of programs: the other transport of a fused gather.

    current stream   E |  fused kernel: arrives, waits for each flag, multiplies         | waits for F | next
    copy stream          waits for E | rows to r + 1 | their flags | rows to r + 2 | ... | F

On a GPU a copy engine sends while the kernel runs, and all programs of the kernel multiply. On CPU the rank copies
before it interprets its kernel.

Note [Copies beside a kernel]
The kernel waits for the same flags with either transport, and flags cover the same rows. So each rank may choose its
transport independently of its peers, and one workspace serves both. (Few rows never travel by copies: their kernel,
all_gather_few_rows.py, waits for one flag per rank.) Slots are safe for these reasons, see Note [Two rotating buffers]
in workspace.py:

- E follows the previous call's fused kernel on the current stream. That kernel has waited for every peer's arrival in
  its call, so all peers have left the call before it, and their slots of this parity may be written. E also follows the
  producer of x. A sending program of this launch has exactly the same guarantees.
- Flags follow their rows on the same stream, where a copy begins only after the previous one has been performed. A flag
  is a copy of the device's own epoch. Between GPUs a copy needs no SM, which matters because waiting kernels may occupy
  all of them; within one GPU a copy may be a kernel, so launchers leave SMs free for it. (NCCL copies its flags as
  well: its authors say that since CUDA 13.1 a stream's own writes do not reach another GPU, NVIDIA/nccl issue 2052.)
- Work after the kernel waits for F. So x may change afterwards, and this rank arrives in its next call only after
  everything it sent has landed. Peers that read nothing leave without waiting for it and rely on that.
- Only the kernel signals the arrival: its first program does, before it waits for anything.

A copy needs its destination's address when it is enqueued, so the host must know which slot the device's epoch selects.
It counts the epochs that it has begun, but it cannot see those of a captured graph: under capture, and on a workspace
with a captured graph, programs send. With HIP they always do.

If a rank's kernel has failed, its programs send nothing more. Copies that its host had enqueued before it noticed still
run, and may overwrite rows that a slow peer is reading. That peer misses this rank's arrival in one of its next two
calls and fails there; its results since then are invalid. If the host raises after enqueueing copies, possibly without
their kernel, it gives up the workspace: the flags claim that the call's rows have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import semaphore
from .streams import SideStream

# The link idles while a copy and the copy of its flags start, so only a large shard gains from a second piece.
# Predicted for 8 H100 and the gate and up projections of Llama 3 8B, in one, two and four pieces: 8192 tokens (8 MiB)
# 347, 344, 376 us, compared with 386 for programs and 334 for the product alone; 2048 tokens (2 MiB), in one and two
# pieces, 133 and 168 us (not measured over NVLink yet).
IN_TWO = 8 << 20  # bytes from which a shard is sent in two pieces


class Part(NamedTuple):
    """Rows first, ..., last - 1 of the shard, for `peer`; `flags` flags from `flag` on announce them."""

    peer: int
    first: int
    last: int
    flag: int
    flags: int


def pieces_of(nbytes: int) -> int:
    """Number of copies to one peer for a shard of `nbytes`."""
    return 2 if nbytes >= IN_TWO else 1


@lru_cache(256)
def parts(rank: int, world_size: int, num_rows: int, chunk_rows: int, pieces: int) -> tuple[Part, ...]:
    """What `rank` sends, in order: to its successor first, in pieces of whole chunks. Flag c belongs to chunk c."""
    chunks = -(-num_rows // chunk_rows)
    each = max(1, -(-chunks // pieces))
    made = []
    for step in range(1, world_size):
        for chunk in range(0, chunks, each):
            end = min(chunk + each, chunks)
            last = min(end * chunk_rows, num_rows)
            made.append(Part((rank + step) % world_size, chunk * chunk_rows, last, chunk, end - chunk))
    return tuple(made)


class Copies:
    """The destinations of one call's copies.

    slots   uint8 [slot_bytes]         per rank: its slot of this call
    flags   int32 [flags_per_source]   per rank: the flags there that this rank sets
    epoch   int32 [epoch_words]        on the device; the first word is the number of this call
    side    the copy stream; None on CPU
    begun   whether anything was enqueued
    """

    def __init__(
        self,
        rank: int,
        slots: Sequence[Tensor],
        flags: Sequence[Tensor],
        epoch: Tensor,
        side: SideStream | None,
    ) -> None:
        self.rank, self.slots, self.flags, self.epoch, self.side = rank, slots, flags, epoch, side
        self.begun = False

    def of(self, x: Tensor, begin: int, chunk_rows: int) -> Sending:
        """Send x [R, K], contiguous, to byte offset `begin` of every peer's slot. Call it before the call begins."""
        return Sending(self, x, begin, chunk_rows)


class Sending:
    """The copies of one call. `send` comes after the epoch update and before the kernel, `join` after the kernel."""

    def __init__(self, copies: Copies, x: Tensor, begin: int, chunk_rows: int) -> None:
        assert x.is_contiguous()
        num_rows, self.row = x.shape[0], x.shape[1] * x.element_size()
        self.copies, self.x, self.begin = copies, x, begin
        self.parts = parts(copies.rank, len(copies.slots), num_rows, chunk_rows, pieces_of(x.nbytes))
        most = max((part.flags for part in self.parts), default=1)
        self.words = copies.epoch[:1].repeat(most)  # not later: this may load a torch kernel

    def send(self) -> None:
        """Enqueue all copies; on CPU, perform them."""
        self.copies.begun = True
        if self.copies.side is None:
            self._by_host()
        else:
            self._by_stream(self.copies.side)

    def _by_host(self) -> None:
        copies, rows = self.copies, self.x.detach().reshape(-1).view(torch.uint8)
        for part in self.parts:
            first, last = part.first * self.row, part.last * self.row
            copies.slots[part.peer][self.begin + first : self.begin + last] = rows[first:last]
            semaphore.fence()
            copies.flags[part.peer][part.flag : part.flag + part.flags] = self.words[: part.flags]

    def _by_stream(self, side: SideStream) -> None:
        copies, source, words = self.copies, self.x.data_ptr(), self.words.data_ptr()
        side.fork()
        for peer, first, last, flag, flags in self.parts:
            if last > first and self.row:
                there, at = copies.slots[peer].data_ptr() + self.begin, first * self.row
                side.copy(there + at, source + at, (last - first) * self.row)
            side.copy(copies.flags[peer].data_ptr() + 4 * flag, words, 4 * flags)

    def join(self) -> None:
        """The current stream waits for all copies."""
        if self.copies.side is not None:
            self.copies.side.join()
