"""Find out whether ranks hold different values at some place in a model: compare in each call, until it is certain.

    parts of the heads, or of a gradient      other values on each rank
    values that every rank holds whole        the same values, except for roundoff

Each rank represents its tensor by sums of its elements with random signs. If ranks disagree in them, they have parts;
that is certain at once and final. Ranks may agree by chance, so agreement is counted in bits: for each number the bits
that all ranks share; equal numbers count once, zeros and values already seen in the previous call do not count.
Numbers that are not finite tell nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtp.ops.tokens import gather_tokens

# Leading bits not affected by roundoff; for wide dtypes fewer than possible, since terms of a sum may cancel.
BITS = {torch.float64: 30, torch.float32: 13, torch.float16: 8, torch.bfloat16: 6}
SURE = 48  # partial sums do not agree in this many bits by chance
SUMS, FEW, MANY = 64, 1 << 12, 1 << 20


@dataclass
class Question:
    """Whether ranks hold different values at one place.

    differ   None: not known yet
    agreed   number of bits in which they have agreed so far
    last     the values of the last call
    """

    differ: bool | None = None
    agreed: float = 0.0
    last: Tensor | None = None

    @torch.no_grad()
    def ask(self, xs: Sequence[Tensor], precisions: Sequence[int], group: str, world_size: int) -> bool:
        """Whether to treat these as different in this call; values that are not finite are. Collective.

        Zeros and constants without a gradient, such as masks, do not block an answer if other values have a gradient.
        """
        own = torch.cat([_shown(x) for x in xs])
        every = gather_tokens(own, group, (own.numel(),) * world_size).view(world_size, len(xs), -1).cpu()
        told = [_told(rows, bits) for rows, bits in zip(every.unbind(1), precisions, strict=True)]
        if any(differ for differ, _ in told):
            self.differ, self.last = True, None
            return True
        there = [(x, bits) for x, (_, bits), size in zip(xs, told, every[0, :, SUMS], strict=True) if size]
        counting = [bits for x, bits in there if x.requires_grad] or [bits for _, bits in there]
        if self.last is None or not torch.equal(every[0], self.last):
            self.agreed += min(counting, default=0.0)
        self.last = every[0]
        if self.agreed >= SURE:
            self.differ, self.last = False, None
        return not bool(every.isfinite().all())


def precision(x: Tensor) -> int:
    """Number of leading bits in which values of this kind agree if they differ only by roundoff."""
    kind = x.device.type
    bits = BITS.get(x.dtype, 2)
    return min(bits, BITS.get(torch.get_autocast_dtype(kind), 2)) if torch.is_autocast_enabled(kind) else bits


def _shown(x: Tensor) -> Tensor:
    """Sums of elements with random signs, the number of elements, and of distinct nonzero values in a small sample."""
    flat = (x.detach().values() if x.is_nested else x.detach()).reshape(-1)
    count = flat.numel()
    some = flat[:: max(1, count // MANY)].double()
    generator = torch.Generator(x.device).manual_seed(0)
    signs = torch.randint(0, 2, some.shape, generator=generator, device=x.device) * 2 - 1
    rows = -(-some.numel() // SUMS)
    sums = F.pad(some * signs, (0, rows * SUMS - some.numel())).view(rows, SUMS).sum(0)
    few = some[:: max(1, some.numel() // FEW)]
    distinct = few[few != 0].unique().numel()
    return torch.cat([sums, sums.new_tensor([count, distinct])])


def _told(rows: Tensor, bits: int) -> tuple[bool | None, float]:
    """The ranks' sums -> whether they differ (None: cannot tell), and in how many bits they agree."""
    sums, counts, distinct = rows[:, :SUMS], rows[:, SUMS], rows[:, SUMS + 1]
    if not torch.equal(counts, counts[:1].expand_as(counts)):
        return True, 0.0
    top = sums.abs().max()
    if not top.isfinite() or top == 0:
        return None, 0.0
    if (sums - sums[0]).abs().max() > top * 2.0**-bits:
        return True, 0.0
    numbers = (sums[0].abs() * 2.0**bits / top).round().unique()
    each = numbers[numbers > 0].log2().sort(descending=True).values
    return False, float(each[: int(distinct.min())].sum())
