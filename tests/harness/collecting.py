"""The garbage collector of processes that live long and load much: it took a tenth of the tests' processor time."""

import gc


def seldom() -> None:
    """Leave alone what is loaded by now, and look less often at what comes: by default after 700 new objects.

    A process that ends as Python's do calls gc.unfreeze() before, else extension modules report leaks.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
