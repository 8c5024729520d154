"""Keras's `fit` on several ranks, as a share of processes that never communicate.

Named like the library that it measures: imports in it are absolute.
"""
