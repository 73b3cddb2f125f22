"""Microbenchmarks: `fusedtp bench`. Imported as fusedtp.bench, and in a checkout `python -m bench` runs too."""
