"""Evaluation of checkpoints while other ranks train."""
