"""A shard's rows carried to the peers by copies in place of programs: the other transport of a fused gather.

    current stream   E |  fused kernel: arrives, waits for each flag, multiplies         | waits for F | next
    copy stream          waits for E | rows to r + 1 | their flags | rows to r + 2 | ... | F

On a GPU a copy engine does it beside the kernel, and all programs of the kernel multiply. On CPU the rank copies before
it interprets its kernel.

Note [Copies beside a kernel]
The kernel waits for the same flags in either transport, and the programs that send cover the same rows with them. So a
rank may send either way, whatever its peers do, and the common workspace serves both. (Few rows never go by copies:
their kernel, all_gather_few_rows.py, waits for one flag of each rank.) What makes its slots safe, see
Note [Two rotating buffers] in workspace.py:

- E stands on the current stream behind the fused kernel of the call before, which has waited for every peer's arrival
  in that call; so all peers have left the call before that, and their slots of this parity may be written. It stands
  behind x, too. That is what a sending program of this launch could count on, no more and no less.
- Flags follow their rows on one stream, where a copy begins when the one before it has been performed. They are copies
  of the device's own epoch. Between GPUs that takes no multiprocessor, of which a kernel that waits may hold all; on
  one GPU a copy may be a kernel, so launchers leave it room. (NCCL copies its flags as well: its authors say that since
  CUDA 13.1 a stream's own writes do not reach another GPU, NVIDIA/nccl issue 2052.)
- Whatever follows the kernel waits for F. So x may change, and this rank arrives in its next call only when all that
  it sent has landed. Peers that read nothing, and so leave without waiting for it, rely on that.
- Nobody but the kernel signals the arrival: its first program does, before it waits for anything.

A copy needs its destination's address when it is enqueued, so the host must know which slot the device's epoch stands
for. It counts the epochs that it has begun. What a captured graph counts it cannot see: under capture, and on a
workspace with a captured graph, programs send. With HIP they always do.

A rank whose kernel has failed sends nothing more by programs. Copies that its host had enqueued before it looked are
made all the same. They can overwrite rows that a slow peer still reads. That peer misses this rank's arrival in one of
its next two calls and fails there; what it has computed since is void. Where the host raises after it has enqueued
copies, maybe without their kernel, the workspace is given up: the flags say that the call's rows have come.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import semaphore
from .streams import SideStream

# Each copy of a shard to a peer has a start, and another for its flags, while which the link idles: only a large shard
# makes up for a second one. Predicted for 8 H100 and the gate and up projections of Llama 3 8B, in one piece, two and
# four: 8192 tokens (8 MiB) 347, 344, 376 us, where programs take 386 and the product alone 334; 2048 tokens (2 MiB),
# in one and two, 133 and 168 us (not measured over NVLink yet).
IN_TWO = 8 << 20  # bytes from which a shard is sent in two pieces


class Part(NamedTuple):
    """Rows first, ..., last - 1 of the shard, for `peer`, which learns of them by `flags` flags from `flag` on."""

    peer: int
    first: int
    last: int
    flag: int
    flags: int


def pieces_of(nbytes: int) -> int:
    """Copies of a shard of so many bytes to one peer."""
    return 2 if nbytes >= IN_TWO else 1


@lru_cache(256)
def parts(rank: int, world_size: int, num_rows: int, chunk_rows: int, pieces: int) -> tuple[Part, ...]:
    """What `rank` sends, in order: the successor's rows first, in pieces of whole chunks. Flag c is chunk c's."""
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
    """One call's way to the peers.

    slots   uint8 [slot_bytes]         a rank: the slot of this call
    flags   int32 [flags_per_source]   a rank: the words there that this rank sets
    epoch   int32 [4]                  on the device, the number of this call in front
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
        """x [R, K], contiguous, to `begin` bytes into every peer's slot. Before the call begins."""
        return Sending(self, x, begin, chunk_rows)


class Sending:
    """`send` behind the epoch and before the kernel, `join` behind the kernel."""

    def __init__(self, copies: Copies, x: Tensor, begin: int, chunk_rows: int) -> None:
        assert x.is_contiguous()
        num_rows, self.row = x.shape[0], x.shape[1] * x.element_size()
        self.copies, self.x, self.begin = copies, x, begin
        self.parts = parts(copies.rank, len(copies.slots), num_rows, chunk_rows, pieces_of(x.nbytes))
        most = max((part.flags for part in self.parts), default=1)
        self.words = copies.epoch[:1].repeat(most)  # now: a kernel of torch's may have to be loaded

    def send(self) -> None:
        """Enqueue all copies; on CPU, make them."""
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
