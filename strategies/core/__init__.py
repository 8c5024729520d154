"""What all strategies share: contexts, values, nests, the base class, agreement of replicas."""
