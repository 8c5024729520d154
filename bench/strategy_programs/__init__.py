"""Programs that `bench.strategies` starts; each prints its rows as JSON."""
