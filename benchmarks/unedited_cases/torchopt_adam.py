"""torchopt: its Adam with a chained clip."""

import torch
import torchopt
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1)
)
optimizer = torchopt.Adam(model.parameters(), lr=1e-3)
for step in range(20):
    x = torch.randn(64, 64)
    loss = nn.functional.mse_loss(model(x).squeeze(1), x[:, :4].sum(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"{step}: {loss.item():.5f}")
torch.optim.SGD(model.parameters(), lr=0.0).step()
