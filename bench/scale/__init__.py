"""Predictions of collectives on up to 65,536 ranks, by the cost model and by simulation."""
