"""The garbage collector of processes that load much and live long: it took a sixth of the time of loading."""

import atexit
import gc


def pause() -> None:
    """None while modules are loaded: nearly all of what they make stays."""
    gc.disable()


def seldom() -> None:
    """Leave alone what is loaded by now, and look less often at what comes: by default after 700 new objects."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # else extension modules report leaks
    gc.set_threshold(10_000, 10, 10)
    gc.enable()
