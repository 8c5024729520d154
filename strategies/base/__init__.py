"""What users call on every strategy: scope, run, reduce, gather, datasets and `extended`."""
