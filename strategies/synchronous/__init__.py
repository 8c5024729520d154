"""Strategies whose replicas hold copies of the variables, updated in step or averaged."""
