"""Optimizers: update rules, slots beside the variables, and the state that a checkpoint keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import Any, TypeAlias, TypeVar

import numpy as np

from collectives import Fusion
from strategies.core.indexed_slices import Gradient, IndexedSlices
from strategies.core.same_error import PropagatedErrors, propagate
from strategies.core.storage import Storage, assign
from strategies.core.values import Array, as_array, on_host
from strategies.optimizers.gradients import (
    absent_text,
    check_limits,
    check_variables,
    checked_pairs,
    clip,
)
from strategies.optimizers.update_rules import UpdateRule
from strategies.replication.contexts import get_replica_context, get_strategy
from strategies.replication.step_series import StepSeries
from strategies.variables.scatter import scatter_sub
from strategies.variables.variable import Variable

Rate: TypeAlias = float | Callable[[int], float]
Rule = TypeVar("Rule", bound=UpdateRule)


class Optimizer(ABC):
    """Base of the optimizers.

    learning_rate: a number, or a function of the step's number from 0, called at least once a step.
    clipnorm, global_clipnorm: the largest norm of each gradient, or of all together; longer ones
    are scaled down. That is done to the sums over the replicas, the same bits on all of them, so
    that several replicas take the step that Keras takes in one process with the whole batch. (Under
    tf.distribute Keras clips each replica's gradients before the sum, which is another step.)
    Where each replica takes steps of its own (ParameterServerStrategy, LocalSGDStrategy), its own
    gradients are clipped, and its own steps are counted.

    All may be changed between steps, alike on all replicas: each step compares them, a function by
    the value it gives. A copy, or a pickled one, has the numbers and no slots. Raises ValueError
    for a limit that isn't above 0, and for both limits.
    """

    _known_rate: tuple[int, float] | None
    """The step that a function was called for last, and the rate that it gave."""

    def __init__(
        self,
        learning_rate: Rate,
        clipnorm: float | None = None,
        global_clipnorm: float | None = None,
    ) -> None:
        check_limits(clipnorm, global_clipnorm)
        self.learning_rate = learning_rate
        self.clipnorm, self.global_clipnorm = clipnorm, global_clipnorm
        self.iterations = 0
        # By the storage's id, which stays its own as long as the storage is kept.
        self._slots: dict[int, tuple[Storage, dict[str, Storage]]] = {}
        self._restored: dict[str, Array] = {}
        self._fused: tuple[list[Variable], Fusion] | None = None
        self.series: StepSeries | None = None
        self.action = ""
        """What must be equal on all ranks in the step that is being taken, but for its number."""
        self._action_of: Any = None
        self._rule: tuple[tuple[Any, ...], Any] | None = None

    @property
    def learning_rate(self) -> Any:
        """The rate of the next step; a number, or a function of the step, may be assigned."""
        if not callable(self._given_rate):
            return self._given_rate
        step = self.iterations
        if self._known_rate is None or self._known_rate[0] != step:
            given = self._given_rate(step)
            text = f"learning_rate gave a {type(given).__name__} for step {step}: must be a number"
            self._known_rate = step, _as_number(given, text)
        return self._known_rate[1]

    @learning_rate.setter
    def learning_rate(self, learning_rate: Rate) -> None:
        if not callable(learning_rate):
            text = f"learning_rate={learning_rate!r}: must be a number or a function of the step"
            if isinstance(learning_rate, Variable):  # `restore` would keep the number alone
                raise TypeError(f"{text}, such as lambda step: float(variable)")
            _as_number(learning_rate, text)
        self._given_rate, self._known_rate = learning_rate, None

    @property
    @abstractmethod
    def rule(self) -> UpdateRule:
        """The rule of the next step."""

    def _made_of(self, kind: Callable[..., Rule], *numbers: Any) -> Rule:
        """The rule of these numbers, the same object while they stay the same."""
        known = *numbers, *map(type, numbers)
        if self._rule is None or self._rule[0] != known:
            self._rule = known, kind(*numbers)
        rule: Rule = self._rule[1]
        return rule

    def gradient_views(self, variables: Sequence[Variable]) -> list[Array]:
        """Arrays to write the gradients into, one for each variable, zeros at first. Collective.

        They lie where the replicas sum them, so that `apply_gradients` of these variables, in this
        order, needs no copies where it is given them. It overwrites them. The latest ones count.
        """
        variables = list(variables)
        known = (each.strategy for each in variables if isinstance(each, Variable))
        strategy = next(known, None) or get_strategy()
        with PropagatedErrors(strategy.communicator, "gradient_views"):
            check_variables(variables)
        kinds = [(variable.shape, variable.dtype) for variable in variables]
        fusion = Fusion(strategy.communicator, kinds)
        self._fused = variables, fusion
        return fusion.views

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Variable]]) -> None:
        """Sum each gradient over the replicas (fused), then update its variable. Collective.

        A gradient is an array of its variable's shape, or an `IndexedSlices` of its rows, on every
        rank alike.

        A pair whose gradient is None is left out, on all ranks alike: where a loss depends on a
        variable on some ranks only, the others give zeros. Raises RuntimeError in cross-replica
        context and for a variable of another strategy than that of `run`; TypeError for one of
        integers, for what is no Variable, such as a parameter of torch, for a gradient that can't
        be read and for a learning rate that gives no number; ValueError where a gradient's shape
        isn't its variable's or where every gradient is None.
        """
        replica = get_replica_context()
        if replica is None:
            raise RuntimeError("apply_gradients must be called as a replica, inside `run`")
        strategy = replica.strategy
        together = strategy.steps_together
        try:
            pairs = list(grads_and_vars)
            gradients, variables = checked_pairs(pairs, strategy)
            if self.clipnorm is not None or self.global_clipnorm is not None:
                check_limits(self.clipnorm, self.global_clipnorm)
            self._known_rate = None
            self.action = self._next_action(gradients, variables)
        except Exception as error:
            propagate(strategy.communicator if together else None, error, None, "apply_gradients")
            raise
        if together and len(variables) < len(pairs):
            strategy.barrier(absent_text(pairs))
        strategy.apply_gradients(self, gradients, variables)

    def _next_action(self, gradients: Sequence[Gradient], variables: Sequence[Variable]) -> str:
        kinds = [
            (variable.number, isinstance(gradient, IndexedSlices))
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        made_of = self.rule, self.clipnorm, self.global_clipnorm, len(self._slots), kinds
        if self._action_of == made_of:
            return self.action
        self._action_of = made_of
        numbers = ", ".join(f"{number}{' sparse' * sparse}" for number, sparse in kinds)
        # A copy, which one rank alone may have made, has no slots.
        known = f"{len(self._slots)} variables updated before"
        return f"{self.settings}, {known}, gradients of variables {numbers}"

    @property
    def settings(self) -> str:
        """The numbers of the next step, as a text."""
        limits = {"clipnorm": self.clipnorm, "global_clipnorm": self.global_clipnorm}
        given = [f", {name}={limit}" for name, limit in limits.items() if limit is not None]
        return f"{self.rule}{''.join(given)}"

    def fusion_of(self, variables: Sequence[Variable]) -> Fusion | None:
        """The buffer of `gradient_views`, if it was made for exactly these variables; or None."""
        if self._fused is None:
            return None
        known, fusion = self._fused
        alike = len(variables) == len(known) and all(map(is_, variables, known))
        return fusion if alike else None

    def update(self, gradients: Sequence[Gradient], variables: Sequence[Variable]) -> None:
        """Count a step and change the variables by it; overwrites the gradients."""
        self.update_clipped(self.clipped(gradients), [each.storage for each in variables])

    def clipped(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """A step's gradients within their limit, if there is one; none is overwritten."""
        return clip(gradients, self.clipnorm, self.global_clipnorm)

    def update_clipped(self, gradients: Sequence[Gradient], values: Sequence[Storage]) -> None:
        """As `update`, of gradients that `clipped` gave, and of values that may have no variable.

        Each process changes its part of them.
        """
        rule = self.rule
        names = rule.slots
        # First, since a slot may not fit, or find no memory.
        needed = names or any(id(value) not in self._slots for value in values)
        slots_of_each = [self.slots_of(value, names) if needed else {} for value in values]
        self.iterations += 1
        for gradient, value, slots in zip(gradients, values, slots_of_each, strict=True):
            if isinstance(gradient, IndexedSlices):
                # As Keras 3: duplicates are summed; a rule that changes all rows gets all of them.
                gradient = gradient.summed()
                if (step := rule.rows_step(gradient.values)) is not None:
                    value.update(scatter_sub, gradient.indices, step)
                    continue
                gradient = gradient.to_dense()
            own = {name: slot.own_part() for name, slot in slots.items()} if names else {}
            rule.apply(value.own_part(), value.part_of(gradient), own, self.iterations)

    def slots_of(self, value: Storage, names: Sequence[str]) -> dict[str, Storage]:
        """The optimizer's own arrays for the value: zeros at first, or restored ones."""
        known = self._slots.get(id(value))
        if known is None:
            known = self._slots[id(value)] = value, {}
        slots = known[1]
        for name in names:
            if name not in slots:
                kept = f"slots/{self.number_of(value)}/{name}"
                restored = self._restored.get(kept)
                _check_slot(name, restored, value)
                slots[name] = value.slot(self, name, restored)
                # Where that has failed it is tried again.
                self._restored.pop(kept, None)
        return slots

    def replace(self, value: Storage, new: Storage | None) -> None:
        """Keep no slots of the value; the new one, if there is one, gets its number."""
        kept = [(new, {}) if each[0] is value else each for each in self._slots.values()]
        self._slots = {id(each): (each, slots) for each, slots in kept if each is not None}

    def number_of(self, value: Storage) -> int | None:
        """The value's number in the names of its slots; None where it has none yet."""
        return next((n for n, known in enumerate(self._slots) if known == id(value)), None)

    @property
    def values(self) -> list[Storage]:
        """The values that it has updated, in the order of their first updates."""
        return [value for value, _ in self._slots.values()]

    def __getstate__(self) -> dict[str, Any]:
        """Its numbers, and what is yet to be restored: slots belong to the values."""
        absent = dict.fromkeys(("_fused", "series", "_action_of"))
        return {**self.__dict__, **absent, "_slots": {}, "_restored": self._restored.copy()}

    def _numbered_slots(self) -> dict[str, Storage]:
        return {
            f"slots/{number}/{name}": slot
            for number, (_, slots) in enumerate(self._slots.values())
            for name, slot in slots.items()
        }

    def saved_tensors(self) -> dict[str, Array]:
        """What a checkpoint keeps: the steps counted, the learning rate, and all slots.

        Slots are numbered in the order in which their variables were first updated.
        """
        counted = [self.iterations, *(value.updates_by(self) for value, _ in self._slots.values())]
        tensors = {
            "iterations": np.array(max(counted), np.int64),
            "learning_rate": np.array(self.learning_rate, np.float64),
        }
        kept = {name: on_host(slot.read()) for name, slot in self._numbered_slots().items()}
        return tensors | self._restored | kept

    def restore_tensors(self, tensors: Mapping[str, Array]) -> None:
        """Restore what `saved_tensors` gave.

        A learning rate that is a function stays. Absent slots are restored when they are made.
        """
        self.iterations = int(tensors["iterations"])
        if not callable(self._given_rate):
            self.learning_rate = float(tensors["learning_rate"])
        self._restored = {name: each for name, each in tensors.items() if name.startswith("slots/")}
        for name, slot in self._numbered_slots().items():
            # What was saved before the first step has no slots: they begin anew.
            restored = self._restored.pop(name, 0)
            slot.change(assign, as_array(restored, name, slot.dtype, gpu=slot.on_gpu))


def _as_number(value: Any, problem: str) -> float:
    if isinstance(value, str | bytes):  # float parses them
        raise TypeError(problem)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(problem) from None


def _check_slot(name: str, restored: Array | None, value: Storage) -> None:
    if restored is None or (restored.shape, restored.dtype) == (value.shape, value.dtype):
        return
    raise ValueError(
        f"{name} was restored as {restored.dtype} of shape {restored.shape}, its variable is"
        f" {value.dtype} of shape {value.shape}: name the variables in the checkpoint, too, or"
        " update them first in the order in which the program did that saved it"
    )
