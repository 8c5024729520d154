"""Conversion of arrays of every library to NumPy or CuPy, and back."""
