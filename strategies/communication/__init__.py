"""Collectives with options: packing of many arrays, deadlines, the ring, NCCL."""
