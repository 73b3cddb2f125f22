"""Where in the user's source a running kernel stands: frames of Python, for it is interpreted."""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType

from .faults import Site, short_path

USERS, OURS, OTHERS = 1, 2, 3


def _triton_folder() -> str:
    return os.path.dirname(sys.modules["triton"].__file__ or "?")


def _whose(code: CodeType, known: dict[CodeType, int]) -> int:
    """USERS, OURS (the simulator's; packages beneath it may hold kernels) or OTHERS (Triton's, and exec's)."""
    whose = known.get(code)
    if whose is None:
        file = code.co_filename
        whose = OTHERS if file.startswith((_triton_folder(), "<")) else USERS
        if file.rpartition("/")[0] == __file__.rpartition("/")[0]:
            whose = OURS
        known[code] = whose
    return whose


def site(known: dict[CodeType, int] | None = None) -> Site:
    """Where the running kernel stands: its innermost line outside of Triton and the simulator."""
    known = {} if known is None else known
    frame: FrameType | None = sys._getframe(1)
    inner: FrameType | None = None
    outer: FrameType | None = None
    while frame is not None:
        whose = known.get(frame.f_code) or _whose(frame.f_code, known)
        if whose == USERS:
            inner = inner or frame
            outer = frame
        elif whose == OURS and inner is not None:
            break  # the simulator called the kernel
        frame = frame.f_back
    if inner is None or outer is None:
        return Site("?", 0, "?", 0)
    code = inner.f_code
    return Site(code.co_filename, inner.f_lineno, code.co_name, outer.f_lineno, outer.f_code.co_filename)


def raised_at(error: BaseException) -> str:
    """Where the user's code was when this was raised."""
    known: dict[CodeType, int] = {}
    found = ""
    at = error.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        if _whose(code, known) == USERS:
            found = f"{short_path(code.co_filename)}:{at.tb_lineno} in {code.co_name}"
        at = at.tb_next
    return found
