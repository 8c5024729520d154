"""Strategies of TensorFlow: subclasses of `tf.distribute.Strategy` over `collectives`.

A program of `tf.distribute` changes the constructor of its strategy, and runs under `mpirun`:

    import strategies.tensorflow
    strategy = strategies.tensorflow.MultiWorkerMirroredStrategy()

tf.data, `tf.function`, GradientTape, Keras on the TensorFlow backend, metrics and checkpoints are
TensorFlow's own. Each rank is one replica.
"""

from strategies.tensorflow import experimental
from strategies.tensorflow.coordinator import ClusterCoordinator
from strategies.tensorflow.local_sgd import LocalSGDStrategy
from strategies.tensorflow.mirrored import (
    CentralStorageStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
)
from strategies.tensorflow.parameter_server import ParameterServerStrategy
from strategies.tensorflow.strategy import Strategy

__all__ = [
    "CentralStorageStrategy",
    "ClusterCoordinator",
    "LocalSGDStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "Strategy",
    "experimental",
]
