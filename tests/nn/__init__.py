"""Tests of fusedtp.nn."""
