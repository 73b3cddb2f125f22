"""`fusedtp check`: runs the library's and users' kernels on simulated ranks, and lints their compiled code.

    dense, experts   calls of the library's kernels with random operands and the expected results
    cases            sequences of these calls, as cases for fusedtp.sim
    lint             the same kernels as launched on GPUs that need not be present, for fusedtp.lint
    workers          cases by name, and processes that run their schedules
    command          the command

fusedtp.sim does not depend on this package. See docs/checking-kernels.md.
"""
