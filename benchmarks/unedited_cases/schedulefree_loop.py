"""schedulefree: AdamWScheduleFree with train() and eval()."""

import schedulefree
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10)
)
optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=3e-3, warmup_steps=5)
x = torch.randn(1024, 64)
y = x[:, :10].argmax(1)
for epoch in range(2):
    model.train()
    optimizer.train()
    for rows in torch.randperm(1024).split(64):
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    optimizer.eval()
    with torch.no_grad():
        print(f"{epoch}: {nn.functional.cross_entropy(model(x), y).item():.5f}")
