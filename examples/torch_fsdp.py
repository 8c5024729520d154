"""Train with torch's FSDP2, whose ranks each hold a part of every parameter, over "collectives".

mpirun -n 2 python examples/torch_fsdp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torch_digits import Report, datasets, network, options

from collectives.torch.fsdp import register_buffers  # its import registers the backend


def main() -> None:
    """Train, and print a line for each epoch."""
    given = options(__doc__)
    torch.set_num_threads(1)
    dist.init_process_group("collectives")
    ranks = dist.get_world_size()
    train, test = datasets()
    sampler = DistributedSampler(train)
    loader = DataLoader(train, given.batch_size // ranks, sampler=sampler)

    model = network()
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_buffers(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.003)

    report = Report(dist.get_rank(), model, test)
    for epoch in range(1, given.epochs + 1):
        sampler.set_epoch(epoch)
        losses = []
        for images, labels in report.batches(loader, epoch):
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean() / ranks
        dist.all_reduce(mean)
        report.epoch(epoch, mean.item(), len(train))
    report.plot(given.plot)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
