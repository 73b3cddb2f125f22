# mypy: ignore-errors
"""Mistakes in kernels of several ranks: which rule finds each, and within how many schedules.

Those made in the kernels of right.py are named by their BUG there; kernels that are wrong as a whole follow below. The
lines that a report may name are marked with `# BUG`, as right.py says.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import right

RACE = ("read-write race", "never written")
WITHIN = 24


@dataclass(frozen=True)
class Wrong:
    """A mistake in the kernel of `make`, a case function that takes its name."""

    make: object
    bug: str
    rules: tuple[str, ...] = RACE
    within: int = WITHIN

    @property
    def name(self) -> str:
        return f"{self.make.__name__.removeprefix('case_')}: {self.bug}"


WRONG = [
    Wrong(right.case_message, "wrong peer told", RACE),
    Wrong(right.case_message, "polls own flag"),
    Wrong(right.case_message, "flag first"),
    Wrong(right.case_message, "relaxed release"),
    Wrong(right.case_message, "acquire in place of release"),
    Wrong(right.case_message, "release at gpu scope", ("scope",)),
    Wrong(right.case_message, "release at cta scope", ("scope",)),
    Wrong(right.case_message, "flag past the last", ("out of bounds",)),
    Wrong(right.case_message, "relaxed acquire"),
    Wrong(right.case_message, "release in place of acquire"),
    Wrong(right.case_message, "acquire at gpu scope", ("scope",)),
    Wrong(right.case_message, "wrong word", ("deadlock",)),
    Wrong(right.case_message, "waits for 0"),
    Wrong(right.case_message, "waits for 2", ("deadlock",)),
    Wrong(right.case_message, "no wait"),
    Wrong(right.case_relaxed_polls, "no acquire"),
    Wrong(right.case_by_thread_0, "no barrier before the release"),
    Wrong(right.case_by_thread_0, "no barrier after the acquire"),
    Wrong(right.case_by_thread_0, "relaxed store"),
    Wrong(right.case_volatile_polls, "no fence"),
    Wrong(right.case_volatile_polls, "fence at gpu scope"),
    Wrong(right.case_fenced_flag, "no fence"),
    Wrong(right.case_fenced_flag, "fence before the barrier"),
    Wrong(right.case_fenced_flag, "fence at gpu scope"),
    Wrong(right.case_acquire_in_every_thread, "relaxed load"),
    Wrong(right.case_bounded_polls, "goes on in vain"),
    Wrong(right.case_signal_pad, "put is relaxed"),
    Wrong(right.case_signal_pad, "taken from the wrong slot", ("deadlock",)),
    Wrong(right.case_signal_pad, "take is relaxed"),
    Wrong(right.case_signal_pad, "take at gpu scope", ("scope",)),
    Wrong(right.case_signal_pad, "not taken", ("deadlock",)),
    Wrong(right.case_signal_pad, "no credit"),
    Wrong(right.case_handshake, "no wait for the reset"),
    Wrong(right.case_handshake, "no reset", ("deadlock",)),
    Wrong(right.case_handshake, "reset is relaxed"),
    Wrong(right.case_double_buffer, "slot 0 alone"),
    Wrong(right.case_double_buffer, "one credit too few"),
    Wrong(right.case_double_buffer, "no credit"),
    Wrong(right.case_double_buffer, "flag is always 1"),
    Wrong(right.case_double_buffer, "waits for the first epoch"),
    Wrong(right.case_double_buffer, "waits for the last epoch"),
    Wrong(right.case_double_buffer, "reads the other slot"),
    Wrong(right.case_double_buffer, "credit before the read"),
    Wrong(right.case_double_buffer, "credit is relaxed"),
    Wrong(right.case_double_buffer, "two credits at once", (*RACE, "wrong value")),
    Wrong(right.case_barrier_reused, "counter one too low"),
    Wrong(right.case_barrier_reused, "counter past the last", ("deadlock",)),
    Wrong(right.case_barrier_reused, "target of the first round"),
    Wrong(right.case_barrier_reused, "relaxed arrival"),
    Wrong(right.case_barrier_reused, "gpu scope", ("scope",)),
    Wrong(right.case_barrier_reused, "arrives twice"),
    Wrong(right.case_barrier_reused, "relaxed wait"),
    Wrong(right.case_barrier_reused, "no second barrier"),
    Wrong(right.case_sense_reversing, "sense stays"),
    Wrong(right.case_sense_reversing, "turns before it resets", (*RACE, "deadlock")),
    Wrong(right.case_sense_reversing, "no reset", ("deadlock",)),
    Wrong(right.case_epochs_of_calls, "not reset, always 1"),
    Wrong(right.case_epochs_of_calls, "equal to the call", ("deadlock",)),
    Wrong(right.case_epochs_of_calls, "toggles", ("deadlock",)),
    Wrong(right.case_pull, "one reader too few"),
    Wrong(right.case_pull, "no wait for readers"),
    Wrong(right.case_pull, "waits for itself"),
    Wrong(right.case_pull, "done is relaxed"),
]
