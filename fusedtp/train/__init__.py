"""The thin trainer: it takes a model, a mesh, data and an optimizer. `fusedtp train` (fusedtp/commands) is built on it.

    loop         the phases of a training step: `Trainer`
    mesh         this rank's position: pipeline x data parallel x tensor parallel
    data         text to tokens to batches, in the same order on any mesh
    stages       a model cut into pipeline stages, run by torch's schedules; `bubbles`: measured and ideal idle share
    shard        torch.compile and activation checkpointing of blocks; FSDP2 over data-parallel ranks
    checkpoint   the state of a run, saved atomically; when to save
    watch        time by kind, stragglers, NaN; `pulse`: ranks that hang; `clocks`: the timers
    config       the options of a run, and their validation
    foreign      adapter for models of transformers; `hf`: transformers' own Trainer, accelerate

`loop` is the top layer: nothing here imports it, and nothing imports the commands.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusedtp.train.checkpoint import Checkpoints, Saver
    from fusedtp.train.loop import Trainer

__all__ = ["Checkpoints", "Saver", "Trainer"]


def __getattr__(name: str) -> Any:
    """Import lazily: commands that only read a run's folder do not need the trainer."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fusedtp.train import checkpoint, loop

    return getattr(loop if name == "Trainer" else checkpoint, name)
