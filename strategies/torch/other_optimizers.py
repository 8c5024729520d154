"""Optimizers of distributed models that were not given to `distribute`: what they do apart, logged.

The gradients that they use are the ranks' common ones. But a closure's loss is each rank's own, and
so are the gradients of layers that were added to the model since.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from collectives.torch.gradients import GradientReducer

log = logging.getLogger("strategies")


class OtherOptimizers:
    """Sees the steps of all optimizers."""

    def __init__(self) -> None:
        self._given: weakref.WeakSet[Any] = weakref.WeakSet()
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._reducers: weakref.WeakKeyDictionary[Any, GradientReducer] = (
            weakref.WeakKeyDictionary()
        )
        self._hook: Any = None

    def note(self, model: Any, reducer: GradientReducer, optimizers: Sequence[Any]) -> None:
        """The model's gradients are reduced, and these optimizers were given with it."""
        self._reducers[model] = reducer
        self._given.update(optimizers)
        self._seen.clear()
        self._hook = self._hook or register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Any, arguments: Any, named: Mapping[str, Any]) -> None:
        """Log, once for each optimizer, what it will do on this rank alone."""
        if optimizer in self._given or optimizer in self._seen:
            return
        self._seen.add(optimizer)
        closure = next(filter(callable, [*arguments[1:], named.get("closure")]), None)
        trained = [each for group in optimizer.param_groups for each in group["params"]]
        for model, reducer in list(self._reducers.items()):
            names = {id(each): name for name, each in model.named_parameters()}
            mine = [each for each in trained if id(each) in names]
            added = [each for each in mine if not reducer.has_all([each])]
            if reducer.closed or not mine or not (closure or added):
                continue
            log.warning(
                "%s was not given to distribute with its model: %s. Call distribute again, with it",
                type(optimizer).__name__,
                f"{names[id(added[0])]} was added since, and its gradients are this rank's own"
                if added
                else "the loss of its closure is this rank's own, so that the ranks may step apart",
            )


other_optimizers = OtherOptimizers()
"""Of this process."""
