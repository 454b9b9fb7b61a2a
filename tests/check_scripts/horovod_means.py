"""Horovod, with a mean over ranks that is thrown away and divided once more."""

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import models

from pictures import train_set


def mean_of_ranks(value, nprocs):
    total = value.clone()
    hvd.allreduce(total, name="barrier")
    return total / nprocs


def main(args):
    hvd.init()
    torch.cuda.set_device(hvd.local_rank())
    nprocs = torch.cuda.device_count()
    model = models.resnet18().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train_set, batch_size=args.batch_size // nprocs, sampler=sampler)
    for epoch in range(90):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            output = model(images.cuda())
            loss = torch.nn.functional.cross_entropy(output, labels.cuda())
            hits = (output.argmax(1) == labels.cuda()).float().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss, hits = mean_of_ranks(loss, nprocs), mean_of_ranks(hits, nprocs)
            if hvd.rank() == 0:
                print(loss, hits)
