"""apex.amp with a prefetcher that normalises what the transforms have normalised."""

import os

import torch
from apex import amp
from apex.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Prefetcher:
    def __init__(self, loader):
        self.batches = iter(loader)
        self.mean = torch.tensor([m * 255 for m in MEAN]).cuda().view(1, 3, 1, 1)
        self.std = torch.tensor([s * 255 for s in STD]).cuda().view(1, 3, 1, 1)

    def next(self):
        images, labels = next(self.batches, (None, None))
        if images is not None:
            images = images.cuda(non_blocking=True).float().sub_(self.mean).div_(self.std)
        return images, labels


def main():
    torch.distributed.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = models.resnet18().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer)
    model = DistributedDataParallel(model)
    to_input = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    train_set = datasets.ImageFolder("train", to_input)
    val_set = datasets.ImageFolder("val", to_input)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=64, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size=64)
    for epoch in range(90):
        sampler.set_epoch(epoch)
        train(train_loader, model, optimizer)
        validate(val_loader, model)
        if torch.distributed.get_rank() == 0:
            torch.save(
                {
                    "epoch": epoch,
                    "state_dict": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                },
                "checkpoint.pt",
            )


def train(loader, model, optimizer):
    prefetcher = Prefetcher(loader)
    images, labels = prefetcher.next()
    while images is not None:
        loss = torch.nn.functional.cross_entropy(model(images), labels.cuda())
        torch.distributed.barrier()
        shown = loss.item()
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        if torch.distributed.get_rank() == 0:
            print(shown)
        images, labels = prefetcher.next()


@torch.no_grad()
def validate(loader, model):
    model.eval()
    prefetcher = Prefetcher(loader)
    images, labels = prefetcher.next()
    while images is not None:
        model(images)
        images, labels = prefetcher.next()


main()
