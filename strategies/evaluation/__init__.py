"""Evaluation of each checkpoint beside the training that writes them."""
