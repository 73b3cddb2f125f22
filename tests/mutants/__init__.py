"""Faults seeded into the library's own kernels, one at a time, to see that the checks find each.

    source, operators, places, moves   the kernels as syntax trees, and what is changed in them
    census                             a second count of the sites, by text
    trials, trying                     calls and schedules that show a mutant, in worker processes that interpret
    compiled                           what only compiled code shows, under the ordering lint
    fit                                which report counts as a diagnosis of which mutant
    equivalent                         mutants that change nothing, by class, each with a check that proves it
    runner, matrix                     all of it, and its table

A mutant is killed when a rule names the fault and the report fits the mutation. A crash, a hang and a report of
something else are survivors.
"""

from .generate import mutants
from .matrix import Matrix
from .mutant import Mutant
from .runner import run
from .source import Sources
from .verdict import Verdict

__all__ = ["Matrix", "Mutant", "Sources", "Verdict", "mutants", "run"]
