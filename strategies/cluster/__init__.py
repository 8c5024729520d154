"""Who takes part, told by TF_CONFIG, Slurm or a program, and which rank is which task."""
