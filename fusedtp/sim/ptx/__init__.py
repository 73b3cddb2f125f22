"""Runs the PTX that Triton compiles on a CPU, thread by thread, on simulated ranks.

parse reads the PTX, kernel turns its basic blocks into Python functions with the opcodes of alu, access, copies,
tensor_core, descriptors and multimem. program runs the lanes of one program, machine interleaves all programs by a
seed. memory, clocks, shadow and shared are the memory model. What it proves and what not: docs/checking-kernels.md.
"""

TARGETS = ("sm_80", "sm_90")  # targets that the machine runs
