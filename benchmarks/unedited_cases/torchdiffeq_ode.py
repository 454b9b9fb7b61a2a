"""torchdiffeq: a neural ODE by odeint with fixed steps."""

import torch
from torch import nn
from torchdiffeq import odeint

torch.manual_seed(0)


class Func(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 128), nn.Tanh(), nn.Linear(128, 2))

    def forward(self, t, y):
        return self.net(y**3)


func = Func()
optimizer = torch.optim.RMSprop(func.parameters(), lr=1e-3)
t = torch.linspace(0, 1, 10)
matrix = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
for step in range(15):
    start = torch.rand(64, 2) * 2 - 1
    true = torch.stack([start @ torch.matrix_exp(matrix * s) for s in t])
    loss = (odeint(func, start, t, method="rk4") - true).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"{step}: {loss.item():.5f}")
