"""Clusters from TF_CONFIG, Slurm or a program, and the assignment of ranks to tasks."""
