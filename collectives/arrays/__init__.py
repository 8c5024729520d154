"""Arrays of every library as NumPy or CuPy sees them, and back."""
