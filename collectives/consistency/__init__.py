"""Checks that all ranks make the same call, in time; records what they called."""
