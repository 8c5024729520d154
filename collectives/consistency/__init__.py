"""Checks that all ranks make the same call in time, and records of the calls made."""
