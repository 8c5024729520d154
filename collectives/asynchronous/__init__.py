"""Asynchronous calls: those that return a handle at once."""
