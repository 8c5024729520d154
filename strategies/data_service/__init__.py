"""A rank that reads the dataset once and deals its batches to the ranks that train."""
