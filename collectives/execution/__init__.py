"""Runs collectives on flat buffers: selects an algorithm, binds its plan, executes it."""
