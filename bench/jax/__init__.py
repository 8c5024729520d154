"""Compiled all-reductions and training steps of JAX compared with mpi4jax, psum and no messages.

Named like the library that it measures: imports in it are absolute.
"""
