"""A fuzzer of the collectives: random calls, random faults, and their required results.

`mpirun -n 3 python -m tests.fuzz --seed 1 --steps 1000` runs it. All ranks draw the same plans from
the seed. Their outcomes are exchanged over a communicator of mpi4py's own and judged on every rank.
"""
