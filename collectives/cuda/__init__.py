"""The part of CUDA that is used, as an interface, and its implementation with CuPy."""
