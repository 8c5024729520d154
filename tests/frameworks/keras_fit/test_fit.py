"""Keras's `fit` on several ranks, with the torch and JAX backends: see program.py."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

PROGRAM = str(Path(__file__).with_name("program.py"))
# The others of program.py run with -m slow.
QUICK = {
    "torch": (
        "short_batches_and_validation",
        "weights_of_samples_and_classes",
        "shuffled_pieces_are_every_row_once",
        "orders_of_batches",
        "evaluation_and_prediction",
        "loops_begin_with_the_chiefs_state",
        "single_batches",
        "random_numbers_differ_by_rank",
        "moving_statistics_are_averaged",
        "calls_within_an_epoch",
        "random_numbers_of_data_and_callbacks",
        "statistics_that_follow_from_weights",
        "callbacks_on_the_chief_and_everywhere",
        "a_stop_on_one_rank_within_an_epoch",
        "a_custom_step",
        "metrics_of_the_guides_step",
        "files_that_all_ranks_write",
        "errors_of_the_chiefs_savers",
        "errors_are_those_of_every_rank",
        "keras_is_as_it_was_outside",
        "compressed_gradients",
        "gradients_that_some_ranks_lack",
        "optimizers_in_containers",
        "values_in_the_place_of_gradients",
        "gradients_in_shared_memory",
        "an_optimizer_that_is_built_in_the_scope",
        "weights_that_no_reduction_keeps_equal",
        "arrays_that_each_rank_has_divided",
        "variables_of_layers_by_their_aggregation",
        "losses_that_are_sums",
        "compiling_again_and_elsewhere",
        "data_that_fails_on_one_rank",
        "data_that_ends_early_on_one_rank",
    ),
    "jax": (
        "short_batches_and_validation",
        "loops_begin_with_the_chiefs_state",
        "random_numbers_differ_by_rank",
        "calls_within_an_epoch",
        "statistics_that_follow_from_weights",
        "layers_that_communicate",
        "values_in_the_place_of_gradients",
        "two_optimizers_in_one_program",
        "all_reduce_of_pytrees",
        "errors_within_programs",
        "data_that_ends_early_on_one_rank",
    ),
}


def failures(launch, backend, ranks, *arguments):
    for module in ("keras", backend):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} isn't installed: Keras can't be tested with {backend}")
    quiet = ["TF_CPP_MIN_LOG_LEVEL=3", "CUDA_VISIBLE_DEVICES=", "OMP_NUM_THREADS=1"]
    command = ["env", *quiet, f"KERAS_BACKEND={backend}", sys.executable, PROGRAM, *arguments]
    ended = launch(ranks, command, timeout=900)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    found = {name: failed for line in lines for name, failed in json.loads(line).items()}
    assert ended.returncode == 0, ended.stderr
    assert found, ended.stdout
    return {name: failed for name, failed in found.items() if failed}


@pytest.mark.parametrize("backend", QUICK)
@pytest.mark.timeout(900)
def test_what_users_do_most(launch, backend):
    assert failures(launch, backend, 2, *QUICK[backend]) == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", QUICK)
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_else_users_do(launch, backend, ranks):
    assert failures(launch, backend, ranks) == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", QUICK)
def test_datasets_of_tensorflow(launch, backend):
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("tensorflow isn't installed: tf.data can't be tested")
    assert failures(launch, backend, 2, "--tensorflow", "datasets_of_tensorflow") == {}
