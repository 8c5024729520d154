"""Reduction operators, the fold of two pieces, and the packing of small arrays into buckets."""
