"""The replicas of a program: which strategy is in force, and how it keeps replicas equal."""
