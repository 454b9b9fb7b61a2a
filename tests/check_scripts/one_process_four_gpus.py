"""One process, nn.DataParallel: four fixed devices, a wait at each step, half a checkpoint."""

import argparse

import torch
import torch.backends.cudnn as cudnn
from torch.utils.data import DataLoader
from torchvision import models, transforms

from pictures import Pictures

parser = argparse.ArgumentParser()
parser.add_argument("-j", "--workers", type=int, default=4)
parser.add_argument("--seed", type=int, default=None)


def main():
    options = parser.parse_args()
    if options.seed is not None:
        torch.manual_seed(options.seed)
        cudnn.deterministic = True
    devices = [0, 1, 2, 3]
    model = torch.nn.DataParallel(models.resnet18().cuda(), device_ids=devices)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cudnn.benchmark = True
    loader = DataLoader(Pictures(transforms.RandomCrop(224)), batch_size=256, num_workers=2)
    for epoch in range(90):
        total = 0.0
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels.cuda())
            total += loss.item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.save({"epoch": epoch, "net": model.module.state_dict()}, "last.pt")


main()
