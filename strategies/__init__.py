"""Distributed training in the manner of `tf.distribute`, over the collectives of this project."""

from strategies import (
    cluster_resolver,
    coordinator,
    cross_device_ops,
    errors,
    experimental,
    metrics,
    optimizers,
)
from strategies.base.extended import StrategyExtended
from strategies.base.strategy import Strategy, get_strategy
from strategies.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointManager,
    Saveable,
    latest_checkpoint,
)
from strategies.cluster.spec import ClusterSpec
from strategies.coordinator import ClusterCoordinator, RemoteValue
from strategies.core.indexed_slices import IndexedSlices, embedding_lookup
from strategies.core.options import (
    CollectiveCommunication,
    CommunicationImplementation,
    CommunicationOptions,
    ReduceOp,
    RunOptions,
)
from strategies.core.values import DistributedValues, Mirrored, PerReplica
from strategies.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
    RingAllReduce,
)
from strategies.data_service.data_worker import DatasetWorker
from strategies.evaluation.end_marker import training_ends
from strategies.evaluation.evaluate import Evaluation, evaluate_checkpoints
from strategies.evaluation.side_by_side import TrainedAndEvaluated, train_and_evaluate
from strategies.input import (
    AutoShardPolicy,
    DatasetError,
    DistributedDataset,
    DistributedIterator,
    FileDataset,
    InputContext,
    InputOptions,
    InputReplicationMode,
    Options,
    TensorSpec,
    ValueContext,
)
from strategies.parameter_server import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    ParameterServerStrategy,
    Partitioner,
    ShardedVariable,
    replica_device_setter,
)
from strategies.replication.contexts import (
    ReplicaContext,
    experimental_set_strategy,
    get_replica_context,
    has_strategy,
    in_cross_replica_context,
)
from strategies.replication.losses import compute_average_loss, scale_regularization_loss
from strategies.synchronous.central_storage import CentralStorageStrategy
from strategies.synchronous.default import DefaultStrategy, OneDeviceStrategy
from strategies.synchronous.local_sgd.strategy import LocalSGDStrategy
from strategies.synchronous.mirrored import MirroredStrategy, MultiWorkerMirroredStrategy
from strategies.synchronous.tpu import TPUStrategy
from strategies.variables.aggregation import VariableAggregation, VariableSynchronization
from strategies.variables.variable import Variable

__all__ = [
    "AutoShardPolicy",
    "CentralStorageStrategy",
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "ClusterCoordinator",
    "ClusterSpec",
    "CollectiveCommunication",
    "CommunicationImplementation",
    "CommunicationOptions",
    "CrossDeviceOps",
    "DatasetError",
    "DatasetWorker",
    "DefaultStrategy",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "Evaluation",
    "FileDataset",
    "FixedShardsPartitioner",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "LocalSGDStrategy",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Mirrored",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "Options",
    "ParameterServerStrategy",
    "Partitioner",
    "PerReplica",
    "ReduceOp",
    "ReductionToOneDevice",
    "RemoteValue",
    "ReplicaContext",
    "RingAllReduce",
    "RunOptions",
    "Saveable",
    "ShardedVariable",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "TensorSpec",
    "TrainedAndEvaluated",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "cluster_resolver",
    "compute_average_loss",
    "coordinator",
    "cross_device_ops",
    "embedding_lookup",
    "errors",
    "evaluate_checkpoints",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "latest_checkpoint",
    "metrics",
    "optimizers",
    "replica_device_setter",
    "scale_regularization_loss",
    "train_and_evaluate",
    "training_ends",
]
