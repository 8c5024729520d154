"""Models, optimizers and samplers of torch under a strategy; imported when the first is given."""
