"""Microbenchmarks: `python -m bench`, or `make bench`."""
