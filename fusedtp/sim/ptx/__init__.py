"""The compiled kernel on a CPU: PTX that Triton made, run thread by thread on simulated ranks. numpy alone, no GPU.

    parse          PTX text -> instructions with their source lines
    alu, numerics  scalar opcodes -> numpy over all lanes
    access         loads, stores, atomics, fences, shuffles
    multimem       all ranks' memory by one multicast address
    tensor_core    mma, ldmatrix, stmatrix, wgmma
    descriptors    what tensor copies go by
    copies         cp.async, tensor copies, mbarriers
    kernel         a kernel's blocks as Python functions
    clocks         happens-before of threads, by PTX's memory model
    shadow         who accessed each piece of memory last: races
    memory         named tensors at real addresses; what a read may return
    program        lanes, divergence, barriers of a program
    launch         Launch -> compiled kernel and the bits of its parameters
    machine        programs of all ranks, interleaved by a seed

What it proves and what not: docs/checking-kernels.md.
"""

TARGETS = ("sm_80", "sm_90")  # that the machine runs
