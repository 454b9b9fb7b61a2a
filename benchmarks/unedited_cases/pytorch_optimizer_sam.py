"""pytorch_optimizer: SAM around AdamP with two passes a step."""

import torch
from pytorch_optimizer import SAM, AdamP
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
)
optimizer = SAM(model.parameters(), AdamP, rho=0.05, lr=1e-3)
x = torch.randn(640, 64)
y = x[:, :10].argmax(1)
for step, rows in enumerate(torch.randperm(640).split(64)):
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    loss.backward()
    optimizer.first_step(zero_grad=True)
    nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
    optimizer.second_step(zero_grad=True)
    print(f"{step}: {loss.item():.5f}")
