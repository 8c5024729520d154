"""The microbenchmark of collectives on arrays in GPUs' memory: `python -m bench.gpu`.

Each call is timed by the GPU's own events, between those of the bare NCCL call on the same
communicator, and again as it is replayed in a CUDA graph.
"""
