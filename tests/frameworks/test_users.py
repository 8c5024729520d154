"""Users' programs with the frameworks on two ranks: one clear sentence, or the right result.

The programs in this folder print which error ends each part; it must be the same on all ranks.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.frameworks.told import refusals_of


def run(launch, program, modules, environment=()):
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} isn't installed: {program} can't be tested")
    quiet = ["TF_CPP_MIN_LOG_LEVEL=3", "CUDA_VISIBLE_DEVICES="]
    path = str(Path(__file__).with_name(program))
    command = ["env", *quiet, *environment, sys.executable, path]
    ended = launch(2, command, timeout=180)
    assert ended.returncode == 0, ended.stderr
    return refusals_of(ended.stdout)


def clear(text, framework, thing, where):
    """Whether an error names the framework, the object and the place, and the alternative."""
    first = text.replace("in user code:", "")
    named = f"the {framework} {thing}" in first and where in first
    if framework == "torch":
        return named and "model, optimizer = strategy.distribute(model, optimizer)" in first
    if framework == "Keras":
        # By its backend.
        ways = (
            "Keras runs on TensorFlow here: use strategies.tensorflow.MultiWorkerMirroredStrategy",
            "model.compile(optimizer, loss), then model.fit",
        )
        return named and sum(way in first for way in ways) == 1
    assert framework == "TensorFlow"
    return named and "strategies.tensorflow.MultiWorkerMirroredStrategy" in first


def test_a_torch_user(launch):
    said = run(launch, "torch_user.py", ["torch"])
    scope, running = "scope of MultiWorkerMirroredStrategy", "run of MultiWorkerMirroredStrategy"
    linear = "module Linear (with the parameter 'weight')"
    network = "module NeuralNetwork (with the parameter 'linear_relu_stack.0.weight')"
    assert clear(said.pop("scope"), "torch", linear, f"was created in the {scope}")
    step = f"would change variables inside the {scope}"
    assert clear(said.pop("training in the scope"), "torch", "optimizer SGD", step)
    assert clear(said.pop("run"), "torch", network, f"is used in {running}")
    step = f"would change variables inside the {running}"
    assert clear(said.pop("a model of its own in run"), "torch", "optimizer Adam", step)
    pair = "at position 0 of apply_gradients"
    assert clear(said.pop("apply_gradients"), "torch", "Parameter", pair)
    assert said == {"distributed": None, "checkpoint": None, "reading": None}


def test_a_tensorflow_user(launch):
    said = run(launch, "tensorflow_user.py", ["tensorflow"])
    scope, running = "scope of MirroredStrategy", "run of MirroredStrategy"
    model = "model Sequential 'sequential'"
    assert clear(said.pop("scope"), "Keras", model, f"was created in the {scope}")
    for what in ("run", "run of a tf.function", "run in a tf.function"):
        assert clear(said.pop(what), "Keras", model, f"is used in {running}")
    step = f"would change variables inside the {scope}"
    assert clear(said.pop("fit of a traced function"), "Keras", "optimizer SGD", step)
    variable = "Variable 'Variable:0' of shape (2, 1)"
    reached = f"is used in {running}"
    assert clear(said.pop("assignment in run"), "TensorFlow", variable, reached)
    assert said == {}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_a_keras_user(launch, backend):
    said = run(launch, "keras_user.py", ["keras", backend], [f"KERAS_BACKEND={backend}"])
    scope, running = "scope of MirroredStrategy", "run of MirroredStrategy"
    made = f"was created in the {scope}"
    compiled = said.pop("tutorial"), said.pop("all of it in the scope")
    if backend == "tensorflow":
        assert clear(compiled[0], "Keras", "model Sequential 'sequential'", made)
        step = f"would change variables inside the {scope}"
        assert clear(compiled[1], "Keras", "optimizer SGD", step)
    else:
        assert compiled == (None, None)
    assert clear(said.pop("built later"), "Keras", "model Sequential 'sequential_1'", made)
    assert clear(said.pop("a variable"), "Keras", "Variable 'own' of shape (3,)", made)
    reached = f"is used in {running}"
    assert clear(said.pop("run"), "Keras", "model Sequential 'sequential_4'", reached)
    assert said == {"helpers": None}
