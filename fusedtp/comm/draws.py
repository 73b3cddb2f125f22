"""Random numbers of ranks that share a layer.

    column-parallel    save the generator's state
    dropout on [T, N_r], with other sizes on other ranks: generators diverge
    row-parallel       if the state has changed, reseed the generator from the saved state

Ranks start with the same state and draw the same numbers for whole tensors; this keeps replicated tensors and
parameters identical. Between two split layers a rank draws only for its own columns. If ranks have different numbers of
columns, their generators would differ from then on.

Ranks that start with different states may draw for their own columns, but not for whole tensors: `Watched` detects it.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor


class Draws:
    """Saves one rank's generator state while it works on its part of a layer."""

    def __init__(self) -> None:
        self._before: Tensor | None = None

    def part(self, device: torch.device) -> None:
        """From here on, draws may be for a part whose size differs between ranks. The last call counts."""
        generator = _generator(device)
        self._before = None if generator is None else generator.get_state()

    def whole(self, device: torch.device, some_have_none: bool = False) -> None:
        """From here on, draws are for whole tensors. some_have_none: some ranks have no columns and draw nothing."""
        before, self._before = self._before, None
        generator = None if before is None else _generator(device)
        if before is None or generator is None:
            return
        if some_have_none or not torch.equal(generator.get_state(), before):
            generator.manual_seed(int.from_bytes(blake2b(before.numpy().tobytes(), digest_size=7).digest()))


class Watched:
    """Detects whether a forward draws numbers for whole tensors.

    part    from here on, draws are for this rank's columns (True) or for whole tensors (False)
    drawn   whether any were drawn for whole tensors so far
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._part, self._drawn = device, False, False
        self._before = states(device)

    def part(self, part: bool) -> None:
        now = states(self._device)
        if not self._part:
            self._drawn |= any(
                not torch.equal(x, self._before[name]) for name, x in now.items() if name in self._before
            )
        self._part, self._before = part, now

    def drawn(self) -> bool:
        self.part(False)
        return self._drawn


def states(device: torch.device) -> dict[str, Tensor]:
    """The states of the generators that a forward on this device draws from."""
    found = {"cpu": torch.default_generator, device.type: _generator(device)}
    return {name: generator.get_state() for name, generator in found.items() if generator is not None}


def _generator(device: torch.device) -> torch.Generator | None:
    """The device's default generator; None during CUDA graph capture, which has its own."""
    if device.type != "cuda":
        return torch.default_generator
    if torch.cuda.is_current_stream_capturing():
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
