"""The lowest layer: values, nests, options, storage, errors on every rank."""
