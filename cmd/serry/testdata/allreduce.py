"""A rank of torch.distributed with gloo, by env:// alone."""

import datetime

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
x = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(x)
dist.barrier()
print("sum", x.item(), "of", dist.get_world_size(), flush=True)
dist.destroy_process_group()
