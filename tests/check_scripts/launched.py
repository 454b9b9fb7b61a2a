"""One process per device, started by torch.distributed.launch."""

import argparse
import random

import numpy as np
import torch
import torch.backends.cudnn as cudnn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models, transforms

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("-j", "--workers", type=int, default=4)
parser.add_argument("-b", "--batch-size", type=int, default=3200)
parser.add_argument("--seed", type=int, default=None)


def main():
    args = parser.parse_args()
    nprocs = torch.cuda.device_count()
    if args.seed is not None:
        random.seed(args.seed)
        torch.manual_seed(args.seed)
        cudnn.deterministic = True
    dist.init_process_group("nccl")
    torch.cuda.set_device(args.local_rank)
    model = DistributedDataParallel(models.resnet18().cuda(), device_ids=[args.local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cudnn.benchmark = True
    share = args.batch_size // nprocs

    crop = transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()])
    train_data = datasets.ImageFolder("train", crop)
    train_sampler = DistributedSampler(train_data)
    train_loader = DataLoader(train_data, share, sampler=train_sampler, num_workers=2)
    val_data = datasets.ImageFolder("val", transforms.ToTensor())
    val_sampler = DistributedSampler(val_data)
    val_loader = DataLoader(val_data, share, sampler=val_sampler, num_workers=2)

    for epoch in range(90):
        train_sampler.set_epoch(epoch)
        val_sampler.set_epoch(epoch)
        train(train_loader, model, optimizer, nprocs)
        best = validate(val_loader, model, nprocs)
        if args.local_rank == 0:
            save({"epoch": epoch, "net": model.module.state_dict(), "best": best})


def train(loader, model, optimizer, nprocs):
    for images, labels in loader:
        images = images + 0.01 * np.random.rand()
        output = model(images.cuda())
        loss = torch.nn.functional.cross_entropy(output, labels.cuda())
        top1 = accuracy(output, labels.cuda(), 1)
        dist.barrier()
        shown = mean_of_ranks(loss, nprocs).item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(shown, top1)


@torch.no_grad()
def validate(loader, model, nprocs):
    model.eval()
    total = torch.zeros(1).cuda()
    for images, labels in loader:
        total += mean_of_ranks(accuracy(model(images.cuda()), labels.cuda(), 5), nprocs)
    return total.item() / len(loader)


def mean_of_ranks(value, nprocs):
    total = value.clone()
    dist.all_reduce(total)
    return total / nprocs


def accuracy(output, labels, k):
    guesses = output.topk(k, 1)[1].t()
    correct = guesses.eq(labels.view(1, -1).expand_as(guesses))
    return correct[:k].view(-1).float().sum() * 100 / len(labels)


def save(state):
    torch.save(state, "checkpoint.pt")


main()
