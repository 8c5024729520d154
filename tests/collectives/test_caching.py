"""The cache of every lookup: what is kept, and what another thread evicts meanwhile."""

from collectives.caching import LRU


class Evicting(LRU):
    def get(self, key, default=None):
        return self.pop(key, default)


def test_an_entry_is_evicted_between_lookup_and_use():
    cache = Evicting()
    cache.put("key", 3)
    assert cache.recall("key") == 3
    assert list(cache) == ["key"]


def test_what_was_recalled_last_is_kept():
    cache = LRU(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.recall("a") == 1
    cache.put("c", 3)
    assert list(cache) == ["a", "c"]
    assert cache.recall("b") is None
