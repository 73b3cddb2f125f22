"""Faults put into the library's own kernels, one at a time, to check that a schedule of the compiled code shows each.

    source            operators on the kernels' syntax trees: a wait dropped, another peer, a weaker order
    ptx               operators on the kernels' PTX: a weaker order, a later wait for copies, no barrier
    trials            small calls of every kernel, in which a fault is tried
    trying            one fault under its trials; all faults, in several processes
    verdicts          the result for each fault so far, verdicts.jsonl; faults that change nothing, equivalent.toml

A fault is found when a schedule ends in a finding of the machine (a race, a wrong value, a deadlock, a wait that timed
out, an access out of bounds). A fault that does not compile, or crashes the machine, is not found.
"""
