"""How much of a large space a test goes through: all that it names, or what CI has time for.

CI sets HYPOTHESIS_PROFILE=ci, see conftest.py. CONTRIBUTING.md says which tests take less there and what runs the rest.
"""

import os

SAMPLED = os.environ.get("HYPOTHESIS_PROFILE") == "ci"


def examples(whole: int, sampled: int) -> int:
    """How many examples are drawn of a law, or schedules run, where one takes seconds."""
    return sampled if SAMPLED else whole
