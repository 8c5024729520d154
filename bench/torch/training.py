"""Training steps of small models, with and without communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import strategies

BATCH, ROWS, WIDTH = 16, 32, 320

Step = Callable[[], Any]


def convolutional() -> nn.Module:
    """The network of TensorFlow's tutorial of custom training: 122,000 parameters, 28 × 28."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1600, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def step_of(model: nn.Module, optimizer: Any) -> Step:
    """A training step on a batch of images; the model ends with 10 classes."""
    inputs, targets = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def apart() -> Step:
    """Without communication."""
    model = convolutional()
    return step_of(model, torch.optim.SGD(model.parameters(), 0.01))


def data_parallel(group: Any, **options: Any) -> Step:
    """DistributedDataParallel over a process group."""
    model = DistributedDataParallel(convolutional(), process_group=group, **options)
    return step_of(model, torch.optim.SGD(model.parameters(), 0.01))


def distributed() -> Step:
    """`strategy.distribute`."""
    model = convolutional()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    strategy = strategies.MultiWorkerMirroredStrategy()
    return step_of(*strategy.distribute(model, optimizer))


def fully_sharded(group: Any, *, register: bool = False) -> Step:
    """FSDP2 on a transformer of ten million parameters, sharded by layers."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    from collectives.torch.fsdp import register_buffers

    layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
    mesh = DeviceMesh.from_group(group, "cpu")
    for each in model.layers:
        fully_shard(each, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if register:
        register_buffers(model)
    optimizer, inputs = torch.optim.SGD(model.parameters(), 0.01), torch.randn(2, ROWS, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step
