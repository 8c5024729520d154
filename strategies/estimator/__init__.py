"""`tf.estimator`, which TensorFlow has removed, over Keras models and `strategies.tensorflow`.

    from strategies import estimator, tensorflow
    strategy = tensorflow.MirroredStrategy()
    config = estimator.RunConfig(train_distribute=strategy, model_dir="model")
    regressor = estimator.model_to_estimator(keras_model=model, config=config)
    estimator.train_and_evaluate(
        regressor, estimator.TrainSpec(input_fn, max_steps=100), estimator.EvalSpec(eval_input_fn)
    )

Graphs of `EstimatorSpec`, session hooks and exporters do not exist: a model function returns a
compiled Keras model.
"""

from strategies.estimator.estimator import Estimator
from strategies.estimator.linear import LinearRegressor
from strategies.estimator.models import model_to_estimator
from strategies.estimator.side_by_side import train_and_evaluate
from strategies.estimator.specs import EvalSpec, ModeKeys, RunConfig, TrainSpec

__all__ = [
    "Estimator",
    "EvalSpec",
    "LinearRegressor",
    "ModeKeys",
    "RunConfig",
    "TrainSpec",
    "model_to_estimator",
    "train_and_evaluate",
]
