"""Tests on worlds of MPI ranks, from one plain `pytest`.

A test marked `mpi` runs once per world size. The parent (`parent.py`) starts one `mpirun` of pytest
for all the tests of a size (`launcher.py`); in it every rank (`rank.py`) records the events of its
tests (`records.py`), and the parent merges them into one report per test (`merging.py`).
A failing rank aborts its world, so that no rank hangs; the parent starts another for the rest.
"""
