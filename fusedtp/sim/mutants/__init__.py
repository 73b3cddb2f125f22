"""Faults seeded into the library's own kernels, one at a time, to see that the checks find each."""
