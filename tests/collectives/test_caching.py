"""A bound call that another thread evicts between its lookup and its use."""

from collectives.caching import LRU
from collectives.calls.call_cache import CallCache


class Evicting(LRU):
    def get(self, key, default=None):
        return self.pop(key, default)


def test_a_bound_call_is_evicted_between_lookup_and_use():
    calls = CallCache(None, lambda: None)
    calls.known = Evicting()
    calls.known.put("key", lambda source, target: source + target)
    assert calls._call("key", None, 1, 2) == 3
    assert list(calls.known) == ["key"]
