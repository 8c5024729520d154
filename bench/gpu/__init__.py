"""Microbenchmark of collectives on arrays in GPU memory: `python -m bench.gpu`.

Each call is timed by the GPU's own events, in alternation with the bare NCCL call on the same
communicator, and again as it is replayed in a CUDA graph.
"""
