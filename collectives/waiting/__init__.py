"""Waiting for other ranks: spin, yield, sleep, and a deadline."""
