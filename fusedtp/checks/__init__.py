"""`fusedtp check`: the library's kernels, and kernels of users, on simulated ranks and under the lint of compiled code.

    dense, experts   calls of the library's kernels with drawn operands and the results that must come out
    cases            those calls in a row, as cases for fusedtp.sim
    lint             the same kernels as launched on GPUs that are not here, for fusedtp.lint
    workers          cases by name, and processes that run their schedules
    command          the command

fusedtp.sim knows nothing of this; here is what it is given. See docs/checking-kernels.md.
"""
