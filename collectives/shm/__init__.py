"""Collectives of ranks that share memory. Knows nothing of MPI: it is given segments of memory."""
