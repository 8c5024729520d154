"""Collectives on arrays in GPU memory."""
