"""ema-pytorch: an EMA beside a convolutional net."""

import torch
from ema_pytorch import EMA
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1, bias=False),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Conv2d(32, 32, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(512, 10),
)
ema = EMA(net, beta=0.99, update_after_step=3, update_every=2)
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
for step in range(16):
    x, y = torch.randn(32, 3, 16, 16), torch.randint(0, 10, (32,))
    loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update()
    if step % 5 == 0:
        print(f"{step}: {loss.item():.5f} {ema(x).abs().mean().item():.5f}")
