"""pytorch/examples: super_resolution, ESPCN with PixelShuffle and PSNR."""

from math import log10

import torch
from torch import nn

torch.manual_seed(123)
model = nn.Sequential(
    nn.Conv2d(1, 64, 5, 1, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU(),
    nn.Conv2d(64, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, 4, 3, 1, 1), nn.PixelShuffle(2),
)  # fmt: skip
for layer in model:
    if isinstance(layer, nn.Conv2d):
        nn.init.orthogonal_(layer.weight)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
images = torch.rand(128, 1, 32, 32)
for epoch in range(2):
    for target in images.split(16):
        small = nn.functional.avg_pool2d(target, 2)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(small), target)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.5f}, PSNR {10 * log10(1 / loss.item()):.4f} dB")
torch.save(model, "model.pth")
