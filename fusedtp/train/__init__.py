"""The thin trainer: it takes a model, a mesh, data and an optimizer. `fusedtp train` (fusedtp/commands) is built on it.

    loop         what happens in a step: `Trainer`
    mesh         this rank among all: pipeline x data parallel x tensor parallel
    data         text to tokens to batches, in one order on any mesh
    stages       a model cut into pipeline stages, run by torch's schedules; `bubbles`: how idle they are, and must be
    shard        blocks compiled and checkpointed; FSDP2 over data-parallel ranks
    checkpoint   what a run is, saved whole or not at all; when it is saved
    watch        time by kind, stragglers, NaN; `pulse`: ranks that hang; `clocks` measures
    config       the options of a run, and what is wrong with them
    foreign      models of transformers as the trainer takes models; `hf`: transformers' own Trainer, accelerate

`loop` is the top layer: nothing here imports it, and nothing imports the commands.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusedtp.train.checkpoint import Checkpoints, Saver
    from fusedtp.train.loop import Trainer

__all__ = ["Checkpoints", "Saver", "Trainer"]


def __getattr__(name: str) -> Any:
    """Imported when asked for: a command that reads a folder needs no trainer."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fusedtp.train import checkpoint, loop

    return getattr(loop if name == "Trainer" else checkpoint, name)
