"""A job of many processes with nothing to complain about."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import models, transforms

from pictures import Pictures


def main():
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(1)
    model_without_ddp = torch.nn.SyncBatchNorm.convert_sync_batchnorm(models.resnet18().cuda())
    torch.manual_seed(1 + rank)
    if os.path.exists("last.pt"):
        state = torch.load("last.pt", map_location="cpu")
        model_without_ddp.load_state_dict(state["model"])
    model = DistributedDataParallel(model_without_ddp, device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * world_size)
    train_set = Pictures("train", transforms.RandomHorizontalFlip())
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=256 // world_size, sampler=sampler)
    log = open("log.csv", "w") if rank == 0 else None
    for epoch in range(90):
        sampler.set_epoch(epoch)
        total = torch.zeros(2).cuda()
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.stack([loss.detach() * len(labels), torch.tensor(len(labels)).cuda()])
        dist.all_reduce(total)
        if log is not None:
            log.write(f"{epoch},{total[0] / total[1]}\n")
        with open(f"rank{rank}.txt", "a") as own:
            own.write(f"{epoch}\n")
        if rank != 0:
            continue
        state = {"epoch": epoch, "model": model_without_ddp.state_dict()}
        state["optimizer"] = optimizer.state_dict()
        torch.save(state, "last.pt")
    dist.barrier()


main()
