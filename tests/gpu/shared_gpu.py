"""Two ranks over NCCL on one GPU, for `test_shared_gpu`: `python -m tests.gpu.shared_gpu`."""

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from tests.gpu import programs
from tests.gpu.real import RealGpu


def main():
    gpu = RealGpu()
    with Communicator(MPI.COMM_WORLD, backend="nccl", deadline=60) as comm:
        for op in ("sum", "mean", "min", "max", "product"):
            for dtype in ("float32", "bfloat16", "int16", "uint8"):
                programs.all_reduce(comm, gpu, op, np.dtype(dtype))
                programs.other_reductions(comm, gpu, op, np.dtype(dtype))
        for dtype in ("bool", "float16", "complex64"):
            programs.gathers(comm, gpu, np.dtype(dtype))
            programs.other_movements(comm, gpu, np.dtype(dtype))
        programs.many(comm, gpu)
        programs.asynchronous(comm, gpu)
        programs.runs_beside(comm, gpu)
        programs.follows_the_stream(comm, gpu)
        programs.holds_what_it_uses(comm, gpu)
        programs.captured(comm, gpu)
        if comm.rank == 0:
            print("all as expected", flush=True)


if __name__ == "__main__":
    main()
