"""nn.DataParallel, as older scripts have it: parameter groups, checkpoints of `.module`."""

import time

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0, 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(self.count, 1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ELU(),
            nn.Conv2d(16, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ELU(),
        )
        self.classifier = nn.Linear(256, 10)

    def forward(self, x):
        x = self.features(x)
        return self.classifier(x.view(x.size(0), -1))


def accuracy(output, target, topk=(1,)):
    _, pred = output.topk(max(topk), 1)
    correct = pred.eq(target.view(-1, 1))
    return [correct[:, :k].float().sum().item() * 100 / len(target) for k in topk]


def main():
    torch.manual_seed(7)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train_loader = DataLoader(
        TensorDataset(images[:1400], labels[:1400]), batch_size=100, shuffle=True, drop_last=True
    )
    val_loader = DataLoader(TensorDataset(images[1400:], labels[1400:]), batch_size=150)

    model = nn.DataParallel(Net()).to(device)
    print(f"Let's use {max(torch.cuda.device_count(), 1)} devices!")
    criterion = nn.CrossEntropyLoss().to(device)
    biases = [p for name, p in model.module.named_parameters() if name.endswith("bias")]
    weights = [p for name, p in model.module.named_parameters() if not name.endswith("bias")]
    optimizer = torch.optim.SGD(
        [{"params": weights, "weight_decay": 1e-4}, {"params": biases, "lr": 0.02}],
        lr=0.01,
        momentum=0.9,
        nesterov=True,
    )

    best_acc1 = 0
    for epoch in range(2):
        model.train()
        losses, top1, end = AverageMeter(), AverageMeter(), time.time()
        for images, target in train_loader:
            images, target = images.to(device), target.to(device)
            output = model(images)
            loss = criterion(output, target)
            losses.update(loss.item(), images.size(0))
            top1.update(accuracy(output, target)[0], images.size(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"Epoch {epoch}: {time.time() - end:.1f} s, {losses.avg:.4f}, {top1.avg:.2f}")

        model.eval()
        top1, top5 = AverageMeter(), AverageMeter()
        with torch.no_grad():
            for images, target in val_loader:
                acc1, acc5 = accuracy(model(images.to(device)), target.to(device), topk=(1, 5))
                top1.update(acc1, images.size(0))
                top5.update(acc5, images.size(0))
        print(f" * Acc@1 {top1.avg:.3f} Acc@5 {top5.avg:.3f}")
        if top1.avg > best_acc1:
            best_acc1 = top1.avg
            torch.save({"state_dict": model.module.state_dict()}, "model_best.pth.tar")


if __name__ == "__main__":
    main()
