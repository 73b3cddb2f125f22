"""Triton device code; imports triton and nothing else. Imported as `fusedtp.kernels`."""
