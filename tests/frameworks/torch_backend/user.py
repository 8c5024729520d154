"""A user's training script for torch.distributed: nothing in it is about MPI."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group(sys.argv[1])
rank, size = dist.get_rank(), dist.get_world_size()
tensor = torch.tensor([rank + 1.0])
dist.all_reduce(tensor)
assert tensor.item() == size * (size + 1) / 2
group = dist.new_group([0])
assert dist.get_backend() == sys.argv[1]
if "leave" not in sys.argv:
    dist.destroy_process_group()
if rank == 0:
    print(f"{size} ranks: {tensor.item()}")
