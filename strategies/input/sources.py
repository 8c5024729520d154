"""What can be distributed: any re-iterable of batches, and the optional attributes of some.

Datasets are recognized by their attributes, whatever their library: a `tf.data.Dataset` by
`as_numpy_iterator` and `element_spec`, datasets of files by `files` and `auto_shard`, datasets
whose shuffle takes a seed by `with_seed`. A `torch.utils.data.DataLoader` is a re-iterable whose
order can be shared. Under DATA, where each global batch is split between the ranks, a shuffle of
another library must have the same seed on all ranks.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from strategies.input.options import AutoShardPolicy, as_policy

# The generator that a sampler of torch got here, for all iterations.
_OWN_ORDER, _NO_GENERATOR = "_order_of_strategies", object()

# Seeds have 63 bits, of which the dataset's is the first 32.
_MOST_ITERATIONS = 1 << 31


def check_iterable(dataset: Any) -> None:
    """TypeError where the dataset can't be iterated, or only once."""
    kind = type(dataset)
    if hasattr(kind, "__next__"):
        raise TypeError(
            f"dataset is a {kind.__name__}, which can be iterated only once: must give"
            " a new iterator at every `iter`"
        )
    if not (hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")):
        raise TypeError(f"dataset is a {kind.__name__}: must be an iterable of batches")


def iterate(dataset: Any) -> Iterator[Any]:
    """The dataset's batches; those of a `tf.data.Dataset` as NumPy arrays."""
    if hasattr(dataset, "as_numpy_iterator") and hasattr(dataset, "element_spec"):
        batches: Iterator[Any] = dataset.as_numpy_iterator()
        return batches
    return iter(dataset)


def policy_of(dataset: Any) -> AutoShardPolicy:
    """The policy in the dataset's own `options()`; AUTO where there is none."""
    if not callable(options := getattr(dataset, "options", None)):
        return AutoShardPolicy.AUTO
    distribute = getattr(options(), "experimental_distribute", None)
    return as_policy(getattr(distribute, "auto_shard_policy", AutoShardPolicy.AUTO))


def files_of(dataset: Any) -> list[str] | None:
    """The names of the dataset's files; None where it isn't made of files."""
    files = getattr(dataset, "files", None)
    if files is None or not hasattr(dataset, "auto_shard"):
        return None
    return [str(file) for file in files]


def batch_size_of(dataset: Any) -> int | None:
    """The number of examples in a full batch; None where the dataset doesn't declare it."""
    size = getattr(dataset, "batch_size", None)
    return size if isinstance(size, int) and size > 0 else None


def takes_seed(dataset: Any) -> bool:
    """Whether the dataset has a shuffle whose seed can be set."""
    return hasattr(dataset, "with_seed") and bool(getattr(dataset, "is_shuffled", True))


def _sampler_of(dataset: Any) -> Any:
    """The sampler that determines the order of a torch DataLoader; None where torch has no part."""
    batches = getattr(dataset, "batch_sampler", None)
    # Without batches, and with those of a class of one's own, the loader's.
    sampler = getattr(batches, "sampler", getattr(dataset, "sampler", None))
    return sampler if type(sampler).__module__.startswith("torch.utils.data") else None


class RandomOrder:
    """The random numbers that a torch DataLoader takes its order from, as they proceed."""

    def __init__(self, dataset: Any) -> None:
        self._sampler = _sampler_of(dataset)

    def state(self) -> Any:
        """To go back to by `restore`; None where there are no such numbers."""
        generator = getattr(self._sampler, "generator", None)
        return None if generator is None else (generator, generator.get_state())

    def restore(self, state: tuple[Any, Any]) -> None:
        """Go on from there, unless the generator is another one by now."""
        generator, numbers = state
        current: Any = getattr(self._sampler, "generator", None)
        if current is generator:
            current.set_state(numbers)


def shared_order(dataset: Any) -> Callable[[int], None] | None:
    """The function that sets the seed of a torch DataLoader's next random order.

    None for others, and where the program has given a generator: it determines the order then.
    """
    sampler = _sampler_of(dataset)
    if sampler is None:
        return None
    if getattr(sampler, "generator", _NO_GENERATOR) is not getattr(sampler, _OWN_ORDER, None):
        return None

    def set_seed(seed: int) -> None:
        if sampler.generator is None:
            sampler.generator = sys.modules["torch"].Generator()
            setattr(sampler, _OWN_ORDER, sampler.generator)
        sampler.generator.manual_seed(seed)

    return set_seed


class InOneOrder:
    """A dataset that several ranks iterate in an order which their equal seed determines."""

    def __init__(self, dataset: Any, seed: int, *, divided: bool = True) -> None:
        """`divided`: the ranks take parts. ValueError where worker processes change the order."""
        by_workers = getattr(dataset, "num_workers", 0) and not getattr(dataset, "in_order", True)
        if divided and by_workers:
            raise ValueError(
                "a DataLoader with in_order=False gives each rank another order, and the ranks"
                " would take parts of different batches: must be in_order=True, or each rank needs"
                " a pipeline of its own"
            )
        self._dataset = dataset.with_seed(seed, 0) if hasattr(dataset, "with_seed") else dataset
        self._seeds, self._set_seed = count(seed * _MOST_ITERATIONS), shared_order(dataset)

    def __iter__(self) -> Iterator[Any]:
        if self._set_seed is not None:
            self._set_seed(next(self._seeds))
        return iterate(self._dataset)


def draw_seed(*, by_torch: bool) -> int:
    """A random seed of 32 bits: torch's next number, or one of the system."""
    if not by_torch:
        return secrets.randbits(32)
    return int(sys.modules["torch"].randint(1 << 32, ()))
