"""What two ranks show, with three: pieces of batches that differ in length, and an empty one."""

import pytest

from tests.frameworks.tensorflow_strategies import (
    test_datasets,
    test_order,
    test_training,
    test_values,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.mpi,
    pytest.mark.ranks(3),
    pytest.mark.timeout_seconds(400),
    pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options"),
]

call = test_values.call
test_a_custom_loop = test_training.test_a_custom_loop
test_batch_normalization = test_training.test_batch_normalization
test_sparse_gradients = test_training.test_sparse_gradients
test_global_batches_are_split = test_datasets.test_global_batches_are_split
test_from_a_function = test_datasets.test_from_a_function
test_independent_reductions = test_order.test_independent_reductions
test_reductions = test_values.test_reductions
test_a_replicas_context = test_values.test_a_replicas_context
