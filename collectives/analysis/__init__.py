"""Verification, traffic and cost of a schedule, without running it."""
