"""The script starts one process per device of this machine, at a fixed port."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import models

from pictures import test_set, train_set


def worker(gpu, devices):
    dist.init_process_group(
        "nccl", init_method="tcp://127.0.0.1:23456", world_size=devices, rank=gpu
    )
    torch.cuda.set_device(gpu)
    model = DistributedDataParallel(models.resnet18().cuda(gpu), device_ids=[gpu])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(train_set)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    test_loader = DataLoader(test_set, 800 // devices, sampler=test_sampler)
    for epoch in range(90):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(train_set, 800 // devices, sampler=sampler):
            loss = torch.nn.functional.cross_entropy(model(images), labels.cuda(gpu))
            dist.barrier()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        hits = torch.zeros(1).cuda(gpu)
        for images, labels in test_loader:
            hits += (model(images).argmax(1) == labels.cuda(gpu)).sum()
        dist.all_reduce(hits)
        if gpu == 0:
            print(epoch, hits)


if __name__ == "__main__":
    devices = torch.cuda.device_count()
    mp.spawn(worker, nprocs=devices, args=(devices,))
