"""Training on one's own, parameters averaged from time to time."""
