"""Collectives on arrays in the memory of GPUs."""
