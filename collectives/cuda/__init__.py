"""Interface to the part of CUDA that is used, and its implementation with CuPy."""
