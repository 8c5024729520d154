"""One-sided messages between ranks: no matching receive has to be posted."""
