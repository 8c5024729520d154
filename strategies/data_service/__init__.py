"""Dataset ranks: each reads its dataset and deals batches to the training ranks."""
