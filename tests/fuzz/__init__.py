"""A fuzzer of the collectives: random calls, random faults, and what must come of them.

`mpirun -n 3 python -m tests.fuzz --seed 1 --steps 1000` runs it. All ranks draw the same plans from
the seed. Their outcomes travel over a communicator of mpi4py's own and are judged on every rank.
"""
