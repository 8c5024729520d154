"""torch: modules, leaf tensors that require gradients, optimizers."""

from __future__ import annotations

from typing import Any

from strategies.foreign.distributed import strategy_of
from strategies.foreign.framework import Callback, Framework
from strategies.foreign.methods import Undo


class Torch(Framework):
    """torch: parameters and steps are observed by torch's own hooks."""

    name = "torch"
    module = "torch"
    classes = ("nn.Module", "Tensor", "optim.Optimizer")
    alternative = (
        "once, model, optimizer = strategy.distribute(model, optimizer); gradients are reduced in"
        " backward from then on"
    )
    saved = "strategies.Variable, and modules, optimizers and schedulers of torch"
    inference_mark = "model.eval() or model.requires_grad_(False)"

    def trains(self, thing: Any) -> bool:
        """Modules in training mode with parameters that require gradients; leaf tensors that do.

        Those that a strategy distributes don't count: they train in step.
        """
        if strategy_of(thing) is not None:
            return False
        if isinstance(thing, self.find("nn.Module")):
            return thing.training and any(
                each.requires_grad and strategy_of(each) is None for each in thing.parameters()
            )
        if isinstance(thing, self.find("Tensor")):
            return bool(thing.requires_grad and thing.is_leaf)
        return True

    def is_input(self, thing: Any) -> bool:
        """Leaf tensors other than parameters: such as a variable's copy for torch.autograd."""
        parameter = self.find("nn.Parameter")
        return isinstance(thing, self.find("Tensor")) and not isinstance(thing, parameter)

    def size(self, thing: Any) -> int:
        """The number of parameters."""
        return len(list(thing.parameters())) if isinstance(thing, self.find("nn.Module")) else 0

    def describe(self, thing: Any) -> str:
        """The class; of a module also its first parameter."""
        kind = type(thing).__name__
        if isinstance(thing, self.find("nn.Module")):
            first = next((name for name, _ in thing.named_parameters()), None)
            return f"module {kind}" + (f" (with the parameter {first!r})" if first else "")
        return kind if isinstance(thing, self.find("Tensor")) else f"optimizer {kind}"

    def hook_steps(self, refuse: Callback) -> Undo:
        """Registers torch's hook for the steps of all optimizers."""
        register = self.find("optim.optimizer.register_optimizer_step_pre_hook")
        handle = register(lambda optimizer, args, kwargs: refuse(optimizer))
        undo: Undo = handle.remove
        return undo

    def hook_creation(self, record: Callback) -> Undo:
        """Registers torch's hook for parameters of modules."""
        register = self.find("nn.modules.module.register_module_parameter_registration_hook")
        handle = register(lambda module, name, parameter: record(module))
        undo: Undo = handle.remove
        return undo
