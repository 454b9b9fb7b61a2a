"""kuangliu/pytorch-cifar: main.py, a ResNet of its own blocks with a checkpoint."""

import os

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class BasicBlock(nn.Module):
    def __init__(self, a, b, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b)
        self.conv2, self.bn2 = nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)
        self.shortcut = nn.Sequential()
        if stride != 1 or a != b:
            self.shortcut = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b))

    def forward(self, x):
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


net = nn.Sequential(
    nn.Conv2d(3, 16, 3, 1, 1, bias=False),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    BasicBlock(16, 16, 1),
    BasicBlock(16, 32, 2),
    BasicBlock(32, 64, 2),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, 10),
)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
images, labels = torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,))
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(images, labels), 16, shuffle=True
)
for epoch in range(2):
    net.train()
    total = correct = 0
    for inputs, targets in loader:
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        correct += outputs.max(1)[1].eq(targets).sum().item()
        total += loss.item()
    scheduler.step()
    print(f"{epoch}: {total:.3f} {correct}")
os.makedirs("checkpoint", exist_ok=True)
torch.save({"net": net.state_dict(), "epoch": epoch}, "./checkpoint/ckpt.pth")
