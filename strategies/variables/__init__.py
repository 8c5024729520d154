"""Variables, their initial values, and the rules by which replicas' changes are aggregated."""
