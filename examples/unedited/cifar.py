"""Small pictures, as scripts for CIFAR-10 do it: a residual network, random crops and flips in
the data set, loader workers, the best checkpoint kept and read back."""

import argparse
import os
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset


class RandomCrop:
    def __init__(self, size, padding):
        self.size, self.padding = size, padding

    def __call__(self, image):
        image = F.pad(image, [self.padding] * 4)
        top = torch.randint(0, image.shape[1] - self.size + 1, (1,)).item()
        left = torch.randint(0, image.shape[2] - self.size + 1, (1,)).item()
        return image[:, top : top + self.size, left : left + self.size]


class RandomInvert:
    def __call__(self, image):
        return 1 - image if random.random() < 0.5 else image


class Pictures(Dataset):
    def __init__(self, train, transforms=()):
        digits = load_digits()
        part = slice(0, 1024) if train else slice(1024, None)
        self.images = torch.tensor(digits.images[part], dtype=torch.float32) / 16
        self.labels = digits.target[part]
        self.transforms = transforms

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index].expand(3, 8, 8)
        for transform in self.transforms:
            image = transform(image)
        return image, int(self.labels[index])


class Block(nn.Module):
    def __init__(self, inside, outside, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x):
        out = F.silu(self.bn1(self.conv1(x)))
        return F.silu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layers = nn.Sequential(Block(8, 8), Block(8, 16, 2), Block(16, 32, 2))
        self.linear = nn.Linear(32, classes)

    def forward(self, x):
        out = self.layers(F.silu(self.bn1(self.conv1(x))))
        return self.linear(F.adaptive_avg_pool2d(out, 1).flatten(1))


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--workers", type=int, default=2)
args = parser.parse_args()


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trainset = Pictures(train=True, transforms=[RandomCrop(8, padding=1), RandomInvert()])
    trainloader = DataLoader(trainset, batch_size=64, shuffle=True, num_workers=args.workers)
    testloader = DataLoader(Pictures(train=False), batch_size=100)

    net = ResNet().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

    best = -1
    for epoch in range(args.epochs):
        net.train()
        train_loss, correct, total = 0, 0, 0
        for inputs, targets in trainloader:
            inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            outputs = net(inputs)
            loss = criterion(outputs, targets)
            loss.backward()
            optimizer.step()
            train_loss += loss.item()
            correct += outputs.argmax(1).eq(targets).sum().item()
            total += targets.size(0)
        print(f"epoch {epoch}: loss {train_loss / len(trainloader):.3f}, {correct}/{total}")

        net.eval()
        correct = 0
        with torch.no_grad():
            for inputs, targets in testloader:
                correct += net(inputs.to(device)).argmax(1).eq(targets.to(device)).sum().item()
        if correct > best:
            os.makedirs("checkpoint", exist_ok=True)
            torch.save({"net": net.state_dict(), "epoch": epoch}, "checkpoint/ckpt.pth")
            best = correct
        scheduler.step()

    net.load_state_dict(torch.load("checkpoint/ckpt.pth")["net"])
    print(f"best: {best} of {len(testloader.dataset)}")


if __name__ == "__main__":
    main()
