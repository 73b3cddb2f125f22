"""A limit in seconds on any code, even a loop that never returns: what `fusedtp check` runs is other people's."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

AGAIN_SECONDS = 0.5


class OutOfTime(BaseException):
    """Raised where the program stands when its time is over. No Exception, so that no case catches it by the way."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises OutOfTime inside the body after so many seconds.

    By the process's timer, which interrupts any loop of Python; again and again, since Python drops what is raised in a
    callback of its garbage collector. Limits may be nested: the shorter one holds. A thread other than the main one has
    no such timer, and no limit.
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
