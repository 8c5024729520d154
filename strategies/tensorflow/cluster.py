"""TensorFlow's cluster resolvers and communication options as those of `strategies`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from strategies.cluster.spec import ClusterSpec
from strategies.cluster_resolver import ClusterResolver, SimpleClusterResolver
from strategies.core.options import CommunicationImplementation, CommunicationOptions


def resolver_of(given: Any) -> ClusterResolver | None:
    """The resolver; TypeError for anything else than one of TensorFlow or `strategies`."""
    if given is None or isinstance(given, ClusterResolver):
        return given
    if not isinstance(given, tf.distribute.cluster_resolver.ClusterResolver):
        raise TypeError(
            f"cluster_resolver is a {type(given).__name__}: must be a cluster resolver of"
            " tf.distribute or of strategies"
        )
    cluster = ClusterSpec(given.cluster_spec().as_dict())
    if not cluster:
        return None
    return SimpleClusterResolver(cluster, task_type=given.task_type, task_id=given.task_id)


def options_of(given: Any) -> CommunicationOptions | None:
    """The options of TensorFlow, or an implementation alone as in its older versions."""
    if given is None or isinstance(given, CommunicationOptions):
        return given
    if isinstance(given, CommunicationImplementation):
        return CommunicationOptions(implementation=given)
    if isinstance(given, tf.distribute.experimental.CommunicationImplementation):
        return CommunicationOptions(implementation=given.value)
    if not hasattr(given, "bytes_per_pack"):
        raise TypeError(
            f"communication_options is a {type(given).__name__}: must be"
            " tf.distribute.experimental.CommunicationOptions"
        )
    return CommunicationOptions(
        bytes_per_pack=given.bytes_per_pack,
        timeout_seconds=given.timeout_seconds,
        implementation=given.implementation.value,
    )
