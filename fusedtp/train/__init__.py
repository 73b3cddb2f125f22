"""The thin trainer behind `fusedtp train`.

    launch    command line -> checks -> torchrun -> one run a rank
    run       build, train, verify, sample, report
    loop      what happens in a step: `Trainer`, which also trains what you bring

Each other file is one idea that these use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusedtp.train.checkpoint import Checkpoints
    from fusedtp.train.loop import Saver, Trainer

__all__ = ["Checkpoints", "Saver", "Trainer"]


def __getattr__(name: str) -> Any:
    """Imported when asked for: a command that reads a folder needs no trainer."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fusedtp.train import checkpoint, loop

    return getattr(checkpoint if name == "Checkpoints" else loop, name)
