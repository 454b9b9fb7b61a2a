"""srun starts one task per node, the task one process per device; they meet at a file."""

import argparse
import csv
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import models

from pictures import train_set, val_set

parser = argparse.ArgumentParser()
parser.add_argument("--dist-file", default="meet")
parser.add_argument("--batch-size", type=int, default=256)


def main():
    args = parser.parse_args()
    args.task = int(os.environ["SLURM_PROCID"])
    args.world_size = int(os.environ["SLURM_NPROCS"])
    args.url = "file://{}.{}".format(os.path.realpath(args.dist_file), os.environ["SLURM_JOBID"])
    devices = torch.cuda.device_count()
    mp.spawn(worker, nprocs=devices, args=(devices, args))


def worker(gpu, devices, args):
    rank = args.task * devices + gpu
    dist.init_process_group("nccl", init_method=args.url, world_size=args.world_size, rank=rank)
    torch.cuda.set_device(gpu)
    model = DistributedDataParallel(models.resnet18().cuda(gpu), device_ids=[gpu])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    share = int(args.batch_size / devices)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=share, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size=share)
    for epoch in range(90):
        sampler.set_epoch(epoch)
        for images, labels in train_loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels.cuda(gpu))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        top1 = validate(val_loader, model)
        with open("epochs.csv", "a+") as table:
            csv.writer(table).writerow([epoch, top1])
        save_checkpoint({"epoch": epoch, "state_dict": model.module.state_dict()})


def validate(loader, model):
    hits = seen = 0
    for images, labels in loader:
        hits += (model(images).argmax(1).cpu() == labels).sum()
        seen += len(labels)
    return hits / seen


def save_checkpoint(state, filename="checkpoint.pt"):
    torch.save(state, filename)


if __name__ == "__main__":
    main()
