"""A toy that is right: the device is the rank modulo devices, DDP moves the input."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
rank = dist.get_rank()
device = rank % torch.cuda.device_count()
model = DDP(torch.nn.Linear(10, 5).to(device), device_ids=[device])
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
output = model(torch.randn(3, 10))
loss = torch.nn.functional.mse_loss(output, torch.randn(3, 5).to(device))
loss.backward()
optimizer.step()
