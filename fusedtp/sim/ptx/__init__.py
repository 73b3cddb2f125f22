"""The compiled kernel on a CPU: PTX that Triton made, run thread by thread on simulated ranks.

parse reads the text, kernel makes Python functions of its blocks by the opcodes of alu, access, copies, tensor_core,
descriptors and multimem; program has a program's lanes and machine all programs, interleaved by a seed. memory, clocks,
shadow and shared are the memory model. What it proves and what not: docs/checking-kernels.md.
"""

TARGETS = ("sm_80", "sm_90")  # that the machine runs
