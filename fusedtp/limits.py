"""A time limit for any code, even a loop that never returns: `fusedtp check` runs users' code."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

AGAIN_SECONDS = 0.5


class OutOfTime(BaseException):
    """Raised wherever the program is when its time is up. Not an Exception, so that no case catches it by accident."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises OutOfTime inside the body after `seconds`.

    Uses the process's timer, which interrupts any Python loop. It fires repeatedly, because Python drops an exception
    that is raised in a garbage-collector callback. Limits may be nested: the shorter one applies. Only the main thread
    has such a timer; other threads have no limit.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    begin, inside = time.monotonic(), True

    def over(number: int, frame: Any) -> None:
        if inside:
            raise OutOfTime

    before, (left, _) = signal.signal(signal.SIGALRM, over), signal.getitimer(signal.ITIMER_REAL)
    signal.setitimer(signal.ITIMER_REAL, max(min(seconds, left or seconds), 1e-3), AGAIN_SECONDS)
    try:
        yield
    finally:
        inside = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - begin), 1e-3), AGAIN_SECONDS)
