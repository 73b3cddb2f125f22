"""How much of a large space a test covers: all of it, or as much as CI has time for.

CI sets HYPOTHESIS_PROFILE=ci, see conftest.py. CONTRIBUTING.md says which tests take less there and what runs the rest.
"""

import os

SAMPLED = os.environ.get("HYPOTHESIS_PROFILE") == "ci"


def examples(whole: int, sampled: int) -> int:
    """How many examples of a law to draw, or schedules to run, where one takes seconds."""
    return sampled if SAMPLED else whole
