"""The lowest layer: values, nests, contexts, the hooks of strategies, errors on every rank."""
