"""Optimizers of distributed models that were not given to `distribute`: what they do apart, logged.

The gradients that they use are the ranks' common ones. But a closure's loss is each rank's own, and
so are the gradients of layers that were added to the model since.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from collectives.torch.gradients import GradientReducer
from strategies.torch.steps import closure_of, parameters_of

log = logging.getLogger("strategies")


class OtherOptimizers:
    """Sees the steps of all optimizers."""

    def __init__(self, reducers: Callable[[], Sequence[tuple[Any, GradientReducer]]]) -> None:
        """`reducers` gives each distributed model and what reduces its gradients."""
        self._reducers = reducers
        self._given: weakref.WeakSet[Any] = weakref.WeakSet()
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._hook: Any = None

    def note(self, optimizers: Sequence[Any]) -> None:
        """These optimizers were given with a model."""
        self._given.update(optimizers)
        self._seen.clear()
        self._hook = self._hook or register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Any, arguments: Any, named: Mapping[str, Any]) -> None:
        """Log, once for each optimizer, what it will do on this rank alone."""
        if optimizer in self._given or optimizer in self._seen:
            return
        self._seen.add(optimizer)
        closure, trained = closure_of(arguments, named), parameters_of(optimizer)
        for model, reducer in self._reducers():
            names = {id(each): name for name, each in model.named_parameters()}
            mine = [each for each in trained if id(each) in names]
            added = [each for each in mine if not reducer.has_all([each])]
            if not mine or not (closure or added):
                continue
            log.warning(
                "%s was not given to distribute with its model: %s. Call distribute again, with it",
                type(optimizer).__name__,
                f"{names[id(added[0])]} was added since, and its gradients are this rank's own"
                if added
                else "the loss of its closure is this rank's own, so that the ranks may step apart",
            )
