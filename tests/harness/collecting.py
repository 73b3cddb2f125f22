"""Settings of the garbage collector for long-lived processes that load a lot: it took a sixth of the loading time."""

import atexit
import gc


def pause() -> None:
    """Disable collection while modules load: nearly everything they allocate is permanent."""
    gc.disable()


def seldom() -> None:
    """Freeze all loaded objects and collect less often; the default is after 700 new objects."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # otherwise extension modules report leaks
    gc.set_threshold(10_000, 10, 10)
    gc.enable()
