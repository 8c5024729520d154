"""Clusters from TF_CONFIG or Slurm, and the assignment of ranks to tasks."""
