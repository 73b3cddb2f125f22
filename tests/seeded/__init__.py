"""Faults put into the library's own kernels one at a time, to see that a schedule of the compiled code shows each.

    source            operators on the kernels' syntax trees: a wait dropped, another peer, a weaker order
    ptx               operators on what Triton made of them: a weaker order, a later wait for copies, no barrier
    trials            small calls of every kernel that a fault is tried in
    trying            one fault under its trials; all of them, in several processes
    verdicts          what came of each so far, verdicts.jsonl; faults that change nothing, equivalent.toml

A fault is found when a schedule ends in a finding of the machine (a race, a wrong value, a deadlock, a wait that timed
out, an access out of bounds). One that does not compile, or crashes the machine, is not found.
"""
