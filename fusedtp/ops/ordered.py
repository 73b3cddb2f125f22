"""Custom ops whose calls keep their order under a compiler."""

from __future__ import annotations

from torch.library import CustomOpDef  # type: ignore[attr-defined]


def ordered(*ops: CustomOpDef) -> None:
    """Keep the calls of these in the order of the program.

    Calls of a group have one order on all ranks; a compiler that sees no data flow between two of them may swap them,
    and would not on all ranks alike where their sizes differ. Older torch has no such mark.
    """
    if not hasattr(CustomOpDef, "register_effect"):
        return
    from torch.library import EffectType  # type: ignore[attr-defined]

    for op in ops:
        op.register_effect(EffectType.ORDERED)
